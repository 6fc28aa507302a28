"""Without data and without options: right answers, true statuses, and the same ending for every seed.

Answers are compared with dense algebra in float64 or with scipy, never with our own solver.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from common import leaf, two_minimisers
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from bilevel import Box, Certificate, Penalty, Problem, Solution, Status, solve
from bilevel.methods.penalty import lower_systems
from bilevel.methods.penalty.exact_multipliers_run import ExactMultipliersRun

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


# -- what a stranger found: CONVERGED must be true -------------------------------------------------------------------


def equal(u, v, _):
    """v = u."""
    return ((v - u) ** 2).sum()


def breast_cancer(rows: int) -> Problem:
    """One log-penalty for each of 30 features, a few rows: without bounds, u runs to infinity."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(y))
    x, y = torch.tensor(((x - x.mean(0)) / x.std(0))[order]), torch.tensor(2.0 * y[order] - 1)

    def loss(v, some):
        return torch.nn.functional.softplus(-y[some] * (x[some] @ v)).mean()

    return Problem(
        lambda u, v, _: loss(v, slice(rows, None)),
        lambda u, v, _: loss(v, slice(rows)) + (u.exp() * v**2).sum(),
    )


def test_penalties_that_run_to_infinity_keep_v_at_the_minimum_and_ask_for_bounds():
    """With 50 rows, the run once ended as CONVERGED with g = 13 to 541, although g is 0.69 at v = 0."""
    problem, u, v = breast_cancer(50), torch.full((30,), -3.0, dtype=FLOAT64, requires_grad=True), leaf(*[0.0] * 30)
    solution = solved(problem, u, v)
    assert problem.lower(u, v, None).item() < problem.lower(u, torch.zeros_like(v), None).item()
    assert set(solution.history["solver"]) == {"exact multipliers"}
    assert "add bounds on u" in str(solution)
    slope = torch.autograd.grad(problem.lower(u, v, None), v)[0]
    assert solution.status is not Status.CONVERGED or slope.norm() < 1e-8


def test_ridge_without_bounds_ends_alike_for_every_seed_and_asks_for_bounds():
    """Penalties of useless features run to infinity. Curvatures from 1 to 1e40 need a scaled factor of g_vv."""
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor((y - y.mean()) / y.std())
    ends = []
    for seed in range(3):
        u, v = leaf(*[0.0] * 10), leaf(*[0.0] * 10)
        problem = Problem(
            lambda u, v, _: ((x[20:] @ v - y[20:]) ** 2).mean(),
            lambda u, v, _: ((x[:20] @ v - y[:20]) ** 2).mean() + (u.exp() * v**2).sum(),
        )
        ends.append(solved(problem, u, v, seed))
        assert "add bounds on u" in str(ends[-1])
        assert ends[-1].steps < 200
    assert {one.status for one in ends} == {ends[0].status}
    assert all(one.certificate.upper == pytest.approx(ends[0].certificate.upper, abs=1e-9) for one in ends)


