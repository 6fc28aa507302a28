"""Problems made of episodes: prepare and start_lower."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from common import Each, leaf, plain
from torch import Tensor

from bilevel import ApproxGrad, OptionError, Penalty, Problem, ReverseMode, Rows, Run, ValueFunction, ValueGap, solve
from bilevel.errors import BilevelWarning


class Episodes:
    """Features of u for each pair of batches; notes when each function ran and what it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[list[str]] = []
        self.callback = Each(self._next)
        self.problem = Problem(self.upper, self.lower, prepare=self.prepare, start_lower=self.start_lower)

    def _next(self, run: Run) -> None:
        if run.step:
            self.steps.append(self.calls)
        self.calls = []

    def prepare(self, u: Tensor, batches: Any) -> dict[str, Any]:
        self.calls.append("prepare")
        return {"features": torch.tanh(u) * sum(batches), "batches": batches}

    def start_lower(self, v: Tensor, prepared: dict[str, Any]) -> None:
        self.calls.append("start")
        v.fill_(0.1)

    def lower(self, u: Tensor, v: Tensor, prepared: dict[str, Any]) -> Tensor:
        self.calls.append("lower live" if prepared["features"].requires_grad else "lower held")
        return torch.sum((v - prepared["features"]) ** 2)

    def upper(self, u: Tensor, v: Tensor, prepared: dict[str, Any]) -> Tensor:
        self.calls.append("upper")
        return torch.sum((v - prepared["batches"][0]) ** 2)


def test_prepare_runs_once_per_upper_step_and_lower_steps_see_it_detached():
    episodes = Episodes()
    u, v = leaf(0.5), leaf(0.0)
    solve(
        episodes.problem,
        plain(lower_steps=3),
        u,
        v,
        ([1.0, 2.0], [0.5, 1.5, 2.5]),
        max_steps=5,
        log_every=1,
        seed=0,
        callbacks=[episodes.callback],
    )
    assert len(episodes.steps) == 5
    for step in episodes.steps:
        assert step == ["prepare", "start", *["lower held", "upper"] * 3, "lower live", "upper"]
    assert u.item() != 0.5


def test_upper_step_differentiates_through_prepare():
    data = ([1.0, 2.0], [0.5, 1.5, 2.5])
    ends = []
    for prepared in (True, False):
        u, v = leaf(0.5), leaf(0.0)
        episodes = Episodes()
        if prepared:
            problem = Problem(episodes.upper, episodes.lower, prepare=episodes.prepare)
            method = plain()
        else:
            # The pair is the same for both objectives, as with prepare, and shared over the step.
            pairs = [(data[0][i % 2], data[1][i % 3]) for i in range(6)]
            problem = Problem(
                lambda u, v, pair: torch.sum((v - pair[0]) ** 2),
                lambda u, v, pair: torch.sum((v - torch.tanh(u) * sum(pair)) ** 2),
            )
            method = plain(lower_batches="shared")
        solve(problem, method, u, v, data if prepared else (pairs, pairs), max_steps=6, seed=0)
        ends.append((u.item(), v.item()))
    # The same products in another order.
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        plain(lower_steps=3),
        ApproxGrad(lower_steps=3, warm_up=0.0),
        ApproxGrad(lower_steps=3, warm_up=0.0, curvature="difference"),
        ReverseMode(lower_steps=3, warm_up=0.0),
        ValueGap(lower_steps=3, warm_up=0.0),
        ValueFunction(lower_steps=3, warm_up=0.0),
    ],
    ids=["penalty", "approx grad", "approx grad, difference", "reverse mode", "value gap", "value function"],
)
def test_derivatives_pass_through_prepare_once_per_upper_step(method):
    """However many products with second derivatives there are: it may be a large network."""
    passes: list[int] = []
    marks: list[int] = []

    def prepare(u: Tensor, batches: Any) -> Tensor:
        features = torch.tanh(u) * sum(batches)
        if features.requires_grad:
            features.register_hook(lambda _: passes.append(1))
        return features

    problem = Problem(
        lambda u, v, z: torch.sum((v - z**2) ** 2) + 0.1 * torch.sum(u**2),
        lambda u, v, z: torch.sum((v - z) ** 2 + 0.1 * (v * u) ** 2),
        prepare=prepare,
    )
    solve(
        problem,
        method,
        leaf(0.5),
        leaf(0.1),
        ([1.0, 2.0], [0.5]),
        max_steps=4,
        seed=0,
        log_every=1,
        callbacks=[Each(lambda run: marks.append(len(passes)))],
    )
    assert [after - before for before, after in itertools.pairwise(marks)] == [1, 1, 1, 1]


@dataclass
class Made:
    features: Tensor
    target: float


