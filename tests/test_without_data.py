"""Without data and without options: right answers, true statuses, and the same ending for every seed.

Answers are compared with dense algebra in float64 or with scipy, never with our own solver.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from common import leaf, two_minimisers
from sklearn.datasets import load_diabetes, load_wine

from bilevel import Box, Penalty, Problem, Solution, Status, solve

sys.path.insert(0, str(Path(__file__).parents[1] / "studies" / "benchmarks"))
from implicit_reference import Logistic, Ridge, implicit, minimised
from scaled_problems import KINDS, Exact, scaled_problem
from without_data import halves, stated

FLOAT64 = torch.float64


def solved(problem: Problem, u: torch.Tensor, v: torch.Tensor, seed: int = 0) -> Solution:
    """Solve without options."""
    return solve(problem, Penalty(), u, v, max_steps=3000, seed=seed)


# -- penalties of linear models -------------------------------------------------------------------------------------


def tuned(model, start, bounds, seed):
    """Solve without options; return the solution and the true value at its u."""
    problem, u, v = stated(model, start, FLOAT64)
    solution = solved(Problem(problem.upper, problem.lower, project_upper=Box(*bounds)), u, v, seed)
    return solution, implicit(model)(u.detach().numpy())[0]


@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_penalties_for_each_feature_reach_the_value_of_dense_implicit_gradients_for_every_seed(name):
    """The default of many penalty methods ends at a worse value than it starts from on such problems."""
    if name == "wine":
        model, start = Logistic(halves(*load_wine(return_X_y=True), 3), 3), np.full(13, -4.0)
    else:
        model, start = Ridge(halves(*load_diabetes(return_X_y=True))), np.zeros(10)
    _, best, _ = minimised(model, start, (-10, 6))
    ends = [tuned(model, start, (-10, 6), seed) for seed in range(3)]
    for solution, value in ends:
        assert solution.status is Status.CONVERGED
        assert value <= 1.02 * best
        assert solution.certificate.upper == pytest.approx(value, rel=1e-9)
        assert solution.certificate.hypergradient_error < 1e-3
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-9)
    assert ends[0][1] == pytest.approx(ends[2][1], rel=1e-9)


def test_a_run_that_starts_at_the_answer_is_converged_at_once():
    """Nothing is left to gain there, so what is left cannot be judged by the decrease since the start."""
    model, start = Logistic(halves(*load_wine(return_X_y=True), 3), 3), np.full(13, -4.0)
    problem, u, _ = stated(model, start, FLOAT64)
    problem = Problem(problem.upper, problem.lower, project_upper=Box(-10, 6))
    solved(problem, u, torch.zeros(14, 3, dtype=FLOAT64, requires_grad=True))
    before = u.detach().clone()
    again = solved(problem, u, torch.zeros(14, 3, dtype=FLOAT64, requires_grad=True), 1)
    assert again.status is Status.CONVERGED
    assert again.steps <= 5
    assert set(again.history["solver"]) == {"exact multipliers"}
    torch.testing.assert_close(u.detach(), before, rtol=0, atol=1e-4)


# -- badly scaled problems with known answers -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::bilevel.BilevelWarning")
@pytest.mark.parametrize("number", range(16))
def test_badly_scaled_problems_are_solved_and_converged_is_true(number):
    """Four kinds, each with u scaled by 1e-6 to 1e6 and f that depends weakly on u; the last four are in float32."""
    scaled = scaled_problem(number, seed=7)
    assert (scaled.kind, scaled.dtype) == (KINDS[number % 4], torch.float32 if number >= 12 else FLOAT64)
    problem, u, v = scaled.problem()
    solution = solved(problem, u, v)
    exact, w = Exact(scaled), u.detach().double() / scaled.scale
    assert exact.missing(w) <= (1e-3 if scaled.dtype == torch.float32 else 1e-4)
    assert solution.status is Status.CONVERGED
    assert exact.distance(w) <= 10 * solution.certificate.tolerance


def test_the_independent_computation_knows_a_point_that_is_no_answer():
    scaled = scaled_problem(0, seed=7)
    exact = Exact(scaled)
    assert exact.missing(scaled.w) == pytest.approx(1.0)
    assert exact.distance(scaled.answer) < 1e-6
    assert exact.distance(scaled.answer + 0.01) > 1e-3


# -- which algorithm runs -------------------------------------------------------------------------------------------


def test_a_softmax_with_biases_that_g_does_not_see_keeps_exact_multipliers():
    """A constant on all biases changes neither g nor f: g_vv is singular there, which is no obstacle."""
    model, start = Logistic(halves(*load_wine(return_X_y=True), 3), 3), np.full(13, -4.0)
    solution, _ = tuned(model, start, (-10, 6), 0)
    assert set(solution.history["solver"]) == {"exact multipliers"}


def test_a_direction_that_f_sees_and_g_does_not_goes_to_the_augmented_lagrangian():
    """g is flat along v[1]: the optimistic solution minimises f there, and g_vv has no inverse."""
    problem = Problem(
        lambda u, v, _: (v[1] - 2) ** 2 + (v[0] - 1) ** 2 + (u**2).sum() / 10, lambda u, v, _: (v[0] - u[0]) ** 2
    )
    u, v = leaf(0.0), leaf(0.0, 0.0)
    solution = solved(problem, u, v)
    assert solution.status is Status.CONVERGED
    assert "augmented Lagrangian" in solution.history["solver"]
    torch.testing.assert_close(v.detach(), torch.tensor([1 / 1.1, 2.0], dtype=FLOAT64), rtol=0, atol=1e-6)


def test_the_search_continues_from_the_better_of_two_ends():
    """The values of the history never rise once exact multipliers run."""
    model, start = Ridge(halves(*load_diabetes(return_X_y=True))), np.zeros(10)
    solution, _ = tuned(model, start, (-10, 6), 0)
    values = solution.history["f"]
    assert all(b <= a + 1e-9 for a, b in pairwise(values))


# -- what a run says at its end -------------------------------------------------------------------------------------


def test_the_end_line_of_a_short_run_says_what_to_try_and_nothing_of_minibatches():
    model = Logistic(halves(*load_wine(return_X_y=True), 3), 3)
    problem, u, v = stated(model, np.full(13, -4.0), FLOAT64)
    paper = Penalty.algorithm_1()
    solution = solve(problem, paper, u, v, max_steps=3, seed=0)
    assert solution.status is Status.MAX_STEPS
    assert solution.certificate.hypergradient_error > 0.1
    assert "Hypergradient error" in str(solution)
    assert "try" in str(solution).lower()
    assert "minibatch" not in str(solution)


def test_negative_curvature_leaves_the_error_of_the_hypergradient_undefined():
    """v starts and stays near the maximum of g, where f wants it."""

    def lower(u, v, _):
        return (-(v**2) / 2 + v**4 / 4 + 1e-3 * u * v).sum()

    problem = Problem(lambda u, v, _: ((v - 0.2) ** 2).sum() * 100 + (u**2).sum(), lower)
    u, v = leaf(0.0), leaf(0.1)
    solution = solve(problem, Penalty.algorithm_1(), u, v, max_steps=2, seed=0)
    assert solution.certificate.hypergradient_error is None
    assert "curves down" in solution.certificate.hypergradient_unknown
    assert "curves down" in str(solution)


def test_starts_report_how_far_the_two_best_ends_are_apart():
    solution = solve(two_minimisers(), Penalty(), leaf(0.7), leaf(0.8), max_steps=500, seed=0, starts=4)
    line = next(line for line in repr(solution).splitlines() if line.startswith("  starts:"))
    assert "2 distinct ends" in line
    assert "f = -0.21 and 0.19" in line
    # (-1.1, -1.0) and (0.9, 1.0) are 2 sqrt(2) apart, relative to 1 + 1.49.
    assert "differ in (u, v) by 1.1" in line


def test_no_converged_end_is_returned_that_another_start_beats():
    solution = solve(two_minimisers(), Penalty(), leaf(0.7), leaf(0.8), max_steps=500, seed=0, starts=4)
    assert all(c.upper >= solution.candidates[0].upper - 1e-9 for c in solution.candidates)
    assert solution.certificate.upper == pytest.approx(solution.candidates[0].upper)


def test_feasibility_is_judged_in_the_unit_of_each_constraint():
    """A constraint in other units, written 1e6 times larger or smaller, is held as closely."""
    for unit in (1e-6, 1.0, 1e6):
        problem = Problem(
            lambda u, v, _: ((v - 2) ** 2).sum() + (u**2).sum() / 10,
            lambda u, v, _: ((v - u) ** 2).sum(),
            inequalities=lambda u, v, _, unit=unit: unit * (v - 1),
        )
        u, v = leaf(0.0), leaf(0.0)
        solution = solved(problem, u, v)
        assert solution.status is Status.CONVERGED
        assert v.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore::bilevel.BilevelWarning")
def test_float32_that_cannot_resolve_the_problem_ends_soon_and_not_as_converged():
    """Penalties from exp(-10) to exp(6) next to float32: the answer is near, but it cannot be confirmed."""
    model, start = Logistic(halves(*load_wine(return_X_y=True), 3), 3), np.full(13, -4.0)
    problem, u, v = stated(model, start, torch.float32)
    solution = solved(Problem(problem.upper, problem.lower, project_upper=Box(-10, 6)), u, v)
    _, best, _ = minimised(model, start, (-10, 6))
    value = implicit(model)(u.detach().double().numpy())[0]
    assert solution.status in (Status.CONVERGED, Status.STALLED)
    assert solution.steps < 300
    assert value <= 1.02 * best
    assert "float64" in str(solution) or solution.status is Status.CONVERGED
