"""Several starts: where they end, how they are ranked, when they stop, resuming."""

from __future__ import annotations

import pytest
import torch
from common import leaf, two_minimisers

from bilevel import Box, Callback, OptionError, Penalty, Problem, Status, solve
from bilevel.certificates import Certificate
from bilevel.measures.problem_check import variables
from bilevel.results import Candidate
from bilevel.running.multistart import ranked
from bilevel.running.starting_points import drawn

# By differences, the augmented Lagrangian runs: it takes more steps than exact multipliers do.
SLOW = Penalty(curvature="difference")


def test_starts_end_at_the_optimistic_solution_and_list_the_other():
    u, v = leaf(0.7), leaf(0.8)
    solution = solve(two_minimisers(), Penalty(), u, v, max_steps=500, seed=0, starts=4)
    assert solution.status is Status.CONVERGED
    assert (u.item(), v.item()) == pytest.approx((-1.1, -1.0), abs=1e-6)
    ends = [(c.u[0].item(), c.v[0].item(), c.upper) for c in solution.candidates]
    assert ends[0] == pytest.approx((-1.1, -1.0, -0.21), abs=1e-6)
    assert ends[1] == pytest.approx((0.9, 1.0, 0.19), abs=1e-6)


def test_of_ends_with_one_f_the_one_whose_certificate_is_best_is_kept():
    """An end that is outside by 1e-7 has an f that is less by about as much: that is no merit."""

    def end(f: float, worst: float, status: Status) -> Candidate:
        return Candidate([leaf(f)], [leaf(0.0)], f, 0.0, status, Certificate(worst, 0.0, 0.0, 0.0, 1.0, 1.0), {}, 0)

    rough, exact = end(-1.000001, 1e-6, Status.MAX_STEPS), end(-1.0, 1e-9, Status.CONVERGED)
    assert ranked([rough, exact])[0] is exact
    assert ranked([end(-1.01, 1e-6, Status.MAX_STEPS), exact])[1] is exact


def test_ends_that_are_no_lower_solutions_are_ranked_by_how_far_they_are_off():
    """f can be anything where v does not minimise g, and where a constraint is violated."""

    def end(f: float, gap: float = 0.0, outside: float = 0.0) -> Candidate:
        certificate = Certificate(
            0.0, 0.0, 0.0, outside, 1.0, 1.0, lower_minimiser=gap == 0, lower_gap=gap, lower_starts=2
        )
        return Candidate([leaf(f)], [leaf(gap)], f, 0.0, Status.MAX_STEPS, certificate, {}, 0)

    far, near = end(-5.0, gap=1.0), end(-1.0, gap=1e-3)
    outside, barely = end(-9.0, outside=0.1), end(-2.0, outside=0.01)
    solved, better = end(3.0), end(2.0)
    assert ranked([far, outside, solved, near, barely, better]) == [better, solved, near, far, barely, outside]


def corner() -> Problem:
    """v = 1 for every u < 1, and f falls to 1/2 at u = 0. At u = 1 every v solves the lower problem; (1, 0) has f = 0
    (Lucchetti, Mignanego and Pieri, 1987)."""
    return Problem(
        lambda u, v, _: torch.sum((1 - u) / 2 + u * v),
        lambda u, v, _: torch.sum((u - 1) * v),
        lower_inequalities=lambda u, v, _: torch.cat([v - 1, -v]),
        project_upper=Box(0.0, 1.0),
    )


def test_starts_find_a_solution_on_a_bound_that_no_neighbour_shows():
    u, v = leaf(0.5), leaf(0.5)
    solution = solve(corner(), Penalty(), u, v, max_steps=500, seed=0, starts=8)
    assert solution.status is Status.CONVERGED
    assert (u.item(), v.item()) == pytest.approx((1.0, 0.0), abs=1e-6)
    assert any(c.upper == pytest.approx(0.5, abs=1e-6) for c in solution.candidates)


def test_every_other_start_is_the_farthest_from_those_before_it():
    problem = Problem(
        lambda u, v, _: torch.sum((u - 0.5) ** 2),
        lambda u, v, _: torch.sum((v - u) ** 2),
        project_upper=Box(0.0, 1.0),
    )
    both = variables(problem, leaf(0.4, 0.4), leaf(0.0, 0.0))
    first, far, second, *_ = drawn(problem, *both, 7, torch.Generator().manual_seed(0))
    assert first.upper <= second.upper  # the best of those that are left
    corners = max((first.u[0] - x).norm() for x in torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).double())
    assert (far.u[0] - first.u[0]).norm() > 0.7 * corners
    assert torch.equal(both[0].leaves[0].detach(), leaf(0.4, 0.4).detach())


