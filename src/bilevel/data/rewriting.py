"""New files that differ from their source in dropped rows and in labels, and in nothing else."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bilevel.data.image_folders import listings
from bilevel.data.labelled import Labelled
from bilevel.data.tables import header, import_or_say
from bilevel.errors import DataError, OptionError


@dataclass(frozen=True)
class Change:
    """Which rows stay, and the class of each row before and after."""

    kept: np.ndarray
    old: np.ndarray
    new: np.ndarray

    @property
    def like(self) -> np.ndarray:
        """For each row, a row of the source whose label it has now: its own, or the first of its new class."""
        first = {int(c): int(np.argmax(self.old == c)) for c in np.unique(self.old)}
        rows = np.arange(len(self.old))
        return np.array([row if a == b else first[int(b)] for row, a, b in zip(rows, self.old, self.new, strict=True)])


@contextmanager
def new_file_or_folder(out: Path) -> Iterator[Path]:
    """A name for a file or a folder, which becomes `out` when all went well, and is gone otherwise.

    Nothing is written over: what is at `out` must be empty.
    """
    if out.exists() and (any(out.iterdir()) if out.is_dir() else out.stat().st_size):
        raise OptionError(f"out must be new; {out} is there and has content.")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if out.is_dir():
            out.rmdir()
        os.replace(temporary, out)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror or error}).") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):  # it may lie under what is no folder
                temporary.unlink()


def rewrite_npz(source: Path, out: Path, change: Change) -> tuple[str, ...]:
    """x and y without the dropped rows; the other arrays byte for byte. Notes name those that may belong to rows."""
    with np.load(source, allow_pickle=False) as arrays:
        new = {"x.npy": arrays["x"][change.kept], "y.npy": arrays["y"][change.like][change.kept]}
    notes = []
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w", allowZip64=True) as file:
        for member in old.infolist():
            entry = zipfile.ZipInfo(member.filename, member.date_time)
            entry.compress_type = member.compress_type
            with file.open(entry, "w", force_zip64=True) as to:
                if member.filename in new:
                    np.lib.format.write_array(to, new[member.filename], allow_pickle=False)
                    continue
                with old.open(member) as found:
                    shutil.copyfileobj(found, to)
            if not change.kept.all() and _length(old, member) == len(change.kept):
                notes.append(f"{Path(member.filename).stem} has a value for each row of x and was not cut.")
    return tuple(notes)


def _length(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """The length of an array that is none of those with a meaning; -1 where there is none."""
    if re.fullmatch(r"[xy](_trusted|_test)?\.npy", member.filename):
        return -1
    with archive.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape = read(file)[0]
        except ValueError:
            return -1
    return int(shape[0]) if shape else -1


def write_named(data: Labelled, out: Path, change: Change) -> None:
    """A named set as an .npz file: bytes where its pixels are such, and the names of the classes as labels."""
    names = np.array(data.classes)

    def pixels(x: np.ndarray) -> np.ndarray:
        whole_bytes = np.round(x * 255).astype(np.uint8)
        return whole_bytes if data.name != "digits" else x  # digits are sixteenths

    arrays = {"x": pixels(data.x.numpy()[change.kept]), "y": names[change.new][change.kept]}
    if data.test is not None:
        arrays |= {"x_test": pixels(data.test[0].numpy()), "y_test": names[data.test[1].numpy()]}
    with open(out, "wb") as file:
        np.savez_compressed(file, **arrays)


def rewrite_parquet(source: Path, out: Path, change: Change, label: str) -> None:
    """All columns with their types, and the file's own compression."""
    parquet = import_or_say("pyarrow.parquet")
    with parquet.ParquetFile(source) as file:
        table = file.read().unify_dictionaries()
        groups = file.metadata.num_row_groups
        compression = file.metadata.row_group(0).column(0).compression if groups else "SNAPPY"
    at = table.schema.get_field_index(label)
    table = table.set_column(at, table.schema.field(at), table.column(at).take(change.like))
    parquet.write_table(
        table.filter(change.kept), out, compression="NONE" if compression == "UNCOMPRESSED" else compression
    )


def rewrite_csv(source: Path, out: Path, change: Change, label: str) -> None:
    """The text of every cell and line as it is; a new label is written as the first row of that class has it."""
    names, delimiter = header(source, label)
    text = source.read_bytes().decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text[len(mark) :]
    records = list(_records(text, delimiter))
    rows = [record for record in records if not record.blank(text)][1:]
    at = names.index(label)
    if len(rows) != len(change.kept) or any(len(row.cells) <= at for row in rows):
        raise DataError(
            f"{source}: {len(rows)} lines were found for {len(change.kept)} rows; check its quotation marks."
        )
    like, number, parts = change.like, {id(row): i for i, row in enumerate(rows)}, [mark]
    for record in records:
        i = number.get(id(record))
        if i is None or (change.kept[i] and like[i] == i):
            parts.append(text[record.start : record.end])
        elif change.kept[i]:
            begin, end = record.cells[at]
            cell = text[slice(*rows[like[i]].cells[at])]
            parts.append(text[record.start : begin] + cell + text[end : record.end])
    out.write_bytes("".join(parts).encode("utf-8"))


@dataclass(frozen=True, eq=False)
class _Record:
    """Where a record of a .csv text lies, with its line end, and where its cells lie."""

    start: int
    end: int
    cells: list[tuple[int, int]]

    def blank(self, text: str) -> bool:
        return len(self.cells) == 1 and not text[self.start : self.end].strip()


def _records(text: str, delimiter: str) -> Iterator[_Record]:
    d = re.escape(delimiter)
    cell = re.compile(rf'("[^"]*(?:""[^"]*)*"[^{d}\r\n]*|[^{d}\r\n]*)({d}|\r\n|\n|\r|\Z)')
    position = start = 0
    cells: list[tuple[int, int]] = []
    while found := cell.match(text, position):
        cells.append(found.span(1))
        position = found.end()
        if found[2] != delimiter:
            yield _Record(start, position, cells)
            start, cells = position, []
            if position == len(text):
                return


def rewrite_folder(source: Path, out: Path, change: Change, data: Labelled) -> None:
    """Copies of the images in the folders of their classes; where a name is taken, the new one tells the old class."""
    fate = {key: i for i, key in enumerate(data.keys)}
    files = [file for listing in listings(source).values() for _, file in listing.images]
    moved: list[tuple[Path, Path]] = []
    for file in files:
        place = file.relative_to(source)
        i = fate.get(place.as_posix())
        if i is not None and not change.kept[i]:
            continue
        if i is not None and change.new[i] != change.old[i]:
            moved.append((file, place.parent.with_name(data.classes[change.new[i]]) / place.name))
        else:
            _copy(file, out / place)
    for file, place in moved:
        target, number = out / place, 1
        while target.exists():
            extra = f"-{number}" if number > 1 else ""
            target = (out / place).with_name(f"{place.stem}-from-{file.parent.name}{extra}{place.suffix}")
            number += 1
        _copy(file, target)


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(file, target)