GRID = torch.linspace(0, 1, 21, dtype=FLOAT64)
FAR = {
    # f(u, u), the start and the minimum. The fall from 1e26 once made anything a solution.
    "exponential": (
        lambda v: v[0].exp() + v[0] ** 2 / 2 + 100 * (v[2] - v[1] ** 2) ** 2 + (1 - v[1]) ** 2,
        (60.0, -1.2, 1.0),
        0.7279690463,
    ),
    "growth": (
        lambda v: ((v[0] + v[1] * GRID).exp() - 2 * (0.7 * GRID).exp()).square().mean(),
        (0.0, 40.0),
        0.0,
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_a_start_that_is_far_off_is_no_unit_and_solving_again_changes_nothing(name):
    f, start, least = FAR[name]
    u, v = leaf(*start), leaf(*[0.0] * len(start))
    problem = Problem(lambda u, v, _: f(v), equal)
    for _ in range(2):
        solution = solved(problem, u, v)
        assert solution.status is Status.CONVERGED
        assert solution.certificate.upper == pytest.approx(least, abs=1e-8)
    assert solution.steps <= 15


def test_numbers_of_v_with_units_from_1e_minus_4_to_1e4_are_no_obstacle():
    """The certificate once said itself that the hypergradient was wrong by 100%, and CONVERGED."""
    a = torch.randn(6, 6, generator=torch.Generator().manual_seed(2), dtype=FLOAT64)
    a = a @ a.T + torch.eye(6)
    b = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=FLOAT64)
    unit_v, unit_u = (
        torch.tensor([1e-4, 1e4, 1, 1, 1e2, 1e-2], dtype=FLOAT64),
        torch.tensor([1e-4, 1, 1e4, 1e2], dtype=FLOAT64),
    )

    def lower(u, v, _):
        apart = v / unit_v - b @ torch.tanh(u / unit_u)
        return apart @ a @ apart / 2

    u, v = leaf(*[0.0] * 4), leaf(*[0.0] * 6)
    problem = Problem(lambda u, v, _: ((v / unit_v - 1) ** 2).sum() + 0.1 * ((u / unit_u - 0.3) ** 2).sum(), lower)
    solution = solved(problem, u, v)
    assert solution.status is Status.CONVERGED
    assert solution.certificate.upper == pytest.approx(2.77961325, rel=1e-8)
    assert solution.certificate.hypergradient_error < 1e-2


def test_a_known_error_of_the_hypergradient_forbids_converged():
    """Whatever the method says: with an error above 10%, or an unknown one at a v that is no minimum, it is not so."""
    good = Certificate(0.0, 0.0, 0.0, 0.0, scale=1.0, lower_scale=1.0, hypergradient_error=0.05)
    assert good.trusted
    assert not replace(good, hypergradient_error=0.2).trusted
    unknown = replace(good, hypergradient_error=None, hypergradient_unknown="g does not curve in some direction of v")
    assert not unknown.trusted
    assert replace(unknown, lower_minimiser=True).trusted


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda v: -(v**4).sum(), "unbounded below"),
        (lambda v: -v.exp().sum(), "unbounded below"),
        (lambda v: -torch.log(1 + v**2).sum(), "runs to infinity"),
    ],
)
def test_f_that_falls_without_bound_has_diverged(f, words):
    """It once was CONVERGED with f = -1e260, where squares of slopes overflow; the last one raised AttributeError."""
    solution = solved(Problem(lambda u, v, _: f(v), equal), leaf(1.0), leaf(1.0))
    assert solution.status is Status.DIVERGED
    assert words in str(solution)
    assert "add bounds" in str(solution)
    assert math.isfinite(solution.certificate.upper)


def test_a_lower_problem_with_kinks_ends_with_a_status():
    """Slopes that are long or not finite once raised OverflowError."""
    a, b = torch.tensor([1.0, 0, 0.5], dtype=FLOAT64), torch.tensor([1.2, 0.3, 0.9], dtype=FLOAT64)
    problem = Problem(
        lambda u, v, _: ((v - a) ** 2).sum(),
        lambda u, v, _: ((v - b) ** 2).sum() / 2 + u.exp().sum() * v.abs().sum(),
    )
    solution = solve(problem, Penalty(), leaf(-3.0), leaf(0.0, 0.0, 0.0), max_steps=500, seed=2)
    assert solution.status is not Status.CONVERGED or solution.certificate.hypergradient_error < 0.1


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_badly_conditioned_systems_do_not_hide_what_is_left(eps):
    """Hilbert matrix: L-BFGS sees curvatures of 1e15 first, which say nothing of the rest. f was 5.5 and CONVERGED."""
    a = 1 / (torch.arange(8.0, dtype=FLOAT64)[:, None] + torch.arange(8.0) + 1) + 2 * eps * torch.eye(8)
    values, vectors = torch.linalg.eigh(a)
    one = vectors.sum(0)
    least = (0.01 * one**2 / (1 + 0.01 * values**2) * values**2).sum().item()
    for seed in range(2):
        problem = Problem(
            lambda u, v, _: ((v - 1) ** 2).sum() + 0.01 * (u**2).sum(), lambda u, v, _: v @ a @ v / 2 - u @ v
        )
        solution = solved(problem, leaf(*[0.0] * 8), leaf(*[0.0] * 8), seed)
        assert solution.certificate.upper == pytest.approx(least, rel=1e-6) or solution.status is Status.STALLED


