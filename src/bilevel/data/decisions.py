"""Decisions made on the review page, applied to the data they were made for.

A CSV file of decisions has the columns `index`, `key`, `decision` and `label`: the row's place in x as `load` returns
it, its key, one of keep, drop and relabel, and its new class. Rows without a decision stay as they are. issues.csv of a
run, with `is_label_issue` and `predicted_label` in place of the last two, relabels the suspects as suggested. The new
data has the form of the source; only the dropped rows and the new labels differ. In a .csv file every cell keeps its
text, and only quotation marks that are not needed can go.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from bilevel._util.checks import ShortRepr, first_of, require
from bilevel.data.arrays import ARRAYS, read_npz
from bilevel.data.image_folders import files_of, listings
from bilevel.data.labelled import Labelled, reading
from bilevel.data.load import form_of, load
from bilevel.data.tables import delimiter_of
from bilevel.errors import DataError, OptionError

COLUMNS = ("index", "key", "decision", "label")
# The columns of a run's issues.csv that can take the place of the last two.
ISSUES = ("is_label_issue", "predicted_label")
DECISIONS = ("keep", "drop", "relabel")


@dataclass(frozen=True, repr=False)
class Applied(ShortRepr):
    """The result of `apply_decisions`: the new file or folder, and how many rows changed.

    Fields:
        out: The path of the new file or folder.
        rows: The number of rows of the source: dropped, relabelled and unchanged ones.
        dropped: The number of rows that the result leaves out.
        relabelled: The number of rows with another label.
        unchanged: The number of rows that stay as they are.
        notes: Sentences for the user about what could not be kept. Default: none.

    >>> from pathlib import Path
    >>> found = Applied(Path("cleaned.csv"), rows=100, dropped=2, relabelled=5, unchanged=93)
    >>> found.rows - found.dropped  # the rows of cleaned.csv
    98
    """

    out: Path
    rows: int
    dropped: int
    relabelled: int
    unchanged: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """Which rows stay, the class of each row before and after, and which rows a person decided on."""

    kept: np.ndarray
    old: np.ndarray
    new: np.ndarray
    decided: np.ndarray

    @property
    def like(self) -> np.ndarray:
        """For each row, a row of the source that has its new label: itself, or the first row of its new class."""
        classes, first = np.unique(self.old, return_index=True)
        return np.where(self.old == self.new, np.arange(len(self.old)), first[np.searchsorted(classes, self.new)])


def apply_decisions(
    source: str | Path, decisions_csv: str | Path, out: str | Path, *, label: str | None = None
) -> Applied:
    r"""Write the source without the dropped rows and with the new labels, and return the numbers of changed rows.

    Args:
        source: A named set, a file or a folder, as for `load`. It does not change.
        decisions_csv: The file of decisions that the review page saves, with the columns index, key, decision (keep,
            drop or relabel) and label. Rows without a line stay as they are. Or issues.csv of a run: its suspects get
            the labels that it suggests.
        out: The new file or folder, written whole or not at all. It has the form of the source; a named set becomes an
            .npz file.
        label: The column of the labels in a table. None (default): the source is not a table.

    >>> from pathlib import Path
    >>> data = load("digits")
    >>> lines = ["index,key,decision,label", f"0,{data.keys[0]},drop,", f"1,{data.keys[1]},relabel,7"]
    >>> _ = Path("decisions.csv").write_text("\n".join(lines))
    >>> found = apply_decisions("digits", "decisions.csv", "cleaned.npz")
    >>> found.dropped, found.relabelled
    (1, 1)
    """
    form, target = form_of(source), Path(out)
    suffix = {"named": ".npz", "folder": ""}.get(form, Path(source).suffix.lower())
    if suffix and target.suffix.lower() != suffix:
        raise OptionError(f"out must end in {suffix}, the form of {source}; got {str(out)!r}.")
    if form == "folder" and target.resolve().is_relative_to(Path(source).resolve()):
        raise OptionError(f"out must not lie in {source}, which is not changed; got {str(out)!r}.")
    data = load(source, label=label)
    change = read_decisions(Path(decisions_csv), data)
    notes: tuple[str, ...] = ()
    with new_file_or_folder(target) as temporary:
        if form in ("npz", "named"):
            arrays = read_npz(Path(source), every=True) if form == "npz" else _arrays_of(data)
            notes = _rewrite_npz(arrays, temporary, change)
        elif form == "folder":
            rewrite_folder(Path(source), temporary, change, data)
        else:
            (_rewrite_parquet if suffix == ".parquet" else _rewrite_csv)(Path(source), temporary, change, str(label))
    kept = int(change.kept.sum())
    relabelled = int((change.kept & (change.new != change.old)).sum())
    return Applied(target, data.count, data.count - kept, relabelled, kept - relabelled, notes)


def trusted_by_decisions(data: Labelled, decisions_csv: str | Path) -> Labelled:
    """Return the data with the rows that a review decided on as `trusted`, with their new labels, without dropped ones.

    Args:
        data: The data without trusted rows.
        decisions_csv: The file of decisions that a review page saves.
    """
    if data.trusted is not None:
        raise OptionError(f"trusted is given twice: {data.name} has trusted rows, and {decisions_csv} was named.")
    change = read_decisions(Path(decisions_csv), data)
    checked = np.flatnonzero(change.decided & change.kept)
    if not len(checked):
        raise DataError(f"{decisions_csv} keeps or relabels no row; at least one of each class is needed to trust.")
    pair = data.x[torch.from_numpy(checked)], torch.from_numpy(change.new[checked].astype(np.int64))
    return replace(data.select(np.flatnonzero(~change.decided)), trusted=pair)


def is_decisions(path: str | Path) -> bool:
    """Return whether a file is a .csv file with the columns of decisions."""
    if Path(path).suffix.lower() != ".csv" or not Path(path).is_file():
        return False
    with reading(Path(path)), open(path, encoding="utf-8-sig", newline="") as file:
        return {*COLUMNS} <= {*next(csv.reader(file), [])}


def read_decisions(path: Path, data: Labelled) -> Change:
    """Read the decisions, and check line by line that they belong to the data."""
    if not path.exists():
        raise DataError(f"The file {path} does not exist.")
    with reading(path), open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        names = rows.fieldnames or ()
        columns = (*COLUMNS[:2], *ISSUES) if {*ISSUES} <= {*names} else COLUMNS
        if absent := [name for name in columns if name not in names]:
            raise DataError(f"{path} must have the columns {', '.join(columns)}; {absent[0]} is missing.")
        lines = [(rows.line_num, row) for row in rows]
    old = data.y.numpy()
    change = Change(np.ones(data.count, bool), old, old.copy(), np.zeros(data.count, bool))
    decided: dict[int, int] = {}
    for line, cells in lines:
        where = f"{path}, line {line}"
        if None in [cells[name] for name in columns]:
            count = sum(cell is not None for cell in cells.values())
            raise DataError(f"{where} has {count} cells, too few for the columns {', '.join(columns)}.")
        index, key = cells["index"], cells["key"]
        row = int(index) if index.isascii() and index.isdigit() and len(index) < 19 else -1
        if not 0 <= row < data.count:
            raise DataError(f"{where}: index must be a whole number from 0 to {data.count - 1}; got {index!r}.")
        if data.keys[row] != key:
            raise DataError(
                f"{where}: row {row} of {data.name} has the key {data.keys[row]!r}, but the line says {key!r}; the "
                "decisions were made for other data."
            )
        if row in decided:
            raise DataError(f"{where}: index {row} was decided in line {decided[row]} already.")
        decided[row], change.decided[row] = line, True
        if columns is COLUMNS:
            _decide(change, row, cells["decision"], cells["label"], data, where)
        elif cells["is_label_issue"] == "True":
            _decide(change, row, "relabel", cells["predicted_label"], data, where)
    if not change.kept.any():
        raise DataError(f"{path} drops all {data.count} rows of {data.name}; nothing would be left.")
    return change


def _decide(change: Change, row: int, decision: str, name: str, data: Labelled, where: str) -> None:
    if decision not in DECISIONS:
        raise DataError(f"{where}: decision must be one of {', '.join(DECISIONS)}; got {decision!r}.")
    if decision == "drop":
        change.kept[row] = False
        return
    if name not in data.classes and not (decision == "keep" and name == ""):
        raise DataError(f"{where}: label must be one of the classes {first_of(data.classes, 20)}; got {name!r}.")
    if decision == "relabel":
        change.new[row] = data.classes.index(name)
    elif name and data.classes[change.old[row]] != name:
        raise DataError(
            f"{where}: row {row} is kept with the label {name!r}, but has {data.classes[change.old[row]]!r} in "
            f"{data.name}; the decisions were made for other labels."
        )


@contextmanager
def new_file_or_folder(out: Path) -> Iterator[Path]:
    """Give a temporary name for a file or folder, which becomes `out` at the end, or is deleted after an exception.

    Nothing is overwritten: an existing `out` must be empty.
    """
    if out.exists() and (any(out.iterdir()) if out.is_dir() else out.stat().st_size):
        raise OptionError(f"out must be new; {out} exists and is not empty.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            temporary = Path(folder) / out.name
            yield temporary
            if out.is_dir():
                out.rmdir()
            temporary.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror or error}).") from None


def _rewrite_npz(arrays: dict[str, np.ndarray], out: Path, change: Change) -> tuple[str, ...]:
    """Write x and y without the dropped rows, and the other arrays; notes name those with as many rows as x."""
    rest = [name for name, array in arrays.items() if name not in ARRAYS and array.shape[:1] == change.kept.shape]
    changed = {"x": arrays["x"][change.kept], "y": arrays["y"][change.like][change.kept]}
    with open(out, "wb") as file:
        np.savez_compressed(file, **(arrays | changed))
    return () if change.kept.all() else tuple(f"{name} has a value for each row of x and was not cut." for name in rest)


def _arrays_of(data: Labelled) -> dict[str, np.ndarray]:
    """Return a named set as arrays: pixels as bytes, except for digits, and labels as the names of classes."""
    names = np.array(data.classes)
    arrays: dict[str, np.ndarray] = {}
    for suffix, (x, y) in (("", (data.x, data.y)), ("_test", data.part("test"))):
        pixels = x if data.name == "digits" else (x * 255).round().to(torch.uint8)  # digits are sixteenths
        arrays |= {f"x{suffix}": pixels.numpy(), f"y{suffix}": names[y.numpy()]}
    return arrays


def _rewrite_parquet(source: Path, out: Path, change: Change, label: str) -> None:
    """Write all columns with their types, and with the file's own compression."""
    parquet = require("pyarrow.parquet", "tables")
    with parquet.ParquetFile(source) as file:
        table = file.read().unify_dictionaries()
        compression = file.metadata.row_group(0).column(0).compression if file.metadata.num_row_groups else "SNAPPY"
    at = table.schema.get_field_index(label)
    table = table.set_column(at, table.schema.field(at), table.column(at).take(change.like)).filter(change.kept)
    parquet.write_table(table, out, compression="NONE" if compression == "UNCOMPRESSED" else compression)


