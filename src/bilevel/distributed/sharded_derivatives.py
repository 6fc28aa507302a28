"""Derivatives where v is divided among the ranks by FSDP2's `fully_shard`.

Each rank has a shard of every tensor of v, and all that a step does with v it does with its shards: moments, prices and
cotangents are as large. A forward pass gathers the tensors, a backward pass leaves in each shard the mean over ranks.
Autograd sees the gathered tensors alone, and there is no second backward: gradients are read where `backward` leaves
them, and the curvature is a difference of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import dot
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients
from bilevel.distributed.derivatives import Across
from bilevel.distributed.process_group import Ranks
from bilevel.errors import BilevelWarning, OptionError
from bilevel.methods.base import Setting


class Sharded(Across):
    """What is shaped like v is a shard of it, and a mean over ranks already."""

    def __init__(self, setting: Setting, ranks: Ranks, curvature: Curvature) -> None:
        if curvature in ("exact", "gram"):
            raise OptionError(
                f"fully_shard has no double backward, which curvature={curvature!r} and ForwardMode need. Use "
                "curvature='difference', or ValueGap."
            )
        for refused, name in (
            (setting.problem.project_lower is not None, "project_lower"),
            (setting.accumulate > 1, "accumulate"),
            (setting.u.shards, "a sharded u"),
        ):
            if refused:
                raise OptionError(f"{name} cannot be used where v is sharded by fully_shard. Use a v that is not.")
        if curvature == "auto":
            warnings.warn(
                "v is sharded by fully_shard, which has no double backward: the curvature is approximated by finite "
                "differences (curvature='difference').",
                BilevelWarning,
                stacklevel=2,
            )
        super().__init__(setting, ranks, "difference")
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
        """d<cotangent, output> in the leaves, those of v as means over ranks."""
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
        for leaf in (*self._parameters.values(), *self.u.leaves, *(leaf for _, leaf in self.cuts), *leaves):
            leaf.grad = None
        return found

    # -- sums over shards ---------------------------------------------------------------------------------------------

    def whole(self, part: Tensor) -> Tensor:
        return self.ranks.total(part)

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return self.whole(dot([x.detach() for x in a], [x.detach() for x in b]))

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.dot(tensors, tensors).sqrt()

    def square(self, tensors: Sequence[Tensor]) -> Tensor:
        count = len(self.u.leaves)
        shards = self.dot(tensors[count:], tensors[count:])
        return shards + dot(tensors[:count], tensors[:count]) if count else shards

    def size(self, found: list[Tensor]) -> Tensor:
        count = len(self.v.leaves)
        shards = self.dot(found[:count], found[:count])
        if len(found) <= count:
            return shards.sqrt()
        leaves = count + len(self.u.leaves)
        square = shards + sum(x.detach().square().sum() for x in found[count:leaves])
        rows = [x.detach().square().sum() for x in found[leaves:]]
        total: Tensor = square + self.ranks.total(torch.stack(rows).sum()) / self.ranks.size**2 if rows else square
        return total.sqrt()

    # -- means of all but v -------------------------------------------------------------------------------------------

    def _agreeing(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: tensors

    def agreed_beside_rows(self, found: list[Tensor]) -> list[Tensor]:
        count, leaves = len(self.v.leaves), len(self.v.leaves) + len(self.u.leaves)
        return [*found[:count], *self.ranks.mean(found[count:leaves]), *found[leaves:]]

    def agreed_gradients(self, found: Gradients) -> Gradients:
        leaves = len(self.u.leaves)
        f, g, *u = self.ranks.mean([found.f, found.g, *found.u[:leaves]])
        return replace(found, f=f, g=g, u=[*u, *found.u[leaves:]])

    def slope(self, batches: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
        g, slope = super(Across, self).slope(batches)
        return self.ranks.mean([g])[0], slope

    def first_order(self, batches: Sequence[Pair], lam: Tensor | None) -> Gradients:
        found = super(Across, self).first_order(batches, lam)
        f, g, *h = self.ranks.mean([found.f, found.g, *found.constraints])
        return replace(found, f=f, g=g, constraints=h)