def test_best_draw_of_another_valley_comes_before_the_second_best_of_the_first():
    """f is (u - 0.3)^2 left of 0.8, and right of it no less than 0.1, which is more than at most draws on the left."""
    problem = Problem(
        lambda u, v, _: torch.sum(torch.where(u < 0.8, (u - 0.3) ** 2, 0.1 + (u - 0.9) ** 2)),
        lambda u, v, _: torch.sum((v - u) ** 2),
        project_upper=Box(0.0, 1.0),
    )
    both = variables(problem, leaf(0.5), leaf(0.0))
    first, _, second, *_ = drawn(problem, *both, 7, torch.Generator().manual_seed(0))
    assert first.u[0].item() == pytest.approx(0.3, abs=0.05)
    assert second.u[0].item() == pytest.approx(0.9, abs=0.05)


def test_first_start_is_the_run_without_starts():
    alone, several = (leaf(0.7), leaf(0.8)), (leaf(0.7), leaf(0.8))
    solve(two_minimisers(), Penalty(), *alone, max_steps=500, seed=0)
    solution = solve(two_minimisers(), Penalty(), *several, max_steps=500, seed=0, starts=3)
    first = next(c for c in solution.candidates if c.start == 0)
    assert torch.equal(first.u[0], alone[0].detach())
    assert torch.equal(first.v[0], alone[1].detach())


def test_starts_that_agree_leave_out_the_rest(tmp_path):
    problem = Problem(lambda u, v, _: torch.sum((v - 1) ** 2), lambda u, v, _: torch.sum((v - u) ** 2))
    u, v = leaf(0.7), leaf(0.8)
    solution = solve(problem, Penalty(), u, v, max_steps=500, seed=0, starts=8, checkpoint=tmp_path)
    assert solution.status is Status.CONVERGED
    assert {path.name for path in tmp_path.iterdir()} == {"start-0", "start-1", "start-2"}


def test_starts_that_take_long_are_set_aside_and_the_best_of_them_is_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("bilevel.running.multistart.FIRST", 2)
    u, v = leaf(0.7), leaf(0.8)
    solution = solve(two_minimisers(), SLOW, u, v, max_steps=500, seed=0, starts=3, checkpoint=tmp_path)
    assert solution.status is Status.CONVERGED
    names = {path.name for path in tmp_path.iterdir()}
    assert {"start-0", "start-1", "start-2"} < names
    assert len([name for name in names if name.endswith("to-its-end")]) == 1


class Forgetful:
    """A `PausedRun` that keeps nothing: a paused run starts from scratch."""

    state = property(lambda self: None, lambda self, state: None)


@pytest.mark.parametrize(("problem", "first"), [(two_minimisers, 2), (corner, 10)])
def test_start_that_was_set_aside_goes_on_from_there_with_the_bits_of_one_that_begins_anew(monkeypatch, problem, first):
    monkeypatch.setattr("bilevel.running.multistart.FIRST", first)
    ends = []
    for begun in ([0, 0, 0, first], [0, 0, 0, 0]):
        steps = []

        class Heard(Callback):
            def start(self, run, steps=steps):
                steps.append(run.step)

        u, v = leaf(0.7), leaf(0.8)
        solution = solve(problem(), SLOW, u, v, max_steps=400, seed=0, starts=3, callbacks=[Heard()])
        assert steps == begun
        assert solution.status is Status.CONVERGED
        assert solution.steps == len(solution.history) > first
        ends.append((u.item(), v.item(), solution.steps, solution.history["upper"]))
        monkeypatch.setattr("bilevel.running.multistart.PausedRun", Forgetful)
    assert ends[0] == ends[1]


def test_later_starts_have_fewer_steps_where_the_first_ones_found_nothing(monkeypatch):
    monkeypatch.setattr("bilevel.running.multistart.FIRST", 4)
    monkeypatch.setattr("bilevel.running.multistart.LATER", 2)
    ends = []

    class Heard(Callback):
        def end(self, solution):
            ends.append(solution.steps)

    solve(two_minimisers(), SLOW, leaf(0.7), leaf(0.8), max_steps=7, seed=0, starts=6, callbacks=[Heard()])
    assert ends[:6] == [4, 4, 4, 4, 2, 2]
    assert ends[6:] == [7]


def test_starts_resume_from_the_folders_of_their_runs(tmp_path):
    with pytest.raises(OptionError, match="seed must be given"):
        solve(two_minimisers(), Penalty(), leaf(0.7), leaf(0.8), max_steps=500, starts=2, checkpoint=tmp_path)
    ends = []
    for resume in (False, True):
        u, v = leaf(0.7), leaf(0.8)
        options = {"max_steps": 500, "starts": 2, "seed": 0, "checkpoint": tmp_path, "resume": resume}
        solution = solve(two_minimisers(), Penalty(), u, v, **options)
        ends.append((u.item(), v.item(), [c.upper for c in solution.candidates]))
    assert ends[0] == ends[1]
    assert {path.name for path in tmp_path.iterdir()} == {"start-0", "start-1"}
