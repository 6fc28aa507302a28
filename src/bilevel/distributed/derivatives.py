"""Derivatives of a problem in one process, over ranks, or with v sharded by FSDP2's `fully_shard`.

With a sharded v, each rank has a shard of every tensor of v. Moments, prices and cotangents have the size of the
shards. A forward pass gathers the tensors; a backward pass leaves in each shard the mean over ranks. Autograd sees only
the gathered tensors, and does not support a second backward. So gradients are read where `backward` leaves them, and
the curvature is a difference of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.tensor_lists import dot
from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.penalised_objective import Curvature, PenalisedObjective
from bilevel.distributed.averaged_gradients import RankDerivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import OptionError
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable


class ShardedDerivatives(RankDerivatives):
    """Derivatives whose tensors shaped like v are shards of it, and means over ranks already."""

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
        for leaf in (*self._parameters.values(), *self.u.leaves, *(leaf for _, leaf in self.cuts), *leaves):
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
