"""The set of the poison points: a box, and a bound on the distance from their bases in the l2 or l-infinity norm.

A projection keeps the points in the box; an l-infinity bound makes the box smaller. An l2 bound is an inequality for
methods with multipliers, |u_i - b_i|^2 / epsilon^2 - 1 <= 0; for other methods a projection shortens the distance.
`settled` makes the returned points satisfy both exactly, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel import Box, DataError, OptionError
from bilevel._util.checks import in_range, one_of
from bilevel.problem.problem import Projection

Norm = Literal["l2", "linf"]
# The share by which a perturbation is shortened if rounding leaves it outside of its bound; doubled at each try.
SHRINK = 1e-6


@dataclass(frozen=True)
class Bound:
    """A bound on each point, |u_i - b_i| <= epsilon, in the `norm` "l2" (default) or "linf".

    >>> Bound(0.5, "linf")
    Bound(epsilon=0.5, norm='linf')
    """

    epsilon: float
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        in_range("epsilon", self.epsilon, above=0)
        one_of("norm", self.norm, ("l2", "linf"))

    def inequality(self, u: Tensor, base: Tensor) -> Tensor:
        """Return one number for each point, which is not positive if the point is within the l2 bound."""
        return ((u - base) ** 2).flatten(1).sum(1) / self.epsilon**2 - 1


def norms(u: Tensor, base: Tensor, norm: Norm) -> Tensor:
    """Return the distance of each point from its base, in double precision."""
    apart = (u.detach().double() - base.double()).flatten(1)
    return apart.norm(dim=1) if norm == "l2" else apart.abs().amax(1)


@dataclass(frozen=True)
class Within:
    """The set of the poison points: a box around all inputs, and a bound around each base."""

    base: Tensor
    low: float | Tensor | None = 0.0
    high: float | Tensor | None = 1.0
    bound: Bound | None = None

    def __post_init__(self) -> None:
        if not torch.equal(self._box()(self.base), self.base):
            raise DataError(
                f"the base points must lie in the box from {_text(self.low)} to {_text(self.high)}; they go from "
                f"{float(self.base.min()):.4g} to {float(self.base.max()):.4g}. Scale the inputs, or give another box."
            )

    def _box(self) -> Projection:
        return (lambda u: u) if self.low is None and self.high is None else Box(self.low, self.high)

    @property
    def room(self) -> float:
        """How far one number of an input can move: the width of the box, or less if the bound leaves less."""
        width = 1.0
        if self.low is not None and self.high is not None:
            width = float(torch.as_tensor(self.high - self.low, dtype=torch.float64).mean())
        if self.bound is None:
            return width
        # All numbers of a point share the l2 bound; three times their equal share leaves room for unequal moves.
        share = 2.0 if self.bound.norm == "linf" else 3.0 / self.base[0].numel() ** 0.5
        return min(width, share * self.bound.epsilon)

    def projection(self, multipliers: bool) -> Projection | None:
        """Return the projection after a step, or None; without multipliers it also keeps the l2 bound."""
        box, bound, base = self._box(), self.bound, self.base
        if bound is not None and bound.norm == "linf":
            return Box(box(base - bound.epsilon), box(base + bound.epsilon))
        if bound is not None and not multipliers:
            return lambda u: drawn_back(box(u), base, bound.epsilon)
        return None if self.low is None and self.high is None else box

    def inequalities(self, multipliers: bool) -> tuple[Any, ...]:
        """Return the constraints of the problem that are not in the projection."""
        if self.bound is None or self.bound.norm == "linf" or not multipliers:
            return ()
        bound, base = self.bound, self.base
        return (lambda u, v, batch: bound.inequality(u, base),)

    @torch.no_grad()
    def settled(self, u: Tensor) -> Tensor:
        """Return points that satisfy the box and the bound exactly."""
        projection = self.projection(multipliers=False)
        u = u.detach() if projection is None else projection(u.detach())
        if self.bound is None:
            return u
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
    """Return the points, each moved on the straight line towards its base until it is within `epsilon`.

    `epsilon` is one number, or one for each point. A box that holds a point and its base also holds the result.
    """
    apart = u - base
    size = (apart * apart).flatten(1).sum(1).sqrt()
    factor = torch.where(size > epsilon, epsilon / size, torch.ones_like(size))
    return base + apart * factor.reshape(-1, *[1] * (u.ndim - 1))


def _text(edge: float | Tensor | None) -> str:
    if edge is None:
        return "no end"
    return f"{float(edge):g}" if not isinstance(edge, Tensor) or edge.numel() == 1 else "a tensor of edges"
