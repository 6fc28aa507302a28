"""Reverse-mode differentiation: its derivative against autograd through the steps, what it keeps and what it costs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import Each, Once, leaf
from test_contract import Case, Counter, StopAt, Watch, check_divergence
from test_contract import run as run_case
from test_engine import COMPILER
from test_sync import classify
from torch import Tensor, nn
from unrolling import SGD, Network, normal, reference, start, watch

from bilevel import BilevelWarning, Box, OptionError, Problem, Rows, solve
from bilevel._util.random_state import random_state, set_random_state
from bilevel.methods.reverse_mode import ReverseMode

FIXED: dict[str, Any] = {"warm_up": 0.0, "upper_optimizer": SGD, "decay": "constant"}
RATE = 0.3
CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # the same sums in another order


# -- the derivative ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_derivative_tends_to_the_hypergradient(quadratic, momentum):
    """At rate 1/L the error falls like (1 - 1/kappa)^T; the condition number of H is about 2."""
    u, v = quadratic.start()
    method = ReverseMode(lower_steps=120, momentum=momentum, **FIXED)
    state = start(quadratic.problem, method, u, v)
    at = dense_solution(quadratic, u)
    expected = u.detach() - quadratic.b + quadratic.C.T @ torch.linalg.solve(quadratic.H, at - quadratic.a)
    torch.testing.assert_close(watch(state)[0].gradient, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(v.detach(), at, rtol=1e-8, atol=1e-8)
    adjoint = torch.linalg.solve(quadratic.H, at - quadratic.a)
    torch.testing.assert_close(state.prices().nu[0], -adjoint, rtol=1e-8, atol=1e-8)
    assert state.prices().gamma == 0


def dense_solution(quadratic: Any, u: Tensor) -> Tensor:
    return torch.linalg.solve(quadratic.H, quadratic.C @ u.detach() + quadratic.c)


@pytest.mark.parametrize("batches", ["fresh", "shared"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("truncate", [None, 2])
def test_derivative_is_that_of_autograd_through_the_steps(batches, accumulate, momentum, rows, truncate):
    network = Network()
    options = FIXED | ({"upper_optimizer": partial(torch.optim.Adam, lr=0.1)} if rows else {})
    method = ReverseMode(
        lower_steps=4, lower_rate=RATE, momentum=momentum, truncate=truncate, lower_batches=batches, **options
    )
    state = start(network.problem, method, *network.start(rows=rows), network.data, accumulate=accumulate)
    found = watch(state, steps=3)
    first = {drawn[0][1][2][0].item() for drawn in found[0].lower}
    assert (len(first) > 1) == (batches == "fresh")
    assert bool(found[2].moments) == bool(momentum)
    for seen in found:
        expected = reference(network.problem, seen, RATE, momentum=momentum, kept=truncate)
        torch.testing.assert_close(seen.gradient, expected, **CLOSE)
    assert found[0].gradient.norm() > 0.1


def test_derivative_without_data_is_that_of_autograd_through_the_steps(quadratic):
    state = start(quadratic.problem, ReverseMode(lower_steps=3, lower_rate=RATE, **FIXED), *quadratic.start())
    for seen in watch(state, steps=3):
        torch.testing.assert_close(seen.gradient, reference(quadratic.problem, seen, RATE), **CLOSE)


@pytest.mark.parametrize("decay", ["linear", "constant"])
def test_derivative_is_of_the_rates_that_were_used(decay):
    network = Network()
    method = ReverseMode(
        lower_steps=3, lower_rate=RATE, momentum=0.5, warm_up=0.0, upper_optimizer=SGD, lower_decay=decay
    )
    found = watch(start(network.problem, method, *network.start(), network.data, max_steps=4), steps=4)
    assert [seen.left for seen in found] == [1.0, 0.75, 0.5, 0.25]
    for seen in found:
        rho = RATE * (seen.left if decay == "linear" else 1.0)
        torch.testing.assert_close(seen.gradient, reference(network.problem, seen, rho, momentum=0.5), **CLOSE)


def test_rate_of_v_falls_by_default_with_data_alone(quadratic):
    for data in (None, quadratic.data()):
        method = ReverseMode(lower_rate=RATE, warm_up=0.0)
        solution = solve(quadratic.problem, method, *quadratic.start(), data, max_steps=2, seed=0)
        expected = [RATE, RATE / 2] if data else [RATE, RATE]
        assert solution.history["lower_rate"] == pytest.approx(expected)
        assert solution.history["upper_rate"] == pytest.approx([5.0, 2.5])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_derivative_goes_through_prepare(accumulate):
    """u makes features of the batches; one graph of it is made in each upper step."""
    calls = []

    def prepare(u: Tensor, pair: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return {"x": torch.tanh(u) * pair[0], "y": pair[1]}

    def lower(u: Tensor, v: dict[str, Tensor], made: Any) -> Tensor:
        return ((made["x"] * v["a"]).sum() - made["y"]).square() + (v["a"] - u).square().sum() + v["b"].cosh().sum()

    def upper(u: Tensor, v: dict[str, Tensor], made: Any) -> Tensor:
        return (v["a"] * made["x"].square()).sum() + v["b"].prod() + u.square().sum()

    problem = Problem(upper, lower, prepare=prepare)
    u, v = leaf(0.3, -0.2), {"a": leaf(0.1, 0.4), "b": leaf(0.7)}
    data = [torch.tensor(x) for x in (1.0, 2.0)], [torch.tensor(x) for x in (0.5, -0.5, 1.5)]
    method = ReverseMode(lower_steps=3, lower_rate=0.1, momentum=0.4, **FIXED)
    state = start(problem, method, u, v, data, accumulate=accumulate)
    plain = state.context.sources.draw
    drawn: list[Any] = []
    state.context.sources.draw = lambda count: drawn.append(plain(count)) or drawn[-1]
    calls.clear()
    found = watch(state, steps=3)
    assert calls == [True] * 3 * accumulate
    for seen, pairs in zip(found, drawn, strict=True):
        seen.lower, seen.upper = [[(pair, pair) for pair in pairs]] * 3, [(pair, pair) for pair in pairs]
        whole = Problem(
            lambda u, v, pair: upper(u, v, prepare(u, pair)), lambda u, v, pair: lower(u, v, prepare(u, pair))
        )
        torch.testing.assert_close(seen.gradient, reference(whole, seen, 0.1, momentum=0.4), **CLOSE)


def test_every_episode_starts_v_and_its_momentum_afresh():
    def begin(v: Tensor, prepared: Any) -> None:
        v.fill_(0.1)

    def lowers(start_lower: Any) -> list[float]:
        problem = Problem(
            lambda u, v, _: torch.sum((v - 1) ** 2), lambda u, v, _: torch.sum((v - u) ** 2), start_lower=start_lower
        )
        method = ReverseMode(
            lower_steps=3, lower_rate=0.1, momentum=0.5, warm_up=0.0, upper_optimizer=partial(torch.optim.SGD, lr=0.0)
        )
        return solve(problem, method, leaf(0.5), leaf(0.1), max_steps=5, seed=0).history["lower"]

    assert len(set(lowers(begin))) == 1
    assert len(set(lowers(None))) == 5


class Noisy(nn.Module):
    """Dropout, BatchNorm, and a buffer that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.last(self.drop(torch.tanh(self.norm(self.first(x))))) * torch.exp(-0.1 * self.seen)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_back_repeat_the_random_draws_and_leave_the_buffers_alone(accumulate):
    network, v = Network(), Noisy()

    def lower(u: Tensor, v: Any, batch: Any) -> Tensor:
        return (torch.sigmoid(u[batch[2]]) * (v(batch[0]) - batch[1]).square().sum(1)).mean()

    problem = Problem(lambda u, v, batch: (v(batch[0]) - batch[1]).square().mean(), lower)
    u = network.start()[0]
    torch.manual_seed(7)
    method = ReverseMode(lower_steps=3, lower_rate=RATE, lower_batches="shared", **FIXED)
    state = start(problem, method, u, v, network.data, accumulate=accumulate)
    assert "random numbers" in state.obstacle()
    before, buffers = random_state(v.seen.device), {key: x.clone() for key, x in v.named_buffers()}
    seen = watch(state)[0]
    after, ends = random_state(v.seen.device), {key: x.clone() for key, x in v.named_buffers()}

    set_random_state(before, v.seen.device)
    twin = Noisy()
    for key, buffer in twin.named_buffers():
        buffer.copy_(buffers[key])

    def called(function: Any) -> Callable[..., Tensor]:
        def call(u: Tensor, parameters: Any, batch: Any) -> Tensor:
            module = lambda x: torch.func.functional_call(twin, (parameters, dict(twin.named_buffers())), (x,))  # noqa: E731
            return function(u, module, batch)

        return call

    def upper(u: Tensor, parameters: Any, batch: Any) -> Tensor:
        if not upper.told:  # the record evaluates g at v_T, before f
            upper.told = True
            for _, b in seen.upper:
                called(lower)(u, parameters, b)
        return called(problem.upper)(u, parameters, batch)

    upper.told = False  # type: ignore[attr-defined]
    expected = reference(Problem(upper, called(lower)), seen, RATE)
    torch.testing.assert_close(seen.gradient, expected, **CLOSE)
    assert torch.equal(after[0], random_state(v.seen.device)[0])
    for key, buffer in twin.named_buffers():
        torch.testing.assert_close(buffer, ends[key], **CLOSE)
    assert v.seen == 5 * accumulate


