"""Several starts for problems with data: one after another, the best kept."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from common import leaf
from ranks import on_ranks
from torch import nn

from bilevel import Alternating, Box, Callback, OptionError, Penalty, Problem, Rows, Status, solve, solve_pessimistic
from bilevel.certificates import Certificate
from bilevel.problem.variables import Variable
from bilevel.results import Candidate
from bilevel.running.multistart import ranked
from bilevel.running.starting_points import spread_points

ADAM = partial(torch.optim.Adam, lr=0.02)
BOTH = {"upper_optimizer": ADAM, "lower_optimizer": ADAM}
OPTIONS = BOTH | {"cotangent": "same"}


def batches() -> tuple[list, list]:
    rows = torch.randn(80, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 10
    found = list((rows - rows.mean()).split(10))
    return found, found


def two_minimisers(**more) -> Problem:
    """v = 1 and v = -1 minimise g on average, for every u. f is -0.21 at best, at (-1.1, -1), and 0.19 at (0.9, 1)."""
    return Problem(
        lambda u, v, batch: ((u - v) ** 2 + 0.2 * u + batch.mean() * v).sum(),
        lambda u, v, batch: ((v * v - 1) ** 2 / 4 + batch.mean() * v).sum() + 0 * u.sum(),
        **more,
    )


class Counting(Callback):
    """How many runs there were, and with how many steps each."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def end(self, solution):
        self.ends.append(solution.steps)


def test_starts_with_data_end_at_the_optimistic_solution_and_list_the_other():
    u, v = leaf(0.7), leaf(0.8)
    heard = Counting()
    solution = solve(
        two_minimisers(), Penalty(**OPTIONS), u, v, batches(), max_steps=600, seed=0, starts=6, callbacks=[heard]
    )
    assert heard.ends == [600] * 6  # the whole budget each
    assert solution.u is u
    assert solution.v is v
    # f is flat around its least value, and batches of ten are noisy.
    assert (u.item(), v.item()) == pytest.approx((-1.1, -1.0), abs=5e-2)
    assert solution.candidates[0].upper == pytest.approx(-0.21, abs=2e-2)
    assert max(c.upper for c in solution.candidates) == pytest.approx(0.19, abs=2e-2)
    assert solution.status is Status.MAX_STEPS
    assert solution.certificate is solution.candidates[0].certificate
    assert [tuple(x.shape) for x in solution.adjoint] == [(1,)]


def test_starts_work_with_projections_rows_dropout_and_values_read_on_the_host():

    def host(u, v, batch):
        return ((v - u) ** 2).sum() * (1.0 if v.sum().item() > -100 else 2.0)

    net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    masked = Problem(
        lambda u, v, batch: v(batch[:, None]).square().mean(),
        lambda u, v, batch: (v(batch[:, None]) - u).square().mean(),
    )
    rows = Problem(
        lambda u, v, batch: ((v - 1) ** 2).sum(), lambda u, v, batch: ((v - u[torch.arange(2)].sum()) ** 2).sum()
    )
    for problem, u, v in (
        (two_minimisers(project_upper=Box(-2.0, 2.0)), leaf(0.7), leaf(0.8)),
        (rows, Rows(2, dtype=torch.float64), leaf(0.5)),
        (masked, leaf(0.1), net),
        (Problem(host, host), leaf(0.1), leaf(0.3)),
    ):
        heard = Counting()
        solution = solve(
            problem,
            Penalty(**OPTIONS),
            u,
            v,
            batches(),
            max_steps=5,
            seed=0,
            starts=3,
            callbacks=[heard],
            hypergradient=False,
        )
        assert heard.ends == [5, 5, 5]
        assert solution.candidates


def test_first_start_is_the_run_without_starts():
    problem = two_minimisers(project_upper=Box(-2.0, 2.0))
    alone, several = (leaf(0.7), leaf(0.8)), (leaf(0.7), leaf(0.8))
    solve(problem, Penalty(**OPTIONS), *alone, batches(), max_steps=40, seed=0)
    solution = solve(problem, Penalty(**OPTIONS), *several, batches(), max_steps=40, seed=0, starts=3)
    first = next(c for c in solution.candidates if c.start == 0)
    assert torch.equal(first.u[0], alone[0].detach())
    assert torch.equal(first.v[0], alone[1].detach())


