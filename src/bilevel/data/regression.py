"""Examples whose labels are numbers to predict: .npz, .csv and .parquet files, read as those of classes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel._util.text import agreeing
from bilevel.data.arrays import _columns, checked_part, feature_names, read_npz
from bilevel.data.columns import Columns, UnusableError, typed_of
from bilevel.data.labelled import Labelled, Pair
from bilevel.data.labels import LEAST_ROWS
from bilevel.data.load import form_of
from bilevel.data.tables import read_table
from bilevel.errors import DataError, OptionError


def load_numbers(source: str | Path, *, label: str | None = None, test: str | Path | None = None) -> Labelled:
    """Read examples with numbers as labels: `y` of the result is float64, and `classes` is empty.

    Sources are those of `load`, but for named sets and folders of images, whose labels are classes.
    """
    form = form_of(source)
    if form not in ("npz", "table"):
        raise OptionError(f"{source} has classes as labels; numbers are read from .npz, .csv and .parquet files.")
    if test is not None and form_of(test) != form:
        raise OptionError(f"test must be of the same form as {source}; got {str(test)!r}.")
    if form == "npz":
        if label is not None:
            raise OptionError(f"label names a column of a table; {source} is none, so leave it out.")
        return _npz(Path(source), None if test is None else Path(test))
    return _table(Path(source), label, None if test is None else Path(test))


def _npz(path: Path, test: Path | None) -> Labelled:
    arrays = read_npz(path)
    x, y = checked_part(arrays, "", path)
    if x.ndim > 2:
        raise DataError(f"{path}, x must have rows of numbers, shape (n, columns); its shape is {x.shape}.")
    transform, notes = _columns(x, f"{path}, x")
    part: Pair | None = None
    if test is not None or "x_test" in arrays or "y_test" in arrays:
        if test is not None and "x_test" in arrays:
            raise OptionError(f"test is given twice: {path} has x_test and y_test, and {test} was named.")
        file, suffix = (path, "_test") if test is None else (test, "")
        x_test, y_test = checked_part(arrays if test is None else read_npz(file), suffix, file)
        if x_test.shape[1:] != x.shape[1:]:
            raise DataError(f"{file}, x{suffix} must have rows of shape {x.shape[1:]}; got {x_test.shape[1:]}.")
        part = transform(x_test), _numbers(y_test, f"{file}, y{suffix}")
    return Labelled(
        name=path.stem,
        kind="arrays",
        x=transform(x),
        y=_main(_numbers(y, f"{path}, y"), f"{path}, y"),
        classes=(),
        keys=[str(i) for i in range(len(y))],
        test=part,
        notes=notes,
        features=feature_names(x),
    )


def _table(path: Path, label: str | None, test: Path | None) -> Labelled:
    frame = read_table(path, label)
    columns = Columns.of(frame.drop(columns=[label]), str(path))
    part: Pair | None = None
    if test is not None:
        other = read_table(test, label)
        part = torch.from_numpy(columns(other, str(test))), _column(other[label], f"{test}, column {label!r}")
    where = f"{path}, column {label!r}"
    return Labelled(
        name=path.stem,
        kind="table",
        x=torch.from_numpy(columns(frame, str(path))),
        y=_main(_column(frame[label], where), where),
        classes=(),
        keys=[str(i) for i in range(len(frame))],
        test=part,
        fields={name: frame[name].to_numpy() for name in frame.columns if name != label},
        notes=columns.notes,
        features=columns.names,
    )


def _column(series: Any, where: str) -> Tensor:
    try:
        typed = typed_of(series)
    except UnusableError as error:
        raise DataError(f"{where} {error}.") from None
    if typed.kind != "number":
        raise DataError(f"{where} must hold numbers to predict; it holds {typed.kind}s. Use a model for classes.")
    return _numbers(np.asarray(typed.values), where)


def _numbers(y: np.ndarray, where: str) -> Tensor:
    if y.dtype.kind not in "buif":
        raise DataError(f"{where} must hold numbers to predict; its type is {y.dtype}.")
    y = y.astype(np.float64)
    if bad := int((~np.isfinite(y)).sum()):
        first = int((~np.isfinite(y)).argmax())
        raise DataError(
            f"{where}: {bad} of {len(y)} labels {agreeing(bad, 'is', 'are')} missing or not finite, "
            f"{agreeing(bad, 'in', 'the first in')} row {first} (from 0). Fill or remove {agreeing(bad, 'it', 'them')}."
        )
    return torch.from_numpy(y)


def _main(y: Tensor, where: str) -> Tensor:
    if len(y) < LEAST_ROWS:
        raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(y)}.")
    if not bool(y.min() < y.max()):
        raise DataError(f"{where}: the labels must vary; every one is {float(y[0]):g}.")
    return y
