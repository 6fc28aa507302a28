"""The columns of a table turned into numbers, by rules fitted once and applied to every part."""

from __future__ import annotations

import datetime
import importlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from bilevel._util.text import agreeing, counted
from bilevel.data.labels import name_of
from bilevel.data.scale import Scale
from bilevel.errors import DataError

MOST_VALUES = 20
"""Values of a text column that have a column of their own."""
NUMBERS = 0.95
"""The share of values that are numbers from which a column of text is one of numbers, with the rest missing."""
DATE = re.compile(r"\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?")
Values = np.ndarray | list[str | None]


@dataclass(frozen=True)
class Typed:
    """A column's values: `number` and `date` as float64 with NaN where missing, `text` as names with None."""

    kind: str
    values: Values
    strange: tuple[str, ...] = ()
    """Values of a column of numbers that are none, and count as missing."""

    @property
    def empty(self) -> bool:
        return bool(np.isnan(self.values).all()) if isinstance(self.values, np.ndarray) else not any(self.values)


class UnusableError(Exception):
    """A column is left out; the message says why."""


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, scaled; missing values are the median, marked in a second column."""

    kind: str
    median: float
    scale: Scale
    marked: bool
    parsed: bool = False
    """Whether it is read from text, some of which is no number."""

    @classmethod
    def of(cls, typed: Typed) -> Numbers:
        values = np.asarray(typed.values)
        missing = np.isnan(values)
        if typed.kind == "number" and _counts_rows(values):
            raise UnusableError("counts the rows")
        median = float(np.median(values[~missing]))
        scale = Scale.of(np.where(missing, median, values)[:, None])
        if not missing.any() and not scale.varies[0]:
            raise UnusableError("is constant")
        return cls(typed.kind, median, scale, bool(missing.any()), bool(typed.strange))

    def names(self, column: str) -> list[str]:
        """What the numbers that the column becomes are called."""
        return [column] * int(self.scale.varies[0]) + [f"{column} is missing"] * self.marked

    def __call__(self, typed: Typed) -> np.ndarray:
        if typed.empty:
            typed = Typed(self.kind, np.full(len(typed.values), np.nan))
        if typed.kind != self.kind:
            raise UnusableError(
                f"must hold {self.kind}s, as in the main file; it holds {typed.kind}{'s' * (typed.kind != 'text')}"
            )
        values = np.asarray(typed.values)
        missing = np.isnan(values)
        scaled = self.scale(np.where(missing, self.median, values)[:, None])
        return np.hstack([scaled, missing[:, None].astype(np.float32)]) if self.marked else scaled


@dataclass(frozen=True)
class Categories:
    """A column of text: 0 and 1 for each frequent value, for all others, and for missing."""

    places: dict[str | None, int]
    width: int
    other: int | None
    """The column of values that are not in `places`; None: they are 0 in all."""

    @classmethod
    def of(cls, typed: Typed) -> Categories:
        counts = Counter(typed.values)
        missing = counts.pop(None, 0)
        present = sum(counts.values())
        if len(counts) == 1 and not missing:
            raise UnusableError("is constant")
        if len(counts) >= 10 and len(counts) > 0.7 * present:
            raise UnusableError("is text of which nearly all values differ")
        frequent = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_VALUES]
        places: dict[str | None, int] = {name: i for i, name in enumerate(frequent)}
        other = len(places) if len(counts) > MOST_VALUES else None
        width = len(places) + (other is not None)
        if missing:
            places[None] = width
        return cls(places, width + bool(missing), other)

    def names(self, column: str) -> list[str]:
        """What the numbers that the column becomes are called."""
        found = [f"{column} is another"] * self.width
        for value, place in self.places.items():
            found[place] = f"{column} is missing" if value is None else f"{column} = {value}"
        return found

    def __call__(self, typed: Typed) -> np.ndarray:
        at = [self.places.get(name, self.other if name is not None else None) for name in typed.values]
        found = np.zeros((len(at), self.width), np.float32)
        for row, column in enumerate(at):
            if column is not None:
                found[row, column] = 1
        return found


@dataclass(frozen=True)
class Columns:
    """The rules for all columns of a table, by name, and the notes on those left out."""

    rules: dict[str, Numbers | Categories]
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns of numbers are called."""
        return tuple(name for column, rule in self.rules.items() for name in rule.names(column))

    @classmethod
    def of(cls, frame: Any, where: str) -> Columns:
        """Fit them on a pandas.DataFrame without the labels."""
        rules: dict[str, Numbers | Categories] = {}
        out: list[str] = []
        notes: list[str] = []
        for name in frame.columns:
            try:
                typed = typed_of(frame[name])
                if typed.empty:
                    raise UnusableError("has no values")
                rules[name] = Categories.of(typed) if typed.kind == "text" else Numbers.of(typed)
                if typed.strange:
                    notes.append(_told(name, typed))
            except UnusableError as reason:
                out.append(f"{name} ({reason})")
        shown = ", ".join(out[:10]) + (f" and {len(out) - 10} more" if len(out) > 10 else "")
        if not rules:
            raise DataError(f"{where} has no column to learn from besides the labels{': ' if out else ''}{shown}.")
        return cls(rules, (*((f"Left out of the inputs: {shown}.",) if out else ()), *notes))

    def __call__(self, frame: Any, where: str) -> np.ndarray:
        """A part as float32 (n, columns)."""
        found = []
        for name, rule in self.rules.items():
            if name not in frame.columns:
                raise DataError(f"{where} has no column {name!r}, which the main file has.")
            series = frame[name]
            try:
                found.append(rule(_typed_for(rule, series)))
            except UnusableError as error:
                raise DataError(f"{where}: column {name!r} {error}.") from None
        return np.hstack(found)


