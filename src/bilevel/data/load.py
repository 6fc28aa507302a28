"""From what a user names to `Labelled`: a named set, a file, or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bilevel._util.checks import did_you_mean
from bilevel.data.arrays import load_npz
from bilevel.data.image_folders import load_folder
from bilevel.data.labelled import Labelled
from bilevel.data.named import NAMES, load_named
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
    `test` are further files of the same form; classes, and the scale of every column, are those of `source` alone. A
    name wins over a file of that name: write ./mnist for a folder called mnist.
    """
    form = form_of(source)
    if label is not None and form != "table":
        raise OptionError(f"label names a column of a table; {source} is none, so leave it out.")
    given = {part: file for part, file in (("trusted", trusted), ("test", test)) if file is not None}
    if form == "named":
        if given:
            part, file = next(iter(given.items()))
            raise OptionError(f"{part} must be left out for a named set, whose rows can be split; got {str(file)!r}.")
        return load_named(str(source))
    for part, file in given.items():
        if form_of(file) != form:
            raise OptionError(f"{part} must be of the same form as {source}; got {str(file)!r}.")
    further = {part: Path(file) for part, file in given.items()}
    if form == "npz":
        return load_npz(Path(source), further)
    if form == "table":
        return load_table(Path(source), label, further)
    return load_folder(Path(source), further)


def form_of(source: str | Path) -> Form:
    """What the source is; refuses what is not there, or of no form that is read."""
    if isinstance(source, str) and source in NAMES:
        return "named"
    path = Path(source)
    if path.is_dir():
        return "folder"
    form = FORMS.get(path.suffix.lower())
    if path.exists():
        if form is None:
            raise DataError(f"{path} must be a .npz, .csv or .parquet file, or a folder of images in class folders.")
        return form
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"There is no file or folder {path}.")
    hint = did_you_mean(str(source).lower(), NAMES)
    raise DataError(
        f"{str(source)!r} is neither a file or folder nor a named set.{hint} The named sets are {', '.join(NAMES)}."
    )
