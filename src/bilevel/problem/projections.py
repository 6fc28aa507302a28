"""Sets with a known projection: Box, Ball, Simplex. Each is a differentiable function from a tensor to a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel._util.checks import ShortRepr
from bilevel.errors import OptionError


@dataclass(frozen=True, repr=False)
class Box(ShortRepr):
    """The set of tensors with every entry between `low` and `high`.

    Args:
        low: The lower bound: a number, a tensor, or None (default) for no bound.
        high: The upper bound: a number, a tensor, or None (default) for no bound. Give at least one of the two.

    >>> Box(0, 1)(torch.tensor([-2.0, 0.5, 3.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    low: float | Tensor | None = None
    high: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise OptionError("Box needs low, high or both; got neither.")
        low, high = (torch.as_tensor(0.0 if bound is None else bound) for bound in (self.low, self.high))
        ordered = self.low is None or self.high is None or bool((low <= high).all())
        if not ordered or bool(low.isnan().any()) or bool(high.isnan().any()):
            raise OptionError(f"Box needs low <= high; got low={self.low}, high={self.high}.")

    def __call__(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.low, self.high)  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Ball(ShortRepr):
    """The set of tensors with a Euclidean distance to `center` of at most `radius`.

    Args:
        radius: The largest distance.
        center: A number or a tensor. Default: 0.
        dim: The dimensions over which the distance is taken. None (default): all, so that the whole tensor is in one
            ball; with `dim=-1`, each row is in its own.

    >>> Ball(1.0)(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    radius: float
    center: float | Tensor = 0.0
    dim: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.radius < float("inf"):
            raise OptionError(f"radius must be positive and finite; got {self.radius}.")

    def __call__(self, x: Tensor) -> Tensor:
        offset = x - self.center
        square = (offset * offset).sum() if self.dim is None else (offset * offset).sum(self.dim, keepdim=True)
        # The square is bounded below before its root is taken: the derivative of the root at zero is not finite.
        norm = square.clamp(min=self.radius**2).sqrt()
        return self.center + offset * (self.radius / norm)


@dataclass(frozen=True)
class Simplex:
    """The set of tensors whose entries along `dim` are not negative and sum to `total`.

    Args:
        total: The sum. Default: 1.
        dim: The dimension whose entries are summed. Default: -1, the last.

    >>> Simplex()(torch.tensor([0.5, 0.5, -1.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    total: float = 1.0
    dim: int = -1

    def __post_init__(self) -> None:
        if not 0 < self.total < float("inf"):
            raise OptionError(f"total must be positive and finite; got {self.total}.")

    def __call__(self, x: Tensor) -> Tensor:
        x = x.movedim(self.dim, -1)
        # Shifting all entries alike changes nothing and keeps the sums below small.
        x = x - x.amax(-1, keepdim=True).detach()
        ordered = x.sort(-1, descending=True).values
        excess = ordered.cumsum(-1) - self.total
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        support = (ordered * count > excess).sum(-1, keepdim=True).clamp(min=1)
        shift = excess.gather(-1, support - 1) / support
        return (x - shift).clamp(min=0).movedim(-1, self.dim)
