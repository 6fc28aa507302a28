"""Constraints of the lower level on minibatches: closed forms, derivatives, cost, resuming, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from common import leaf
from test_lower_constraints import P, Program, Q, StopAt, circle, program
from torch import nn

from bilevel import OptionError, Penalty, Problem, ProblemError, solve
from bilevel.methods.penalty.constrained_minibatch import RHO, T_FACTOR, ConstrainedMinibatchRun
from bilevel.methods.penalty.minibatch import PenaltyMinibatchRun

ADAM = partial(torch.optim.Adam, lr=0.02)
OPTIONS = {"upper_optimizer": ADAM, "lower_optimizer": ADAM}


class Watching(Penalty):
    """Keeps the state of its run."""

    def init(self, setting):
        states.append(super().init(setting))
        return states[-1]


states: list = []


def noisy(p: Program) -> tuple[Problem, tuple[list, list]]:
    """The program with both objectives as means over rows: its linear terms are those of the rows on average."""
    rows = torch.randn(200, Q, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 2
    batches = list((rows - rows.mean(0)).split(20))
    problem = replace(
        p.problem,
        upper=lambda u, v, batch: p.problem.upper(u, v, None) + v @ batch.mean(0),
        lower=lambda u, v, batch: p.problem.lower(u, v, None) - v @ batch.mean(0),
    )
    return problem, (batches, batches)


def zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(P, dtype=torch.float64, requires_grad=True), torch.zeros(
        Q, dtype=torch.float64, requires_grad=True
    )


@pytest.mark.parametrize(("seed", "kinds"), [(5, "aia"), (9, "aii")])
def test_quadratic_program_with_data_ends_near_its_solution_with_multipliers(seed, kinds):
    """9 has a lower equality, too. With a tenth of the noise left by batches, 1e-2 is what Adam's last steps allow."""
    p = program(seed)
    assert "".join(p.kinds) == kinds
    problem, data = noisy(p)
    u, v = zeros()
    solution = solve(problem, Penalty(**OPTIONS), u, v, data, max_steps=1000, seed=0)
    near = {"rtol": 0, "atol": 1e-2}
    torch.testing.assert_close(u.detach(), p.u, **near)
    torch.testing.assert_close(v.detach(), p.v, **near)
    torch.testing.assert_close(solution.multipliers["lower_inequalities"][0], p.alpha, **near)
    for beta in solution.multipliers["lower_equalities"]:
        torch.testing.assert_close(beta, p.beta, **near)
    certificate = solution.certificate
    assert max(certificate.lower_violation, certificate.complementarity) <= 5e-3
    assert certificate.lower_gap is None
    assert certificate.lower_minimiser is None


def test_without_data_the_lower_problem_is_solved_again():
    p = program(1)
    u, v = zeros()
    options = {**OPTIONS, "mode": "stochastic"}
    solution = solve(p.problem, Penalty(**options), u, v, max_steps=800, seed=0, tolerance=1e-2)
    assert (u.detach() - p.u).abs().max() <= 2e-2
    assert solution.certificate.lower_gap is not None
    assert solution.certificate.lower_starts > 1


# -- derivatives and cost ---------------------------------------------------------------------------------------------


def run_of(problem: Problem, *start, data=None, **options) -> ConstrainedMinibatchRun:
    states.clear()
    method = Watching(**({"mode": "stochastic", "warm_up": 0.0} | OPTIONS | options))
    solve(problem, method, *start, data, max_steps=1, seed=0)
    return states[0]


def test_v_descends_the_augmented_lagrangian_with_multipliers_held():
    problem, u, v = circle()
    state = run_of(problem, u, v)
    kkt = state.kkt
    with torch.no_grad():
        kkt.a[0].copy_(torch.tensor([0.4, 0.1]))
        kkt.b[0].fill_(-0.3)
        v.copy_(torch.tensor([0.8, 0.9]))
    state.schedule.lam.fill_(0.7)
    gradients = state.derivatives.penalised([(None, None)], state.schedule.prices, with_u=True)
    (found,) = state._lowered(gradients)
    alpha, beta = kkt.alpha[0].detach(), kkt.beta[0].detach()
    rho_c, rho_d = (RHO * kkt.bend / sizes[0] ** 2 for sizes in (kkt.sizes_c, kkt.sizes_d))
    c, d = problem.lower_inequalities[0](u, v, None), problem.lower_equalities[0](u, v, None)
    written = (
        problem.lower(u, v, None) + torch.sum((alpha + rho_c * c).clamp(min=0) ** 2 / rho_c - alpha**2 / rho_c) / 2
    )
    written = written + torch.sum(beta * d + rho_d / 2 * d * d)
    (slope,) = torch.autograd.grad(written, v)
    torch.testing.assert_close(found, gradients.v[0] + 0.7 * slope, rtol=1e-12, atol=1e-12)
    assert u.requires_grad


@pytest.mark.parametrize("warm_up", [0.0, 0.9])
def test_step_evaluates_objectives_once_and_lower_constraints_three_times(warm_up):
    problem, _, _ = circle()
    counts = {}

    def counting(name, function):
        def counted(*arguments):
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments)

        return counted

    counted = Problem(
        counting("upper", problem.upper),
        counting("lower", problem.lower),
        lower_inequalities=counting("c", problem.lower_inequalities[0]),
        lower_equalities=counting("d", problem.lower_equalities[0]),
    )
    data = ([torch.zeros(1)] * 2, [torch.zeros(1)] * 2)
    found = []
    for steps in (10, 20):
        counts.clear()
        _, u, v = circle()
        method = Penalty(lower_steps=2, warm_up=warm_up, gamma=1.0, **OPTIONS)
        solve(counted, method, u, v, data, max_steps=steps, seed=0, hypergradient=False)
        found.append(dict(counts))
    more = {name: found[1][name] - found[0][name] for name in found[0]}
    assert more == {"upper": 30, "lower": 30, "c": 90, "d": 90}


