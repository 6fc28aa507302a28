"""Counts in sentences: 1 row is, 2 rows are."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """The count and its noun, whose plural ends in s."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def agreeing(count: int, one: str, many: str) -> str:
    """Return the singular for a count of one, else the plural."""
    return one if count == 1 else many


def first_of(names: Iterable[object], most: int) -> str:
    """Join names for a sentence; a long list is cut after the first ones."""
    some = list(map(str, names))
    return ", ".join(some[:most]) + (", ..." if len(some) > most else "")
