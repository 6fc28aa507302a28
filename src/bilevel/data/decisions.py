"""Decisions made on the review page, applied to the data they were made for.

A CSV file of decisions has the columns `index`, `key`, `decision` and `label`: the row's place in x as `load` gives it,
its key, one of keep, drop and relabel, and the class after that. Rows that it does not name stay as they are. The new
data has the form of the source, and everything but dropped rows and new labels is as it was there.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bilevel._util.text import first_of
from bilevel.data.labelled import Labelled
from bilevel.data.load import form_of, load
from bilevel.data.rewriting import (
    Change,
    new_file_or_folder,
    rewrite_csv,
    rewrite_folder,
    rewrite_npz,
    rewrite_parquet,
    write_named,
)
from bilevel.errors import DataError, OptionError

COLUMNS = ("index", "key", "decision", "label")
DECISIONS = ("keep", "drop", "relabel")


@dataclass(frozen=True)
class Applied:
    """What `apply_decisions` did."""

    out: Path
    rows: int
    """Rows of the source; dropped + relabelled + unchanged."""
    dropped: int
    relabelled: int
    unchanged: int
    notes: tuple[str, ...] = ()


def apply_decisions(
    source: str | Path, decisions_csv: str | Path, out: str | Path, *, label: str | None = None
) -> Applied:
    """Write the source without the dropped rows and with the new labels to `out`, a new file or folder.

    An .npz, .csv or .parquet file becomes one of that form, a folder of images a folder, a named set an .npz file.
    `label` is the column of the labels in a table. `out` is written whole or not at all; the source stays.
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
        if form == "npz":
            notes = rewrite_npz(Path(source), temporary, change)
        elif form == "folder":
            rewrite_folder(Path(source), temporary, change, data)
        elif form == "named":
            write_named(data, temporary, change)
        elif suffix == ".parquet":
            rewrite_parquet(Path(source), temporary, change, str(label))
        else:
            rewrite_csv(Path(source), temporary, change, str(label))
    dropped = int((~change.kept).sum())
    relabelled = int((change.kept & (change.new != change.old)).sum())
    return Applied(target, data.count, dropped, relabelled, data.count - dropped - relabelled, notes)


def read_decisions(path: Path, data: Labelled) -> Change:
    """The decisions, checked line by line against the data they must belong to."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            absent = [name for name in COLUMNS if name not in names]
            if absent:
                raise DataError(f"{path} must have the columns {', '.join(COLUMNS)}; {absent[0]} is not there.")
            at = [names.index(name) for name in COLUMNS]
            lines = [(reader.line_num, _cells(row, at, path, reader.line_num)) for row in reader if row]
    except FileNotFoundError:
        raise DataError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a .csv file ({error}).") from None
    old = data.y.numpy()
    change = Change(np.ones(data.count, bool), old, old.copy())
    first: dict[int, int] = {}
    for line, (index, key, decision, name) in lines:
        where = f"{path}, line {line}"
        row = _row(index, key, data, where)
        if row in first:
            raise DataError(f"{where}: index {row} was decided in line {first[row]} already.")
        first[row] = line
        _decide(change, row, decision, name, data, where)
    if not change.kept.any():
        raise DataError(f"{path} drops all {data.count} rows of {data.name}; nothing would be left.")
    return change


def _cells(row: Sequence[str], at: Sequence[int], path: Path, line: int) -> tuple[str, str, str, str]:
    if len(row) <= max(at):
        raise DataError(f"{path}, line {line} has {len(row)} cells, too few for the columns {', '.join(COLUMNS)}.")
    index, key, decision, label = (row[i] for i in at)
    return index, key, decision, label


def _row(index: str, key: str, data: Labelled, where: str) -> int:
    row = int(index) if index.isascii() and index.isdigit() and len(index) < 19 else -1
    if not 0 <= row < data.count:
        raise DataError(f"{where}: index must be a whole number from 0 to {data.count - 1}; got {index!r}.")
    if data.keys[row] != key:
        raise DataError(
            f"{where}: row {row} of {data.name} has the key {data.keys[row]!r}, but the line says {key!r}; the "
            "decisions were made for other data."
        )
    return row


def _decide(change: Change, row: int, decision: str, name: str, data: Labelled, where: str) -> None:
    if decision not in DECISIONS:
        raise DataError(f"{where}: decision must be one of {', '.join(DECISIONS)}; got {decision!r}.")
    if decision == "drop":
        change.kept[row] = False
        return
    if name not in data.classes and not (decision == "keep" and name == ""):
        shown = first_of(data.classes, 20)
        raise DataError(f"{where}: label must be one of the classes {shown}; got {name!r}.")
    if decision == "relabel":
        change.new[row] = data.classes.index(name)
    elif name and data.classes[change.old[row]] != name:
        raise DataError(
            f"{where}: row {row} is kept with the label {name!r}, but has {data.classes[change.old[row]]!r} in "
            f"{data.name}; the decisions were made for other labels."
        )
