"""Read a named set, a file or a folder as `Labelled`, with classes or numbers as labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import agreeing, did_you_mean
from bilevel.data.arrays import load_npz
from bilevel.data.column_rules import kind_of, read_column
from bilevel.data.image_folders import load_folder
from bilevel.data.labelled import LEAST_ROWS, Classes, Labelled, LabelReader, class_labels
from bilevel.data.named_sets import NAMES, load_named
from bilevel.data.tables import as_frame, from_frames, load_table
from bilevel.errors import DataError, OptionError

Form = Literal["named", "npz", "table", "folder"]
FORMS: dict[str, Form] = {".npz": "npz", ".csv": "table", ".parquet": "table"}


def load(
    source: Any,
    *,
    label: str | None = None,
    trusted: Any = None,
    test: Any = None,
) -> Labelled:
    """Read labelled examples.

    Args:
        source: One of

            - a named set: `digits`, `mnist`, `fashion-mnist`, `cifar10` or `svhn`. For a folder called mnist, write
              ./mnist;
            - an .npz file with the arrays x and y, and optionally x_trusted, y_trusted, x_test and y_test;
            - a .csv or .parquet table;
            - a folder with a folder of images for each class;
            - a table in memory: a pandas.DataFrame, a dictionary of columns, or a `datasets.Dataset` of Hugging Face.
        label: The column of the labels in a table. None (default): the source is not a table.
        trusted: A further source of the same form, whose labels are right. None (default): only what `source` has.
        test: A further source of the same form to measure on. None (default): only what `source` has.

    The classes, and the scale of every column, come from `source` only.

    >>> load("digits").x.shape
    torch.Size([1397, 1, 8, 8])
    """
    parts = {"trusted": trusted, "test": test}
    if isinstance(source, (str, Path)):
        return read(source, label, parts)
    frame = as_frame(source, label, "source")
    further = {part: as_frame(table, label, part) for part, table in parts.items() if table is not None}
    return from_frames(frame, "source", "table", str(label), further, class_labels)


def read(
    source: str | Path, label: str | None, parts: dict[str, str | Path | None], labels: LabelReader = class_labels
) -> Labelled:
    """Read a source and the files of its other parts; `labels` reads the labels, by default as classes."""
    form = form_of(source)
    if label is not None and form != "table":
        raise OptionError(f"label names a column of a table; {source} is not a table, so leave it out.")
    further = {part: Path(file) for part, file in parts.items() if file is not None}
    for part, file in further.items():
        if form == "named":
            raise OptionError(f"{part} must be left out for a named set, whose rows can be split; got {str(file)!r}.")
        if form_of(parts[part] or file) != form:  # as given: a name is not a path
            raise OptionError(f"{part} must be of the same form as {source}; got {str(file)!r}.")
    if form == "named":
        return load_named(str(source))
    if form == "folder":
        return load_folder(Path(source), further)
    return (
        load_npz(Path(source), further, labels) if form == "npz" else load_table(Path(source), label, further, labels)
    )


def load_numbers(source: str | Path, *, label: str | None = None, test: str | Path | None = None) -> Labelled:
    """Read examples with numbers as labels: `y` of the result is float64, and `classes` is empty.

    Args:
        source: An .npz file with the arrays x and y, or a .csv or .parquet table. Inputs are prepared as in `load`.
        label: The column of the labels in a table. None (default): the source is an .npz file.
        test: A further file of the same form to measure on. None (default): only what `source` has.

    >>> np.savez("house-prices.npz", x=np.random.rand(20, 3), y=np.linspace(1.0, 2.0, 20))
    >>> load_numbers("house-prices.npz").y.dtype
    torch.float64
    """
    if form_of(source) not in ("npz", "table"):
        raise OptionError(f"{source} has classes as labels; numbers are read from .npz, .csv and .parquet files.")
    data = read(source, label, {"test": test}, number_labels)
    if data.kind == "images":
        shape = tuple(data.x.shape[1:])
        raise DataError(f"{source}, x must have rows of numbers, shape (n, columns); it holds images of {shape}.")
    return data


def form_of(source: str | Path) -> Form:
    """Return the form of the source; raise DataError if it does not exist or has another form."""
    if isinstance(source, str) and source in NAMES:
        return "named"
    path = Path(source)
    if path.is_dir():
        return "folder"
    if path.exists():
        if (form := FORMS.get(path.suffix.lower())) is None:
            raise DataError(f"{path} must be a .npz, .csv or .parquet file, or a folder of images in class folders.")
        return form
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"The file or folder {path} does not exist.")
    raise DataError(
        f"{str(source)!r} is neither a file or folder nor a named set.{did_you_mean(str(source).lower(), NAMES)} "
        f"The named sets are {', '.join(NAMES)}."
    )


def number_labels(values: Any, where: str, classes: Classes | None) -> tuple[Tensor, Classes]:
    """Return the labels of an array or of a pandas.Series as float64, and no classes.

    `where` names the labels in errors. The labels of the main part, for which `classes` is None, must vary.
    """
    if not isinstance(values, np.ndarray):
        if (kind := kind_of(values)) != "number":
            held = f"holds {kind}s" if kind in ("date", "text") else kind
            raise DataError(f"{where} must hold numbers to predict; it {held}. Use a model for classes.")
        values = read_column(values, kind)
    if values.dtype.kind not in "buif":
        raise DataError(f"{where} must hold numbers to predict; its type is {values.dtype}.")
    y = values.astype(np.float64)
    if bad := int((~np.isfinite(y)).sum()):
        first = int((~np.isfinite(y)).argmax())
        raise DataError(
            f"{where}: {bad} of {len(y)} labels {agreeing(bad, 'is', 'are')} missing or not finite, "
            f"{agreeing(bad, 'in', 'the first in')} row {first} (from 0). Fill or remove "
            f"{agreeing(bad, 'it', 'them')}."
        )
    if classes is None and len(y) < LEAST_ROWS:
        raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(y)}.")
    if classes is None and not y.min() < y.max():
        raise DataError(f"{where}: the labels must vary; every one is {y[0]:g}.")
    return torch.from_numpy(y), ()