@pytest.mark.parametrize("method", [ApproxGrad, ReverseMode])
@pytest.mark.parametrize("kind", [Made, lambda *parts: dict(zip(("features", "target"), parts, strict=True))])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_derivative_through_prepare_is_the_closed_form_whatever_it_returns(method, kind, accumulate):
    """g = |v - sin u|^2 / 2 has v = sin u, and f = |v - 1|^2 / 2 + 3 sin u + u^2 the derivative
    (sin u - 1) cos u + 3 cos u + 2 u."""

    def of(made: Any, name: str) -> Any:
        return made[name] if isinstance(made, dict) else getattr(made, name)

    problem = Problem(
        lambda u, v, made: torch.sum(0.5 * (v - of(made, "target")) ** 2 + 3 * of(made, "features") + u**2),
        lambda u, v, made: 0.5 * torch.sum((v - of(made, "features")) ** 2),
        prepare=lambda u, _: kind(torch.sin(u), 1.0),
    )
    u, v = leaf(0.5), leaf(0.2)
    rates = {"upper_optimizer": partial(torch.optim.SGD, lr=0.1), "decay": "constant", "warm_up": 0.0}
    own = {"lower_rate": 1.0} if method is ReverseMode else {"lower_optimizer": partial(torch.optim.SGD, lr=1.0)}
    chosen = method(lower_steps=2, **rates, **own)
    solve(problem, chosen, u, v, ([1.0, 2.0], [0.5]), max_steps=1, seed=0, accumulate=accumulate)
    expected = (math.sin(0.5) - 1) * math.cos(0.5) + 3 * math.cos(0.5) + 2 * 0.5
    assert u.item() == pytest.approx(0.5 - 0.1 * expected, abs=1e-12)


def test_the_warm_up_records_the_gradient_in_u_where_prepare_hands_a_leaf_on():
    """|f_u| of f = 3 u + z^2 with z = u = 0.5, which goes through what was prepared, too."""
    problem = Problem(
        lambda u, v, z: torch.sum(3 * u + z**2), lambda u, v, z: torch.sum((v - z) ** 2), prepare=lambda u, _: u
    )
    method = ApproxGrad(lower_steps=1, warm_up=0.5)
    with pytest.warns(BilevelWarning, match="upper does not depend on v"):
        solution = solve(problem, method, leaf(0.5), leaf(0.0), ([1.0], [1.0]), max_steps=2, seed=0, log_every=1)
    assert solution.history["grad_u"][0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("given", "passes"), [({}, 1), ({"gamma": None}, 2), ({"upper_optimizer": None, "decay": "linear"}, 2)]
)
def test_one_episode_is_looked_at_before_the_first_step_where_nothing_is_chosen_by_it(given, passes):
    """An episode may be a pass of a large network; here there are two."""
    episodes = Episodes()
    before: list[int] = []
    solve(
        episodes.problem,
        plain(**given),
        leaf(0.5),
        leaf(0.0),
        ([1.0, 2.0], [0.5]),
        max_steps=1,
        seed=0,
        callbacks=[Each(lambda run: before.append(episodes.calls.count("prepare")))],
    )
    assert before[0] == 1 + passes, "the first is the trial of the user's functions"


def test_every_episode_starts_v_its_optimizer_and_its_multipliers_afresh():
    """With u held by a rate of zero and one episode, every upper step then repeats the first one bit for bit."""
    momentum, still = partial(torch.optim.Adam, lr=0.05), partial(torch.optim.SGD, lr=0.0)

    def lowers(start_lower: bool) -> list[float]:
        def start(v, prepared):
            v.fill_(0.1)

        problem = Problem(
            lambda u, v, _: torch.sum((v - 1) ** 2),
            lambda u, v, _: torch.sum((v - u) ** 2),
            start_lower=start if start_lower else None,
        )
        method = plain(
            lower_steps=3,
            nu=0.2,
            multipliers=True,
            advances=None,
            advance_every=1,
            gamma_factor=1.0,
            lam_factor=1.0,
            lower_optimizer=momentum,
            upper_optimizer=still,
        )
        solution = solve(problem, method, leaf(0.5), leaf(0.1), max_steps=6, seed=0)
        assert "steps" in solution.history["advanced"]
        return solution.history["lower"]

    assert len(set(lowers(True))) == 1
    assert len(set(lowers(False))) == 6


def test_rows_in_prepare_are_refused():
    u, v = Rows(3, dtype=torch.float64), leaf(0.0)
    problem = Problem(
        lambda u, v, p: torch.sum((v - 1) ** 2), lambda u, v, p: torch.sum((v - p) ** 2), prepare=lambda u, _: u[[0]]
    )
    with pytest.raises(OptionError, match="u cannot hold Rows if the problem has prepare"):
        solve(problem, Penalty(mode="stochastic"), u, v, max_steps=1, seed=0)
