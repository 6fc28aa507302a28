"""Tables: .csv and .parquet files with a column of labels.

Every other column becomes numbers by rules that are fitted on the main file alone:

- numbers, dates and durations: scaled (see `scale`); a missing value is the median, and a column of 0 and 1 says so;
- text that is numbers but for one value in twenty: numbers, with the others missing, and a note;
- text, categories, true and false: a column of 0 and 1 for each of the 20 most frequent values, one for all others
  where there are more, one for missing where there are such;
- left out, with a note: constant columns, columns without values, a count of the rows from any number on, text of which
  nearly all values differ, and nested values.
"""

from __future__ import annotations

import csv
import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bilevel._util.checks import did_you_mean
from bilevel.data.columns import Columns
from bilevel.data.labelled import Labelled, Pair, row_keys
from bilevel.data.labels import classes_of, indices, names_of
from bilevel.data.size import COPIES, refuse_larger
from bilevel.errors import DataError, OptionError, reason

DELIMITERS = (",", ";", "\t", "|")
AT_ONCE = 10_000
"""Rows of a .parquet file that are unpacked at a time."""
Frame = Any
"""A pandas.DataFrame; pandas is an optional dependency and has no types of its own."""


def load_table(path: Path, label: str | None, further: dict[str, Path]) -> Labelled:
    """The file as `Labelled`; `further` names the tables of the trusted and the test part."""
    frame = read_table(path, label)
    names = labels_of(frame, label, path)
    classes = classes_of(names, f"{path}, column {label!r}")
    columns = Columns.of(frame.drop(columns=[label]), str(path))
    infer = import_or_say("pandas").api.types.infer_dtype
    as_text = [name for name in frame.columns if infer(frame[name], skipna=True) == "string"]
    parts: dict[str, Pair] = {}
    for part, file in further.items():
        other = read_table(file, label, as_text)
        y = indices(labels_of(other, label, file), classes, f"{file}, column {label!r}")
        parts[part] = torch.from_numpy(columns(other, str(file))), y
    return Labelled(
        name=path.stem,
        kind="table",
        x=torch.from_numpy(columns(frame, str(path))),
        y=indices(names, classes, str(path)),
        classes=classes,
        keys=row_keys("\x1f".join(map(str, row)).encode("utf-8", "surrogateescape") for row in frame.to_numpy(object)),
        trusted=parts.get("trusted"),
        test=parts.get("test"),
        fields={name: frame[name].to_numpy() for name in frame.columns if name != label},
        notes=columns.notes,
        features=columns.names,
    )


def labels_of(frame: Frame, label: str | None, path: Path) -> list[str]:
    """The class name of each row."""
    return names_of(frame[label].tolist(), f"{path}, column {label!r}")


def read_table(path: Path, label: str | None, as_text: list[str] | None = None) -> Frame:
    """The file as a pandas.DataFrame that has the label's column. `as_text`: columns that a .csv must not guess."""
    pandas = import_or_say("pandas")
    if path.suffix.lower() == ".parquet":
        frame = _read_parquet(path)
    else:
        delimiter = header(path, label)[1]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows longer than the header
                frame = pandas.read_csv(
                    path,
                    sep=delimiter,
                    encoding="utf-8-sig",
                    index_col=False,
                    low_memory=False,
                    dtype=dict.fromkeys(as_text or (), "str"),
                )
        except (ValueError, OSError, OverflowError, pandas.errors.ParserWarning) as error:
            raise DataError(f"{path} cannot be read as a .csv file ({_why(error)}).") from None
    frame.columns = [str(name) for name in frame.columns]
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise DataError(f"{path} has more than one column named {twice[0]!r}; their names must differ.")
    _check_label(label, list(frame.columns), path)
    if len(frame) == 0:
        raise DataError(f"{path} has no rows.")
    return frame


def _why(error: Exception) -> str:
    """What pandas says of a file, in our words where a line has too many fields."""
    found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
    return f"line {found[2]} has {found[3]} fields, and those before it {found[1]}" if found else reason(error)


def header(path: Path, label: str | None) -> tuple[list[str], str]:
    """The names of a .csv file's columns, and its delimiter: the first of , ; tab | by which the label is a column."""
    found: list[tuple[list[str], str]] = []
    for delimiter in DELIMITERS:
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                names = next((row for row in csv.reader(file, delimiter=delimiter) if row), [])
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text. Save it as UTF-8.") from None
        except (csv.Error, OSError) as error:
            raise DataError(f"{path} cannot be read as a .csv file ({reason(error)}).") from None
        found.append((names, delimiter))
    names, delimiter = next((each for each in found if label in each[0]), max(found, key=lambda each: len(each[0])))
    if not names:
        raise DataError(f"{path} is empty.")
    _check_label(label, names, path)
    return names, delimiter


def _read_parquet(path: Path) -> Frame:
    parquet = import_or_say("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            table = _batches(file, path)
        table.validate(full=True)  # text may be no UTF-8
        return table.to_pandas().reset_index(drop=True)
    except DataError:
        raise
    except Exception as error:  # Arrow's errors have several bases
        raise DataError(f"{path} cannot be read as a .parquet file ({reason(error)}).") from None


def _batches(file: Any, path: Path) -> Any:
    """The whole file as a pyarrow.Table, read in parts: a few bytes may stand for very many equal values."""
    rows, columns = file.metadata.num_rows, file.metadata.num_columns
    what = f"{rows:,} rows of {columns:,} columns"
    refuse_larger(path, COPIES * 8 * rows * columns, what)
    batches, size = [], 0
    for batch in file.iter_batches(batch_size=AT_ONCE):
        size += batch.nbytes
        refuse_larger(path, COPIES * size, what)
        batches.append(batch)
    return import_or_say("pyarrow").Table.from_batches(batches, schema=file.schema_arrow)


def _check_label(label: str | None, names: list[str], path: Path) -> None:
    shown = ", ".join(names if len(names) <= 12 else [*names[:8], "...", *names[-3:]])
    if label is None:
        raise OptionError(f"label must name the column of {path} that holds the labels; its columns are {shown}.")
    if label not in names:
        hint = did_you_mean(label, names)
        raise OptionError(f"label must be a column of {path}; got {label!r}.{hint} Its columns are {shown}.")
    if names.count(label) > 1:
        raise DataError(f"{path} has more than one column named {label!r}; their names must differ.")


def import_or_say(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"Tables need {name.split('.')[0]}: pip install bilevel[tables].") from None
