"""Constraints of the lower level: convex programs whose solution is known, certificates, resuming, refusals."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from common import leaf
from torch import Tensor

from bilevel import Box, Callback, Penalty, Problem, ProblemError, Status, check, solve
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.measures.constrained_lower_minimum import Resolved
from bilevel.methods.penalty.constrained_lagrangian import ConstrainedLagrangianRun
from bilevel.methods.penalty.deterministic import DeterministicRun
from bilevel.problem.variables import Variable

P, Q = 2, 3


def definite(generator: torch.Generator, size: int) -> Tensor:
    a = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return a @ a.T / size + 0.5 * torch.eye(size, dtype=torch.float64)


@dataclass
class Program:
    """A quadratic program at both levels with its global solution."""

    problem: Problem
    f: float
    u: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    kinds: tuple[str, ...]
    """Of each lower inequality: i(nactive), a(ctive), b(oth zero: no strict complementarity)."""


def program(seed: int) -> Program | None:
    """A random one; None where it has no solution.

    The pieces of its feasible set are polyhedra, one for each choice of active constraints, on which f is a strictly
    convex quadratic: their minima are those of linear systems, one for each face, and the least feasible one is the
    solution.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    m, e = 2 + seed % 2, int(seed % 3 == 0)
    H, C, c0, M, q = definite(generator, Q), normal(Q, P), normal(Q), definite(generator, P + Q), normal(P + Q)
    A, b, E, eb = normal(m, P + Q), normal(m).abs() / 2, normal(e, P + Q), normal(e)
    U, ub = normal(1, P + Q), normal(1).abs() / 2 + 0.2
    n = P + Q + m + e
    S = torch.cat([-C, H, A[:, P:].T, E[:, P:].T], 1)
    wide = partial(torch.nn.functional.pad, pad=(0, m + e))
    rows = [(wide(A)[i : i + 1], b[i : i + 1]) for i in range(m)]
    signs = [
        (torch.eye(n, dtype=torch.float64)[P + Q + i][None], torch.zeros(1, dtype=torch.float64)) for i in range(m)
    ]
    bend, slope = torch.zeros(n, n, dtype=torch.float64), torch.nn.functional.pad(q, (0, m + e))
    bend[: P + Q, : P + Q] = M
    best: tuple[float, Tensor, tuple[str, ...]] | None = None
    for kinds in itertools.product("iab", repeat=m):
        for upper in (False, True):
            held = [(S, c0), (wide(E), eb)]
            held += [rows[i] for i, kind in enumerate(kinds) if kind in "ab"]
            held += [signs[i] for i, kind in enumerate(kinds) if kind in "ib"]
            held += [(wide(U), ub)] if upper else []
            R, r = (torch.cat(parts) for parts in zip(*held, strict=True))
            K = torch.cat([torch.cat([bend, R.T], 1), torch.cat([R, torch.zeros(len(R), len(R), dtype=R.dtype)], 1)])
            if len(R) > n or torch.linalg.cond(K) > 1e10:
                continue
            x = torch.linalg.solve(K, torch.cat([-slope, r]))[:n]
            z, alpha = x[: P + Q], x[P + Q : P + Q + m]
            if (A @ z - b).max() > 1e-9 or alpha.min() < -1e-9 or (U @ z - ub).max() > 1e-9:
                continue
            f = (x @ bend @ x / 2 + slope @ x).item()
            if best is None or f < best[0] - 1e-12:
                best = f, x, kinds
    if best is None:
        return None

    def stack(u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u, v])

    problem = Problem(
        lambda u, v, _: stack(u, v) @ M @ stack(u, v) / 2 + q @ stack(u, v),
        lambda u, v, _: v @ H @ v / 2 - v @ (C @ u + c0),
        inequalities=lambda u, v, _: U @ stack(u, v) - ub,
        lower_inequalities=lambda u, v, _: A @ stack(u, v) - b,
        lower_equalities=[lambda u, v, _: E @ stack(u, v) - eb] if e else [],
    )
    u, v, alpha, beta = torch.split(best[1], [P, Q, m, e])
    return Program(problem, best[0], u, v, alpha, beta, best[2])


