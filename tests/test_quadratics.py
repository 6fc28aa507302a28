"""With no option given, random strongly convex quadratics and the paper's four problems are solved.

    g = v'Hv/2 - v'(Cu + c)        f = |v - a|^2/2 + alpha |u - b|^2/2

Dimensions 2 to 50; the condition number of H to 100; the scales of H, C, u and v from 0.1 to 10; alpha from 0.01 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from bilevel import Penalty, Problem, solve
from bilevel.applications.synthetic import examples

SEEDS = range(11, 16)
"""Not used for choosing constants."""
COUNT, PART = 100, 20
STEPS = 3000


@dataclass(frozen=True)
class Quadratic:
    problem: Problem
    u: Tensor
    v: Tensor
    best: Tensor
    """The solution (u, v), in one vector."""

    @property
    def error(self) -> float:
        z = torch.cat([self.u, self.v]).detach()
        return float((z - self.best).norm() / self.best.norm())


def quadratic(seed: int, number: int) -> Quadratic:
    draw = np.random.default_rng([seed, number])

    def scale(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(draw.standard_normal(shape))

    p, q = (int(n) for n in draw.integers(2, 51, 2))
    size_h, size_c, size_u, size_v = (scale(0.1, 10) for _ in range(4))
    condition, alpha = scale(1, 100), scale(0.01, 1)
    basis, _ = torch.linalg.qr(normal(q, q))
    H = size_h * basis @ torch.diag(torch.logspace(0, -np.log10(condition), q, dtype=torch.float64)) @ basis.T
    H = (H + H.T) / 2
    C = size_c * normal(q, p) / np.sqrt(p)
    c, a, b = size_h * size_v * normal(q), size_v * normal(q), size_u * normal(p)
    M, m = torch.linalg.solve(H, C), torch.linalg.solve(H, c)
    best_u = torch.linalg.solve(M.T @ M + alpha * torch.eye(p, dtype=torch.float64), alpha * b + M.T @ (a - m))
    problem = Problem(
        lambda u, v, _: torch.sum((v - a) ** 2) / 2 + alpha * torch.sum((u - b) ** 2) / 2,
        lambda u, v, _: v @ H @ v / 2 - v @ (C @ u + c),
    )
    u, v = (size_u * normal(p)).requires_grad_(), (size_v * normal(q)).requires_grad_()
    return Quadratic(problem, u, v, torch.cat([best_u, M @ best_u + m]))


def errors(seed: int, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        case = quadratic(seed, number)
        solve(case.problem, Penalty(), case.u, case.v, max_steps=STEPS, seed=number, hypergradient=False)
        found.append(case.error)
    return found


def check(found: list[float]) -> None:
    assert max(found) < 1e-3
    # 95 of 100 to 1e-6, and so 19 of every 20.
    assert sum(error < 1e-6 for error in found) >= 0.95 * len(found)


@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_defaults_solve_random_quadratics(first):
    check(errors(SEEDS[0], range(first, first + PART)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_defaults_solve_a_hundred_of_a_hundred_random_quadratics(seed):
    check(errors(seed, range(COUNT)))


@pytest.mark.parametrize("index", range(4), ids=[example.name for example in examples()])
def test_defaults_solve_the_papers_problems_from_twenty_starts(index):
    example = examples()[index]
    for start in range(20):
        u, v = example.start(start)
        solve(example.problem, Penalty(), u, v, max_steps=STEPS, seed=start, hypergradient=False)
        # The run ends at a relative 1e-8; the solution and the start are of the size 1 to 10.
        assert example.distance(u, v) < 1e-5, f"start {start}"