def _rewrite_csv(source: Path, out: Path, change: Change, label: str) -> None:
    """Write every cell with its text; a new label is written as in the first row of its class."""
    delimiter, _ = delimiter_of(source, [label])
    text = source.read_bytes()
    encoding = "utf-8-sig" if text.startswith(b"\xef\xbb\xbf") else "utf-8"
    # The parser and the encoding of `read_table`, so that the rows are the same.
    table = require("pandas", "tables").read_csv(
        source, sep=delimiter, encoding="utf-8-sig", index_col=False, header=None, dtype=str, na_filter=False
    )
    at = table.iloc[0].tolist().index(label)
    table.iloc[1:, at] = table.iloc[1:, at].to_numpy()[change.like]
    # With a line end that has "\r", the writer quotes cells that have it.
    end = "\r\n" if b"\r" in text else "\n"
    table[[True, *change.kept]].to_csv(
        out, sep=delimiter, encoding=encoding, lineterminator=end, header=False, index=False
    )


def rewrite_folder(source: Path, out: Path, change: Change, data: Labelled) -> None:
    """Copy the images into the folders of their classes; if a name is taken, the old class is added to it."""
    rows = {key: i for i, key in enumerate(data.keys)}
    same: list[tuple[Path, Path]] = []
    moved: list[tuple[Path, Path]] = []
    for file in [file for listing in listings(source).values() for file in files_of(listing)]:
        place = file.relative_to(source)
        i = rows.get(place.as_posix())
        if i is None or (change.kept[i] and change.new[i] == change.old[i]):
            same.append((file, out / place))
        elif change.kept[i]:
            moved.append((file, out / place.parent.with_name(data.classes[change.new[i]]) / place.name))
    for file, target in [*same, *moved]:
        while target.exists():
            target = target.with_name(f"{target.stem}-from-{file.parent.name}{target.suffix}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
