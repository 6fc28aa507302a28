"""Forward-mode differentiation: its derivative against autograd through the steps and against reverse mode."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import Once, leaf
from test_contract import Case, Counter
from test_contract import run as run_case
from test_engine import COMPILER
from test_reverse_mode import CLOSE, FIXED, RATE, compare, dense_solution, trial_problem
from test_sync import classify
from torch import Tensor, nn
from unrolling import SGD, Network, reference, start, watch

from bilevel import BilevelWarning, Box, OptionError, Problem, ProblemError, Status, solve
from bilevel.methods.forward_mode import ForwardMode
from bilevel.methods.reverse_mode import ReverseMode

# -- the derivative ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_derivative_tends_to_the_hypergradient(quadratic, momentum):
    """At rate 1/L the error falls like (1 - 1/kappa)^T; the condition number of H is about 2."""
    u, v = quadratic.start()
    state = start(quadratic.problem, ForwardMode(lower_steps=120, momentum=momentum, **FIXED), u, v)
    at = dense_solution(quadratic, u)
    adjoint = torch.linalg.solve(quadratic.H, at - quadratic.a)
    expected = u.detach() - quadratic.b + quadratic.C.T @ adjoint
    torch.testing.assert_close(watch(state)[0].gradient, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("batches", ["fresh", "shared"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("chunk", [32, 5], ids=["at once", "in chunks"])
def test_derivative_is_that_of_autograd_through_the_steps(batches, accumulate, momentum, chunk):
    network = Network()
    method = ForwardMode(
        lower_steps=4, lower_rate=RATE, momentum=momentum, lower_batches=batches, chunk_size=chunk, **FIXED
    )
    state = start(network.problem, method, *network.start(), network.data, accumulate=accumulate)
    found = watch(state, steps=3)
    for seen in found:
        torch.testing.assert_close(seen.gradient, reference(network.problem, seen, RATE, momentum=momentum), **CLOSE)
    assert found[0].gradient.norm() > 0.1


def test_derivative_is_of_the_rates_that_were_used():
    network = Network()
    method = ForwardMode(lower_steps=3, lower_rate=RATE, momentum=0.5, warm_up=0.0, upper_optimizer=SGD)
    for seen in watch(start(network.problem, method, *network.start(), network.data, max_steps=4), steps=4):
        expected = reference(network.problem, seen, RATE * seen.left, momentum=0.5)
        torch.testing.assert_close(seen.gradient, expected, **CLOSE)


def several(u: Any, v: Any) -> tuple[Problem, Any, Any]:
    """u of several tensors, one of them a number; v a module."""

    def lower(u: dict[str, Tensor], v: nn.Module, _: Any) -> Tensor:
        out = v(torch.ones(3, 2, dtype=torch.float64) * u["x"])
        return (out - u["y"]).square().sum() + u["z"].exp() * sum(p.square().sum() for p in v.parameters())

    problem = Problem(lambda u, v, _: v(torch.eye(2, dtype=torch.float64)).sum() + u["y"].square().sum(), lower)
    return problem, u, v


@pytest.mark.parametrize("case", ["network", "several", "prepare", "noisy"])
def test_forward_and_reverse_mode_are_one_derivative(case):
    ends = []
    for kind in (ForwardMode, ReverseMode):
        options = {"lower_steps": 3, "lower_rate": 0.05, "momentum": 0.3, "warm_up": 0.0}
        data: Any = None
        if case == "network":
            network = Network()
            problem, data = network.problem, network.data
            u, v = network.start()
        elif case == "several":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                v = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
            problem, u, v = several({"x": leaf(0.3, 0.4), "y": leaf(0.5), "z": leaf(-1.0).sum().detach()}, v)
            u["z"].requires_grad_()
        elif case == "prepare":
            problem = Problem(
                lambda u, v, x: torch.sum((v - x) ** 2),
                lambda u, v, x: torch.sum((v - 2 * x) ** 2 * u.exp()),
                prepare=lambda u, pair: torch.tanh(u) * pair[0] + pair[1],
                start_lower=lambda v, x: v.fill_(0.1),
            )
            u, v, data = leaf(0.2, 0.3, 0.4), leaf(0.0, 0.0, 0.0), ([1.0, 2.0], [1.0, 0.5, 2.0])
        else:
            problem, u, v, data = classify(rows=False)
            v, u = v.double(), torch.zeros(24, dtype=torch.float64, requires_grad=True)
            data = tuple([(b[0].double(), *b[1:]) for b in source] for source in data)
        # SGD: Adam would turn rounding of a gradient that is zero into a step.
        method = kind(upper_optimizer=partial(torch.optim.SGD, lr=0.1), **options)
        solve(problem, method, u, v, data, max_steps=4, seed=0, hypergradient=False)
        tensors = list(u.values()) if isinstance(u, dict) else [u]
        tensors += (
            list(v.state_dict().values()) if isinstance(v, nn.Module) else [*v.values()] if case == "network" else [v]
        )
        ends.append([x.detach() for x in tensors])
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("rate", [None, 0.1])
def test_trials_are_the_separate_runs(rate, chunk):
    method = ForwardMode(
        lower_steps=3, lower_rate=rate, momentum=0.3, chunk_size=chunk, upper_optimizer=partial(SGD, lr=0.1)
    )
    problem, u, v = trial_problem(3)
    together = solve(problem, method, u, v, max_steps=10, seed=0)
    for i in range(3):
        problem, u, v = trial_problem(None, i)
        alone = solve(problem, method, u, v, max_steps=10, seed=0)
        torch.testing.assert_close(together.u[i], alone.u, **CLOSE)
        torch.testing.assert_close(together.v[i], alone.v, **CLOSE)
        torch.testing.assert_close(together.adjoint[0][i], alone.adjoint[0], **CLOSE)


def test_lower_objective_without_u_leaves_the_direct_derivative(quadratic):
    problem = Problem(quadratic.upper, lambda u, v, _: (v - 1).square().sum() + 0 * u.sum())
    seen = watch(start(problem, ForwardMode(**FIXED), *quadratic.start()))[0]
    torch.testing.assert_close(seen.gradient, seen.u - quadratic.b, **CLOSE)
    problem = Problem(quadratic.upper, lambda u, v, _: (u[:2] * v).sum())  # and one without curvature
    seen = watch(start(problem, ForwardMode(lower_steps=2, **FIXED), *quadratic.start()))[0]
    torch.testing.assert_close(seen.gradient, reference(problem, seen, 1.0), **CLOSE)


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lower_objective_is_evaluated_once_for_each_lower_step_and_the_record(quadratic, accumulate):
    counter = Counter(quadratic.problem)
    method = ForwardMode(lower_steps=4, warm_up=0.5, chunk_size=2)
    solution = run_case(
        quadratic,
        Case("", method, True, 6, 0.0),
        problem=counter.problem,
        callbacks=[counter],
        log_every=1,
        accumulate=accumulate,
    )
    assert counter.each_step("lower") == [5 * accumulate] * 6
    assert counter.each_step("upper") == [accumulate] * 6
    assert [b - a for a, b in pairwise(solution.history["evaluations"])] == [5 * accumulate] * 5


# -- runs --------------------------------------------------------------------------------------------------------------

RUNS = [
    Case("plain", ForwardMode(), False, 200, 0.002),
    Case("momentum with data", ForwardMode(momentum=0.5), True, 200, 0.1),
]
each = pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name.replace(" ", "_"))


@each
def test_answer_is_approached_and_the_certificate_has_the_adjoint(quadratic, case):
    solution = run_case(quadratic, case)
    assert quadratic.error(solution.u, solution.v) < case.error
    assert solution.certificate.stationarity_v < 1e-10
    assert solution.certificate.hypergradient_error < 1e-8
    adjoint = torch.linalg.solve(quadratic.H, solution.v.detach() - quadratic.a)
    torch.testing.assert_close(solution.adjoint[0], adjoint, rtol=1e-8, atol=1e-8)


def test_run_ends_as_converged_at_its_tolerance(quadratic):
    method = ForwardMode(lower_steps=60, upper_optimizer=partial(torch.optim.SGD, lr=0.5), decay="constant")
    solution = solve(quadratic.problem, method, *quadratic.start(), max_steps=200, tolerance=1e-6, seed=0)
    assert solution.status is Status.CONVERGED
    assert solution.steps < 200


def test_adjoint_is_that_of_the_present_point(quadratic):
    u, v = quadratic.start()
    state = start(quadratic.problem, ForwardMode(), u, v)
    for k in range(3):
        expected = torch.linalg.solve(quadratic.H, quadratic.a - v.detach())
        torch.testing.assert_close(state.prices().nu[0], expected, rtol=1e-8, atol=1e-8)
        state.step(k)


def test_adjoint_is_sought_only_as_far_as_g_curves_up(quadratic):
    """f_v is (-1, 1) at the start: there g curves down by 1 - 2, and nothing is added."""
    problem = Problem(quadratic.upper, lambda u, v, _: v[0] ** 2 / 2 - v[1] ** 2 + (u[:2] * v).sum())
    state = start(problem, ForwardMode(lower_rate=0.1), *quadratic.start())
    assert not state.prices().nu[0].any()


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [0, 10**6], ids=["steps", "whole"])
def test_record_takes_the_path_of_eager(monkeypatch, whole):
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)
    monkeypatch.setattr("bilevel.engines.engine.WHOLE", whole)
    compare(ForwardMode(lower_steps=3, lower_rate=0.1, momentum=0.5, warm_up=0.4, chunk_size=7), rows=False)


@COMPILER
@pytest.mark.slow
def test_compiled_run_takes_the_path_of_eager():
    compare(ForwardMode(lower_steps=2, lower_rate=0.1, warm_up=0.0), rows=False, steps=3)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lower_steps", 0),
        ("lower_rate", 0.0),
        ("lower_rate", -1.0),
        ("momentum", 1.0),
        ("chunk_size", 0),
        ("chunk_size", 2.5),
        ("lower_decay", "cosine"),
        ("warm_up", 1.0),
        ("upper_optimizer", 0.1),
    ],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(OptionError) as caught:
        ForwardMode(**{name: value})
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
    with pytest.raises(OptionError, match=f"ForwardMode .*{word}"):
        solve(problem, ForwardMode(), *quadratic.start(), max_steps=1)


def test_rows_are_refused():
    network = Network()
    u, v = network.start(rows=True)
    with pytest.raises(OptionError, match="u cannot hold Rows"):
        solve(network.problem, ForwardMode(), u, v, network.data, max_steps=1)


@pytest.mark.parametrize(
    ("momentum", "words"),
    [
        (0.0, "a matrix of U x V = 1,000 x 3,000 numbers: 0.01 GiB; at most 0.01 GiB are allowed"),
        (0.5, "two matrices of U x V = 1,000 x 3,000 numbers: 0.02 GiB; at most 0.01 GiB are allowed"),
    ],
)
def test_matrix_that_is_too_large_is_refused_with_its_size(momentum, words, monkeypatch):
    monkeypatch.setattr("bilevel.methods.forward_mode.MEMORY_LIMIT", 0.01)
    u, v = torch.zeros(1000, requires_grad=True), torch.zeros(3000, requires_grad=True)
    problem = Problem(lambda u, v, _: v.square().sum() + u.sum(), lambda u, v, _: (v - u.sum()).square().sum())
    with pytest.raises(OptionError) as caught:
        solve(problem, ForwardMode(momentum=momentum), u, v, max_steps=1)
    assert words in str(caught.value)
    assert "Use ReverseMode or Penalty" in str(caught.value)
    limit = 1000 * 3000 * 4 * (2 if momentum else 1) / 2**30
    monkeypatch.setattr("bilevel.methods.forward_mode.MEMORY_LIMIT", limit)
    solve(
        problem,
        ForwardMode(momentum=momentum, lower_steps=1, lower_rate=0.1),
        u,
        v,
        max_steps=1,
        hypergradient=False,
    )


def test_missing_double_backward_is_refused():
    def lower(u: Tensor, v: Tensor, _: Any) -> Tensor:
        return (Once.apply(v).square() * torch.exp(u)).sum() + v.sum()

    problem = Problem(lambda u, v, _: v.square().sum(), lower)
    with pytest.raises(ProblemError, match=r"ForwardMode needs a double backward of lower, and an autograd.Function"):
        solve(problem, ForwardMode(lower_rate=0.1), leaf(0.1, 0.2), leaf(0.3, 0.4), max_steps=1)


def test_large_u_is_warned_of():
    u, v = torch.zeros(5000, requires_grad=True), torch.zeros(2, requires_grad=True)
    problem = Problem(lambda u, v, _: v.sum(), lambda u, v, _: (v - u.mean()).square().sum())
    with pytest.warns(BilevelWarning, match=r"T x U = 25,000 second backward passes in every upper step. Use"):
        solve(problem, ForwardMode(warm_up=0.5), u, v, max_steps=1)
