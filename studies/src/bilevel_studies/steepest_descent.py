"""Steepest descent in the Euclidean norm, for variables whose rows each live in a ball of that norm.

Adam gives every entry a step of the same size: this is steepest descent in the maximum norm. Under a bound on the
Euclidean length, it spends that length on entries that gain little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Steepest(torch.optim.Optimizer):
    """Moves each row (the first dimension) along the mean of its last gradients, scaled to the same length.

    A row moves by at most `lr` in the root mean square of its entries; the lengths of the gradients do not matter.
    `momentum` is the share of the mean that a step keeps.
    """

    state_starts_at_zero = True  # so that the engines can record it

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is None:
                    continue
                state = self.state[leaf]
                if not state:
                    state["mean"] = torch.zeros_like(leaf)
                even = leaf.grad / row_lengths(leaf.grad).clamp(min=torch.finfo(leaf.dtype).tiny)
                state["mean"].lerp_(even, 1 - group["momentum"])
                leaf.sub_(group["lr"] * state["mean"])

    @staticmethod
    def gradient_length(gradient: Tensor) -> Tensor:
        """Return the length of each row: a variable with a projection moves row by row."""
        return row_lengths(gradient)


def row_lengths(x: Tensor) -> Tensor:
    """Return the root mean square of each row, in a shape that can divide x."""
    return x.square().mean(tuple(range(1, x.ndim)), keepdim=True).sqrt() if x.ndim > 1 else x.abs()
