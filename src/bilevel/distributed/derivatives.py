"""The derivatives of the mean objectives over ranks, each of which sees its share of the batches.

s and h are averaged before they become cotangents (F is of the mean of s, not a mean of F), and what they are pulled on
with is averaged after: with the mean cotangent p held fixed, the mean over ranks of d<p, s_rank> is d<p, s>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel.batches.rank_shares import Share, weighted
from bilevel.derivatives.penalised_objective import Curvature, Derivatives
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.distributed.process_group import Ranks
from bilevel.distributed.shared_rows import all_rows
from bilevel.distributed.weighted_mean import among
from bilevel.errors import OptionError
from bilevel.methods.base import Setting
from bilevel.problem.rows import Parts


class Across(Derivatives):
    """Derivatives of the means over ranks: every rank calls the same functions in the same order."""

    shared = True

    def __init__(self, setting: Setting, ranks: Ranks, curvature: Curvature) -> None:
        super().__init__(setting.problem, setting.u, setting.v, curvature, setting.precision)
        self.ranks = ranks

    @contextmanager
    def calling(self, batch: Any) -> Iterator[Any]:
        given, weight = (batch.batch, batch.weight) if isinstance(batch, Share) else (batch, 1.0)
        with among(self.ranks, weight), super().calling(given):
            yield given

    def returned(self, value: Any, batch: Any) -> Any:
        value = super().returned(value, batch)
        return value * batch.weight if isinstance(batch, Share) and isinstance(value, Tensor) else value

    def prepare(self, batches: Sequence[Pair], *, graph: bool) -> list[Pair]:
        if self.problem.prepare is None:
            return list(batches)
        plain = [tuple(x.batch if isinstance(x, Share) else x for x in pair) for pair in batches]
        weights = [[x.weight if isinstance(x, Share) else 1.0 for x in pair] for pair in batches]
        with among(self.ranks, 1.0):
            made = super().prepare(plain, graph=graph)
        return [(weighted(upper, w[0]), weighted(lower, w[1])) for (upper, lower), w in zip(made, weights, strict=True)]

    # -- means -----------------------------------------------------------------------------------------------------

    def agreed(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.ranks.mean(tensors)

    def _agreeing(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        return self.ranks.start(tensors).wait

    def agreed_beside_rows(self, found: list[Tensor]) -> list[Tensor]:
        count = len(self.v.leaves) + len(self.u.leaves)
        return [*self.ranks.mean(found[:count]), *found[count:]]

    def agreed_gradients(self, found: Gradients) -> Gradients:
        count, leaves = len(found.v), len(self.u.leaves)
        f, g, *rest = self.ranks.mean([found.f, found.g, *found.v, *found.u[:leaves]])
        return replace(found, f=f, g=g, v=rest[:count], u=[*rest[count:], *found.u[leaves:]])

    def all_rows(self, parts: Parts) -> Parts:
        if not self.u.rows:
            return parts
        return all_rows(self.ranks, parts or [[] for _ in self.u.rows], self.u.rows)

    def size(self, found: list[Tensor]) -> Tensor:
        """Of rows, which every rank has its own of, the squares are added."""
        count = len(self.v.leaves) + len(self.u.leaves)
        square = torch.stack([x.square().sum() for x in found[:count]]).sum()
        if self.u.rows:
            own = [x.detach().square().sum() for x in found[count:]]
            rows = torch.stack(own).sum() if own else torch.zeros_like(square)
            square = square + self.ranks.total(rows) / self.ranks.size**2
        return square.sqrt()

    # -- the functions of one process, of which the mean is taken ----------------------------------------------------

    def slope(self, batches: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
        g, slope = super().slope(batches)
        g, *slope = self.ranks.mean([g, *slope])
        return g, slope

    def first_order(self, batches: Sequence[Pair], lam: Tensor | None) -> Gradients:
        found = super().first_order(batches, lam)
        count, parts = len(found.slope), len(found.slope) + len(found.v)
        f, g, *rest = self.ranks.mean([found.f, found.g, *found.slope, *found.v, *found.constraints])
        slope = rest[:count]
        return replace(
            found, f=f, g=g, slope=slope, residual=self.residual(slope), v=rest[count:parts], constraints=rest[parts:]
        )

    def direct(self, batches: Sequence[Pair], *, with_v: bool = True) -> Gradients:
        return self.agreed_gradients(super().direct(batches, with_v=with_v))

    def penalised(
        self,
        batches: Sequence[Pair],
        prices: Prices,
        *,
        with_u: bool,
        slope: Sequence[Tensor] | None = None,
        lam: Tensor | None = None,
    ) -> Gradients:
        return self.agreed_gradients(super().penalised(batches, prices, with_u=with_u, slope=slope, lam=lam))

    def hessian_product(self, batches: Sequence[Pair], direction: Sequence[Tensor], *, with_u: bool) -> list[Tensor]:
        return self.agreed_beside_rows(super().hessian_product(batches, direction, with_u=with_u))


def derivatives(setting: Setting, curvature: Curvature = "auto") -> Derivatives:
    """The derivatives of a run's problem: of this process alone, or of the means over its ranks."""
    if setting.ranks is None:
        return Derivatives(setting.problem, setting.u, setting.v, curvature, setting.precision)
    problem = setting.problem
    if problem.start_lower is not None:
        raise OptionError(
            "start_lower cannot be used under torchrun: v belongs to one batch there, and ranks have different ones. "
            "Run it in one process."
        )
    if problem.trials is not None:
        raise OptionError("trials cannot be used with data under torchrun. Run them in one process.")
    if curvature == "gram":
        raise OptionError("curvature='gram' cannot be used under torchrun. Use curvature='auto'.")
    if setting.v.shards or setting.u.shards:
        from bilevel.distributed.sharded_derivatives import Sharded  # it builds on this module

        return Sharded(setting, setting.ranks, curvature)
    return Across(setting, setting.ranks, curvature)
