"""Arrays in an .npz file: `x` and `y`, and if there are any `x_trusted`, `y_trusted`, `x_test`, `y_test`.

x of shape (n, height, width), or with 1, 3 or 4 channels last or first, holds images. Whole numbers from 0 to 255 are
divided by 255; fractions in [0, 1] stay; any other range is brought to [0, 1] by the smallest and the largest value of
the main part. x of shape (n,) or (n, columns) is scaled column by column, as numbers of tables are. Labels are numbers
or text.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel._util.checks import agreeing, counted, require
from bilevel.data.labelled import Labelled, LabelReader, Pair, reading, row_keys
from bilevel.errors import DataError, OptionError

CHANNELS = (1, 3, 4)
# The order of the axes that brings (n, height, width, channels) to channels first.
CHANNELS_LAST = 0, 3, 1, 2
PARTS = ("trusted", "test")
ARRAYS = ("x", "y", *(f"{letter}_{part}" for part in PARTS for letter in "xy"))
# Memory that reading a file takes, as a multiple of the size of its numbers.
COPIES = 4
# Larger numbers are cut off, so that no variance overflows.
LARGEST = 1e100
Arrays = dict[str, np.ndarray]


def load_npz(path: Path, further: dict[str, Path], labels: LabelReader) -> Labelled:
    """Return the file as `Labelled`.

    `further` has the files, with arrays x and y, of the parts `trusted` and `test`. `labels` reads the labels.
    """
    found = read_npz(path)
    x, values = _part(found, "", path)
    y, classes = labels(values, f"{path}, y", None)
    images = x.ndim > 2
    transformer, notes = (_images if images else _columns)(x, f"{path}, x")
    parts: dict[str, Pair] = {}
    for part in PARTS:
        inside = f"x_{part}" in found or f"y_{part}" in found
        if inside and part in further:
            raise OptionError(
                f"{part} is given twice: {path} has x_{part} and y_{part}, and {further[part]} was named."
            )
        if not inside and part not in further:
            continue
        file, suffix = (path, f"_{part}") if inside else (further[part], "")
        x_part, values_part = _part(found if inside else read_npz(file), suffix, file)
        where = f"{file}, x{suffix}"
        if x_part.shape[1:] != x.shape[1:]:
            raise DataError(f"{where} must have rows of shape {x.shape[1:]}, as x has; got {x_part.shape[1:]}.")
        if images and (x_part.dtype.kind == "f") != (x.dtype.kind == "f"):
            raise DataError(f"{where} must have whole numbers or fractions as x has, {x.dtype}; got {x_part.dtype}.")
        parts[part] = (
            torch.from_numpy(transformer.transform(x_part)),
            labels(values_part, f"{file}, y{suffix}", classes)[0],
        )
    return Labelled(
        name=path.stem,
        kind="images" if images else "arrays",
        x=torch.from_numpy(transformer.transform(x)),
        y=y,
        classes=classes,
        keys=array_keys(x, [classes[c] for c in y] if classes else list(map(str, y.tolist()))),
        trusted=parts.get("trusted"),
        test=parts.get("test"),
        notes=notes,
        features=() if images else tuple(f"column {j}" for j in np.flatnonzero(x.min(axis=0) < x.max(axis=0))),
        transformer=transformer,
    )


def array_keys(x: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the keys of rows of an .npz file, with a checksum of the row and the name of its label."""
    return row_keys(row.tobytes() + name.encode("utf-8", "surrogatepass") for row, name in zip(x, names, strict=True))


def standard_scaler() -> Any:
    """Return a scikit-learn pipeline that brings columns to mean 0 and deviation 1, cut off at 10 deviations.

    The limit keeps one wild number from deciding a step. Constant columns become 0. The inputs are float64 without NaN
    or infinite values.
    """
    preprocessing = require("sklearn.preprocessing", "apps")
    bounds = [
        preprocessing.FunctionTransformer(np.clip, kw_args={"a_min": -most, "a_max": most}) for most in (LARGEST, 10.0)
    ]
    return require("sklearn.pipeline", "apps").make_pipeline(bounds[0], preprocessing.StandardScaler(), bounds[1])


def read_npz(path: Path, *, every: bool = False, labels: bool = True) -> Arrays:
    """Return the arrays with the names above, or all if `every` is true. Nothing is unpickled.

    x must be among them and, if `labels` is true, y.
    """
    with reading(path):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a whole archive")
        with zipfile.ZipFile(path) as archive:
            wanted = [each for each in archive.infolist() if every or each.filename.removesuffix(".npy") in ARRAYS]
            for member in wanted:
                _check_header(archive, member, path)
        total = sum(member.file_size for member in wanted)
        refuse_larger(path, COPIES * total, f"arrays of {total:,} bytes")
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            held = list(file.files)
            found = {name: file[name] for name in held if every or name in ARRAYS}
    for name in ("x", "y")[: 1 + labels]:
        if name not in found:
            raise DataError(f"{path} must hold an array named {name!r}; it holds {', '.join(held) or 'none'}.")
    return found


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    """Refuse a member of an archive that is not an array, has Python objects, or claims more than it holds."""
    formats = np.lib.format
    with archive.open(member) as file:
        try:
            version = formats.read_magic(file)
        except ValueError:
            raise DataError(
                f"{path} must hold {member.filename.removesuffix('.npy')!r} as an array; it holds something else."
            ) from None
        read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
        shape, _, dtype = read(file)
        held = member.file_size - file.tell()
    if dtype.hasobject:
        raise DataError(f"{path} holds Python objects, which are not read. Save numbers and text as arrays.")
    if math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{member.filename} claims the shape {shape}, and has {held} bytes")


