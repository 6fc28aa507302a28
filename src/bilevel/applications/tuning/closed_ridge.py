"""Ridge regression on folds in closed form: the weights, the held-out loss and its derivative in the penalties.

With X_k, y_k the rows outside fold k, centred, and A_k = X_k' X_k + diag(alpha),

    w_k = A_k^-1 X_k' y_k,      phi(alpha) = mean over held-out rows of (x w_k + b_k - y)^2 / 2
    q_k = A_k^-1 (derivative of phi in w_k),      phi'(alpha) = - sum_k q_k w_k

For a single penalty, the eigenvectors of X_k' X_k give phi at many values at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.applications.tuning.folded_linear_model import Rows, is_sparse

# The most multiplications of a factorisation of all folds, and of the matrices X_k' X_k.
FACTOR, GRAM = 1e10, 2e11
# The values of a grid of single penalties, and how often it is made again between the neighbours of its best one.
MANY, ZOOMS = 46, 3


def has_closed_form(rows: Rows) -> bool:
    """Return True if the closed form exists for these rows and is the fastest way."""
    if rows.loss != "squared" or is_sparse(rows.x):
        return False
    n, d = rows.x.shape
    return max(1, rows.folds) * d**3 / 3 <= FACTOR and 2 * n * d**2 <= GRAM


@dataclass(frozen=True)
class _Moments:
    """Sums over the training rows of each fold: centred products, and means."""

    gram: Tensor  # (folds, d, d)
    cross: Tensor  # (folds, d)
    mean: Tensor  # (folds, d)
    level: Tensor  # (folds)


class ClosedRidge:
    """Ridge regression on the folds of `rows`; with `held_out=False` on all rows at once."""

    def __init__(self, rows: Rows, held_out: bool = True) -> None:
        self.folds = rows.folds if held_out else 1
        center, level = rows.x.mean(0), rows.y.to(rows.x.dtype).mean()
        x, y = rows.x - center, rows.y.to(rows.x.dtype) - level
        self.center, self._level = center, level
        self._held = [(x[rows.fold == k], y[rows.fold == k]) for k in range(self.folds)] if held_out else []
        self._moments = self._sums(x, y)
        self._axes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._count = max(1, sum(len(part) for _, part in self._held))

    def _sums(self, x: Tensor, y: Tensor) -> _Moments:
        """Return the moments of each fold: sums over all rows minus sums over its held-out rows."""
        gram, cross, total, level = x.T @ x, x.T @ y, x.sum(0), y.sum()
        parts = []
        for out_x, out_y in self._held or [(x[:0], y[:0])]:
            left = len(y) - len(out_y)
            mean, mid = (total - out_x.sum(0)) / left, (level - out_y.sum()) / left
            own = gram - out_x.T @ out_x - left * mean[:, None] * mean
            parts.append((own, cross - out_x.T @ out_y - left * mean * mid, mean, mid))
        return _Moments(*(torch.stack(part) for part in zip(*parts, strict=True)))

    def solved(self, alpha: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the weights (folds, d) and the factors of A; None if A is not positive in floating point."""
        m = self._moments
        factor, failed = torch.linalg.cholesky_ex(m.gram + torch.diag_embed(alpha))
        if bool(failed.any()):
            return None
        return torch.cholesky_solve(m.cross[..., None], factor)[..., 0], factor

    def model(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (1, d) and bias (1) of the model on all rows, for inputs that are not centred."""
        found = self.solved(alpha)
        if found is None:
            m = self._moments
            weight = torch.linalg.lstsq(m.gram + torch.diag_embed(alpha), m.cross[..., None], driver="gelsd").solution
            weight = weight[..., 0]
        else:
            weight = found[0]
        bias = self._level + self._moments.level[:1] - (weight * (self._moments.mean[:1] + self.center)).sum(1)
        return weight[:1], bias

    def loss(self, alpha: Tensor) -> float:
        """Return the held-out loss."""
        found = self.solved(alpha)
        return (
            float("inf")
            if found is None
            else sum(float(e.square().sum()) for e in self._errors(found[0])) / (2 * self._count)
        )

    def with_slope(self, alpha: Tensor) -> tuple[float, Tensor]:
        """Return the held-out loss and its derivative in alpha."""
        found = self.solved(alpha)
        if found is None:
            return float("inf"), torch.zeros_like(alpha)
        w, factor = found
        errors, m = self._errors(w), self._moments
        slopes = [x.T @ e - m.mean[k] * e.sum() for k, ((x, _), e) in enumerate(zip(self._held, errors, strict=True))]
        q = torch.cholesky_solve(torch.stack(slopes)[..., None] / self._count, factor)[..., 0]
        return sum(float(e.square().sum()) for e in errors) / (2 * self._count), -(q * w).sum(0)

    def single_losses(self, values: Tensor) -> Tensor:
        """Return the held-out loss with each single penalty in `values`."""
        if not self._axes:
            self._axes = [self._rotated(k) for k in range(self.folds)]
        total = torch.zeros_like(values)
        for bend, cross, rows, rest in self._axes:
            errors = rows @ (cross[:, None] / (bend[:, None] + values)) + rest[:, None]
            total += errors.square().sum(0)
        return total / (2 * self._count)

    def best_single(self, low: float, high: float) -> float:
        """Return the single penalty with the least loss: the best of a grid, between whose neighbours we zoom in."""
        for _ in range(ZOOMS):
            values = torch.logspace(math.log10(low), math.log10(high), MANY, dtype=self.center.dtype)
            at = int(self.single_losses(values.to(self.center.device)).nan_to_num(nan=math.inf).argmin())
            best, low, high = (float(values[max(0, min(MANY - 1, at + step))]) for step in (0, -1, 1))
        return best

    def _rotated(self, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the eigenvalues of a fold, and the moments, held-out rows and their offsets in its eigenvectors."""
        m, (x, y) = self._moments, self._held[k]
        bend, axes = torch.linalg.eigh(m.gram[k])
        return bend.clamp(min=0.0), axes.T @ m.cross[k], (x - m.mean[k]) @ axes, m.level[k] - y

    @property
    def kept(self) -> Sequence[Tensor]:
        return []

    def _errors(self, w: Tensor) -> list[Tensor]:
        m = self._moments
        return [x @ w[k] + (m.level[k] - m.mean[k] @ w[k] - y) for k, (x, y) in enumerate(self._held)]
