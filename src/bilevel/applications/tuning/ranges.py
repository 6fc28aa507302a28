"""The range of a hyper-parameter and its natural scale, kept by a change of variables.

    natural(value) = middle + half tanh(t / REACH),     natural: the logarithm, or the value itself

t is free. All hyper-parameters have it in the same units: a move by 5 from the middle, which the default rate of the
penalty method allows for, covers most of any range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bilevel._util.checks import in_range, one_of
from bilevel.errors import OptionError

REACH = 2.5
EDGE = 1e-3
"""How near to its ends, as a share of half the range, a value may start: at an end nothing would move it."""
Scale = Literal["log", "linear"]


@dataclass(frozen=True)
class Range:
    """All values between `low` and `high`; on the scale `log` both are above 0."""

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
    def _ends(self) -> tuple[float, float]:
        """The middle and half of the width, on the natural scale."""
        low, high = (math.log(end) if self.scale == "log" else float(end) for end in (self.low, self.high))
        return (low + high) / 2, (high - low) / 2

    def value(self, t: Tensor) -> Tensor:
        """The value that a free t stands for."""
        middle, half = self._ends
        # 1 + tanh(t / REACH) = 2 sigmoid(2 t / REACH), which takes a fraction of the time of tanh on a CPU.
        # In place, as no derivative needs what is overwritten: new memory costs a million values more than the numbers.
        natural = t.mul(2 / REACH).sigmoid_().mul(2 * half).add_(middle - half)
        return natural.exp_() if self.scale == "log" else natural

    def free(self, value: Tensor) -> Tensor:
        """The t of a value; one at an end of the range, or beyond it, is moved a little inside."""
        middle, half = self._ends
        natural = value.clamp(self.low, self.high)
        share = ((natural.log() if self.scale == "log" else natural) - middle) / half
        return REACH * torch.atanh(share.clamp(EDGE - 1, 1 - EDGE))