# -- trials ------------------------------------------------------------------------------------------------------------


def trial_problem(trials: int | None, which: slice | int = slice(None)) -> tuple[Problem, Tensor, Tensor]:
    scale = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)[which]
    shift = normal(3, 2, seed=3)[which]

    def lower(u: Tensor, v: Tensor, _: Any) -> Tensor:
        return scale * torch.cosh(v - torch.tanh(u)).sum(-1) + v.square().sum(-1)

    problem = Problem(lambda u, v, _: (v - shift).square().sum(-1) + u.square().sum(-1), lower, trials=trials)
    u, v = normal(3, 2, seed=4)[which].clone().requires_grad_(), normal(3, 2, seed=5)[which].clone().requires_grad_()
    return problem, u, v


@pytest.mark.parametrize("rate", [None, 0.1])
def test_trials_are_the_separate_runs(rate):
    method = ReverseMode(
        lower_steps=3, lower_rate=rate, momentum=0.3, warm_up=0.2, upper_optimizer=partial(SGD, lr=0.1)
    )
    problem, u, v = trial_problem(3)
    together = solve(problem, method, u, v, max_steps=10, seed=0)
    for i in range(3):
        problem, u, v = trial_problem(None, i)
        alone = solve(problem, method, u, v, max_steps=10, seed=0)
        torch.testing.assert_close(together.u[i], alone.u, **CLOSE)
        torch.testing.assert_close(together.v[i], alone.v, **CLOSE)
        torch.testing.assert_close(together.adjoint[0][i], alone.adjoint[0], **CLOSE)


