"""The preparation of a run's inputs, kept as JSON, and new rows that are prepared by it.

The rules are numbers and names: nothing is pickled. A column of a new table that the rules do not name is not read. A
value of a text column that the run's data do not have is in the column of rare values, or in none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._util.checks import agreeing, counted, first_of
from bilevel.data.arrays import ColumnScale, PixelScale, read_npz
from bilevel.data.column_rules import ColumnRules
from bilevel.data.image_folders import SUFFIXES, ImageRules, images_below
from bilevel.data.labelled import Transformer
from bilevel.data.tables import read_frame
from bilevel.errors import DataError

Rules = ColumnRules | ColumnScale | PixelScale | ImageRules
KINDS: dict[str, type[Any]] = {"table": ColumnRules, "columns": ColumnScale, "pixels": PixelScale, "images": ImageRules}
# What each kind of rules reads.
FORMS = {
    ColumnRules: "a .csv or .parquet file, or a pandas.DataFrame",
    ColumnScale: "an .npz file with an array x, or an array",
    PixelScale: "an .npz file with an array x, or an array",
    ImageRules: "a folder of images, an image, or a list of images",
}


@dataclass(frozen=True)
class NewRows:
    """Prepared inputs, the name of each row (its number or its file), and notes for the user."""

    x: np.ndarray
    names: list[str]
    notes: tuple[str, ...] = ()


def rules_to_json(rules: Transformer | None) -> dict[str, Any]:
    """Return the rules as JSON holds them."""
    for kind, known in KINDS.items():
        if isinstance(rules, known):
            return {"kind": kind} | asdict(rules)
    raise DataError(f"rules must be the transformer of data that `load` read; got {type(rules).__name__}.")


def rules_from_json(held: Mapping[str, Any]) -> Rules:
    """Return the rules that `rules_to_json` wrote."""
    fields = {name: _tupled(value) for name, value in held.items() if name != "kind"}
    found: Rules = KINDS[held["kind"]](**fields)
    return found


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def new_rows(rules: Rules, source: Any, shape: Sequence[int]) -> NewRows:
    """Read and prepare new rows; `shape` is the shape of an input of the run.

    Args:
        rules: The rules of the run.
        source: A path, or the rows in memory: a pandas.DataFrame, an array, a list of image files.
        shape: The shape of one prepared input.
    """
    if isinstance(source, str):
        source = Path(source)
    if isinstance(source, Path) and not source.exists():
        raise DataError(f"The file or folder {source} does not exist.")
    if isinstance(rules, ColumnRules):
        found = _table(rules, source)
    elif isinstance(rules, ImageRules):
        found = _images(rules, source)
    else:
        found = _array(rules, source)
    if found.x.shape[1:] != tuple(shape):
        raise DataError(f"{_name(source)} must have inputs of shape {tuple(shape)}; got {found.x.shape[1:]}.")
    return found


def _name(source: Any) -> str:
    return str(source) if isinstance(source, Path) else "the data"


def _refuse_form(rules: Rules, source: Any) -> DataError:
    got = str(source) if isinstance(source, Path) else type(source).__name__
    return DataError(f"the new data must be {FORMS[type(rules)]}, as the run's data was; got {got}.")


def _table(rules: ColumnRules, source: Any) -> NewRows:
    where = _name(source)
    if isinstance(source, Path):
        if source.suffix.lower() not in (".csv", ".parquet"):
            raise _refuse_form(rules, source)
        source = read_frame(source, list(rules.kinds), rules.text_columns)
    if not hasattr(source, "columns"):
        raise _refuse_form(rules, source)
    x, notes = rules.transform(source, where), []
    for name, count in rules.unknown(source).items():
        notes.append(
            f"{name}: {counted(count, 'value')} {agreeing(count, 'does', 'do')} not occur in the run's data, and "
            f"{agreeing(count, 'has', 'have')} no column."
        )
    if extra := [name for name in map(str, source.columns) if name not in rules.kinds]:
        notes.insert(0, f"Not read, because the run does not use them: {first_of(extra, 10)}.")
    return NewRows(x, [str(i) for i in range(len(x))], tuple(notes))


def _array(rules: ColumnScale | PixelScale, source: Any) -> NewRows:
    where = _name(source)
    if isinstance(source, Path):
        if source.suffix.lower() != ".npz":
            raise _refuse_form(rules, source)
        source = read_npz(source, labels=False)["x"]
    try:
        x = np.asarray(source)
    except (TypeError, ValueError):
        raise _refuse_form(rules, source) from None
    if x.dtype.kind not in "buif" or (x.dtype.kind == "f" and not np.isfinite(x).all()):
        raise DataError(f"{where}, x must hold finite real numbers; its type is {x.dtype}.")
    if isinstance(rules, ColumnScale):
        x = x[:, None] if x.ndim == 1 else x
        if x.ndim != 2 or x.shape[1] != rules.count:
            raise DataError(f"{where}, x must have {counted(rules.count, 'column')}, as in the run; got {x.shape}.")
    elif x.ndim not in (3, 4):
        raise DataError(f"{where}, x must hold images, as in the run; its shape is {x.shape}.")
    elif rules.low == 0 and (
        (rules.high == 255 and x.dtype.kind == "f") or (len(x) and not 0 <= x.min() <= x.max() <= rules.high)
    ):
        kind = "whole numbers" if rules.high == 255 else "numbers"
        raise DataError(f"{where}, x must hold {kind} from 0 to {rules.high:g}, as in the run; got {x.dtype}.")
    return NewRows(rules.transform(x), [str(i) for i in range(len(x))])


def _images(rules: ImageRules, source: Any) -> NewRows:
    if isinstance(source, Path):
        files, root = (images_below(source), source) if source.is_dir() else ([source], source.parent)
    elif isinstance(source, (list, tuple)) and source and all(isinstance(file, (str, Path)) for file in source):
        files = [Path(file).absolute() for file in source]
        root = Path(os.path.commonpath([file.parent for file in files]))
    else:
        raise _refuse_form(rules, source)
    if strange := [file for file in files if file.suffix.lower() not in SUFFIXES]:
        raise _refuse_form(rules, strange[0])
    x, kept, broken = rules.decode(files, root)
    notes = [f"Left out {counted(len(broken), 'image')}, which cannot be decoded: {first_of(broken, 3)}."] * bool(
        broken
    )
    return NewRows(x, [file.relative_to(root).as_posix() for file in kept], tuple(notes))