def solve_program(seed: int, starts: int) -> str | None:
    """Solve one; the active set of its solution, or None where there is none."""
    p = program(seed)
    if p is None:
        return None
    u, v = (torch.zeros(k, dtype=torch.float64, requires_grad=True) for k in (P, Q))
    solution = solve(p.problem, Penalty(), u, v, max_steps=2000, seed=seed, starts=starts)
    assert solution.status is Status.CONVERGED
    # What is promised, on solutions of size one.
    near = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(u.detach(), p.u, **near)
    torch.testing.assert_close(v.detach(), p.v, **near)
    torch.testing.assert_close(solution.multipliers["lower_inequalities"][0], p.alpha, **near)
    if len(p.beta):
        torch.testing.assert_close(solution.multipliers["lower_equalities"][0], p.beta, **near)
    assert solution.certificate.lower_gap <= 1e-7
    return "".join(p.kinds)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 6, 8, 9, 12])
def test_quadratic_programs_at_both_levels_end_at_their_solution_with_multipliers(seed):
    assert solve_program(seed, starts=1) is not None


@pytest.mark.slow
def test_a_hundred_quadratic_programs_all_end_at_their_solution():
    kinds, missed = [], []
    for seed in range(200):
        try:
            if len(kinds) + len(missed) < 100 and (found := solve_program(seed, starts=8)) is not None:
                kinds.append(found)
        except AssertionError:
            missed.append(seed)
    assert missed == []
    assert len(kinds) == 100
    assert sum("b" in kind for kind in kinds) >= 10  # without strict complementarity


# -- derivatives and cost ---------------------------------------------------------------------------------------------


def circle() -> tuple[Problem, Tensor, Tensor]:
    """g bent, c and d curved and coupled: nothing about it is special."""
    problem = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2) + torch.sum(torch.sin(u) * v),
        lambda u, v, _: torch.sum(torch.cosh(v - u)) + v[0] * v[1] * u[0],
        inequalities=lambda u, v, _: u[0] * v[1] - 2,
        lower_inequalities=lambda u, v, _: torch.stack([v @ v - 1 - u[0] ** 2, v[0] - 3 * u[1]]),
        lower_equalities=lambda u, v, _: v[0] * u[1] + v[1] - 0.2,
    )
    return problem, leaf(0.3, 0.4), leaf(0.5, -0.2)


