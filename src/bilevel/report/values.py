"""Values of a table as a card shows them: short numbers, and a word where there is none."""

from __future__ import annotations

import math

import numpy as np

MISSING = "missing"
DIGITS = 6
"""Most significant digits of a number that is not whole."""
WHOLE = 1e15
"""Below it, double precision has every whole number: one that reads as such is shown with all its digits."""


def cell_text(value: object) -> str:
    """What a card says of a value; whole numbers, which may be names of things, keep their digits."""
    if is_missing(value):
        return MISSING
    if not isinstance(value, (float, np.floating)):
        return str(value)
    number = float(value)
    if number.is_integer() and abs(number) < WHOLE:
        return str(int(number))
    return f"{number:.{DIGITS}g}" if math.isfinite(number) else str(number)


def is_missing(value: object) -> bool:
    """Whether a value is None, not a number, or one of pandas' marks for missing values."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas.NA is neither equal to itself nor different
        return not isinstance(value, np.ndarray)
