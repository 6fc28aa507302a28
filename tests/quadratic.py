"""A quadratic bilevel problem with a known solution, which many tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bilevel import Problem


def _tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Quadratic:
    """g = v'Hv/2 - v'(Cu + c + x) and f = |v - a - y|^2/2 + alpha |u - b|^2/2.

    x and y are the lower and the upper batch, absent without data. Their means are zero, and they add a constant to
    |grad_v g|^2 and to f, so that the solution is the same with and without data.
    """

    H: Tensor = field(default_factory=lambda: _tensor([1.5, 0.3], [0.3, 1.0]))
    C: Tensor = field(default_factory=lambda: _tensor([1.0, -0.5, 0.3], [0.2, 0.8, -0.4]))
    c: Tensor = field(default_factory=lambda: _tensor(0.3, -0.2))
    a: Tensor = field(default_factory=lambda: _tensor(1.0, -1.0))
    b: Tensor = field(default_factory=lambda: _tensor(0.5, -0.5, 0.2))
    alpha: float = 1.0

    def upper(self, u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
        target = self.a if batch is None else self.a + batch
        return torch.sum((v - target) ** 2, -1).mean() / 2 + self.alpha * torch.sum((u - self.b) ** 2) / 2

    def lower(self, u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
        pull = self.C @ u + self.c if batch is None else self.C @ u + self.c + batch.reshape(-1, 2).mean(0)
        return v @ self.H @ v / 2 - v @ pull

    @property
    def problem(self) -> Problem:
        return Problem(self.upper, self.lower)

    def start(self) -> tuple[Tensor, Tensor]:
        return _tensor(0.0, 0.0, 0.0).requires_grad_(), _tensor(0.0, 0.0).requires_grad_()

    def data(self, size: float = 0.01) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
        """Four upper and eight lower examples of this size, in shuffled batches of two."""
        draws = size * torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        y, x = draws[:4] - draws[:4].mean(0), draws[4:] - draws[4:].mean(0)
        return DataLoader(list(y), 2, shuffle=True), DataLoader(list(x), 2, shuffle=True)

    def solution(self) -> tuple[Tensor, Tensor]:
        M, m = torch.linalg.solve(self.H, self.C), torch.linalg.solve(self.H, self.c)
        bend = M.T @ M + self.alpha * torch.eye(3, dtype=torch.float64)
        u = torch.linalg.solve(bend, self.alpha * self.b + M.T @ (self.a - m))
        return u, M @ u + m

    def held(self) -> tuple[Tensor, Tensor]:
        """Where v minimises g and u minimises f with v held, which is no solution: f_v is not zero there."""
        return self.b, torch.linalg.solve(self.H, self.C @ self.b + self.c)

    def error(self, u: Tensor, v: Tensor, answer: tuple[Tensor, Tensor] | None = None) -> float:
        """The distance from the solution, or from another answer, relative to its size."""
        best = torch.cat(answer or self.solution())
        return float((torch.cat([u.detach(), v.detach()]) - best).norm() / best.norm())
