"""Counts in sentences: 1 row is, 2 rows are."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """The count and its noun, whose plural ends in s."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def agreeing(count: int, one: str, many: str) -> str:
    """The form of a word that goes with the count: that of one, or that of none and many."""
    return one if count == 1 else many
