"""Columns of numbers brought to mean 0 and deviation 1, as measured on the main part alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LIMIT = 10.0
"""Where scaled values end, so that one wild number does not decide a step. Most columns never come near."""


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of each column, both in units of `unit`; `varies` says which columns are kept."""

    unit: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    varies: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Scale:
        """Measure finite values of shape (n, columns)."""
        # Divided by its largest value first, a column of any size has a deviation that does not overflow.
        unit = np.abs(values).max(axis=0)
        unit = np.where(unit > 0, unit, 1.0)
        scaled = values / unit
        deviation = scaled.std(axis=0)
        varies = (values.min(axis=0) < values.max(axis=0)) & (deviation > 1e-14)
        return cls(unit, scaled.mean(axis=0), deviation, varies)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The columns that vary, as float32."""
        kept = self.varies
        with np.errstate(over="ignore"):  # a value far beyond those of the main part ends at the limit
            scaled = (values[:, kept] / self.unit[kept] - self.mean[kept]) / self.deviation[kept]
        clipped: np.ndarray = np.clip(scaled, -LIMIT, LIMIT)
        return clipped.astype(np.float32)
