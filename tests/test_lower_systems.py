"""Linear systems with g_vv without data: the rows of g_vv, and corrections of an inverse of an earlier g_vv."""

import pytest
import torch
from torch.nn import functional

from bilevel import Penalty, Problem, solve
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.methods.penalty.exact_multipliers_run import PROBING, ExactMultipliersRun
from bilevel.methods.penalty.lower_newton import LowerNewton
from bilevel.methods.penalty.lower_systems import LowerSystems
from bilevel.problem.variables import Variable


class OneByOne(torch.autograd.Function):
    """The identity, whose derivative refuses batches of cotangents, as a custom operator of a user can."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        cotangent.data_ptr()  # a batched tensor has none
        return cotangent


def logistic(rows: int, wrap=lambda x: x):
    """Return Newton steps for a small logistic regression with `rows` rows, and its exact Hessian at the present v."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 5, generator=draw, dtype=torch.float64)
    y = (torch.rand(rows, generator=draw) < 0.5).double()
    u = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    v = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()

    def lower(u, v, batch):
        return functional.binary_cross_entropy_with_logits(x @ wrap(v), y) + (u.exp() * v**2).sum()

    d = PenalisedObjective(Problem(lambda u, v, _: (v**2).sum(), lower), Variable(u, "u"), Variable(v, "v"), "exact")
    p = torch.sigmoid(x @ v.detach())
    hessian = (x * (p * (1 - p))[:, None]).T @ x / rows + 2 * u.exp().item() * torch.eye(5, dtype=torch.float64)
    return LowerNewton(LowerSystems(d)), hessian


@pytest.mark.parametrize(("rows", "side_by_side"), [(40, True), (40_000, False)])
def test_rows_of_the_hessian_are_exact_side_by_side_and_one_after_another(rows, side_by_side):
    newton, hessian = logistic(rows)
    slope = newton.slope()
    assert newton.systems.batched is side_by_side  # 40,000 x 5 numbers are more than SIDE_BY_SIDE
    # Sums of `rows` terms of size one, each rounded to 1e-16.
    assert torch.allclose(newton.systems._matrix(slope), hessian, rtol=1e-10, atol=0)


def test_an_operator_that_cannot_be_batched_gets_its_rows_one_after_another():
    newton, hessian = logistic(40, wrap=OneByOne.apply)
    slope = newton.slope()
    assert newton.systems.batched
    assert torch.allclose(newton.systems._matrix(slope), hessian, rtol=1e-10, atol=0)
    assert newton.systems.batched is False


def test_a_corrected_inverse_maps_the_change_of_the_slope_to_the_move_and_stays_symmetric_and_positive():
    newton, _ = logistic(40)
    systems, before = newton.systems, newton.slope()
    systems._inverse(before)
    systems.inverse = 3 * systems.inverse  # an inverse of another g_vv
    move = 0.1 * torch.arange(1.0, 6.0, dtype=torch.float64)
    with torch.no_grad():
        systems.d.v.leaves[0].add_(move)
    bend = newton.slope().flat - before.flat
    systems.correct_inverse(move, bend)
    assert torch.allclose(systems.inverse @ bend, move, rtol=1e-10, atol=1e-14)  # rounding only
    assert torch.allclose(systems.inverse, systems.inverse.T, rtol=1e-10, atol=1e-14)
    assert torch.linalg.eigvalsh(systems.inverse)[0] > 0


def test_a_move_along_which_g_curves_down_corrects_nothing():
    newton, _ = logistic(40)
    newton.systems._inverse(newton.slope())
    held = newton.systems.inverse.clone()
    newton.systems.correct_inverse(torch.ones(5, dtype=torch.float64), -torch.ones(5, dtype=torch.float64))
    assert torch.equal(newton.systems.inverse, held)


def test_the_end_check_looks_for_a_lower_g_with_few_newton_steps_from_each_point(monkeypatch):
    """From a far point, Newton steps on a logistic loss overshoot; one such search once took 115 evaluations of g."""
    taken = []
    minimise = ExactMultipliersRun._minimise

    def counting(run):
        before = run.exact.newton.steps
        value = minimise(run)
        taken.append(run.exact.newton.steps - before)
        return value

    monkeypatch.setattr(ExactMultipliersRun, "_minimise", counting)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(30, 8, generator=draw, dtype=torch.float64)
    y = (x[:, 0] > 0).double()
    u = torch.full((8,), -6.0, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    loss = functional.binary_cross_entropy_with_logits
    problem = Problem(
        lambda u, v, _: ((v - 1) ** 2).mean() + ((u + 5) ** 2).mean(),
        lambda u, v, _: loss(x @ v, y) + (u.exp() * v**2).sum(),
    )
    solution = solve(problem, Penalty(), u, v, max_steps=300, seed=0)
    assert solution.status.name == "CONVERGED"
    assert taken
    assert max(taken) <= PROBING
