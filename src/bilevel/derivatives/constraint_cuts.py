"""Cuts: g(u, v) <= g(u, w) wherever w meets the lower constraints, for each w that was found to be better than v.

The KKT conditions also hold at points that are not lower solutions. Cuts keep v away from these.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel._util.nested import copy_state
from bilevel.problem import Objective, Variable

if TYPE_CHECKING:
    from bilevel.derivatives.lower_constraints import KKT


class Cuts:
    """The cuts of a run: inequalities at the upper level, in the unit of v."""

    def __init__(self, kkt: KKT) -> None:
        self.kkt = kkt
        self.points: list[Tensor] = []
        self._values: list[Any] = []
        self._moved: list[list[Tensor]] = []

    def add(self, w: Tensor) -> None:
        """Require g(u, v) <= g(u, w)."""
        self.points.append(w.clone())
        self._values.append(other(self.kkt.v, w))
        self._moved.append(self._moved_by_u(self._values[-1]))

    def functions(self) -> list[Objective]:
        """Return one inequality for each cut."""
        return [
            self._cut(w, 1 + flat.norm().item(), moved)
            for w, flat, moved in zip(self._values, self.points, self._moved, strict=True)
        ]

    @torch.no_grad()
    def violation(self, batch: Any) -> float:
        """Return the largest violation of a cut at the present point; above 0, one of the w is better than v."""
        return max((cut(None, None, batch).item() for cut in self.functions()), default=0.0)

    def _cut(self, w: Any, size: float, moved: list[Tensor]) -> Objective:
        kkt = self.kkt
        scale = kkt.bend * size

        def cut(u: Any, v: Any, batch: Any) -> Tensor:
            here = kkt.lower_value(batch)
            there, c, d = kkt.parts(batch, w)
            # The cut is also met if w is not feasible at the lower level. Only constraints that u moves can cause this.
            outside = [x / size for x, size in zip(c, kkt.sizes_c, strict=True)]
            outside += [(x / size).abs() for x, size in zip(d, kkt.sizes_d, strict=True)]
            outside = [x[rows].amax() for x, rows in zip(outside, moved, strict=True) if bool(rows.any())]
            gap = (here - there) / scale
            return torch.minimum(gap, 1e-6 - torch.stack(outside).amax()) if outside else gap

        return cut

    @torch.no_grad()
    def _moved_by_u(self, w: Any) -> list[Tensor]:
        """Return which numbers of the lower constraints at w change with u."""
        kkt, generator = self.kkt, torch.Generator().manual_seed(0)
        held = [leaf.detach().clone() for leaf in kkt.plain_u.leaves]
        prepare = kkt.source.prepare

        def values() -> list[Tensor]:
            _, c, d = kkt.parts(None if prepare is None else prepare(kkt.plain_u.value, None), w)
            return [*c, *d]

        first = values()
        found = [torch.zeros_like(x, dtype=torch.bool) for x in first]
        for _ in range(2):
            for leaf, value in zip(kkt.plain_u.leaves, held, strict=True):
                draw = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
                leaf.copy_(value + 0.1 * (1 + value.abs()) * draw)
            found = [old | ~(x == y) for old, x, y in zip(found, first, values(), strict=True)]
        copy_state(kkt.plain_u.leaves, held)
        return found


def other(v: Variable, w: Tensor) -> Any:
    """Return a copy of the user's v that has the numbers w and requires no gradient."""
    value = copy.deepcopy(v.value)
    twin = Variable(value, "v")
    for leaf, part in zip(twin.leaves, torch.split(w, [leaf.numel() for leaf in twin.leaves]), strict=True):
        leaf.requires_grad_(False).copy_(part.reshape(leaf.shape))
    return value