@pytest.mark.parametrize("constant", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("name", ["maximum", "saddle"])
def test_a_start_at_a_maximum_or_saddle_is_left_whatever_constant_f_has(constant, name):
    f, least = {
        "maximum": (lambda v: (v**4 - v**2).sum(), -0.5),
        "saddle": (lambda v: v[0] ** 2 - v[1] ** 2 + v[1] ** 4, -0.25),
    }[name]
    solution = solved(Problem(lambda u, v, _: f(v) + constant, equal), leaf(0.0, 0.0), leaf(0.0, 0.0))
    assert solution.status is Status.CONVERGED
    assert solution.certificate.upper - constant == pytest.approx(least, abs=1e-7)


def test_an_exploration_takes_at_most_a_tenth_of_the_evaluations(monkeypatch):
    """Or four, in a short run."""
    counts = []
    known = ExactMultipliersRun._explore

    def counting(run, stuck):
        before = run.exact.evaluations
        known_answer = known(run, stuck)
        counts.append((run.exact.evaluations - before, before))
        return known_answer

    monkeypatch.setattr(ExactMultipliersRun, "_explore", counting)
    for name in ("wine", "diabetes"):
        if name == "wine":
            model, start = Logistic(halves(*load_wine(return_X_y=True), 3), 3), np.full(13, -4.0)
        else:
            model, start = Ridge(halves(*load_diabetes(return_X_y=True))), np.zeros(10)
        tuned(model, start, (-10, 6), 0)
    assert counts
    assert all(taken <= max(4, before // 10) for taken, before in counts)


@pytest.mark.parametrize("max_steps", [100, 2000])
def test_a_region_where_f_is_infinite_is_not_entered(max_steps):
    """The run once ended as DIVERGED, and with 2,000 steps it returned its start."""
    problem = Problem(lambda u, v, _: torch.where(v < 0.3, torch.inf, (v - 0.1) ** 2).sum(), equal)
    u, v = leaf(3.0), leaf(3.0)
    solution = solve(problem, Penalty(), u, v, max_steps=max_steps, seed=0)
    assert solution.status is Status.STALLED
    assert u.item() == pytest.approx(0.3, abs=1e-3)
    assert "not finite" in str(solution)
    assert "learning rate" not in repr(solution)


def chain(n: int, groups: int) -> Problem:
    """Smoothing of a signal: one weight for each group of differences; g_vv is at least the identity."""
    draw = np.random.default_rng(5)
    clean = torch.tensor(np.sin(np.linspace(0, 20, n)))
    noisy = clean + torch.tensor(draw.random(n) - 0.5)
    return Problem(
        lambda u, v, _: ((v - clean) ** 2).sum() / 2 + 1e-3 * (u**2).sum(),
        lambda u, v, _: (
            ((v - noisy) ** 2).sum() / 2
            + (u.exp().repeat_interleave(n // groups)[: n - 1] * (v[1:] - v[:-1]) ** 2).sum() / 2
        ),
    )


def test_systems_that_take_too_many_products_only_shorten_a_step(monkeypatch):
    """With 100,000 numbers in v, exact multipliers once gave up at such a trial point, and the end was worse."""
    monkeypatch.setattr(lower_systems, "PRODUCTS", 40)
    solution = solve(chain(1500, 30), Penalty(), leaf(*[0.0] * 30), leaf(*[0.0] * 1500), max_steps=60, seed=0)
    assert set(solution.history["solver"]) == {"exact multipliers"}
    assert all(b <= a + 1e-9 for a, b in pairwise(solution.history["f"]))


def test_a_run_ends_soon_after_its_tolerance_if_its_goal_is_out_of_reach():
    """A large v has no factor of g_vv, so the last digits are rounding. The run once used all its steps for them."""
    solution = solve(chain(1100, 20), Penalty(), leaf(*[0.0] * 20), leaf(*[0.0] * 1100), max_steps=1000, seed=0)
    assert solution.status is Status.CONVERGED
    assert solution.steps < 150


def test_a_budget_that_ends_within_the_tolerance_is_converged():
    """Equal answers have equal statuses: the end is checked there too."""
    model, start = Ridge(halves(*load_diabetes(return_X_y=True))), np.zeros(10)
    problem, u, v = stated(model, start, FLOAT64)
    problem = Problem(problem.upper, problem.lower, project_upper=Box(-10, 6))
    full = solved(problem, u, v)
    within = next(k for k, left in enumerate(full.history["epsilon"]) if left <= 1e-7) + 1
    assert within < full.steps
    _, u, v = stated(model, start, FLOAT64)
    assert solve(problem, Penalty(), u, v, max_steps=within, seed=0).status is Status.CONVERGED


@pytest.mark.filterwarnings("ignore::bilevel.BilevelWarning")
def test_a_constant_f_is_converged_and_the_end_says_so():
    solution = solved(Problem(lambda u, v, _: 0 * v.sum() + 3, equal), leaf(1.0, 1.0), leaf(0.0, 0.0))
    assert solution.status is Status.CONVERGED
    assert "does not change with u" in str(solution)