def test_smoothing_falls_with_the_schedule_and_the_warm_up_sets_the_multipliers():
    p = program(9)
    problem, data = noisy(p)
    states.clear()
    solve(problem, Watching(advances=0, **OPTIONS), *zeros(), data, max_steps=1, seed=0)
    first = states[0].kkt.t.item()
    states.clear()
    solve(problem, Watching(advances=5, warm_up=0.5, **OPTIONS), *zeros(), data, max_steps=100, seed=0)
    kkt = states[0].kkt
    assert kkt.t.item() == pytest.approx(first * T_FACTOR**5)
    state = run_of(problem, *zeros(), data=data)
    c, d = state.kkt.constraints(None)
    state._warmed(1)
    for a, x, size in zip(state.kkt.a, c, state.kkt.sizes_c, strict=True):
        assert torch.equal(a.detach(), (RHO * x / size).clamp(min=0).detach())
    assert torch.equal(state.kkt.b[0].detach(), (RHO * d[0] / state.kkt.sizes_d[0]).detach())


def test_without_lower_constraints_the_steps_are_the_plain_ones(quadratic):
    ends = []
    for problem in (quadratic.problem, replace(quadratic.problem, lower_equalities=[], lower_inequalities=())):
        states.clear()
        u, v = quadratic.start()
        solution = solve(problem, Watching(cotangent="same"), u, v, quadratic.data(), max_steps=30, seed=0)
        assert type(states[0]) is PenaltyMinibatchRun
        assert set(solution.multipliers) == {"nu", "equalities", "inequalities"}
        ends.append((u.detach(), v.detach(), solution.history["upper"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


# -- resuming and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [5, 40])
def test_resumed_run_on_minibatches_with_lower_constraints_has_the_same_bits(tmp_path, stop):
    problem, data = noisy(program(9))
    options = {"max_steps": 60, "seed": 0, "log_every": 1}
    straight, halves = zeros(), zeros()
    method = Penalty(lower_steps=1, **OPTIONS)
    expected = solve(problem, method, *straight, data, **options)
    solve(problem, method, *halves, data, callbacks=[StopAt(stop)], checkpoint=tmp_path, **options)
    found = solve(problem, method, *halves, data, checkpoint=tmp_path, resume=True, **options)
    for a, b in zip(straight, halves, strict=True):
        assert torch.equal(a.detach(), b.detach())
    for name, values in expected.multipliers.items():
        for a, b in zip(values, found.multipliers[name], strict=True):
            assert torch.equal(a, b)


def test_lower_constraint_that_uses_the_batch_is_refused_with_a_sentence():
    problem, data = noisy(program(1))
    uses = replace(problem, lower_inequalities=lambda u, v, batch: v - batch.mean())
    with pytest.raises(ProblemError, match=r"a lower constraint failed .* batch None"):
        solve(uses, Penalty(), *zeros(), data, max_steps=1, seed=0)


def test_lower_constraints_never_see_a_batch():
    problem, data = noisy(program(9))
    seen = []

    def noting(function):
        def constraint(u, v, batch):
            seen.append(batch)
            return function(u, v, batch)

        return constraint

    below = [[noting(h) for h in functions] for functions in (problem.lower_inequalities, problem.lower_equalities)]
    told = replace(problem, lower_inequalities=below[0], lower_equalities=below[1])
    solve(told, Penalty(**OPTIONS), *zeros(), data, max_steps=3, seed=0)
    assert seen
    assert all(batch is None for batch in seen)


def test_prepare_and_start_lower_are_refused_beside_lower_constraints_on_minibatches():
    problem, data = noisy(program(1))
    plain = replace(problem, upper=lambda u, v, _: v @ v, lower=lambda u, v, _: v @ v)
    for more in ({"prepare": lambda u, pair: None}, {"start_lower": lambda v, prepared: None}):
        with pytest.raises(OptionError, match=f"{next(iter(more))} cannot be used with lower_equalities"):
            solve(replace(plain, **more), Penalty(), *zeros(), data, max_steps=1, seed=0)


def test_module_with_frozen_and_free_tensors_meets_a_norm_bound():
    """v = Linear(2, 1) would fit y = 3 x[0]; the bound on its weight's square leaves 2 x[0], whatever u is."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = list(zip(x.split(32), (3 * x[:, :1]).split(32), strict=True))
    v, u = nn.Linear(2, 1, dtype=torch.float64), leaf(0.0)
    with torch.no_grad():
        v.weight.copy_(torch.tensor([[0.5, 0.5]]))
        v.bias.zero_()

    def squares(u, v, batch):
        return (v(batch[0]) - batch[1]).square().mean() + 0.01 * (u**2).sum()

    problem = Problem(squares, squares, lower_inequalities=lambda u, v, _: v.weight.square().sum() - 4)
    solution = solve(problem, Penalty(**OPTIONS), u, v, (rows, rows), max_steps=1000, seed=0)
    # alpha from the normal equations: E x x' (w - 3 e) + alpha w = 0 with |w| = 2; E x x' is near the identity.
    second = x.T @ x / len(x)
    w = v.weight.detach()[0]
    assert w.norm().item() == pytest.approx(2.0, abs=1e-2)
    alpha = solution.multipliers["lower_inequalities"][0].item()
    target = torch.tensor([3.0, 0.0], dtype=torch.float64)
    slope = 2 * second @ (w - target) + 2 * alpha * w
    assert slope.norm().item() <= 0.1
