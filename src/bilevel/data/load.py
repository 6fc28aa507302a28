"""From the name of a set, a file or a folder to `Labelled`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bilevel._util.checks import did_you_mean
from bilevel.data.arrays import load_npz
from bilevel.data.image_folders import load_folder
from bilevel.data.labelled import Labelled
from bilevel.data.labels import ClassLabels
from bilevel.data.named_sets import NAMES, load_named
from bilevel.data.tables import load_table
from bilevel.errors import DataError, OptionError

Form = Literal["named", "npz", "table", "folder"]
FORMS: dict[str, Form] = {".npz": "npz", ".csv": "table", ".parquet": "table"}


def load(
    source: str | Path,
    *,
    label: str | None = None,
    trusted: str | Path | None = None,
    test: str | Path | None = None,
) -> Labelled:
    """Read labelled examples.

    `source` is a named set (`digits`, `mnist`, `fashion-mnist`, `cifar10`, `svhn`), an .npz file, a .csv or .parquet
    table with `label` the column of the labels, or a folder with a folder of images for each class. `trusted` and
    `test` are more files of the same form; the classes, and the scale of every column, come from `source` only. A
    name wins over a file of that name: write ./mnist for a folder called mnist.

    >>> load("digits").x.shape
    torch.Size([1397, 1, 8, 8])
    """
    return read(source, label, {"trusted": trusted, "test": test})


def read(
    source: str | Path, label: str | None, parts: dict[str, str | Path | None], labels: ClassLabels | None = None
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
    labels = labels or ClassLabels()
    return (
        load_npz(Path(source), further, labels) if form == "npz" else load_table(Path(source), label, further, labels)
    )


def form_of(source: str | Path) -> Form:
    """Return the form of the source; raise DataError if it is not there, or in no form that is read."""
    if isinstance(source, str) and source in NAMES:
        return "named"
    path = Path(source)
    if path.is_dir():
        return "folder"
    form = FORMS.get(path.suffix.lower())
    if path.exists() and form is None:
        raise DataError(f"{path} must be a .npz, .csv or .parquet file, or a folder of images in class folders.")
    if form is not None and path.exists():
        return form
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"There is no file or folder {path}.")
    hint = did_you_mean(str(source).lower(), NAMES)
    raise DataError(
        f"{str(source)!r} is neither a file or folder nor a named set.{hint} The named sets are {', '.join(NAMES)}."
    )
