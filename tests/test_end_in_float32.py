"""A run without data says CONVERGED only where the exact hypergradient is small in the unit of u."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel import Penalty, Problem, Status, solve

ROWS, CLASSES, RIDGE = 500, 10, 0.2


def weighted_digits(dtype: torch.dtype) -> tuple[Problem, Tensor, Tensor]:
    """A weight for each of 500 digits, half of them labelled at random; f depends on each weight only weakly."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=dtype), torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(ROWS, generator=generator) < 0.5
    noisy = torch.where(wrong, torch.randint(CLASSES, (ROWS,), generator=generator), y[:ROWS])

    def upper(u: Tensor, v: Tensor, _: None) -> Tensor:
        return cross_entropy(x[ROWS:1000] @ v, y[ROWS:1000])

    def lower(u: Tensor, v: Tensor, _: None) -> Tensor:
        losses = cross_entropy(x[:ROWS] @ v, noisy, reduction="none")
        return (torch.sigmoid(u) * losses).mean() + RIDGE * (v * v).sum()

    u = torch.full((ROWS,), -2.0, dtype=dtype, requires_grad=True)
    return Problem(upper, lower), u, torch.zeros(x.shape[1], CLASSES, dtype=dtype, requires_grad=True)


def hypergradient(u: Tensor) -> Tensor:
    """The implicit hypergradient at u, in float64 with a dense Hessian; v is put at the lower minimum by Newton's
    method."""
    problem, _, v = weighted_digits(torch.float64)
    u = u.detach().double().requires_grad_()

    def lower(w: Tensor) -> Tensor:
        return problem.lower(u.detach(), w.reshape(v.shape), None)

    flat = v.detach().reshape(-1)
    for _ in range(6):
        bend = torch.autograd.functional.hessian(lower, flat)
        slope = torch.autograd.functional.jacobian(lower, flat)
        flat = flat - torch.linalg.solve(bend, slope)
    assert slope.norm() < 1e-12
    w = flat.reshape(v.shape).requires_grad_()
    (f_v,) = torch.autograd.grad(problem.upper(u, w, None), w)
    (g_v,) = torch.autograd.grad(problem.lower(u, w, None), w, create_graph=True)
    (g_u,) = torch.autograd.grad(g_v, u, torch.linalg.solve(bend, f_v.reshape(-1)).reshape(v.shape))
    return -g_u


def test_a_float32_run_whose_f_depends_weakly_on_u_is_not_converged_before_its_hypergradient_is_small():
    problem, u, v = weighted_digits(torch.float32)
    before = hypergradient(u).norm()
    with pytest.warns(UserWarning, match="float32"):
        solution = solve(problem, Penalty(), u, v, max_steps=150, seed=0, hypergradient=False)
    assert solution.status is not Status.CONVERGED or hypergradient(u).norm() < 0.01 * before


def test_the_certificate_judges_u_in_its_own_unit():
    problem, u, v = weighted_digits(torch.float32)
    with pytest.warns(UserWarning, match="float32"):
        solution = solve(problem, Penalty(), u, v, max_steps=1, seed=0, hypergradient=False)
    certificate = solution.certificate
    assert certificate.scale_u < 1e-2 * certificate.scale
    # One step is not the end: relative to its scale, grad_u F is as large as at the start.
    assert certificate.stationarity_u / certificate.scale_u > 1e-3
    assert certificate.worst >= certificate.relative_stationarity > 1e-3
