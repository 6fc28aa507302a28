"""What a stochastic step does beside the schedule: the warm-up, the joint step, the default rate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from common import leaf
from torch import Tensor

from bilevel import Penalty, Problem, Solution, solve
from bilevel.errors import OptionError
from bilevel.measures import batch_scales

SGD = partial(torch.optim.SGD, lr=0.1)


def upper(u: Tensor, v: Tensor, _: Any) -> Tensor:
    return 0.5 * ((v - 1) ** 2).sum() + 0.05 * (u**2).sum()


def lower(u: Tensor, v: Tensor, _: Any) -> Tensor:
    return 0.5 * (torch.tensor([1.0, 3.0], dtype=torch.float64) * (v - u) ** 2).sum()


def run(*, steps: int = 1, scale: float = 1.0, **options: Any) -> tuple[Solution, Tensor, Tensor]:
    u, v = leaf(0.5, -0.2), leaf(2.0, 0.7)
    fixed: dict[str, Any] = {
        "mode": "stochastic",
        "lam": 0.3,
        "gamma": 0.7,
        "advances": 0,
        "warm_up": 0.0,
        "decay": "constant",
        "lower_optimizer": SGD,
        "upper_optimizer": SGD,
        "multipliers": False,
    }
    problem = Problem(lambda u, v, b: scale * upper(u, v, b), lambda u, v, b: scale * lower(u, v, b))
    solution = solve(problem, Penalty(**(fixed | options)), u, v, max_steps=steps, seed=0, hypergradient=False)
    return solution, u.detach(), v.detach()


def gradients(u: Tensor, v: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """grad_u F and grad_v (F + lam g), in closed form."""
    h = torch.tensor([1.0, 3.0], dtype=torch.float64)
    s = h * (v - u)
    return 0.1 * u - gamma * h * s, (v - 1) + gamma * h * s + lam * s


def test_joint_step_moves_u_and_v_by_the_gradients_of_one_point():
    u, v = leaf(0.5, -0.2).detach(), leaf(2.0, 0.7).detach()
    d_u, d_v = gradients(u, v, 0.7, 0.3)
    _, found_u, found_v = run(lower_steps=0)
    torch.testing.assert_close(found_u, u - 0.1 * d_u)
    torch.testing.assert_close(found_v, v - 0.1 * d_v)


def test_step_that_is_not_joint_moves_u_alone_after_its_lower_steps():
    u, v = leaf(0.5, -0.2).detach(), leaf(2.0, 0.7).detach()
    for _ in range(2):
        v = v - 0.1 * gradients(u, v, 0.7, 0.3)[1]
    _, found_u, found_v = run(lower_steps=2, joint=False)
    torch.testing.assert_close(found_v, v)
    torch.testing.assert_close(found_u, u - 0.1 * gradients(u, v, 0.7, 0.3)[0])


def test_no_lower_step_needs_a_joint_step():
    with pytest.raises(OptionError, match="lower_steps must be at least 1 with joint=False"):
        Penalty(lower_steps=0, joint=False)
    assert run(lower_steps=0)[0].steps == 1


def test_warm_up_descends_f_and_lam_g_alone_and_leaves_u_and_the_schedule():
    v = leaf(2.0, 0.7).detach()
    for _ in range(6):  # three steps of a lower and a joint one
        v = v - 0.1 * gradients(leaf(0.5, -0.2).detach(), v, 0.0, 0.3)[1]
    solution, found_u, found_v = run(steps=4, lower_steps=1, warm_up=0.75, advance_every=1, advances=None)
    history = solution.history
    assert history["upper_rate"][:3] == [0.0] * 3
    assert history["advanced"] == ["", "", "", "steps"]
    assert history["gamma"] == [0.7] * 4
    # The fourth step is of the penalised objective.
    u = leaf(0.5, -0.2).detach()
    v = v - 0.1 * gradients(u, v, 0.7, 0.3)[1]
    d_u, d_v = gradients(u, v, 0.7, 0.3)
    torch.testing.assert_close(found_u, u - 0.1 * d_u)
    torch.testing.assert_close(found_v, v - 0.1 * d_v)


def test_first_gamma_is_measured_where_the_warm_up_ends():
    solution, *_ = run(steps=4, lower_steps=0, warm_up=0.5, gamma=None)
    u, v = leaf(0.5, -0.2).detach(), leaf(2.0, 0.7).detach()
    for _ in range(2):
        v = v - 0.1 * gradients(u, v, 0.0, 0.3)[1]
    h = torch.tensor([1.0, 3.0], dtype=torch.float64)
    expected = batch_scales.GAMMA_SHARE * (v - 1).norm() / (h * h * (v - u)).norm()
    assert solution.history["gamma"][2:] == pytest.approx([expected.item()] * 2, rel=1e-12)


def test_given_gamma_is_kept_after_the_warm_up():
    assert run(steps=4, lower_steps=0, warm_up=0.5)[0].history["gamma"] == [0.7] * 4


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_default_lower_rate_takes_a_set_share_of_the_loss_whatever_its_scale(scale, monkeypatch):
    monkeypatch.setattr(batch_scales, "LOWER_RATES", (1e-9, 1e9))
    solution, *_ = run(scale=scale, lower_optimizer=None)
    u, v = leaf(0.5, -0.2).detach(), leaf(2.0, 0.7).detach()
    s = torch.tensor([1.0, 3.0], dtype=torch.float64) * (v - u)
    value = upper(u, v, None) + 0.3 * lower(u, v, None)
    expected = batch_scales.LOWER_SHARE * value / ((v - 1).abs().sum() + 0.3 * s.abs().sum())
    assert solution.history["lower_rate"][0] == pytest.approx(expected.item(), rel=1e-9)


def test_default_lower_rate_has_bounds(monkeypatch):
    monkeypatch.setattr(batch_scales, "LOWER_RATES", (1e-4, 1e-2))
    solution, *_ = run(lower_optimizer=None)
    assert solution.history["lower_rate"][0] == batch_scales.LOWER_RATES[1]


def test_episodes_have_defaults_of_their_own():
    seen = []

    def start(v: Tensor, _: Any) -> None:
        seen.append(v.detach().clone())
        v.fill_(0.1)

    u, v = leaf(0.5, -0.2), leaf(2.0, 0.7)
    solution = solve(
        Problem(upper, lower, start_lower=start),
        Penalty(mode="stochastic"),
        u,
        v,
        max_steps=10,
        seed=0,
        hypergradient=False,
    )
    assert min(solution.history["upper_rate"]) > 0  # no warm-up
    assert (
        solution.history["evaluations"][1] - solution.history["evaluations"][0] == 6
    )  # five lower steps and the upper


@pytest.mark.parametrize("name", ["gamma", "lam", "epsilon"])
def test_first_price_of_each_trial_is_that_of_a_run_of_its_own(name):
    prices = [0.3, 2.0, 7.0]

    def start(n: int | None) -> list[Tensor]:
        shape = (4,) if n is None else (n, 4)
        return [torch.full(shape, x, dtype=torch.float64).requires_grad_() for x in (0.5, -0.5)]

    def problem(trials: int | None) -> Problem:
        return Problem(
            lambda u, v, _: (u**2).sum(-1) + ((v - 1) ** 2).sum(-1),
            lambda u, v, _: ((v - u) ** 2).sum(-1),
            trials=trials,
        )

    u, v = start(3)
    solve(problem(3), Penalty.algorithm_2(lower_steps=2, **{name: prices}), u, v, max_steps=40, seed=0)
    for k, price in enumerate(prices):
        one_u, one_v = start(None)
        solve(problem(None), Penalty.algorithm_2(lower_steps=2, **{name: price}), one_u, one_v, max_steps=40, seed=0)
        # Sums over more numbers are rounded otherwise.
        torch.testing.assert_close(u[k], one_u, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(v[k], one_v, rtol=1e-10, atol=1e-12)


def test_prices_that_are_not_one_for_each_trial_are_refused():
    u, v = (torch.zeros(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, _: (u**2 + v**2).sum(1), lambda u, v, _: ((v - u - 1) ** 2).sum(1), trials=2)
    with pytest.raises(
        OptionError, match="gamma must be one number, or one for each trial; got 3 numbers and trials=2"
    ):
        solve(problem, Penalty(mode="stochastic", gamma=[1.0, 2.0, 3.0]), u, v, max_steps=1)
    with pytest.raises(OptionError, match=r"lam must be at least 0; got -1\.0"):
        Penalty(lam=[1.0, -1.0])
    with pytest.raises(OptionError, match="gamma must be one number in deterministic mode"):
        solve(problem, Penalty(gamma=(1.0, 2.0)), u, v, max_steps=1)
