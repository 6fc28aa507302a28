"""Without data: problems on which the first v is far from a minimum of g, g has a kink, or f falls for ever."""

from __future__ import annotations

import pytest
import torch
from common import leaf

from bilevel import Box, Penalty, Problem, Status, solve
from bilevel.optim.projected_lbfgs import ProjectedLBFGS

COST = torch.tensor([1.0, 2.0, 3.0, 2.5], dtype=torch.float64)


def toll(u: torch.Tensor) -> torch.Tensor:
    return COST + torch.cat([u, u.new_zeros(2)])


def routes(u, v, batch):
    """The routes that travellers choose: cost and entropy, which curves down in v at v = 0."""
    p = torch.softmax(v, 0)
    return (p * toll(u)).sum() + (p * torch.log_softmax(v, 0)).sum() / 2 + v.mean() ** 2 / 2


def revenue(u, v, batch):
    return -(u * torch.softmax(v, 0)[:2]).sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("box", [None, Box(0.0, 5.0)])
def test_a_lower_level_that_curves_down_at_the_first_v_is_solved_at_its_minimum(seed, box):
    """The travellers' answer is softmax(-2 cost), so the revenue is known in closed form."""
    u, v = leaf(0.0, 0.0), leaf(0.0, 0.0, 0.0, 0.0)
    solution = solve(Problem(revenue, routes, project_upper=box), Penalty(), u, v, max_steps=400, seed=seed)
    p = torch.softmax(-2 * toll(u), 0)
    slope = torch.autograd.grad(-(u * p[:2]).sum(), u)[0]
    assert solution.status is Status.CONVERGED
    assert set(solution.history["solver"]) == {"exact multipliers"}
    assert slope.norm() < 1e-8  # the run goes far below its tolerance of 1e-6
    assert torch.allclose(torch.softmax(v, 0), p, rtol=0, atol=1e-9)


def test_a_plateau_of_g_far_from_its_minimum_is_not_called_converged():
    """At v = (100, -100, 0, 0) the softmax is flat up to rounding."""
    u, v = leaf(0.0, 0.0), leaf(100.0, -100.0, 0.0, 0.0)
    problem = Problem(revenue, routes, project_upper=Box(0.0, 5.0))
    solution = solve(problem, Penalty(), u, v, max_steps=150, seed=0)
    p = torch.softmax(-2 * toll(u), 0)
    slope = torch.autograd.grad(-(u * p[:2]).sum(), u)[0]
    assert solution.status is not Status.CONVERGED or slope.norm() < 1e-5


def test_a_kink_of_g_neither_ends_far_from_the_start_nor_as_unbounded():
    """v* = 1 - exp(u) as long as that is positive, so F is known; f is never negative."""
    u, v = leaf(-2.0), leaf(0.5)
    solution = solve(
        Problem(
            lambda u, v, _: ((v - 0.6) ** 2).sum() + 1e-3 * (u**2).sum(),
            lambda u, v, _: ((v - 1) ** 2).sum() / 2 + (u.exp() * v.abs()).sum(),
        ),
        Penalty(),
        u,
        v,
        max_steps=300,
        seed=0,
    )
    assert solution.status is not Status.DIVERGED
    slope = -2 * (1 - u.exp() - 0.6) * u.exp() + 2e-3 * u
    assert slope.abs().item() < 1e-8


def test_an_f_that_falls_linearly_diverges_in_few_steps():
    u, v = leaf(0.0), leaf(0.0)
    problem = Problem(lambda u, v, _: v.sum(), lambda u, v, _: ((v - u) ** 2).sum())
    solution = solve(problem, Penalty(), u, v, max_steps=100, seed=0)
    assert solution.status is Status.DIVERGED
    assert solution.steps < 10
    assert "add bounds on u" in solution.message


def test_a_line_search_goes_on_while_the_slope_stays():
    """The first trial is 0.1 long, and the minimum is 1,000 away, along a line and then a parabola."""

    def function(x):
        far = (x - 900).clamp(min=0)
        return (-x + far**2 / 200).sum().item(), -1 + far / 100, None

    search = ProjectedLBFGS.start(function, torch.zeros(1, dtype=torch.float64))
    assert search.iterate(function)
    assert search.x.item() > 100


def test_a_budget_that_is_too_small_is_not_blamed_on_kinks():
    u, v = leaf(0.0, 3.0), leaf(0.0, 0.0)
    problem = Problem(
        lambda u, v, _: ((v - 1) ** 4).sum() + (u**2).sum(), lambda u, v, _: ((v - u.sin()) ** 2).sum() + (v**4).sum()
    )
    solution = solve(problem, Penalty(), u, v, max_steps=1, seed=0)
    assert solution.status is Status.MAX_STEPS
    assert solution.message == ""
