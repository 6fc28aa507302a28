"""`weighted_mean`: the mean of losses by weights that u may decide, the same in one process and over ranks.

    sum_i w_i l_i / sum_i w_i

Under ranks both sums are over the examples of all of them. A mean over ranks of such quotients would be another number;
the normaliser is therefore summed over ranks, with its derivative.
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
def among(ranks: ProcessGroup, weight: float) -> Iterator[None]:
    """Inside, an objective is evaluated on this rank's share of a batch, and its value multiplied by `weight`."""
    token = _SHARE.set((ranks, weight))
    try:
        yield
    finally:
        _SHARE.reset(token)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * losses) / sum(weights), over the examples of all ranks.

    Use it in an objective in place of the quotient: the same number in one process, and exact under torchrun, where the
    mean of each rank's quotient is not the quotient of the means.
    """
    if losses.shape != weights.shape:
        raise ProblemError(
            f"weighted_mean needs one weight for each loss; got losses of shape {tuple(losses.shape)} and weights of "
            f"shape {tuple(weights.shape)}. Pass reduction='none' to the loss."
        )
    share = _SHARE.get()
    if share is None:
        return (weights * losses).sum() / weights.sum()
    ranks, weight = share
    # The mean over ranks of weight * this is the quotient of the sums.
    return ranks.size / weight * (weights * losses).sum() / _total(weights.sum(), ranks)


def _total(value: Tensor, ranks: ProcessGroup) -> Tensor:
    found: Tensor = _Total.apply(value, ranks)  # type: ignore[no-untyped-call]
    return found


class _Total(torch.autograd.Function):
    """The sum over ranks. Its derivative is the sum over ranks of the cotangents, and so on to any order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce_sum(value)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _total(cotangent, ctx.ranks), None