@pytest.mark.parametrize("phase", ["smooth", "piece"])
def test_derivative_with_lower_constraints_is_that_of_the_objective_as_written(phase):
    problem, u, v = circle()
    plain_u, lower = Variable(u, "u"), Variable(v, "v")
    kkt = KKT(problem, plain_u, lower, None)
    kkt.measure(None, 1.3)
    kkt.t.fill_(0.1)
    with torch.no_grad():
        kkt.a[0].copy_(torch.tensor([0.4, 0.1]))
        kkt.b[0].fill_(-0.3)
    if phase == "piece":
        kkt.active = [torch.tensor([True, False])]
    kkt.cuts.add(torch.tensor([0.2, 0.1], dtype=torch.float64))
    d = PenalisedObjective(kkt.problem(), kkt.u, lower, "exact")
    leaves = [*kkt.u.leaves, *lower.leaves]
    nu = [torch.tensor([0.7, -0.4], dtype=torch.float64)]
    shapes = [h.detach() for h in d.constraints(None)]
    new = partial(torch.tensor, dtype=torch.float64)
    prices = Prices(new(3.0), nu, [new(1.0 + i) for i in range(len(shapes))], [0.2 + 0 * h for h in shapes])
    found = d.penalised([(None, None)], prices, with_u=True)

    def written() -> float:
        g, c, e = kkt.parts(None)
        lagrangian = g + torch.sum(kkt.alpha[0] * c[0]) + torch.sum(kkt.beta[0] * e[0])
        (s,) = torch.autograd.grad(lagrangian, v)
        total = problem.upper(u, v, None) + nu[0] @ s + 1.5 * s @ s
        a, b = kkt.a[0], -c[0] / kkt.sizes_c[0]
        smooth = a + b - torch.sqrt(a * a + b * b + 0.02)
        equal = [e[0], smooth if phase == "smooth" else torch.stack([b[0], a[1]])]
        less = [problem.inequalities[0](u, v, None)]
        less += [torch.stack([-a[0], -b[1]])] if phase == "piece" else []
        less.append(d.constraints(None)[-1])  # the cut
        for i, h in enumerate([*equal, *less]):
            price = 1.0 + i
            if i < 2:
                total = total + torch.sum(0.2 * h + price / 2 * h * h)
            else:
                total = total + (torch.sum((0.2 + price * h).clamp(min=0) ** 2) - 0.04 * h.numel()) / (2 * price)
        return total.item()

    step = 1e-6
    for leaf_, slope in zip(leaves, [*found.u, *found.v], strict=True):
        for i in range(leaf_.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf_.view(-1)[i] += sign * step
                values.append(written())
                with torch.no_grad():
                    leaf_.view(-1)[i] -= sign * step
            # A central difference is right to step^2 and rounding over step: 1e-9.
            assert slope.reshape(-1)[i].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("start", [0, 1])
def test_gradient_evaluates_objectives_and_lower_constraints_once_and_once_more_for_a_cut(start):
    """In the smooth rounds, with which start 0 begins, and in a piece, with which start 1 does."""
    problem, u, v = circle()
    counts = {}

    def counting(name, function):
        def counted(*arguments):
            counts[name] += 1
            return function(*arguments)

        return counted

    counted = Problem(
        counting("upper", problem.upper),
        counting("lower", problem.lower),
        lower_inequalities=counting("c", problem.lower_inequalities[0]),
        lower_equalities=counting("d", problem.lower_equalities[0]),
    )
    found = []

    class Counting(Penalty):
        def init(self, setting):
            state = super().init(replace(setting, start=start))
            assert (state.kkt.active is None) is (start == 0)
            for cuts in range(3):
                counts.update(dict.fromkeys(counts, 0))
                state._penalised(state.search.x)
                assert counts == {"upper": 1, "lower": 1 + cuts, "c": 1 + cuts, "d": 1 + cuts}
                found.append(state.derivatives.lower_evaluations)
                state.kkt.cuts.add(torch.tensor([0.2, 0.1], dtype=torch.float64))
                state._set_problem()
                state._measure()
            return state

    counts.update(dict.fromkeys(("upper", "lower", "c", "d"), 0))
    solve(counted, Counting(), u, v, max_steps=1, seed=0)
    assert len(found) == 3


def test_difference_of_gradients_takes_no_lower_constraint_from_another_point():
    """Where g has no second derivative, v is moved within one gradient of F."""
    problem, u, v = circle()
    found = []

    class Watched(Penalty):
        def init(self, setting):
            state = super().init(setting)
            found.append(state._penalised(state.search.x + 0.01)[1])
            return state

    for curvature in ("exact", "difference"):
        _, u, v = circle()
        solve(problem, Watched(curvature=curvature), u, v, max_steps=1, seed=0)
    # eps^(2/3) of a central difference, and what the first rounds make of it.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_without_lower_constraints_the_run_is_the_plain_one(quadratic):
    states = []

    class Watching(Penalty):
        def init(self, setting):
            states.append(super().init(setting))
            return states[-1]

    u, v = quadratic.start()
    solution = solve(quadratic.problem, Watching(), u, v, max_steps=200, seed=0)
    assert type(states[0]) is DeterministicRun
    assert states[0].derivatives.kkt is None
    assert set(solution.multipliers) == {"nu", "equalities", "inequalities"}
    assert solution.certificate.lower_gap is None
    empty = replace(quadratic.problem, lower_equalities=[], lower_inequalities=())
    again = quadratic.start()
    assert solve(empty, Penalty(), *again, max_steps=200, seed=0).history["upper"] == solution.history["upper"]
    assert torch.equal(again[0].detach(), u.detach())
    assert torch.equal(again[1].detach(), v.detach())
    bounded = Problem(quadratic.upper, quadratic.lower, lower_inequalities=lambda u, v, _: v - 100)
    solve(bounded, Watching(), *quadratic.start(), max_steps=200, seed=0)
    assert type(states[1]) is ConstrainedLagrangianRun


# -- endings ----------------------------------------------------------------------------------------------------------


def test_constraints_that_do_not_bind_leave_the_solution_where_it_is(quadratic):
    u, v = quadratic.start()
    problem = Problem(quadratic.upper, quadratic.lower, lower_inequalities=lambda u, v, _: v - 100)
    solution = solve(problem, Penalty(), u, v, max_steps=500, seed=0)
    assert solution.status is Status.CONVERGED
    assert quadratic.error(u, v) <= 1e-6
    assert solution.multipliers["lower_inequalities"][0].abs().max() <= 1e-6


def mirrlees() -> Problem:
    """Two lower minimisers, near 1 and near -1, which tie at u = 1; f would have u = 2 and v near 1."""
    return Problem(
        lambda u, v, _: torch.sum((u - 2) ** 2 + (v - 1) ** 2),
        lambda u, v, _: torch.sum(-u * torch.exp(-((v + 1) ** 2)) - torch.exp(-((v - 1) ** 2))),
        lower_inequalities=lambda u, v, _: torch.cat([v - 2, -2 - v]),
    )


def test_stationary_point_that_is_no_lower_minimiser_is_called_so(monkeypatch):
    monkeypatch.setattr("bilevel.methods.penalty.augmented_lagrangian.RESTARTS", 0)
    u, v = leaf(1.8), leaf(0.9)
    solution = solve(mirrlees(), Penalty(), u, v, max_steps=1000, seed=0)
    assert solution.status is Status.STATIONARY
    assert solution.certificate.lower_minimiser is False
    assert solution.certificate.lower_gap > 0.1
    assert "does not minimise" in str(solution.status)


def test_cuts_keep_v_a_lower_minimiser_where_two_tie():
    u, v = leaf(1.8), leaf(0.9)
    solution = solve(mirrlees(), Penalty(), u, v, max_steps=2000, seed=0, starts=4)
    assert solution.certificate.lower_minimiser
    # To what rounding of the tie allows: g is compared to a relative 1e-9 only.
    assert u.item() == pytest.approx(1.0, abs=1e-4)
    assert v.item() == pytest.approx(0.95753, abs=1e-4)


class Pieces(Penalty):
    """Without the smooth rounds, as every other of several starts."""

    def init(self, setting):
        return super().init(replace(setting, start=1))


def valleys() -> Problem:
    """g has a minimum at sqrt(u) and another at -1, where v ends; they tie at u = 1/4 (Mitsos and Barton, 3.14)."""
    return Problem(
        lambda u, v, _: torch.sum((u - 0.25) ** 2 + v**2),
        lambda u, v, _: torch.sum(v**3 / 3 - u * v),
        lower_inequalities=lambda u, v, _: torch.cat([v - 1, -1 - v]),
        project_upper=Box(-1.0, 1.0),
    )


def test_run_that_ends_beyond_a_cut_is_no_lower_minimiser_though_the_search_misses_it(monkeypatch):
    """The better point was found at another u: it is asked again at the end."""
    monkeypatch.setattr("bilevel.methods.penalty.constrained_lagrangian.resolve", lambda *_: Resolved(0.0, None, 1, 1))
    finish = ConstrainedLagrangianRun.finish

    def with_a_cut(state):
        state.kkt.cuts.add(torch.tensor([-1.0], dtype=torch.float64))
        return finish(state)

    ends = []
    for change in (finish, with_a_cut):
        monkeypatch.setattr(ConstrainedLagrangianRun, "finish", change)
        u, v = leaf(1.8), leaf(0.9)
        ends.append(solve(mirrlees(), Penalty(), u, v, max_steps=1000, seed=0))
    assert [end.status for end in ends] == [Status.CONVERGED, Status.STATIONARY]
    assert [end.certificate.lower_minimiser for end in ends] == [True, False]


@pytest.mark.parametrize(("restarts", "status"), [(0, Status.STATIONARY), (4, Status.INFEASIBLE)])
def test_run_that_gave_up_on_a_cut_is_called_stationary_and_never_converged(monkeypatch, restarts, status):
    """Its method says INFEASIBLE; no constraint of the problem is violated where it ended."""
    monkeypatch.setattr("bilevel.methods.penalty.augmented_lagrangian.RESTARTS", restarts)
    monkeypatch.setattr(ConstrainedLagrangianRun, "ended", lambda state: state.status and Status.INFEASIBLE)
    solution = solve(mirrlees(), Penalty(), leaf(1.8), leaf(0.9), max_steps=1000, seed=0)
    assert solution.certificate.infeasibility <= 1e-7
    assert solution.certificate.lower_minimiser is (restarts > 0)
    assert solution.status is status


def test_cut_at_the_end_of_a_fixed_range_counts_in_full():
    """A constraint that u moves may excuse a cut where it is violated; one that u does not move may not."""
    u, v = leaf(0.1), leaf(0.3)
    bound = leaf(-1.0).detach()
    fixed = KKT(valleys(), Variable(u, "u"), Variable(v, "v"), None)
    fixed.cuts.add(bound)
    gap = (0.3**3 / 3 - 0.03) - (-1 / 3 + 0.1)
    assert fixed.problem().inequalities[-1](u, v, None).item() == pytest.approx(gap / 2, abs=1e-12)  # 1 + |w| = 2
    moving = replace(valleys(), lower_inequalities=[lambda u, v, _: u - v - 1.05])  # at w = -1: u - 0.05
    kkt = KKT(moving, Variable(u, "u"), Variable(v, "v"), None)
    kkt.cuts.add(bound)
    assert kkt.problem().inequalities[-1](u, v, None).item() == pytest.approx(1e-6 - 0.05, abs=1e-12)


def test_of_lower_minimisers_that_tie_the_one_with_the_least_f_is_taken():
    u, v = leaf(0.25), leaf(-1.0)  # where f = 1, and Pieces stays
    solution = solve(valleys(), Pieces(), u, v, max_steps=500, seed=0)
    assert solution.status is Status.CONVERGED
    # To what the comparison of g allows, a relative 1e-9, with a slope of 3/2 in u.
    assert (u.item(), v.item()) == pytest.approx((0.25, 0.5), abs=1e-5)


def test_lower_constraints_that_no_point_meets_are_called_infeasible():
    problem = Problem(
        lambda u, v, _: torch.sum((v - u) ** 2 + u**2),
        lambda u, v, _: torch.sum(v**2),
        lower_inequalities=lambda u, v, _: torch.cat([v**2 + 1, v - u]),
    )
    solution = solve(problem, Penalty(), leaf(0.5), leaf(0.5), max_steps=1000, seed=0)
    assert solution.status is Status.INFEASIBLE
    assert solution.certificate.lower_violation > 0.1


def test_upper_bounds_and_lower_constraints_work_together():
    """Clark and Westerberg's example: (1, 3) and (3, 5) are its local solutions."""
    problem = Problem(
        lambda u, v, _: torch.sum((u - 3) ** 2 + (v - 2) ** 2),
        lambda u, v, _: torch.sum((v - 5) ** 2),
        lower_inequalities=[
            lambda u, v, _: -2 * u + v - 1,
            lambda u, v, _: u - 2 * v + 2,
            lambda u, v, _: u + 2 * v - 14,
        ],
        project_upper=Box(0.0, 8.0),
    )
    u, v = leaf(4.0), leaf(1.0)
    solution = solve(problem, Penalty(), u, v, max_steps=1000, seed=0, starts=4)
    assert solution.status is Status.CONVERGED
    assert (u.item(), v.item()) == pytest.approx((1.0, 3.0), abs=1e-6)
    values = [candidate.upper for candidate in solution.candidates]
    assert values[0] == pytest.approx(5.0, abs=1e-6)
    assert values == sorted(values)
    assert len(values) == len({round(value, 4) for value in values})


def test_piece_is_left_for_its_neighbour_where_f_falls_there():
    """v = max(u, 0). From u = -1, where v = 0 is held, f falls to u = 0, and from there on along v = u to 3/2."""
    problem = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2 + (u - 2) ** 2),
        lambda u, v, _: torch.sum((v - u) ** 2) / 2,
        lower_inequalities=lambda u, v, _: -v,
    )
    u, v = leaf(-1.0), leaf(0.0)
    solution = solve(problem, Pieces(), u, v, max_steps=500, seed=0)
    assert solution.status is Status.CONVERGED
    assert (u.item(), v.item()) == pytest.approx((1.5, 1.5), abs=1e-6)
    # And back: with f least at u = -2, v is held at 0 again.
    back = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2 / 9 + (u + 2) ** 2),
        problem.lower,
        lower_inequalities=problem.lower_inequalities,
    )
    u, v = leaf(1.0), leaf(1.0)
    solution = solve(back, Pieces(), u, v, max_steps=500, seed=0)
    assert (u.item(), v.item()) == pytest.approx((-2.0, 0.0), abs=1e-6)
    assert solution.multipliers["lower_inequalities"][0].item() == pytest.approx(2.0, abs=1e-5)