# -- what it keeps and costs -------------------------------------------------------------------------------------------


def test_iterates_are_kept_and_no_graph(monkeypatch):
    """The most tensors that autograd holds at a time do not depend on T."""

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def most(lower_steps: int) -> int:
        alive: weakref.WeakSet[Held] = weakref.WeakSet()
        peak = 0

        def pack(tensor: Tensor) -> Held:
            nonlocal peak
            held = Held(tensor)
            alive.add(held)
            peak = max(peak, len(alive))
            return held

        network = Network()
        method = ReverseMode(lower_steps=lower_steps, lower_rate=0.01, **FIXED)
        state = start(network.problem, method, *network.start(), network.data)
        gc.collect()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            state.step(0)
        return peak

    assert 0 < most(2) == most(20)


@pytest.mark.parametrize(("truncate", "kept"), [(None, 6), (2, 2)])
def test_only_the_iterates_that_are_differentiated_are_kept(truncate, kept):
    network = Network()
    method = ReverseMode(lower_steps=6, lower_rate=0.1, truncate=truncate, **FIXED)
    state = start(network.problem, method, *network.start(), network.data)
    points, plain = [], state._forward

    def forward(*arguments: Any) -> Any:
        points.append(plain(*arguments))
        return points[-1]

    state._forward = forward
    state.step(0)
    assert [len(point) for point in points] == [0] * (6 - kept) + [2] * kept
    assert all(not x.requires_grad for point in points for x in point)