def test_multipliers_are_those_of_the_end_of_each_start():
    u, v = leaf(0.7), leaf(0.8)
    solution = solve(two_minimisers(), Penalty(**OPTIONS), u, v, batches(), max_steps=50, seed=0, starts=6)
    assert len(solution.candidates) > 1
    for c in solution.candidates:
        # grad_v F = f_v + g_vv nu at the end, on average over the batches, whose mean is zero.
        x, y = c.u[0].item(), c.v[0].item()
        slope = -2 * (x - y) + (3 * y * y - 1) * c.multipliers["nu"][0].item()
        assert c.certificate.stationarity_v == pytest.approx(abs(slope), abs=1e-9)


def test_u_and_v_are_left_at_the_best_end_whose_f_is_a_mean_over_the_batches():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    data = (list(x.split(10)), list(x.split(10)))
    u = {"scale": leaf(0.1), "shift": leaf(0.2)}
    problem = Problem(
        lambda u, v, batch: (v(batch) - 1).square().mean() + u["scale"].square().sum(),
        lambda u, v, batch: (v(batch) * u["scale"] - u["shift"]).square().mean(),
    )
    solution = solve(problem, Alternating(lower_steps=2, **BOTH), u, net, data, max_steps=20, seed=0, starts=3)
    assert solution.v is net
    best = solution.candidates[0]
    for tensor, value in zip(net.state_dict().values(), best.v, strict=True):
        assert torch.equal(tensor, value)
    f = torch.stack([problem.upper(u, net, batch) for batch in data[0]]).mean().item()
    assert best.upper == pytest.approx(f, abs=1e-12)


def test_starting_points_keep_the_first_and_the_sizes_of_each_tensor_of_v():
    torch.manual_seed(0)
    net = nn.Linear(200, 50).double()
    with torch.no_grad():
        net.weight.mul_(0.01)
        net.bias.zero_()
    before = [p.detach().clone() for p in net.parameters()]
    u = torch.zeros(500, dtype=torch.float64, requires_grad=True)
    points = spread_points(Variable(u, "u", Box(-1.0, 3.0)), Variable(net, "v"), 4, 0)
    assert len(points) == 4
    for p, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.detach(), value)
    assert torch.equal(points[0][1][0], before[0])
    rms = before[0].square().mean().sqrt()
    for drawn_u, drawn_v in points[1:]:
        moved = (drawn_v[0] - before[0]).square().mean().sqrt()
        assert (moved / rms).item() == pytest.approx(1.0, abs=0.05)
        assert drawn_v[1].abs().max() < 0.1  # a bias of zero moves by the size of all weights
        assert drawn_u[0].min() == -1.0  # a twelfth of the coordinates lie on each bound
        assert drawn_u[0].max() == 3.0
        assert 0.1 < (drawn_u[0].abs() > 0).double().mean() <= 1.0
        on_bounds = ((drawn_u[0] == -1.0) | (drawn_u[0] == 3.0)).double().mean().item()
        assert on_bounds == pytest.approx(1 / 6, abs=0.06)


def test_with_data_an_end_that_is_no_lower_solution_ranks_behind():
    def end(f: float, residual: float, violation: float = 0.0) -> Candidate:
        certificate = Certificate(0.1, 0.1, residual, violation, 1.0, 1.0, batches=4)
        return Candidate([leaf(f)], [leaf(residual)], f, 0.0, Status.MAX_STEPS, certificate, {}, 0)

    cheat, fine, better, outside = end(-5.0, 0.5), end(1.0, 0.01), end(0.5, 0.02), end(-9.0, 0.01, violation=0.1)
    assert ranked([cheat, outside, fine, better]) == [better, fine, cheat, outside]


def test_starts_with_data_resume(tmp_path):
    ends = []
    for resume in (False, True):
        u, v = leaf(0.7), leaf(0.8)
        options = {"max_steps": 30, "starts": 3, "seed": 0, "checkpoint": tmp_path, "resume": resume}
        solve(two_minimisers(), Penalty(**OPTIONS), u, v, batches(), **options)
        ends.append((u.item(), v.item()))
    assert ends[0] == ends[1]
    assert {path.name for path in tmp_path.iterdir()} == {"start-0", "start-1", "start-2"}


