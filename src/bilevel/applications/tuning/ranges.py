"""The range of a hyperparameter and its scale, and the change of variables that keeps its values inside.

    natural(value) = middle + half tanh(t / REACH),     t free

Every hyperparameter has t in the same units: a move by 5 from the middle, which the default rate of the penalty method
allows for, covers most of any range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bilevel import OptionError
from bilevel._util.checks import ShortRepr, in_range, one_of

REACH = 2.5
# The least distance of a start from the ends, as a share of half the range: at an end the gradient is zero.
EDGE = 1e-3
Scale = Literal["log", "linear"]


@dataclass(frozen=True, repr=False)
class Range(ShortRepr):
    """The values between `low` and `high`, on a "log" or a "linear" scale. A log scale needs `low` above 0.

    >>> Range(1e-4, 1.0).value(torch.tensor(0.0)).item()  # the middle of the logarithms
    0.01
    """

    low: float
    high: float
    scale: Scale = "log"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, ("log", "linear"))
        for name in ("low", "high"):
            in_range(name, getattr(self, name))
        if self.scale == "log" and not self.low > 0:
            raise OptionError(f"low must be above 0 on the scale 'log'; got {self.low!r}. Use scale='linear'.")
        if not self.low < self.high:
            raise OptionError(f"low must be below high; got low={self.low!r} and high={self.high!r}.")

    @property
    def natural_ends(self) -> tuple[float, float]:
        """Return the ends on the natural scale."""
        low, high = (math.log(end) if self.scale == "log" else float(end) for end in (self.low, self.high))
        return low, high

    def natural(self, value: Tensor) -> Tensor:
        """Return a value on the natural scale: its logarithm, or the value itself."""
        return value.log() if self.scale == "log" else value

    @property
    def _ends(self) -> tuple[float, float]:
        """Return the middle and half the width, on the natural scale."""
        low, high = self.natural_ends
        return (low + high) / 2, (high - low) / 2

    def value(self, t: Tensor) -> Tensor:
        """Return the value of a free t."""
        middle, half = self._ends
        # 1 + tanh(t / REACH) = 2 sigmoid(2 t / REACH), and sigmoid is much faster than tanh on a CPU. In place: no
        # derivative needs the old numbers, and for a million values new memory costs more than the arithmetic.
        natural = t.mul(2 / REACH).sigmoid_().mul(2 * half).add_(middle - half)
        return natural.exp_() if self.scale == "log" else natural

    def log_slope(self, t: Tensor) -> Tensor:
        """Return the derivative of the logarithm of the value of t, on a logarithmic scale."""
        return (1 - (t / REACH).tanh().square()) * (self._ends[1] / REACH)

    def free(self, value: Tensor) -> Tensor:
        """Return the t of a value; a value at or beyond an end of the range is moved a little inside."""
        middle, half = self._ends
        share = (self.natural(value.clamp(self.low, self.high)) - middle) / half
        return REACH * torch.atanh(share.clamp(EDGE - 1, 1 - EDGE))
