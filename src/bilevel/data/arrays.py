"""Arrays in an .npz file: `x` and `y`, and where there are such `x_trusted`, `y_trusted`, `x_test`, `y_test`.

x of shape (n, height, width), or with 1, 3 or 4 channels last or first, holds images. Whole numbers from 0 to 255 are
divided by 255; fractions in [0, 1] stay; any other range is brought to [0, 1] by the least and the largest value of the
main part. x of shape (n,) or (n, columns) is scaled column by column (see `scale`). Labels may be numbers or text.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bilevel._util.text import agreeing, counted
from bilevel.data.labelled import Labelled, Pair, row_keys
from bilevel.data.labels import classes_of, indices, names_of
from bilevel.data.scale import Scale
from bilevel.data.size import COPIES, refuse_larger
from bilevel.errors import DataError, OptionError, reason

CHANNELS = (1, 3, 4)
PARTS = ("trusted", "test")
Arrays = dict[str, np.ndarray]
Transform = Callable[[np.ndarray], Tensor]


def load_npz(path: Path, further: dict[str, Path]) -> Labelled:
    """The file as `Labelled`; `further` names files with the arrays x and y of the trusted and the test part."""
    found = read_npz(path)
    x, names = _part(found, "", path)
    classes = classes_of(names, f"{path}, y")
    transform, notes = (_images if x.ndim > 2 else _columns)(x, f"{path}, x")
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
        x_part, names_part = _part(found if inside else read_npz(file), suffix, file)
        where = f"{file}, x{suffix}"
        if x_part.shape[1:] != x.shape[1:]:
            raise DataError(f"{where} must have rows of shape {x.shape[1:]}, as x has; got {x_part.shape[1:]}.")
        if x.ndim > 2 and (x_part.dtype.kind == "f") != (x.dtype.kind == "f"):
            raise DataError(f"{where} must have whole numbers or fractions as x has, {x.dtype}; got {x_part.dtype}.")
        parts[part] = transform(x_part), indices(names_part, classes, f"{file}, y{suffix}")
    return Labelled(
        features=() if x.ndim > 2 else feature_names(x),
        name=path.stem,
        kind="images" if x.ndim > 2 else "arrays",
        x=transform(x),
        y=indices(names, classes, f"{path}, y"),
        classes=classes,
        keys=array_keys(x, names),
        trusted=parts.get("trusted"),
        test=parts.get("test"),
        notes=notes,
    )


def array_keys(x: np.ndarray, names: Sequence[str]) -> list[str]:
    """The keys of rows of an .npz file, which hold a checksum of the row and of its label."""
    return row_keys(row.tobytes() + name.encode("utf-8", "surrogatepass") for row, name in zip(x, names, strict=True))


def read_npz(path: Path) -> Arrays:
    """The arrays that the names above ask for. Nothing is unpickled."""
    wanted = ("x", "y", *(f"{letter}_{part}" for part in PARTS for letter in "xy"))
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a whole archive")
        _refuse_claims(path, wanted)
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            held = list(file.files)
            found = {name: file[name] for name in wanted if name in held}
    except DataError:
        raise
    except Exception as error:  # a broken archive raises anything: zipfile's, zlib's, numpy's, a memory error
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds Python objects, which are not read. Save numbers and text as arrays."
            ) from None
        raise DataError(f"{path} cannot be read as an .npz file ({reason(error)}).") from None
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # a member that is no .npy file comes as its bytes
            raise DataError(f"{path} must hold {name!r} as an array; what it holds is none.")
    for name in ("x", "y"):
        if name not in found:
            raise DataError(f"{path} must hold an array named {name!r}; it holds {', '.join(held) or 'none'}.")
    return found


def _refuse_claims(path: Path, wanted: tuple[str, ...]) -> None:
    """Refuse headers that claim more than the archive holds, and archives that unpack to more than the memory."""
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.removesuffix(".npy") in wanted]
        for member in members:
            with archive.open(member) as file:
                try:
                    version = np.lib.format.read_magic(file)
                except ValueError:  # no array: refused by its name
                    continue
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                held = member.file_size - file.tell()
            if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
                raise ValueError(f"{member.filename} claims the shape {shape}, and has {held} bytes")
        total = sum(member.file_size for member in members)
    refuse_larger(path, COPIES * total, f"arrays of {total:,} bytes")


def _part(arrays: Arrays, suffix: str, path: Path) -> tuple[np.ndarray, list[str]]:
    """Checked inputs, (n,) made (n, 1), and the names of their labels."""
    x, y = checked_part(arrays, suffix, path)
    return x, names_of(y.tolist(), f"{path}, y{suffix}")


def checked_part(arrays: Arrays, suffix: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Checked inputs, (n,) made (n, 1), and their labels as they are."""
    for name in (f"x{suffix}", f"y{suffix}"):
        if name not in arrays:
            raise DataError(f"{path} must hold both x{suffix} and y{suffix}; {name} is not there.")
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
        raise DataError(f"{path}: x{suffix} has {len(x)} rows and y{suffix} has {len(y)}; they must be as many.")
    if x.dtype.kind == "f" and (bad := int((~np.isfinite(x)).sum())):
        rows = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        raise DataError(
            f"{where} has {counted(bad, 'NaN or infinite value')}, in {counted(len(rows), 'row')}; the first is row "
            f"{rows[0]}."
        )
    return x[:, None] if x.ndim == 1 else x, y


def feature_names(x: np.ndarray) -> tuple[str, ...]:
    """The numbers of the columns that vary: constant ones are left out of the inputs."""
    return tuple(f"column {j}" for j in np.flatnonzero(Scale.of(x.astype(np.float64)).varies))


def _columns(x: np.ndarray, where: str) -> tuple[Transform, tuple[str, ...]]:
    scale = Scale.of(x.astype(np.float64))
    constant = int((~scale.varies).sum())
    if constant == x.shape[1]:
        raise DataError(f"{where} has no column that varies.")
    left = agreeing(constant, "is constant and was left out", "are constant and were left out")
    notes = (f"{constant} of {x.shape[1]} columns {left}.",) if constant else ()
    return lambda part: torch.from_numpy(scale(part.astype(np.float64))), notes


def _images(x: np.ndarray, where: str) -> tuple[Transform, tuple[str, ...]]:
    order = _order(x.shape, where)
    low, high = float(x.min()), float(x.max())
    notes: tuple[str, ...] = ()
    if x.dtype.kind in "ui" and low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    else:
        notes = (f"Pixel values from {low:g} to {high:g} were brought to [0, 1].",)

    def transform(part: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(np.transpose(_four(part), order)))
        if low == 0 and high in (1, 255):
            return pixels.float().div_(high).clamp_(0, 1)
        # Halves, so that the distance of two large numbers does not overflow.
        return ((pixels.double() / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)).clamp_(0, 1).float()

    return transform, notes


def _four(x: np.ndarray) -> np.ndarray:
    x = x[..., None] if x.ndim == 3 else x
    return x if x.dtype in (np.uint8, np.float32) else x.astype(np.float64)


def _order(shape: tuple[int, ...], where: str) -> tuple[int, int, int, int]:
    """The axes that put channels first. Channels last win where both could be."""
    if len(shape) == 3 or shape[3] in CHANNELS:
        return 0, 3, 1, 2
    if shape[1] in CHANNELS:
        return 0, 1, 2, 3
    raise DataError(
        f"{where} has shape {shape}; images must have 1, 3 or 4 channels, as their last or their second dimension."
    )
