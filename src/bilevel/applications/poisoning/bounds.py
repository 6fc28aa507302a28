"""How far a poison point may go from its base: the pixel box, and a bound in the l2 or the l-infinity norm.

The box and the l-infinity bound are one box, and a projection keeps the points in it. The l2 bound is an inequality
with multipliers for methods that have them, |u_i - b_i|^2 / epsilon^2 - 1 <= 0; for others the points are drawn back to
their bases. `settled` makes both hold exactly, to the last bit, in what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel._util.checks import in_range, one_of
from bilevel.errors import DataError, OptionError
from bilevel.problem.problem import Projection
from bilevel.problem.projections import Box

Norm = Literal["l2", "linf"]
SHRINK = 1e-6
"""The share by which a perturbation that rounding leaves outside of its bound is shortened, doubled at each try."""


@dataclass(frozen=True)
class Bound:
    """|u_i - b_i| <= epsilon for each point by itself."""

    epsilon: float
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        in_range("epsilon", self.epsilon, above=0)
        one_of("norm", self.norm, ("l2", "linf"))

    def inequality(self, u: Tensor, base: Tensor) -> Tensor:
        """One number for each point, not positive where it is within the l2 bound."""
        return ((u - base) ** 2).flatten(1).sum(1) / self.epsilon**2 - 1


def norms(u: Tensor, base: Tensor, norm: Norm) -> Tensor:
    """How far each point is from its base, in double precision."""
    apart = (u.detach().double() - base.double()).flatten(1)
    return apart.norm(dim=1) if norm == "l2" else apart.abs().amax(1)


@dataclass(frozen=True)
class Within:
    """The set that poison points live in: a box, and perhaps a bound on what was changed."""

    base: Tensor
    low: float | Tensor | None = 0.0
    high: float | Tensor | None = 1.0
    bound: Bound | None = None

    def __post_init__(self) -> None:
        if not torch.equal(self._box()(self.base), self.base):
            raise DataError(
                f"the base points must lie in the box from {_said(self.low)} to {_said(self.high)}; they go from "
                f"{float(self.base.min()):.4g} to {float(self.base.max()):.4g}. Scale the inputs, or give another box."
            )

    def _box(self) -> Projection:
        return (lambda u: u) if self.low is None and self.high is None else Box(self.low, self.high)

    @property
    def room(self) -> float:
        """How far an input may travel, one of them by itself: the width of the box, or what the bound leaves."""
        width = 1.0
        if self.low is not None and self.high is not None:
            width = float(torch.as_tensor(self.high - self.low, dtype=torch.float64).mean())
        if self.bound is None:
            return width
        # The l2 bound is shared by all inputs of a point; three times their even share is room for unequal moves.
        share = 2.0 if self.bound.norm == "linf" else 3.0 / self.base[0].numel() ** 0.5
        return min(width, share * self.bound.epsilon)

    def projection(self, multipliers: bool) -> Projection | None:
        """What keeps u in the set after a step; without multipliers the l2 bound, too."""
        box, bound, base = self._box(), self.bound, self.base
        if bound is None:
            return None if self.low is None and self.high is None else box
        if bound.norm == "linf":
            return Box(box(base - bound.epsilon), box(base + bound.epsilon))
        if multipliers:
            return None if self.low is None and self.high is None else box
        return lambda u: drawn_back(box(u), base, bound.epsilon)

    def inequalities(self, multipliers: bool) -> tuple[Any, ...]:
        """The constraints of the problem that are no projection."""
        if self.bound is None or self.bound.norm == "linf" or not multipliers:
            return ()
        bound, base = self.bound, self.base
        return (lambda u, v, batch: bound.inequality(u, base),)

    @torch.no_grad()
    def settled(self, u: Tensor) -> Tensor:
        """The points in the set, exactly: box and bound hold for the numbers that are returned."""
        u = self._box()(u.detach())
        if self.bound is None:
            return u
        if self.bound.norm == "linf":
            low, high = self.base - self.bound.epsilon, self.base + self.bound.epsilon
            u = self._box()(torch.clamp(u, low, high))
        else:
            u = self._box()(drawn_back(u, self.base, self.bound.epsilon))
        for k in range(20):
            far = norms(u, self.base, self.bound.norm) > self.bound.epsilon
            if not bool(far.any()):
                return u
            u[far] = self.base[far] + (u[far] - self.base[far]) * (1 - SHRINK * 2**k)
            u = self._box()(u)
        raise OptionError(
            f"epsilon must be large enough for the precision of the inputs; got {self.bound.epsilon} with inputs of "
            f"size {float(self.base.abs().max()):.3g} in {str(u.dtype).removeprefix('torch.')}."
        )


def drawn_back(u: Tensor, base: Tensor, epsilon: float | Tensor) -> Tensor:
    """Points on the segment to their bases that are within epsilon, one number or one for each: a box that holds both
    ends holds them, too."""
    apart = u - base
    size = (apart * apart).flatten(1).sum(1).sqrt()
    factor = torch.where(size > epsilon, epsilon / size, torch.ones_like(size))
    return base + apart * factor.reshape(-1, *[1] * (u.ndim - 1))


def _said(edge: float | Tensor | None) -> str:
    if edge is None:
        return "no end"
    return f"{float(edge):g}" if not isinstance(edge, Tensor) or edge.numel() == 1 else "a tensor of edges"