def refuse_larger(path: Path, needed: int, claim: str) -> None:
    """Raise DataError if a file needs more than the free memory; a system that does not report it passes.

    `needed` is in bytes; `claim` says what the file claims to hold.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return
    if needed > free:
        raise DataError(
            f"{path} claims to hold {claim}: {needed / 2**30:,.0f} GiB would be needed, and {free / 2**30:,.1f} GiB "
            "are free. Use a part of the rows, or a larger machine."
        )


def _part(arrays: Arrays, suffix: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the checked inputs of a part, (n,) as (n, 1), and its labels."""
    for name in (f"x{suffix}", f"y{suffix}"):
        if name not in arrays:
            raise DataError(f"{path} must hold both x{suffix} and y{suffix}; {name} is missing.")
    x, y, where = arrays[f"x{suffix}"], arrays[f"y{suffix}"], f"{path}, x{suffix}"
    if x.dtype.kind not in "buif":
        raise DataError(f"{where} must hold real numbers; its type is {x.dtype}.")
    if not 1 <= x.ndim <= 4 or 0 in x.shape:
        raise DataError(
            f"{where} must have 1 to 4 dimensions, rows first, and none of length 0; its shape is {x.shape}."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{path}, y{suffix} must be a vector of labels; its shape is {y.shape}.")
    if len(x) != len(y):
        raise DataError(f"{path}: x{suffix} has {len(x)} rows and y{suffix} has {len(y)}; the numbers must be equal.")
    if x.dtype.kind == "f" and (bad := int((~np.isfinite(x)).sum())):
        rows = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        raise DataError(
            f"{where} has {counted(bad, 'NaN or infinite value')}, in {counted(len(rows), 'row')}; the first is row "
            f"{rows[0]}."
        )
    return x[:, None] if x.ndim == 1 else x, y


@dataclass(frozen=True)
class ColumnScale:
    """Scales the columns of (n, columns) that vary, and leaves out the others."""

    # The number of columns, and the places of those that vary, with their means and deviations.
    count: int
    varies: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    @classmethod
    def fit(cls, x: np.ndarray) -> ColumnScale:
        """Fit the rule on (n, columns); at least one must vary."""
        varies = np.flatnonzero(x.min(axis=0) < x.max(axis=0))
        scaler = standard_scaler().fit(x[:, varies].astype(np.float64))[1]
        return cls(x.shape[1], *(tuple(each.tolist()) for each in (varies, scaler.mean_, scaler.scale_)))

    def transform(self, X: np.ndarray, /) -> np.ndarray:
        """Return the scaled columns as float32."""
        numbers = X[:, list(self.varies)].astype(np.float64).clip(-LARGEST, LARGEST)
        scaled = (numbers - np.array(self.means)) / np.array(self.deviations)
        return np.asarray(scaled.clip(-10, 10), dtype=np.float32)


@dataclass(frozen=True)
class PixelScale:
    """Brings images to channels first, and their values from `low` to `high` to [0, 1]."""

    axes: tuple[int, int, int, int]
    low: float
    high: float

    def transform(self, X: np.ndarray, /) -> np.ndarray:
        """Return the images as float32 (n, channels, height, width)."""
        four = X[..., None] if X.ndim == 3 else X
        four = four if four.dtype in (np.uint8, np.float32) else four.astype(np.float64)
        pixels = torch.from_numpy(np.ascontiguousarray(np.transpose(four, self.axes)))
        if self.low == 0 and self.high in (1, 255):
            return pixels.float().div_(self.high).clamp_(0, 1).numpy()
        # Halves, so that the distance of two large numbers does not overflow.
        low, high = self.low / 2, self.high / 2
        return ((pixels.double() / 2 - low) / ((high - low) or 1.0)).clamp_(0, 1).float().numpy()


def _columns(x: np.ndarray, where: str) -> tuple[ColumnScale, tuple[str, ...]]:
    constant = int((x.min(axis=0) == x.max(axis=0)).sum())
    if constant == x.shape[1]:
        raise DataError(f"{where} has no column that varies.")
    left = agreeing(constant, "is constant and was left out", "are constant and were left out")
    return ColumnScale.fit(x), (f"{constant} of {x.shape[1]} columns {left}.",) if constant else ()


def _images(x: np.ndarray, where: str) -> tuple[PixelScale, tuple[str, ...]]:
    shape = x.shape
    if len(shape) == 3 or shape[3] in CHANNELS:  # if both ends could be channels, the last axis is
        axes = CHANNELS_LAST
    elif shape[1] in CHANNELS:
        axes = (0, 1, 2, 3)
    else:
        raise DataError(
            f"{where} has shape {shape}; images must have 1, 3 or 4 channels, as their last or their second dimension."
        )
    low, high = float(x.min()), float(x.max())
    if x.dtype.kind in "ui" and low >= 0 and high <= 255:
        return PixelScale(axes, 0.0, 255.0), ()
    if low >= 0 and high <= 1:
        return PixelScale(axes, 0.0, 1.0), ()
    return PixelScale(axes, low, high), (f"Pixel values from {low:g} to {high:g} were brought to [0, 1].",)
