"""Labels as they stand in a file, turned into indices into a sorted list of class names.

A label is text, a whole number (1 and 1.0 are the class "1") or true or false. Classes are sorted, by value where all
are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from bilevel._util.text import agreeing, first_of
from bilevel.errors import DataError

MANY = 20
"""More classes than this, and more than half as many as rows, are no classes."""
LEAST_ROWS = 10


def names_of(values: Iterable[object], where: str) -> list[str]:
    """The class name of each label; refuses labels that are missing. `where` names them in errors."""
    names = [name_of(value) for value in values]
    missing = [i for i, name in enumerate(names) if name is None]
    if missing:
        first = first_of(missing, 3)
        raise DataError(
            f"{where}: {len(missing)} of {len(names)} labels {agreeing(len(missing), 'is', 'are')} missing or not "
            f"finite, in {agreeing(len(missing), 'row', 'rows')} {first} (from 0). Fill or remove "
            f"{agreeing(len(missing), 'it', 'them')}."
        )
    return [name for name in names if name is not None]


def name_of(value: object) -> str | None:
    """The class name of a label; None where it is missing: None, NaN, an infinite number, empty text."""
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
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas, which need not be installed
        return None
    return str(value) or None


def classes_of(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The classes of the main part, sorted; refuses what cannot be classes, and too few rows or classes."""
    if len(names) < LEAST_ROWS:
        raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(names)}.")
    found = set(names)
    numbers = {name: number for name in found if (number := _number(name)) is not None}
    classes = sorted(found, key=lambda name: (numbers[name], name)) if len(numbers) == len(found) else sorted(found)
    if len(classes) < 2:
        raise DataError(f"{where}: at least 2 classes are needed; every label is {classes[0]!r}.")
    broken = [name for name, number in numbers.items() if not number.is_integer()]
    if len(numbers) == len(found) and len(broken) > MANY:
        raise DataError(
            f"{where}: the labels are numbers with {len(found)} different values, such as "
            f"{float(sorted(broken)[0]):.6g}; this looks like regression, and classes are needed. For numbers there "
            "are `bilevel tune --model ridge` and `--model mlp --numbers`."
        )
    if len(classes) > MANY and len(classes) > len(names) / 2:
        raise DataError(
            f"{where}: the labels have {len(classes)} different values in {len(names)} rows; this looks like an "
            "identifier or a measurement, and classes are needed."
        )
    return tuple(classes)


def indices(names: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """Each name's place in `classes`, as int64; refuses a name that is not there."""
    place = {name: i for i, name in enumerate(classes)}
    strange = sorted({name for name in names if name not in place})
    if strange:
        raise DataError(
            f"{where}: the labels {_listed(strange)} do not occur in the main part, whose classes are "
            f"{_listed(list(classes))}."
        )
    return torch.tensor([place[name] for name in names], dtype=torch.int64)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:10])
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _number(name: str) -> float | None:
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
