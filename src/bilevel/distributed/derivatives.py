"""Derivatives of a problem in one process, over ranks, or with v sharded by FSDP2's `fully_shard`.

Over ranks these are the derivatives of the mean objectives: each rank sees its share of the batches. s and h are
averaged before they become cotangents, because F is the penalty of the mean of s, not a mean of F. The result is
averaged later: for a fixed mean cotangent p, the mean over ranks of d<p, s_rank> is d<p, s>.

With a sharded v, each rank has a shard of every tensor of v. Moments, multipliers and cotangents have the size of the
shards. A forward pass gathers the tensors; a backward pass leaves in each shard the mean over ranks. Autograd sees only
the gathered tensors, and does not support a second backward. So gradients are read where `backward` leaves them, and
the curvature is a difference of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import dot
from bilevel.batches.rank_shares import BatchShare, weighted
from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.penalised_objective import Curvature, PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.weighted_mean import evaluating_share
from bilevel.errors import OptionError
from bilevel.problem import Parts, Problem, Variable


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
        self.rank_count = ranks.size

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

    def direct(self, batches: Sequence[Pair], *, with_v: bool = True, lower: bool = False) -> Gradients:
        return self.mean_gradients_over_ranks(super().direct(batches, with_v=with_v, lower=lower))

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


class ShardedDerivatives(RankDerivatives):
    """Derivatives for a sharded v: tensors shaped like v are shards, and already means over ranks."""

    def __init__(
        self,
        problem: Problem,
        u: Variable,
        v: Variable,
        ranks: ProcessGroup,
        curvature: Curvature,
        precision: Precision | None,
    ) -> None:
        if curvature in ("exact", "gram"):
            raise OptionError(
                f"fully_shard has no double backward, which curvature={curvature!r} and ForwardMode need. Use "
                "curvature='difference', or ValueGap."
            )
        if curvature == "auto":
            warn_user(
                "v is sharded by fully_shard, which has no double backward: the curvature is approximated by finite "
                "differences (curvature='difference')."
            )
        super().__init__(problem, u, v, ranks, "difference", precision)
        self._parameters = {id(leaf): p for leaf, p in zip(self.v.leaves, self.v.shards, strict=True)}
        self._units: list[Any] = [m for m in self.v.modules[0].modules() if hasattr(m, "reshard")]

    @contextmanager
    def calling(self, batch: Any) -> Iterator[Any]:
        for unit in self._units:  # tensors gathered for an earlier pass belong to an earlier v
            unit.reshard()
        with super().calling(batch) as given:
            yield given

    def gradient(
        self,
        output: Tensor | Sequence[Tensor],
        leaves: Sequence[Tensor],
        *,
        cotangent: Sequence[Tensor | None] | None = None,
        keep_graph: bool = False,
        retain: bool = False,
    ) -> list[Tensor]:
        """Return d<cotangent, output> in the leaves. The derivatives in v are means over ranks."""
        outputs = [output] if isinstance(output, Tensor) else list(output)
        weights: Sequence[Tensor | None] = [None] * len(outputs) if cotangent is None else cotangent
        pairs = [(out, w) for out, w in zip(outputs, weights, strict=True) if out.requires_grad]
        if pairs:
            total = torch.stack([(out if w is None else out * w).sum() for out, w in pairs]).sum()
            total.backward(retain_graph=retain or None)  # type: ignore[no-untyped-call]
        found = []
        for leaf in leaves:
            grad: Any = self._parameters.get(id(leaf), leaf).grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            found.append(torch.zeros_like(leaf, requires_grad=False) if local is None else local.detach())
        for leaf in (*self._parameters.values(), *self.u.leaves, *(leaf for _, leaf in self.prepared_leaves), *leaves):
            leaf.grad = None
        return found

    # -- sums over shards ---------------------------------------------------------------------------------------------

    def whole(self, part: Tensor) -> Tensor:
        return self.ranks.all_reduce_sum(part)

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return self.whole(dot([x.detach() for x in a], [x.detach() for x in b]))

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.dot(tensors, tensors).sqrt()

    def square(self, tensors: Sequence[Tensor]) -> Tensor:
        count = len(self.u.leaves)
        shards = self.dot(tensors[count:], tensors[count:])
        return shards + dot(tensors[:count], tensors[:count]) if count else shards

    def size(self, found: list[Tensor]) -> Tensor:
        count, dense = len(self.v.leaves), len(self.v.leaves) + len(self.u.leaves)
        square = self.dot(found[:count], found[:count]) + sum(x.detach().square().sum() for x in found[count:dense])
        return (square + self._row_square(found[dense:], square)).sqrt()

    # -- means of all but v -------------------------------------------------------------------------------------------

    def _means(self, like_v: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return list(like_v), self.ranks.all_reduce_mean(others)

    def mean_over_ranks_async(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: tensors


def make_derivatives(
    problem: Problem,
    u: Variable,
    v: Variable,
    *,
    ranks: ProcessGroup | None = None,
    precision: Precision | None = None,
    curvature: Curvature = "auto",
    accumulate: int = 1,
) -> PenalisedObjective:
    """Return the derivatives of a problem: of this process, or of the means over `ranks`.

    Args:
        problem: The problem. With ranks, without `start_lower` and `trials`.
        u: The upper variable.
        v: The lower variable; `fully_shard` can have divided it among the ranks.
        ranks: The processes that share the batches; None: this process has them all.
        precision: The precision of the user's functions; None: the precision of the variables.
        curvature: How products with second derivatives are formed (see `Penalty.curvature`).
        accumulate: How many batches a gradient averages. A sharded v needs 1.
    """
    if ranks is None:
        return PenalisedObjective(problem, u, v, curvature, precision)
    if problem.start_lower is not None:
        raise OptionError(
            "start_lower cannot be used under torchrun: v belongs to one batch there, and ranks have different ones. "
            "Run it in one process."
        )
    if problem.trials is not None:
        raise OptionError("trials cannot be used with data under torchrun. Run them in one process.")
    if curvature == "gram":
        raise OptionError("curvature='gram' cannot be used under torchrun. Use curvature='auto'.")
    if not (u.shards or v.shards):
        return RankDerivatives(problem, u, v, ranks, curvature, precision)
    if u.shards:
        raise OptionError("u cannot be sharded by fully_shard: only v can. Pass a u that is not sharded.")
    for refused, name in ((problem.project_lower is not None, "project_lower"), (accumulate > 1, "accumulate")):
        if refused:
            raise OptionError(f"{name} cannot be used if v is sharded by fully_shard. Use a v that is not sharded.")
    return ShardedDerivatives(problem, u, v, ranks, curvature, precision)