def _told(name: str, typed: Typed) -> str:
    count, of = len(typed.strange), len(typed.values)
    are = agreeing(count, "is no number and counts", "are no numbers and count")
    return f"{name}: {count} of {counted(of, 'value')}, such as {typed.strange[0]!r}, {are} as missing."


def _typed_for(rule: Numbers | Categories, series: Any) -> Typed:
    """The values of a column for a rule that was fitted on another part of it."""
    if isinstance(rule, Categories):
        return Typed("text", _names_of(series.astype(object)))
    return _parsed(importlib.import_module("pandas"), series) if rule.parsed else typed_of(series)


def typed_of(series: Any) -> Typed:
    """What a pandas.Series holds. Infinite numbers count as missing."""
    pandas = importlib.import_module("pandas")
    types = pandas.api.types
    if types.is_bool_dtype(series.dtype):
        return Typed("text", _names_of(series.astype(object)))
    if types.is_complex_dtype(series.dtype):
        raise UnusableError("holds complex numbers")
    if types.is_numeric_dtype(series.dtype):
        return _numbers(series.to_numpy(dtype=np.float64, na_value=np.nan))
    if types.is_datetime64_any_dtype(series.dtype):
        return _dates(pandas, series)
    if types.is_timedelta64_dtype(series.dtype):
        return _numbers(series.dt.total_seconds().to_numpy(dtype=np.float64))
    return _objects(pandas, series.astype(object))


def _objects(pandas: Any, series: Any) -> Typed:
    present = [value for value, gone in zip(series, series.isna(), strict=True) if not gone]
    if any(isinstance(value, (list, dict, tuple, set, np.ndarray)) for value in present):
        raise UnusableError("holds nested values")
    if present and all(isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) for value in present):
        try:
            return _numbers(
                np.array([np.nan if gone else float(v) for v, gone in zip(series, series.isna(), strict=True)])
            )
        except OverflowError:
            raise UnusableError("holds numbers that are too large") from None
    if present and all(_is_date(value) for value in present):
        return _dates(pandas, series)
    if present and all(isinstance(value, str) for value in present):
        parsed = _parsed(pandas, series)
        if len(parsed.strange) <= (1 - NUMBERS) * len(present):
            return parsed
    return Typed("text", _names_of(series))


def _parsed(pandas: Any, series: Any) -> Typed:
    """Text read as numbers; what is none is missing."""
    numbers = pandas.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    pairs = zip(series, np.isnan(numbers) & ~series.isna().to_numpy(), strict=True)
    return Typed("number", _numbers(numbers).values, tuple(str(value) for value, strange in pairs if strange))


def _is_date(value: object) -> bool:
    return isinstance(value, datetime.date) or (isinstance(value, str) and DATE.fullmatch(value) is not None)


def _dates(pandas: Any, series: Any) -> Typed:
    """Seconds since 1970, in UTC where a date names no zone."""
    try:
        if series.dtype == object:
            iso = series.astype(str).where(series.notna(), None)
            dates = pandas.to_datetime(iso, utc=True, format="ISO8601")
        else:
            dates = pandas.to_datetime(series, utc=True)
        seconds = (dates - pandas.Timestamp(0, tz="UTC")).dt.total_seconds()
        return Typed("date", seconds.to_numpy(dtype=np.float64))
    except (ValueError, OverflowError):
        if series.dtype == object:
            return Typed("text", _names_of(series))  # such as 2020-13-45
        raise UnusableError("holds dates that are out of range") from None


def _numbers(values: np.ndarray) -> Typed:
    return Typed("number", np.where(np.isfinite(values), values, np.nan))


def _names_of(values: Sequence[object]) -> list[str | None]:
    return [name_of(value) for value in values]


def _counts_rows(values: np.ndarray) -> bool:
    return len(values) > 1 and bool(np.array_equal(values, values[0] + np.arange(len(values))))
