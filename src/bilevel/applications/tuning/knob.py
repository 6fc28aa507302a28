"""What every hyperparameter has: a range, a start, a shape, and no effect on the training loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bilevel._util.checks import in_range
from bilevel.applications.tuning.ranges import Range, Scale

Parameters = Mapping[str, Tensor]
# (scores, targets) -> one loss for each example.
Losses = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and the data, which determine how many values a knob has.

    `features` counts the numbers in one input. `classes` is None if the targets are numbers, `sources` 0 if the
    training examples have none.
    """

    parameters: Parameters
    features: int
    classes: int | None
    sources: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Knob(Range):
    """A hyperparameter: its range and its start. The methods below change nothing; each subclass replaces one."""

    # Whether one number for all entries of the value means something: equal weights of all classes are no weights.
    has_singles: ClassVar[bool] = True

    low: float
    high: float
    start: float
    scale: Scale = "log"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("start", self.start, least=self.low, most=self.high)

    def singles(self, count: int) -> list[float]:
        """Return single values over the range for a grid; none if they mean nothing."""
        if not self.has_singles:
            return []
        low, high = self.natural_ends
        places = (
            torch.linspace(low, high, count, dtype=torch.float64) if count > 1 else torch.tensor([low / 2 + high / 2])
        )
        return [float(x) for x in (places.exp() if self.scale == "log" else places)]

    def grown(self, best: float, factor: float) -> float | None:
        """Return the next value beyond the range if the best of a grid is at an end of it or beyond; else None.

        Only the default range of a logarithmic scale grows: a range that the caller gave is kept.
        """
        if self.scale != "log":
            return None
        if self.low == getattr(type(self), "low", None) and best <= self.low * (1 + 1e-6):
            return best / factor
        if self.high == getattr(type(self), "high", None) and best >= self.high * (1 - 1e-6):
            return best * factor
        return None

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the value."""
        return (1,)

    def inputs(self, value: Tensor, x: Tensor) -> Tensor:
        return x

    def targets(self, value: Tensor, target: Tensor) -> Tensor:
        """Return the target probabilities, one row for each example."""
        return target

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor | None:
        """Return a weight for each example, or None."""
        return None

    def losses(self, value: Tensor, scores: Tensor, target: Tensor) -> Tensor | None:
        """Return losses that replace the usual ones, or None."""
        return None

    def penalty(self, value: Tensor, parameters: Parameters) -> Tensor | None:
        return None