@pytest.mark.parametrize(("truncate", "back"), [(None, 4), (3, 3)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [True, False])
def test_lower_objective_is_evaluated_t_times_each_way_and_once_for_the_record(
    quadratic, truncate, back, accumulate, data
):
    if not data and accumulate > 1:
        return
    counter = Counter(quadratic.problem)
    method = ReverseMode(lower_steps=4, truncate=truncate, warm_up=0.5)
    solution = run_case(
        quadratic,
        Case("", method, data, 6, 0.0),
        problem=counter.problem,
        callbacks=[counter],
        log_every=1,
        accumulate=accumulate,
    )
    lower = [accumulate * 5] * 3 + [accumulate * (5 + back)] * 3
    assert counter.each_step("lower") == lower
    assert counter.each_step("upper") == [accumulate] * 6
    assert [b - a for a, b in pairwise(solution.history["evaluations"])] == lower[1:]


# -- runs --------------------------------------------------------------------------------------------------------------

RUNS = [
    Case("plain", ReverseMode(), False, 200, 0.0),
    Case("momentum with data", ReverseMode(momentum=0.5), True, 200, 0.0),
    Case("truncated", ReverseMode(truncate=2, lower_batches="shared"), True, 200, 0.0),
]
each = pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name.replace(" ", "_"))


def test_run_on_noisy_batches_resumes_bit_for_bit(tmp_path):
    ends = []
    for stops in ([], [StopAt(4)]):
        for resume in [False, True][: 1 + len(stops)]:
            problem, u, v, data = classify()
            solve(
                problem,
                ReverseMode(lower_steps=2, momentum=0.5),
                u,
                v,
                data,
                max_steps=8,
                seed=0,
                log_every=1,
                checkpoint=tmp_path / str(len(stops)),
                callbacks=[] if resume else stops,
                resume=resume,
            )
        ends.append([u.values, *v.state_dict().values()])
    for x, y in zip(*ends, strict=True):
        assert torch.equal(x, y)


@each
def test_answer_is_approached_and_the_certificate_says_how_near(quadratic, case):
    """T steps leave out (1 - 1/kappa)^T of the adjoint; on data rates that fall leave out more."""
    solution = run_case(quadratic, case)
    assert quadratic.error(solution.u, solution.v) < (0.002 if not case.data else 0.1)
    assert solution.certificate.lower_residual < 0.01
    if not case.data:
        assert solution.certificate.stationarity_u < 1e-3
        assert solution.certificate.stationarity_v < 1e-2
        assert solution.certificate.hypergradient_error < 0.05


def test_rate_that_is_too_large_diverges(quadratic):
    u, v = quadratic.start()
    seen = Watch(u, v)
    solution = solve(
        quadratic.problem,
        ReverseMode(lower_rate=100.0, warm_up=0.0),
        u,
        v,
        max_steps=200,
        log_every=5,
        callbacks=[seen],
        seed=0,
    )
    check_divergence(solution, seen, 5)


def test_default_rate_is_one_over_the_largest_curvature(quadratic):
    largest = torch.linalg.eigvalsh(quadratic.H)[-1].item()
    for data in (None, quadratic.data()):
        state = start(quadratic.problem, ReverseMode(), *quadratic.start(), data)
        assert state.lower.rate == pytest.approx(1 / largest, rel=1e-2)


def test_flat_lower_objective_has_a_rate(quadratic):
    problem = Problem(quadratic.upper, lambda u, v, _: (u[:2] * v).sum())
    assert start(problem, ReverseMode(), *quadratic.start()).lower.rate == 1.0


# -- engines -----------------------------------------------------------------------------------------------------------


