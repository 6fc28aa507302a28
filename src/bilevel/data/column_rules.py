"""How the columns of a table become numbers, by rules that scikit-learn fits on the main file only.

- numbers, dates and durations: mean 0 and deviation 1, cut off at 10 deviations. A missing value is the median, and a
  column of 0 and 1 marks it;
- text, if at least 95% of its values are numbers: numbers, with the others missing, and a note;
- text, categories, true and false: a column of 0 and 1 for each value, missing included. If there are more than 21
  values, the 20 most frequent have a column, and the others share one;
- free text, whose values nearly all differ and have four words or more on average: the words and pairs of words are
  counted in 1,024 columns, chosen by a hash of the words. The columns of a row are scaled to the length 3;
- left out, with a note: constant columns, columns without values, columns that count the rows, shorter text whose
  values nearly all differ, and complex or nested values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bilevel._util.checks import agreeing, counted, require
from bilevel.data.arrays import LARGEST, standard_scaler
from bilevel.data.labelled import name_of
from bilevel.errors import DataError

# The columns for the words of a text, the length of a row of them, and the least words of free text, on average.
HASHES, LENGTH, LEAST_WORDS = 1024, 3.0, 4
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}.*)?"
# For the types that pandas infers: the kind of the column, or the reason to leave it out. All others are text.
KINDS = {
    "floating": "number",
    "integer": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "timedelta": "number",
    "timedelta64": "number",
    "date": "date",
    "datetime": "date",
    "datetime64": "date",
    "complex": "holds complex numbers",
    "mixed": "holds nested or mixed values",
}


@dataclass(frozen=True)
class ColumnRules:
    """The rules of each column of a table. Every field is text or numbers, so that JSON holds them."""

    # For each column that is used: `number`, `date`, `text` or `words`.
    kinds: dict[str, str]
    # Of the numbers and dates, in their order: the value of a missing one, the mean and the deviation.
    medians: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]
    # The places, among the numbers, of the columns whose missing values are marked.
    marked: tuple[int, ...]
    # Of each text column: the values with a column, None for missing ones; and whether all others share one more.
    values: tuple[tuple[str | None, ...], ...]
    shared: tuple[bool, ...]
    # The names of the columns of the result.
    features: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def fit(cls, frame: Any, where: str) -> ColumnRules:
        """Fit the rules on a table without its labels. `where` names it in errors."""
        kinds, values, left_out, notes = {}, {}, [], []
        for name, series in frame.items():
            kind = kind_of(series)
            found = read_column(series, kind) if kind in ("number", "date", "text") else np.empty(0)
            if kind == "text" and _is_free_text(found):
                kind = "words"
            if why := _useless(found, kind) if len(found) else kind:
                left_out.append(f"{name} ({why})")
                continue
            kinds[name], values[name] = kind, found
            if kind == "number" and (strange := series[np.isnan(found) & series.notna().to_numpy()].tolist()):
                notes.append(
                    f"{name}: {len(strange)} of {counted(len(series), 'value')}, such as {strange[0]!r}, "
                    f"{agreeing(len(strange), 'is not a number and counts', 'are not numbers and count')} as missing."
                )
        shown = ", ".join(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
        if not kinds:
            raise DataError(f"{where} has no column to learn from except the labels{': ' * bool(shown)}{shown}.")
        if left_out:
            notes.insert(0, f"Left out of the inputs: {shown}.")
        medians, means, deviations, marked = _number_rules(kinds, values)
        names, shared = _text_rules(kinds, values)
        return cls(kinds, medians, means, deviations, marked, names, shared, ()).named(tuple(notes))

    def named(self, notes: tuple[str, ...]) -> ColumnRules:
        """Return these rules with the names of the columns of the result, and with notes."""
        numbers, texts, words = self._of("number"), self._of("text"), self._of("words")
        names = [*numbers, *(f"{numbers[i]} is missing" for i in self.marked)]
        for name, values, shared in zip(texts, self.values, self.shared, strict=True):
            names += [f"{name} is missing" if value is None else f"{name} = {value}" for value in values]
            names += [f"{name} is another"] * shared
        names += [f"words of {name}, {k}" for name in words for k in range(HASHES)]
        return ColumnRules(**{**vars(self), "features": tuple(names), "notes": notes})

    @property
    def text_columns(self) -> list[str]:
        """The columns whose values in a .csv file are text, even if they look like numbers."""
        pairs = zip(self._of("text"), self.values, strict=True)
        return [*self._of("words"), *(name for name, values in pairs if not {"True", "False", None}.issuperset(values))]

    def transform(self, X: Any, /, where: str = "the table") -> np.ndarray:
        """Return a table with the same columns as float32 (n, columns); other columns are not read."""
        X = named_columns(X)
        if missing := [name for name in self.kinds if name not in X.columns]:
            raise DataError(f"{where} has no column {missing[0]!r}, which the main data have.")
        read = {name: self._read(X[name], name, where) for name in self.kinds}
        numbers = [read[name] for name in self._of("number")]
        blocks = [self._scaled(np.column_stack(numbers))] if numbers else []
        for name, values, shared in zip(self._of("text"), self.values, self.shared, strict=True):
            blocks.append(_one_hot(read[name], values, shared))
        blocks += [counted_words(read[name]) for name in self._of("words")]
        return np.concatenate(blocks, axis=1, dtype=np.float32)

    def unknown(self, X: Any) -> dict[str, int]:
        """Return the number of values of each text column of a table that the main data do not have."""
        found: dict[str, int] = {}
        X = named_columns(X)
        for name, values, shared in zip(self._of("text"), self.values, self.shared, strict=True):
            names = read_column(X[name], "text")
            strange = 0 if shared else sum(_known(value) not in values for value in names)
            found |= {name: strange} if strange else {}
        return found

    def _of(self, kind: str) -> list[str]:
        """Return the columns of a kind; dates are numbers."""
        return [name for name, each in self.kinds.items() if {"date": "number"}.get(each, each) == kind]

    def _read(self, series: Any, name: str, where: str) -> np.ndarray:
        kind = self.kinds[name]
        found, present = read_column(series, kind), series.dropna()
        if kind in ("number", "date") and len(present) and np.isnan(found).all():
            raise DataError(
                f"{where}: column {name!r} must hold {kind}s, as in the main data; got {str(present.iloc[0])!r}."
            )
        return found

    def _scaled(self, numbers: np.ndarray) -> np.ndarray:
        """Return numbers scaled, and the marks of missing ones."""
        missing = np.isnan(numbers)
        filled = np.where(missing, np.array(self.medians), numbers)
        scaled = ((filled - np.array(self.means)) / np.array(self.deviations)).clip(-10, 10)
        return np.concatenate([scaled, missing[:, list(self.marked)]], axis=1, dtype=np.float32)


def named_columns(frame: Any) -> Any:
    """Return a pandas.DataFrame with text as column names: a number such as 0 becomes "0"."""
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _number_rules(kinds: dict[str, str], values: dict[str, np.ndarray]) -> tuple[tuple[Any, ...], ...]:
    """Return the medians, means, deviations and marked columns of the numbers."""
    numbers = [values[name] for name, kind in kinds.items() if kind in ("number", "date")]
    if not numbers:
        return (), (), (), ()
    table = np.column_stack(numbers)
    fill = require("sklearn.impute", "apps").SimpleImputer(strategy="median").fit(table)
    scaler = standard_scaler().fit(fill.transform(table))[1]
    marked = tuple(np.flatnonzero(np.isnan(table).any(axis=0)).tolist())
    return tuple(fill.statistics_.tolist()), tuple(scaler.mean_.tolist()), tuple(scaler.scale_.tolist()), marked


def _text_rules(kinds: dict[str, str], values: dict[str, np.ndarray]) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """Return, of each text column, the values with a column, and whether the others share one."""
    texts = [values[name] for name, kind in kinds.items() if kind == "text"]
    if not texts:
        return (), ()
    encoder = require("sklearn.preprocessing", "apps").OneHotEncoder(
        max_categories=21, handle_unknown="infrequent_if_exist", sparse_output=False
    )
    encoder.fit(np.column_stack(texts))
    rare = encoder.infrequent_categories_
    kept = []
    for found, others in zip(encoder.categories_, rare, strict=True):
        less = set() if others is None else set(map(_known, others))
        kept.append(tuple(name for name in map(_known, found) if name not in less))
    return tuple(kept), tuple(others is not None for others in rare)


def _is_free_text(names: np.ndarray) -> bool:
    """Return whether text is long and nearly all values differ, so that its words say more than its values."""
    present = [name for name in names if isinstance(name, str)]
    words = sum(len(name.split()) for name in present)
    return _nearly_all_differ(len(set(present)), len(present)) and words >= LEAST_WORDS * len(present)


def _nearly_all_differ(distinct: int, count: int) -> bool:
    return distinct >= 10 and distinct > 0.7 * count


def counted_words(names: np.ndarray) -> np.ndarray:
    """Return the hashed counts of the words and pairs of words of each text; a missing text has none."""
    hashing = require("sklearn.feature_extraction.text", "apps").HashingVectorizer(
        n_features=HASHES, ngram_range=(1, 2), dtype=np.float32
    )
    found: np.ndarray = hashing.transform([_known(name) or "" for name in names]).toarray()
    return found * np.float32(LENGTH)


def _known(value: Any) -> str | None:
    """Return the value of a text column, None for a missing one."""
    return value if isinstance(value, str) else None


def _one_hot(names: np.ndarray, values: tuple[str | None, ...], shared: bool) -> np.ndarray:
    """Return a column of 0 and 1 for each value, and for all others if they share one."""
    place = {value: i for i, value in enumerate(values)}
    at = np.array([place.get(_known(name), len(values)) for name in names], dtype=np.int64)
    return np.eye(len(values) + 1, dtype=np.float32)[at, : len(values) + shared]


def kind_of(series: Any) -> str:
    """Return the kind of a pandas.Series, `number`, `date` or `text`, or the reason why it cannot be used."""
    found = require("pandas", "tables").api.types.infer_dtype(series, skipna=True)
    if found != "string":
        return KINDS.get(found, "text")
    present = int(series.notna().sum())
    if np.isfinite(read_column(series, "number")).sum() >= 0.95 * present:
        return "number"
    return "date" if np.isfinite(read_column(series, "date")).sum() == present else "text"


def read_column(series: Any, kind: str) -> np.ndarray:
    """Return the values of a pandas.Series as this kind.

    Numbers and dates (in seconds since 1970, UTC) become float64, with NaN for missing, infinite and other values;
    text becomes names, with NaN for missing ones.
    """
    if kind in ("text", "words"):
        names = [name_of(value) for value in series.astype(object)]
        return np.array([np.nan if name is None else name for name in names], dtype=object)
    pandas = require("pandas", "tables")
    if kind == "date":
        text = series.astype("string")
        text = text.where(text.str.fullmatch(DATE))  # pandas reads more as dates, such as "now"
        dates = pandas.to_datetime(text, utc=True, format="ISO8601", errors="coerce")
        seconds: np.ndarray = (dates.to_numpy("datetime64[us]") - np.datetime64(0, "us")) / np.timedelta64(1, "s")
        return seconds
    if pandas.api.types.is_timedelta64_dtype(series.dtype):
        found = series.dt.total_seconds()
    else:
        plain = pandas.api.types.is_numeric_dtype(series.dtype)
        found = pandas.to_numeric(series if plain else series.astype(object), errors="coerce")
    values = found.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values.clip(-LARGEST, LARGEST), np.nan)


def _useless(values: np.ndarray, kind: str) -> str:
    """Return why nothing can be learned from the values of a column; empty if something can."""
    present = require("pandas", "tables").Series(values).dropna()
    if (distinct := present.nunique()) == 0:
        return "has no values"
    if distinct == 1 and len(present) == len(values):
        return "is constant"
    if kind == "text":
        return "is text whose values nearly all differ" if _nearly_all_differ(distinct, len(present)) else ""
    counts_rows = kind == "number" and np.array_equal(values, values[0] + np.arange(len(values)))
    return "counts the rows" if counts_rows else ""
