"""Tables: .csv and .parquet files with a column of labels; `column_rules` says how columns become numbers."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bilevel._util.checks import did_you_mean, require
from bilevel.data.arrays import COPIES, refuse_larger
from bilevel.data.column_rules import ColumnRules, named_columns
from bilevel.data.labelled import Labelled, LabelReader, Pair, reading, row_keys
from bilevel.errors import DataError, OptionError, reason


def load_table(path: Path, label: str | None, further: dict[str, Path], labels: LabelReader) -> Labelled:
    """Return the table as `Labelled`.

    `label` is the column of the labels, which `labels` reads. `further` has the tables of the parts `trusted` and
    `test`.
    """
    frame = read_table(path, label)
    return from_frames(frame, str(path), path.stem, str(label), further, labels)


def from_frames(
    frame: Any, where: str, name: str, label: str, further: Mapping[str, Any], labels: LabelReader
) -> Labelled:
    """Return a pandas.DataFrame as `Labelled`; `where` names it in errors.

    `further` has the parts `trusted` and `test`, as paths of tables or as DataFrames.
    """
    y, classes = labels(frame[label], f"{where}, column {label!r}", None)
    transformer = ColumnRules.fit(frame.drop(columns=[label]), where)
    infer = require("pandas", "tables").api.types.infer_dtype
    as_text = [name for name in frame.columns if infer(frame[name], skipna=True) == "string"]
    parts: dict[str, Pair] = {}
    for part, file in further.items():
        other = read_table(file, label, as_text) if isinstance(file, Path) else file
        named = str(file) if isinstance(file, Path) else part
        x = torch.from_numpy(transformer.transform(other, named))
        parts[part] = x, labels(other[label], f"{named}, column {label!r}", classes)[0]
    return Labelled(
        name=name,
        kind="table",
        x=torch.from_numpy(transformer.transform(frame, where)),
        y=y,
        classes=classes,
        keys=row_keys("\x1f".join(map(str, row)).encode("utf-8", "surrogateescape") for row in frame.to_numpy(object)),
        trusted=parts.get("trusted"),
        test=parts.get("test"),
        fields={column: frame[column].to_numpy() for column in frame.columns if column != label},
        notes=transformer.notes,
        features=transformer.features,
        transformer=transformer,
    )


def read_table(path: Path, label: str | None, as_text: Sequence[str] = ()) -> Any:
    """Return the file as a pandas.DataFrame that has the column `label`; for `as_text` see `read_frame`."""
    if path.suffix.lower() != ".parquet":
        _check_label(label, delimiter_of(path, [label])[1], path)
    frame = read_frame(path, [label], as_text)
    _check_label(label, list(frame.columns), path)
    return frame


def read_frame(path: Path, expected: Sequence[str | None], as_text: Sequence[str] = ()) -> Any:
    """Return the file as a pandas.DataFrame. The `expected` columns decide the delimiter of a .csv file.

    The columns `as_text` of a .csv file are read as text, without a guess of their type.
    """
    pandas = require("pandas", "tables")
    if path.suffix.lower() == ".parquet":
        frame = _read_parquet(path)
    else:
        delimiter = delimiter_of(path, expected)[0]
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
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{path} has more than one column named {twice!r}; their names must differ.")
    if len(frame) == 0:
        raise DataError(f"{path} has no rows.")
    return frame


def as_frame(table: Any, label: str | None, where: str) -> Any:
    """Return a table in memory as a pandas.DataFrame with new row numbers and text as column names.

    Args:
        table: A pandas.DataFrame, a dictionary of columns, or a `datasets.Dataset` of Hugging Face, whose class labels
            get their names.
        label: The column of the labels, which it must have.
        where: The name of the table in errors.
    """
    frame, features = table, getattr(table, "features", None)
    if hasattr(table, "to_pandas"):
        frame = table.to_pandas()
        names = getattr((features or {}).get(label), "names", None)
        if names is not None:
            frame[label] = [names[int(i)] if i >= 0 else None for i in frame[label]]
    elif isinstance(table, Mapping):
        frame = require("pandas", "tables").DataFrame(dict(table))
    if not (hasattr(frame, "columns") and hasattr(frame, "to_numpy")):
        raise DataError(
            f"{where} must be a pandas.DataFrame, a dictionary of columns or a datasets.Dataset; got "
            f"{type(table).__name__}."
        )
    frame = named_columns(frame).reset_index(drop=True)
    _check_label(label, list(frame.columns), Path(where))
    if not frame.columns.is_unique or len(frame) == 0:
        raise DataError(f"{where} must have rows, and columns whose names differ.")
    return frame


def delimiter_of(path: Path, expected: Sequence[str | None]) -> tuple[str, list[str]]:
    """Return the delimiter of a .csv file and its header: the one of , ; tab | that gives the most expected columns.

    Of several, the one that gives the most columns.
    """
    found: dict[str, list[str]] = {}
    for delimiter in (",", ";", "\t", "|"):
        with reading(path), open(path, encoding="utf-8-sig", newline="") as file:
            found[delimiter] = next((row for row in csv.reader(file, delimiter=delimiter) if row), [])
    best = max(found, key=lambda each: (len({*expected} & {*found[each]}), len(found[each])))
    if not found[best]:
        raise DataError(f"{path} is empty.")
    return best, found[best]


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