def test_starting_points_where_an_objective_is_not_finite_are_drawn_anew():
    problem = Problem(
        lambda u, v, batch: ((v - 1) ** 2).sum() + batch.mean(),
        lambda u, v, batch: ((v - u) ** 2 - 0.01 * torch.log(1.3 - v)).sum() + 0 * batch.sum(),
    )
    u, v = leaf(0.1), leaf(1.2)
    solution = solve(problem, Penalty(**OPTIONS), u, v, batches(), max_steps=10, seed=2, starts=6)
    assert solution.status is Status.MAX_STEPS
    points = spread_points(Variable(leaf(0.1), "u"), Variable(leaf(1.2), "v"), 6, 2)
    assert any(drawn[0].item() > 1.3 for _, drawn in points)


def test_starts_that_diverge_rank_behind_those_that_do_not():
    """If v meets 1.5 from below, g ends."""

    def lower(u, v, batch):
        return ((v - u) ** 2 - 1e-4 * torch.log(1.5 - v)).sum() + 0 * batch.sum()

    problem = Problem(lambda u, v, batch: ((v - 1) ** 2).sum() + (u + v).sum() * batch.mean(), lower)
    u, v = leaf(0.1), leaf(0.2)
    heard = Counting()
    fast = partial(torch.optim.Adam, lr=0.3)
    method = Penalty(gamma=1.0, lam=1.0, warm_up=0.0, upper_optimizer=fast, lower_optimizer=fast)
    solution = solve(problem, method, u, v, batches(), max_steps=50, seed=2, starts=4, callbacks=[heard])
    assert len(heard.ends) == 4
    assert min(heard.ends) < 50
    assert solution.status is Status.MAX_STEPS
    assert math.isfinite(v.item())


def test_starts_are_refused_with_trials():
    problem = Problem(lambda u, v, _: ((u - v) ** 2).sum(1), lambda u, v, _: ((v - 1) ** 2).sum(1), trials=2)
    u, v = (torch.zeros(2, 1, requires_grad=True) for _ in range(2))
    with pytest.raises(OptionError, match="starts must be 1 with trials"):
        solve(problem, Penalty(mode="stochastic"), u, v, max_steps=1, starts=2)


def on_two_ranks(data: bool) -> list[tuple]:
    """The ranks have seeds of their own and, with data, draw random numbers of their own in f."""
    torch.manual_seed(int(os.environ["RANK"]))
    plain = Problem(lambda u, v, _: ((u - v) ** 2 + 0.2 * u).sum(), lambda u, v, _: ((v * v - 1) ** 2 / 4).sum())
    noisy = replace(two_minimisers(), upper=lambda u, v, batch: (u - v).square().sum() + torch.randn(()))
    problem, given = (noisy, batches()) if data else (plain, None)
    ends = []
    method = Penalty(**OPTIONS) if data else Penalty()
    for run in [solve] if data else [solve, solve_pessimistic]:
        u, v = leaf(0.7), leaf(0.8)
        more = {"data": given} if data else {}
        solution = run(problem, method, u, v, max_steps=10, starts=3, **more)
        ends.append((u.item(), v.item(), [(c.upper, c.start) for c in solution.candidates]))
    return ends


@pytest.mark.parametrize("data", [True, False])
def test_ranks_keep_the_same_start(data):
    first, second = on_ranks(2, on_two_ranks, data)
    assert first == second
    assert len(first[0][2]) > data  # with noise in f no two ends have the same


def test_lower_constraints_and_starts_work_together_on_minibatches():
    """v >= 1/2 leaves one of the two minimisers."""
    problem = replace(two_minimisers(), lower_inequalities=lambda u, v, _: 0.5 - v)
    u, v = leaf(0.2), leaf(0.3)
    solve(problem, Penalty(**OPTIONS), u, v, batches(), max_steps=400, seed=0, starts=2)
    assert (u.item(), v.item()) == pytest.approx((0.9, 1.0), abs=5e-2)