def compare(method: Any, *, rows: bool, steps: int = 6) -> None:
    """The path of the record, to rounding in float64."""
    ends = []
    for engine in ("compile", "eager"):
        network = Network()
        u, v = network.start(rows=rows)
        solution = solve(
            network.problem, method, u, v, network.data, max_steps=steps, seed=0, engine=engine, hypergradient=False
        )
        assert solution.engine == engine
        ends.append([u.values if rows else u.detach(), v["a"].detach(), v["b"].detach(), *solution.adjoint])
        ends[-1].append(torch.tensor(solution.history["evaluations"]))
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("whole", [0, 10**6], ids=["steps", "whole"])
def test_record_takes_the_path_of_eager(monkeypatch, rows, whole):
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)
    monkeypatch.setattr("bilevel.engines.engine.WHOLE", whole)
    compare(ReverseMode(lower_steps=3, lower_rate=0.1, momentum=0.5, warm_up=0.4), rows=rows)


@COMPILER
@pytest.mark.slow
def test_compiled_run_takes_the_path_of_eager():
    compare(ReverseMode(lower_steps=2, lower_rate=0.1, warm_up=0.0), rows=True, steps=3)


def test_random_draws_keep_a_run_from_being_recorded():
    problem, u, v, data = classify()
    with pytest.warns(BilevelWarning, match="lower draws random numbers"):
        solution = solve(problem, ReverseMode(lower_steps=1), u, v, data, max_steps=2, seed=0, engine="compile")
    assert solution.engine == "eager"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lower_steps", 0),
        ("lower_rate", 0.0),
        ("lower_rate", -1.0),
        ("lower_rate", math.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("truncate", 0),
        ("truncate", 6),
        ("truncate", 1.5),
        ("lower_decay", "cosine"),
        ("decay", "cosine"),
        ("warm_up", 1.0),
        ("upper_optimizer", 0.1),
    ],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(OptionError) as caught:
        ReverseMode(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"equalities": lambda u, v, b: u}, "multipliers"),
        ({"inequalities": lambda u, v, b: u}, "multipliers"),
        ({"project_lower": Box(-1.0, 1.0)}, "project_lower"),
    ],
)
def test_constraints_and_lower_projections_are_refused(quadratic, extra, word):
    problem = Problem(quadratic.upper, quadratic.lower, **extra)
    with pytest.raises(OptionError, match=f"ReverseMode .*{word}"):
        solve(problem, ReverseMode(), *quadratic.start(), max_steps=1)


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_missing_double_backward_is_a_difference(rows):
    def lower(u: Any, v: Tensor, _: Any) -> Tensor:
        return (Once.apply(v).square() * torch.exp(u[torch.tensor([0, 1])])).sum() + v.sum()

    def upper(u: Any, v: Tensor, _: Any) -> Tensor:
        return v.square().sum()

    u = Rows(2, init=leaf(0.1, 0.2)) if rows else leaf(0.1, 0.2)
    method = ReverseMode(lower_rate=0.1, **(FIXED | ({"upper_optimizer": None} if rows else {})))
    with pytest.warns(BilevelWarning, match="no double backward"):
        state = start(Problem(upper, lower), method, u, leaf(0.3, 0.4))
    seen = watch(state)[0]
    smooth = Problem(upper, lambda u, v, _: (v**4 * torch.exp(u)).sum() + v.sum())
    # A central difference: its error is of the order eps^(2/3).
    torch.testing.assert_close(seen.gradient, reference(smooth, seen, 0.1), rtol=1e-8, atol=1e-8)


def test_projection_of_u_is_kept(quadratic):
    problem = Problem(quadratic.upper, quadratic.lower, project_upper=Box(-0.1, 0.1))
    solution = solve(problem, ReverseMode(), *quadratic.start(), max_steps=50, seed=0)
    assert solution.u.abs().max() <= 0.1


def test_callback_sees_each_step(quadratic):
    steps = []
    watching = Each(lambda run: steps.append(run.step))
    solve(quadratic.problem, ReverseMode(), *quadratic.start(), max_steps=3, log_every=1, callbacks=[watching])
    assert steps == [0, 1, 2, 3]
