"""Logistic regression on folds by Newton steps with a factorised second derivative, for few features.

With W_k the weights and biases of fold k, x the centred rows with a one at their end, and p the probabilities,

    slope_k = sum outside fold k of (p - y) x + alpha w,    H_k = sum of (diag(p) - p p') (x) x x' + diag(alpha)

H_k is at hand after the last step, so the derivative of the held-out loss costs one more solution:
q_k = H_k^-1 (its derivative in W_k), and the derivative in alpha is - sum_k q_k w_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from bilevel.applications.tuning.folded_linear_model import Rows, is_sparse

# The most scores times features of a fold, and the most multiplications of the second derivatives of all folds.
WIDTH, PRODUCTS = 400, 2e9
STEPS, HALVINGS = 60, 30
# Newton steps end if the decrease that the next one promises is below this share of the loss.
DONE = 1e-18
# The share of the second derivative that keeps the biases of several classes, which have one too many, apart.
TIED = 1e-9
VALUES = 5


def has_newton_steps(rows: Rows) -> bool:
    """Return True if Newton steps with a factorised second derivative are the fastest way for these rows."""
    if rows.loss != "logistic" or is_sparse(rows.x):
        return False
    width = rows.outputs * (rows.x.shape[1] + 1)
    return width <= WIDTH and len(rows.y) * max(1, rows.folds) * width**2 <= PRODUCTS


class NewtonLogistic:
    """Logistic regression on the folds of `rows`; with `held_out=False` on all rows at once.

    `weights` (folds, outputs, features + 1) are the weights and the biases of the last penalties; the next search
    starts there.
    """

    def __init__(self, rows: Rows, held_out: bool = True) -> None:
        folds = rows.folds if held_out else 1
        self.center = rows.x.mean(0)
        self._x = torch.cat([rows.x - self.center, torch.ones_like(rows.x[:, :1])], 1)
        y = rows.y.to(rows.x.dtype)[:, None] if rows.outputs == 1 else one_hot(rows.y.long(), rows.outputs).to(rows.x)
        self._y = y[:, None, :]
        fold = rows.fold[:, None]
        outside = fold != (torch.arange(folds, device=fold.device) if held_out else -2)  # no row is in fold -2
        self._inside, self._out = outside.to(rows.x.dtype), (~outside).to(rows.x.dtype)
        self._count = max(1, int((~outside).sum()))
        self.weights = rows.x.new_zeros(folds, rows.outputs, self._x.shape[1])

    def loss(self, alpha: Tensor) -> float:
        """Return the held-out loss."""
        self._solve(alpha)
        return self._held_out()

    def with_slope(self, alpha: Tensor) -> tuple[float, Tensor]:
        """Return the held-out loss and its derivative in alpha."""
        factor = self._solve(alpha)
        if factor is None:
            return math.inf, torch.zeros_like(alpha)
        pull = self._pull(self._probabilities(self._scores(self.weights)), self._out) / self._count
        q = torch.cholesky_solve(pull.flatten(1)[..., None], factor).view_as(self.weights)
        return self._held_out(), -(q * self.weights)[..., :-1].sum((0, 1))

    def model(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (outputs, d) and bias (outputs) of the model on all rows, for inputs that are not centred."""
        self._solve(alpha)
        weight = self.weights[0, :, :-1].clone()
        return weight, self.weights[0, :, -1] - weight @ self.center

    def best_single(self, low: float, high: float) -> float:
        """Return the single penalty of a small grid with the least held-out loss; start from zero weights after it."""
        values = torch.logspace(math.log10(high), math.log10(low), VALUES, dtype=torch.float64)
        losses = [self.loss(torch.full_like(self.center, float(value))) for value in values]
        self.weights.zero_()
        finite = [value if math.isfinite(value) else math.inf for value in losses]
        return float(values[finite.index(min(finite))])

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self.weights]

    def _held_out(self) -> float:
        return float((self._losses(self._scores(self.weights)) * self._out).sum()) / self._count

    def _solve(self, alpha: Tensor) -> Tensor | None:
        """Move the weights to the minimum; return the factors of H there, or None if H is not positive."""
        ridge, last = torch.cat([alpha, alpha.new_zeros(1)]), math.inf
        value, factor = self._objective(self.weights, ridge), None
        for _ in range(STEPS):
            p = self._probabilities(self._scores(self.weights))
            slope = (self._pull(p, self._inside) + ridge * self.weights).flatten(1)
            factor, failed = torch.linalg.cholesky_ex(self._second(p, ridge))
            if bool(failed.any()):
                return None
            step = torch.cholesky_solve(slope[..., None], factor)[..., 0]
            promised = (slope * step).sum(1)
            share = float((promised / (1 + value)).max())
            # At the rounding error the promise no longer falls.
            if share <= DONE or (share < 1e-12 and share > last / 4):
                break
            last = share
            value = self._moved(step.view_as(self.weights), promised, value, ridge)
        return factor

    def _moved(self, step: Tensor, promised: Tensor, value: Tensor, ridge: Tensor) -> Tensor:
        """Take the step, halved for each fold until its objective falls; return the objectives."""
        length = torch.ones_like(promised)
        noise = 1e-14 * (1 + value.abs())
        for _ in range(HALVINGS):
            moved = self.weights - length[:, None, None] * step
            found = self._objective(moved, ridge)
            worse = ~(found <= value - 1e-4 * length * promised + noise)
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        self.weights.copy_(moved)
        return found

    def _objective(self, weights: Tensor, ridge: Tensor) -> Tensor:
        """Return the training objective of each fold."""
        losses = (self._losses(self._scores(weights)) * self._inside).sum(0)
        return losses + (ridge * weights.square()).sum((1, 2)) / 2

    def _scores(self, weights: Tensor) -> Tensor:
        return (self._x @ weights.flatten(0, 1).T).view(-1, *weights.shape[:2])

    def _losses(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] == 1:
            return softplus((1 - 2 * self._y) * scores)[..., 0]
        return -(self._y * scores.log_softmax(-1)).sum(-1)

    @staticmethod
    def _probabilities(scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) if scores.shape[-1] == 1 else scores.softmax(-1)

    def _pull(self, p: Tensor, share: Tensor) -> Tensor:
        """Return the derivative in the weights of the losses of these rows (n, folds)."""
        errors = (p - self._y) * share[..., None]
        return (errors.flatten(1).T @ self._x).view_as(self.weights)

    @staticmethod
    def _blocks(parts: list[Tensor]) -> Tensor:
        return torch.block_diag(*parts)  # type: ignore[no-untyped-call, no-any-return]

    def _second(self, p: Tensor, ridge: Tensor) -> Tensor:
        """Return the second derivatives (folds, outputs * (d + 1), outputs * (d + 1))."""
        x, outputs, blocks = self._x, p.shape[-1], []
        for k in range(p.shape[1]):
            own, part = p[:, k], self._inside[:, k, None]
            if outputs == 1:
                blocks.append((x * (part * own * (1 - own))).T @ x)
                continue
            spread = ((part.sqrt() * own)[:, :, None] * x[:, None, :]).flatten(1)
            bent = self._blocks([(x * (part * own[:, c : c + 1])).T @ x for c in range(outputs)])
            blocks.append(bent - spread.T @ spread)
        found = torch.stack(blocks)
        diagonal = ridge.repeat(outputs).expand(len(found), -1).clone()
        if outputs > 1:
            size = TIED * found.diagonal(dim1=1, dim2=2).mean(1)
            diagonal[:, x.shape[1] - 1 :: x.shape[1]] += size[:, None]
        return found + torch.diag_embed(diagonal)
