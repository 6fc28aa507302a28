"""Penalties on folds whose weights and derivatives are at hand: ridge in closed form, logistic by Newton steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.applications.tuning.closed_ridge import ClosedRidge, has_closed_form
from bilevel.applications.tuning.folded_linear_model import Rows
from bilevel.applications.tuning.newton_logistic import NewtonLogistic, has_newton_steps
from bilevel.applications.tuning.ranges import Range

# An evaluation takes a millisecond, so L-BFGS must not remember more steps than it needs.
MEMORY = 8
Folds = ClosedRidge | NewtonLogistic


def at_hand(rows: Rows, held_out: bool = True) -> Folds | None:
    """Return the model of the folds, or of all rows at once, if its weights need no general solver."""
    if has_closed_form(rows):
        return ClosedRidge(rows, held_out)
    return NewtonLogistic(rows, held_out) if has_newton_steps(rows) else None


class FoldDescent:
    """phi of the free variables t of the penalties `scale * span.value(t)`, as `descend` calls it.

    `price` is the cost of log(alpha / scale)^2 / 2.
    """

    def __init__(self, folds: Folds, t: Tensor, span: Range, scale: Tensor, price: float) -> None:
        self.folds, self.span, self.scale, self.price = folds, span, scale, price
        self.evaluations, self.memory = 0, MEMORY
        self.leaves: Sequence[Tensor] = [t]

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.folds.kept

    @torch.no_grad()
    def __call__(self, x: Tensor, /) -> tuple[float, Tensor, Any]:
        self.evaluations += 1
        share = self.span.value(x)
        alpha, size = self.scale * share, len(self.folds.center)
        value, slope = self.folds.with_slope(alpha.expand(size))
        pull = alpha * (slope if len(alpha) == size else slope.sum())  # in log(alpha)
        if self.price:
            logs = share.log()
            value, pull = value + self.price * logs.square().sum().item() / 2, pull + self.price * logs
        return value, pull * self.span.log_slope(x), None

    def finish(self) -> None:
        """Do nothing: the weights follow from the penalties."""

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluations = state["evaluations"]
