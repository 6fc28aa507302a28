"""Tables: .csv and .parquet files with a column of labels.

scikit-learn turns every other column into numbers, by rules that are fitted on the main file only:

- numbers, dates and durations: mean 0 and deviation 1, cut off at 10 deviations. A missing value is the median, and a
  column of 0 and 1 marks it;
- text, if at least 95% of its values are numbers: numbers, with the others missing, and a note;
- text, categories, true and false: a column of 0 and 1 for each value, missing included. If there are more than 21
  values, the 20 most frequent have a column, and the others share one;
- left out, with a note: constant columns, columns without values, columns that count the rows, text whose values nearly
  all differ, and complex or nested values.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel._util.checks import agreeing, counted, did_you_mean, require
from bilevel.data.arrays import COPIES, LARGEST, refuse_larger, standard_scaler
from bilevel.data.labelled import Labelled, LabelReader, Pair, name_of, reading, row_keys
from bilevel.errors import DataError, OptionError, reason

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


def load_table(path: Path, label: str | None, further: dict[str, Path], labels: LabelReader) -> Labelled:
    """Return the table as `Labelled`.

    `label` is the column of the labels, which `labels` reads. `further` has the tables of the parts `trusted` and
    `test`.
    """
    frame = read_table(path, label)
    y, classes = labels(frame[label], f"{path}, column {label!r}", None)
    transformer = TableTransformer.fit(frame.drop(columns=[label]), str(path))
    infer = require("pandas", "tables").api.types.infer_dtype
    as_text = [name for name in frame.columns if infer(frame[name], skipna=True) == "string"]
    parts: dict[str, Pair] = {}
    for part, file in further.items():
        other = read_table(file, label, as_text)
        x = torch.from_numpy(transformer.transform(other, str(file)))
        parts[part] = x, labels(other[label], f"{file}, column {label!r}", classes)[0]
    return Labelled(
        name=path.stem,
        kind="table",
        x=torch.from_numpy(transformer.transform(frame, str(path))),
        y=y,
        classes=classes,
        keys=row_keys("\x1f".join(map(str, row)).encode("utf-8", "surrogateescape") for row in frame.to_numpy(object)),
        trusted=parts.get("trusted"),
        test=parts.get("test"),
        fields={name: frame[name].to_numpy() for name in frame.columns if name != label},
        notes=transformer.notes,
        features=transformer.features,
        transformer=transformer,
    )


@dataclass(frozen=True)
class TableTransformer:
    """The columns of a table as numbers, by rules fitted on its main file; it can be pickled."""

    # For each column that is used: `number`, `date` or `text`.
    kinds: dict[str, str]
    # A fitted sklearn.compose.ColumnTransformer.
    transformer: Any
    # The names of the columns of the result.
    features: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def fit(cls, frame: Any, where: str) -> TableTransformer:
        """Fit the rules on a table without its labels. `where` names it in errors."""
        kinds, values, left_out, notes = {}, {}, [], []
        for name, series in frame.items():
            kind = kind_of(series)
            found = read_column(series, kind) if kind in ("number", "date", "text") else np.empty(0)
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
        return cls(kinds, *_fitted(kinds, values), tuple(notes))

    def transform(self, X: Any, /, where: str = "the table") -> np.ndarray:
        """Return a table with the same columns as float32 (n, columns)."""
        values = {}
        for name, kind in self.kinds.items():
            if name not in X.columns:
                raise DataError(f"{where} has no column {name!r}, which the main file has.")
            values[name] = found = read_column(X[name], kind)
            present = X[name].dropna()
            if kind != "text" and len(present) and np.isnan(found).all():
                raise DataError(
                    f"{where}: column {name!r} must hold {kind}s, as in the main file; got {str(present.iloc[0])!r}."
                )
        return np.asarray(self.transformer.transform(_numbered(values)), dtype=np.float32)


def _fitted(kinds: dict[str, str], values: dict[str, np.ndarray]) -> tuple[Any, tuple[str, ...]]:
    """Return a sklearn.compose.ColumnTransformer fitted on columns of these kinds, and the names of its results."""
    impute, pipeline = require("sklearn.impute", "apps"), require("sklearn.pipeline", "apps")
    names = list(kinds)
    numbers = [i for i, name in enumerate(names) if kinds[name] != "text"]
    texts = [i for i, name in enumerate(names) if kinds[name] == "text"]
    scaled = pipeline.make_pipeline(impute.SimpleImputer(strategy="median"), standard_scaler())
    one_hot = require("sklearn.preprocessing", "apps").OneHotEncoder(
        max_categories=21,
        handle_unknown="infrequent_if_exist",
        sparse_output=False,
        feature_name_combiner=_category_name,
    )
    # The marks of missing values are a separate group, so that they stay 0 and 1.
    marks = impute.MissingIndicator(error_on_new=False)
    groups = [("numbers", scaled, numbers), ("missing", marks, numbers), ("texts", one_hot, texts)]
    found = require("sklearn.compose", "apps").ColumnTransformer([group for group in groups if group[2]])
    steps = found.fit(_numbered(values)).named_transformers_
    missing = [f"{names[numbers[i]]} is missing" for i in steps["missing"].features_] if numbers else []
    categories = steps["texts"].get_feature_names_out([names[i] for i in texts]).tolist() if texts else []
    return found, (*(names[i] for i in numbers), *missing, *categories)


def _numbered(values: dict[str, np.ndarray]) -> Any:
    """Return a table whose columns have numbers in place of names: scikit-learn changes names with a NUL byte."""
    return require("pandas", "tables").DataFrame(dict(enumerate(values.values())))


def _category_name(column: str, value: object) -> str:
    if name_of(value) is None:
        return f"{column} is missing"
    return f"{column} is another" if value == "infrequent_sklearn" else f"{column} = {value}"


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
    if kind == "text":
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
        return "is text whose values nearly all differ" if distinct >= 10 and distinct > 0.7 * len(present) else ""
    counts_rows = kind == "number" and np.array_equal(values, values[0] + np.arange(len(values)))
    return "counts the rows" if counts_rows else ""


def read_table(path: Path, label: str | None, as_text: Sequence[str] = ()) -> Any:
    """Return the file as a pandas.DataFrame that has the column `label`.

    The columns `as_text` of a .csv file are read as text, without a guess of their type.
    """
    pandas = require("pandas", "tables")
    if path.suffix.lower() == ".parquet":
        frame = _read_parquet(path)
    else:
        delimiter = delimiter_of(path, label)
        try:
            # pandas warns of rows that are longer than the header.
            with warnings.catch_warnings(action="error", category=pandas.errors.ParserWarning):
                frame = pandas.read_csv(
                    path,
                    sep=delimiter,
                    encoding="utf-8-sig",
                    index_col=False,
                    low_memory=False,
                    dtype=dict.fromkeys(as_text, "str"),
                )
        except (ValueError, OSError, OverflowError, pandas.errors.ParserWarning) as error:
            why = reason(error).removeprefix("Error tokenizing data. C error: ")
            raise DataError(f"{path} cannot be read as a .csv file ({why}).") from None
    frame.columns = [str(name) for name in frame.columns]
    _check_label(label, list(frame.columns), path)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{path} has more than one column named {twice!r}; their names must differ.")
    if len(frame) == 0:
        raise DataError(f"{path} has no rows.")
    return frame


def delimiter_of(path: Path, label: str | None) -> str:
    """Return the delimiter of a .csv file: the first of , ; tab | that gives a column `label`.

    If none does, the delimiter that gives the most columns.
    """
    found: dict[str, list[str]] = {}
    for delimiter in (",", ";", "\t", "|"):
        with reading(path), open(path, encoding="utf-8-sig", newline="") as file:
            found[delimiter] = next((row for row in csv.reader(file, delimiter=delimiter) if row), [])
    best = max(found, key=lambda each: (label in found[each], len(found[each])))
    if not found[best]:
        raise DataError(f"{path} is empty.")
    _check_label(label, found[best], path)
    return best


def _read_parquet(path: Path) -> Any:
    """Return the whole file, unpacked in parts: a few bytes can stand for very many equal values."""
    arrow, parquet = require("pyarrow", "tables"), require("pyarrow.parquet", "tables")
    with reading(path), parquet.ParquetFile(path) as file:
        rows, columns = file.metadata.num_rows, file.metadata.num_columns
        claim = f"{rows:,} rows of {columns:,} columns"
        refuse_larger(path, COPIES * 8 * rows * columns, claim)
        batches, size = [], 0
        for batch in file.iter_batches(batch_size=10_000):
            size += batch.nbytes
            refuse_larger(path, COPIES * size, claim)
            batches.append(batch)
        table = arrow.Table.from_batches(batches, schema=file.schema_arrow)
        table.validate(full=True)  # its text need not be UTF-8
        return table.to_pandas().reset_index(drop=True)


def _check_label(label: str | None, names: list[str], path: Path) -> None:
    shown = ", ".join(names if len(names) <= 12 else [*names[:8], "...", *names[-3:]])
    if label is None:
        raise OptionError(f"label must name the column of {path} that holds the labels; its columns are {shown}.")
    if label not in names:
        hint = did_you_mean(label, names)
        raise OptionError(f"label must be a column of {path}; got {label!r}.{hint} Its columns are {shown}.")
    if names.count(label) > 1:
        raise DataError(f"{path} has more than one column named {label!r}; their names must differ.")
