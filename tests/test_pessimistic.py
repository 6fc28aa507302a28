"""The pessimistic choice: the worst of the tied lower solutions counts."""

from __future__ import annotations

import pytest
import torch
from common import leaf, two_minimisers

from bilevel import Alternating, OptionError, Penalty, Problem, Status, solve_pessimistic
from bilevel.running import pessimistic


def test_pessimistic_choice_ends_where_the_worst_lower_solution_is_least():
    u, v = leaf(0.7), leaf(0.8)
    solution = solve_pessimistic(two_minimisers(), Penalty(), u, v, max_steps=500, seed=0)
    assert solution.status is Status.CONVERGED
    assert solution.v is v
    assert u.item() == pytest.approx(0.0, abs=1e-6)
    assert [c.upper for c in solution.candidates] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert {round(c.v[0].item()) for c in solution.candidates} == {1, -1}


def test_pessimistic_choice_counts_minimisers_that_tie_on_the_boundary():
    """g = -v^2 on [-1, 1] is least at both ends, for every u: max f = 1 + 2 |u| + u^2 + 0.2 u is least at u = 0."""
    problem = Problem(
        lambda u, v, _: torch.sum((u - v) ** 2 + 0.2 * u),
        lambda u, v, _: -torch.sum(v * v) + 0 * u.sum(),
        lower_inequalities=lambda u, v, _: torch.cat([v - 1, -1 - v]),
    )
    u, v = leaf(0.7), leaf(0.8)
    solution = solve_pessimistic(problem, Penalty(), u, v, max_steps=500, seed=0)
    assert u.item() == pytest.approx(0.0, abs=1e-5)
    assert sorted(c.v[0].item() for c in solution.candidates) == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert [c.upper for c in solution.candidates] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_pessimistic_choice_leaves_out_a_minimum_that_does_not_tie():
    """Near v = -1 g has a minimum, too, but a larger one: it is no lower solution, however large f is there."""
    problem = Problem(
        lambda u, v, _: torch.sum((u - v) ** 2 + 0.2 * u),
        lambda u, v, _: torch.sum((v * v - 1) ** 2 / 4 - 0.1 * v) + 0 * u.sum(),
    )
    u, v = leaf(0.7), leaf(0.8)
    solution = solve_pessimistic(problem, Penalty(), u, v, max_steps=500, seed=0)
    (only,) = solution.candidates
    w = 1.0466805318046  # of v^3 - v = 0.1
    assert (u.item(), only.v[0].item()) == pytest.approx((w - 0.1, w), abs=1e-5)


@pytest.mark.parametrize(("rounds", "status"), [(1, Status.STALLED), (3, Status.CONVERGED)])
def test_pessimistic_choice_is_converged_only_where_no_other_lower_solution_is_found(monkeypatch, rounds, status):
    """The first search misses one of the two minimisers, as a search may; the next finds it."""
    found = pessimistic.lower_solutions
    monkeypatch.setattr(pessimistic, "lower_solutions", lambda *of: found(*of)[: None if of[4] else 1])
    monkeypatch.setattr(pessimistic, "ROUNDS", rounds)
    u = leaf(0.7)
    solution = solve_pessimistic(two_minimisers(), Penalty(), u, leaf(0.8), max_steps=500, seed=0)
    assert solution.status is status
    assert ("still finds other lower solutions" in str(solution)) == (rounds == 1)
    assert (abs(u.item()) <= 1e-6) == (rounds == 3)


def test_pessimistic_choice_with_starts_keeps_the_least_worst_case():
    """f has two valleys in u, and v = 1 and v = -1 tie: max f is (u^2 - 1)^2 + 0.3 u + 0.1 |u|."""
    problem = Problem(
        lambda u, v, _: torch.sum((u * u - 1) ** 2 + 0.3 * u + 0.1 * u * v),
        lambda u, v, _: torch.sum((v * v - 1) ** 2) / 4 + 0 * u.sum(),
    )
    u, v = leaf(0.9), leaf(0.8)
    solve_pessimistic(problem, Penalty(), u, v, max_steps=500, seed=0, starts=4)
    # 4 u^3 - 4 u + 0.3 - 0.1 = 0 left of zero, where the worst v is -1.
    assert u.item() == pytest.approx(-1.0241, abs=1e-3)
    assert v.item() == pytest.approx(-1.0, abs=1e-5)


def test_pessimistic_choice_refuses_what_it_does_not_support(quadratic):
    with pytest.raises(OptionError, match=r"Penalty\(\) in its deterministic mode; got Penalty\(mode='stochastic'\)"):
        solve_pessimistic(quadratic.problem, Penalty(mode="stochastic"), *quadratic.start(), max_steps=1, seed=0)
    with pytest.raises(OptionError, match=r"Penalty\(\) in its deterministic mode; got Alternating\(\)"):
        solve_pessimistic(quadratic.problem, Alternating(), *quadratic.start(), max_steps=1, seed=0)
    with pytest.raises(OptionError, match="starts must be at least 1"):
        solve_pessimistic(quadratic.problem, Penalty(), *quadratic.start(), max_steps=1, starts=0)