# -- resuming and refusals ---------------------------------------------------------------------------------------------


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run):
        return run.step >= self.step


@pytest.mark.parametrize("stop", [5, 60])
def test_resumed_run_with_lower_constraints_has_the_same_bits(tmp_path, stop):
    p = program(0)

    def start():
        return [torch.zeros(k, dtype=torch.float64, requires_grad=True) for k in (P, Q)]

    straight = start()
    expected = solve(p.problem, Penalty(), *straight, max_steps=500, seed=0, log_every=1)
    assert expected.steps > 60
    halves = start()
    options = {"max_steps": 500, "seed": 0, "log_every": 1, "checkpoint": tmp_path}
    solve(p.problem, Penalty(), *halves, callbacks=[StopAt(stop)], **options)
    found = solve(p.problem, Penalty(), *halves, resume=True, **options)
    assert found.status is expected.status
    for a, b in zip(straight, halves, strict=True):
        assert torch.equal(a.detach(), b.detach())
    for name, values in expected.multipliers.items():
        for a, b in zip(values, found.multipliers[name], strict=True):
            assert torch.equal(a, b)


def test_check_tries_lower_constraints(quadratic):
    problem = Problem(quadratic.upper, quadratic.lower, lower_inequalities=lambda u, v, _: v / 0)
    with pytest.raises(ProblemError, match="lower constraint 0 must be finite"):
        check(problem, *quadratic.start())


def test_lower_constraints_are_refused_beside_a_projection_and_trials(quadratic):
    for options in ({"project_lower": Box(0, 1)}, {"trials": 2}):
        with pytest.raises(ProblemError, match="lower_inequalities"):
            Problem(quadratic.upper, quadratic.lower, lower_inequalities=lambda u, v, _: v, **options)
