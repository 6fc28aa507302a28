"""Alternating descent ends where v minimises g and u minimises f with v held, which is no bilevel solution."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from bilevel import Alternating, BilevelWarning, OptionError, Problem, Rows, solve

ADAM = partial(torch.optim.Adam, lr=0.05)


def problem() -> tuple[Problem, Tensor, Tensor]:
    """f = |u - b|^2/2 + <u, v>, g = |v - M u|^2/2: the end is u = (I + M)^-1 b, v = M u."""
    draw = torch.Generator().manual_seed(0)
    M = torch.eye(3, dtype=torch.float64) / 2 + 0.1 * torch.randn(3, 3, generator=draw, dtype=torch.float64)
    b = torch.randn(3, generator=draw, dtype=torch.float64)

    def upper(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return torch.sum((u - b) ** 2) / 2 + u @ v

    def lower(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return torch.sum((v - M @ u) ** 2) / 2

    end = torch.linalg.solve(torch.eye(3, dtype=torch.float64) + M, b)
    return Problem(upper, lower), end, M @ end


def leaf() -> Tensor:
    return torch.zeros(3, dtype=torch.float64, requires_grad=True)


def test_end_is_where_each_level_is_at_its_minimum_with_the_other_held():
    p, u_end, v_end = problem()
    solution = solve(p, Alternating(lower_optimizer=ADAM, upper_optimizer=ADAM), leaf(), leaf(), max_steps=400, seed=0)
    # The last steps of Adam are about 0.05 / 400.
    torch.testing.assert_close(solution.u.detach(), u_end, rtol=0, atol=1e-3)
    torch.testing.assert_close(solution.v.detach(), v_end, rtol=0, atol=1e-3)


def test_certificate_shows_what_is_left_out():
    """f_v = u is not zero there: with an adjoint of zero the Lagrangian has that slope in v."""
    p, u_end, _ = problem()
    solution = solve(p, Alternating(lower_optimizer=ADAM, upper_optimizer=ADAM), leaf(), leaf(), max_steps=400, seed=0)
    assert solution.certificate.stationarity_v == pytest.approx(u_end.norm().item(), rel=1e-2)
    assert solution.certificate.stationarity_u < 1e-2
    assert solution.certificate.damping == 0.0


def test_default_rates_reach_the_same_end():
    p, u_end, _ = problem()
    solution = solve(p, Alternating(), leaf(), leaf(), max_steps=400, seed=0)
    torch.testing.assert_close(solution.u.detach(), u_end, rtol=0, atol=1e-2)


def test_rows_move_along_the_gradient_of_f_alone():
    u, v = Rows(6, dtype=torch.float64), torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rows = [torch.arange(3), torch.arange(3, 6)]
    p = Problem(lambda u, v, row: torch.sum((u[row] - 1.0) ** 2), lambda u, v, row: torch.sum((v - u[row].mean()) ** 2))
    method = Alternating(lower_optimizer=ADAM, upper_optimizer=ADAM)
    with pytest.warns(BilevelWarning, match="upper does not depend on v"):
        solve(p, method, u, v, (rows, rows), max_steps=400, seed=0)
    torch.testing.assert_close(u.values, torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-2)
    torch.testing.assert_close(v.detach(), torch.ones(2, dtype=torch.float64), rtol=0, atol=2e-2)


def test_constraints_are_refused_by_name():
    p = Problem(lambda u, v, b: u @ u, lambda u, v, b: v @ v, inequalities=lambda u, v, b: u)
    with pytest.raises(OptionError, match="Alternating has no multipliers"):
        solve(p, Alternating(), leaf(), leaf(), max_steps=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lower_steps", 0), ("warm_up", 1.0), ("decay", "cosine"), ("lower_batches", "own"), ("upper_optimizer", 1)],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(OptionError) as caught:
        Alternating(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
