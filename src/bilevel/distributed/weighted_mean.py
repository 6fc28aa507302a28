"""`weighted_mean`: the mean of losses by weights that can depend on u, in one process and over ranks.

    sum_i w_i l_i / sum_i w_i

Under torchrun both sums run over the examples of all ranks. The mean over ranks of their quotients would be another
number, so the normaliser is summed over ranks, with its derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import ProblemError

_SHARE: ContextVar[tuple[ProcessGroup, float] | None] = ContextVar("share", default=None)


@contextmanager
def evaluating_share(ranks: ProcessGroup, weight: float) -> Iterator[None]:
    """Declare that the block evaluates an objective on this rank's share, and multiplies its value by `weight`."""
    token = _SHARE.set((ranks, weight))
    try:
        yield
    finally:
        _SHARE.reset(token)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return sum(weights * losses) / sum(weights), over the examples of all ranks.

    Use it in an objective in place of the quotient. In one process it is the same number. Under torchrun it is exact,
    while the mean over ranks of each rank's quotient is not.

    Args:
        losses: The loss of each example; pass `reduction="none"` to the loss function.
        weights: The weight of each example, of the same shape. Their sum must not be 0.

    >>> weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]))
    tensor(2.5000)
    """
    if losses.shape != weights.shape:
        raise ProblemError(
            f"weights must have one weight for each loss; got losses of shape {tuple(losses.shape)} and weights of "
            f"shape {tuple(weights.shape)}. Pass reduction='none' to the loss function."
        )
    if (share := _SHARE.get()) is None:
        return (weights * losses).sum() / weights.sum()
    ranks, weight = share
    # The mean over ranks of weight * this is the quotient of the sums.
    total: Tensor = _SumOverRanks.apply(weights.sum(), ranks)  # type: ignore[no-untyped-call]
    return ranks.size / weight * (weights * losses).sum() / total


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Its derivative is the sum over ranks of the cotangents, and so on to any order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce_sum(value)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(cotangent, ctx.ranks), None  # type: ignore[no-untyped-call]
