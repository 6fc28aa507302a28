"""The derivatives of the mean objectives over ranks. Each rank sees its share of the batches.

s and h are averaged before they become cotangents, because F is the penalty of the mean of s, not a mean of F. The
result is averaged later: for a fixed mean cotangent p, the mean over ranks of d<p, s_rank> is d<p, s>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel.batches.readers import BatchShare, weighted
from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.penalised_objective import Curvature, PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.weighted_mean import evaluating_share
from bilevel.problem.problem import Problem
from bilevel.problem.rows import Parts
from bilevel.problem.variables import Variable


class RankDerivatives(PenalisedObjective):
    """Derivatives of the means over ranks. Every rank calls the same functions in the same order."""

    shared = True

    def __init__(
        self,
        problem: Problem,
        u: Variable,
        v: Variable,
        ranks: ProcessGroup,
        curvature: Curvature,
        precision: Precision | None,
    ) -> None:
        super().__init__(problem, u, v, curvature, precision)
        self.ranks = ranks

    @contextmanager
    def calling(self, batch: Any) -> Iterator[Any]:
        given, weight = (batch.batch, batch.weight) if isinstance(batch, BatchShare) else (batch, 1.0)
        with evaluating_share(self.ranks, weight), super().calling(given):
            yield given

    def returned(self, value: Any, batch: Any) -> Any:
        value = super().returned(value, batch)
        return value * batch.weight if isinstance(batch, BatchShare) and isinstance(value, Tensor) else value

    def prepare(self, batches: Sequence[Pair], *, graph: bool) -> list[Pair]:
        if self.problem.prepare is None:
            return list(batches)
        plain = [tuple(x.batch if isinstance(x, BatchShare) else x for x in pair) for pair in batches]
        weights = [[x.weight if isinstance(x, BatchShare) else 1.0 for x in pair] for pair in batches]
        with evaluating_share(self.ranks, 1.0):
            made = super().prepare(plain, graph=graph)
        return [(weighted(upper, w[0]), weighted(lower, w[1])) for (upper, lower), w in zip(made, weights, strict=True)]

    # -- means -----------------------------------------------------------------------------------------------------

    def _means(self, like_v: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the means over ranks of tensors shaped like v, and of the others."""
        found = self.ranks.all_reduce_mean([*others, *like_v])
        return found[len(others) :], found[: len(others)]

    def mean_over_ranks(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.ranks.all_reduce_mean(tensors)

    def mean_over_ranks_async(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        return self.ranks.all_reduce_mean_async(tensors)

    def mean_dense_over_ranks(self, found: list[Tensor]) -> list[Tensor]:
        count, dense = len(self.v.leaves), len(self.v.leaves) + len(self.u.leaves)
        v, u = self._means(found[:count], found[count:dense])
        return [*v, *u, *found[dense:]]

    def mean_gradients_over_ranks(self, found: Gradients) -> Gradients:
        leaves = len(self.u.leaves)
        v, (f, g, *u) = self._means(found.v, [found.f, found.g, *found.u[:leaves]])
        return replace(found, f=f, g=g, v=v, u=[*u, *found.u[leaves:]])

    def all_rows(self, parts: Parts) -> Parts:
        """Return the rows that any rank has read, with their part of the mean gradient: the same on every rank.

        Every rank holds all rows and differentiates the rows of its examples. Their indices and gradients, O(batch)
        numbers, are gathered on all ranks.
        """
        if not (variables := self.u.rows):
            return parts
        parts = parts or [[] for _ in variables]
        counts = self.ranks.all_gather_counts([sum(len(index) for index, _ in pairs) for pairs in parts])
        found: Parts = []
        for pairs, rows, sizes in zip(parts, variables, counts, strict=True):
            if max(sizes) == 0:
                found.append([])
                continue
            own, like = sizes[self.ranks.rank], rows.values
            index = torch.zeros(max(sizes), dtype=torch.int64, device=like.device)
            gradient = like.new_zeros(max(sizes), *like.shape[1:])
            if pairs:
                index[:own] = torch.cat([i for i, _ in pairs])
                gradient[:own] = torch.cat([g.detach().reshape(-1, *like.shape[1:]) for _, g in pairs])
                gradient[:own] /= self.ranks.size
            joined, moved = (
                torch.cat([part[:n] for part, n in zip(self.ranks.all_gather(x), sizes, strict=True)])
                for x in (index, gradient)
            )
            found.append([(joined, moved)])
        return found

    def size(self, found: list[Tensor]) -> Tensor:
        dense = len(self.v.leaves) + len(self.u.leaves)
        square = torch.stack([x.square().sum() for x in found[:dense]]).sum()
        return (square + self._row_square(found[dense:], square)).sqrt()

    def _row_square(self, rows: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the square of the gradients of all ranks in the rows that they have read; this rank passes its own."""
        own = torch.stack([x.detach().square().sum() for x in rows]).sum() if rows else torch.zeros_like(like)
        return self.ranks.all_reduce_sum(own) / self.ranks.size**2 if self.u.rows else own

    # -- the functions of one process, averaged ----------------------------------------------------------------------

    def slope(self, batches: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
        g, slope = super().slope(batches)
        slope, (g,) = self._means(slope, [g])
        return g, slope

    def first_order(self, batches: Sequence[Pair], lam: Tensor | None) -> Gradients:
        found = super().first_order(batches, lam)
        count = len(found.slope)
        like_v, (f, g, *h) = self._means([*found.slope, *found.v], [found.f, found.g, *found.constraints])
        slope = like_v[:count]
        return replace(found, f=f, g=g, slope=slope, residual=self.residual(slope), v=like_v[count:], constraints=h)

    def direct(self, batches: Sequence[Pair], *, with_v: bool = True) -> Gradients:
        return self.mean_gradients_over_ranks(super().direct(batches, with_v=with_v))

    def penalised(
        self,
        batches: Sequence[Pair],
        prices: Prices,
        *,
        with_u: bool,
        slope: Sequence[Tensor] | None = None,
        lam: Tensor | None = None,
    ) -> Gradients:
        return self.mean_gradients_over_ranks(super().penalised(batches, prices, with_u=with_u, slope=slope, lam=lam))

    def hessian_product(self, batches: Sequence[Pair], direction: Sequence[Tensor], *, with_u: bool) -> list[Tensor]:
        return self.mean_dense_over_ranks(super().hessian_product(batches, direction, with_u=with_u))
