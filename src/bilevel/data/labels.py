"""Labels as they are written in a file, turned into indices into a sorted list of class names.

A label is text, a whole number (1 and 1.0 are the class "1"), or true or false. Classes are sorted by value if all are
numbers, else by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel._util.text import agreeing, first_of
from bilevel.errors import DataError

MANY = 20
"""Labels with more different values than this, and than half the number of rows, are not classes."""
LEAST_ROWS = 10


class ClassLabels:
    """Reads labels as classes; `classes` are the classes of the main part."""

    classes: tuple[str, ...] = ()

    def main(self, values: Any, where: str) -> Tensor:
        """Return the indices of the main part's labels, and keep its classes. `where` names them in errors."""
        names = names_of(values.tolist(), where)
        self.classes = classes_of(names, where)
        return indices(names, self.classes, where)

    def part(self, values: Any, where: str) -> Tensor:
        """Return the indices of another part's labels."""
        return indices(names_of(values.tolist(), where), self.classes, where)


def names_of(values: Iterable[object], where: str) -> list[str]:
    """Return the class name of each label; raise DataError if some are missing. `where` names them in errors."""
    names = [name_of(value) for value in values]
    missing = [i for i, name in enumerate(names) if name is None]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(names)} labels {agreeing(len(missing), 'is', 'are')} missing or not "
            f"finite, in {agreeing(len(missing), 'row', 'rows')} {first_of(missing, 3)} (from 0). Fill or remove "
            f"{agreeing(len(missing), 'it', 'them')}."
        )
    return [name for name in names if name is not None]


def name_of(value: object) -> str | None:
    """Return the class name of a label, or None if it is missing: None, NaN, an infinite number, empty text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else repr(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' marks; it need not be installed
        return None
    return str(value) or None


def classes_of(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the sorted classes of the main part; raise DataError for labels that cannot be classes."""
    if len(names) < LEAST_ROWS:
        raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(names)}.")
    found = set(names)
    numbers = {name: number for name in found if (number := _number(name)) is not None}
    all_numbers = len(numbers) == len(found)
    classes = sorted(found, key=lambda name: (numbers[name], name)) if all_numbers else sorted(found)
    if len(classes) < 2:
        raise DataError(f"{where}: at least 2 classes are needed; every label is {classes[0]!r}.")
    fractions = [name for name, number in numbers.items() if not number.is_integer()]
    if all_numbers and len(fractions) > MANY:
        raise DataError(
            f"{where}: the labels are numbers with {len(found)} different values, such as "
            f"{float(min(fractions)):.6g}; this looks like regression, and classes are needed. To predict numbers, use "
            "`bilevel tune --model ridge` or `--model mlp --numbers`."
        )
    if len(classes) > MANY and len(classes) > len(names) / 2:
        raise DataError(
            f"{where}: the labels have {len(classes)} different values in {len(names)} rows; this looks like an "
            "identifier or a measurement, and classes are needed."
        )
    return tuple(classes)


def indices(names: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """Return the place of each name in `classes`, as int64; raise DataError for a name that is not there."""
    place = {name: i for i, name in enumerate(classes)}
    strange = sorted({name for name in names if name not in place})
    if strange:
        raise DataError(
            f"{where}: the labels {first_of(map(repr, strange), 10)} do not occur in the main part, whose classes are "
            f"{first_of(map(repr, classes), 10)}."
        )
    return torch.tensor([place[name] for name in names], dtype=torch.int64)


def _number(name: str) -> float | None:
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
