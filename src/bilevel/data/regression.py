"""Examples whose labels are numbers to predict, from .npz, .csv and .parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel._util.text import agreeing
from bilevel.data.labelled import Labelled
from bilevel.data.labels import LEAST_ROWS, ClassLabels
from bilevel.data.load import form_of, read
from bilevel.data.tables import kind_of, read_column
from bilevel.errors import DataError, OptionError


def load_numbers(source: str | Path, *, label: str | None = None, test: str | Path | None = None) -> Labelled:
    """Read examples with numbers as labels: `y` of the result is float64, and `classes` is empty.

    `source` is an .npz file, or a .csv or .parquet table with the labels in the column `label`. `test` is another file
    of the same form. Inputs are prepared as `load` does it.
    """
    if form_of(source) not in ("npz", "table"):
        raise OptionError(f"{source} has classes as labels; numbers are read from .npz, .csv and .parquet files.")
    data = read(source, label, {"test": test}, NumberLabels())
    if data.kind == "images":
        shape = tuple(data.x.shape[1:])
        raise DataError(f"{source}, x must have rows of numbers, shape (n, columns); it holds images of {shape}.")
    return data


class NumberLabels(ClassLabels):
    """Reads labels as float64 numbers."""

    def main(self, values: Any, where: str) -> Tensor:
        """Return the labels of the main part, which must vary."""
        y = self.part(values, where)
        if len(y) < LEAST_ROWS:
            raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(y)}.")
        if not bool(y.min() < y.max()):
            raise DataError(f"{where}: the labels must vary; every one is {float(y[0]):g}.")
        return y

    def part(self, values: Any, where: str) -> Tensor:
        """Return the labels of an array or of a pandas.Series; none may be missing."""
        if not isinstance(values, np.ndarray):
            kind = kind_of(values)
            if kind != "number":
                held = f"holds {kind}s" if kind in ("date", "text") else kind
                raise DataError(f"{where} must hold numbers to predict; it {held}. Use a model for classes.")
            values = read_column(values, kind)
        if values.dtype.kind not in "buif":
            raise DataError(f"{where} must hold numbers to predict; its type is {values.dtype}.")
        y = values.astype(np.float64)
        if bad := int((~np.isfinite(y)).sum()):
            first = int((~np.isfinite(y)).argmax())
            raise DataError(
                f"{where}: {bad} of {len(y)} labels {agreeing(bad, 'is', 'are')} missing or not finite, "
                f"{agreeing(bad, 'in', 'the first in')} row {first} (from 0). Fill or remove "
                f"{agreeing(bad, 'it', 'them')}."
            )
        return torch.from_numpy(y)
