"""Images in class folders: `folder/<class>/<any name>.png`, and optionally `train`, `test` and `trusted` above them.

A folder of the name `train`, `test` or `trusted` that holds folders and no images is that part; without `train` the
other folders are the classes. Hidden files are passed over, and classes and files are in the order of their names. All
images get one size and one number of channels, as the main part has it: images of one size of at most 64 pixels keep
it; else the shorter side becomes 64 and the middle is cut out. They are grey if all of the main part are, else RGB;
what is transparent becomes white, and of an animation the first frame is taken. An image that does not decode, or has
more than 64 million pixels, is left out, with a note that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from bilevel._util.text import agreeing, counted
from bilevel.data.labelled import Labelled, Pair
from bilevel.data.labels import LEAST_ROWS, indices
from bilevel.errors import DataError, OptionError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
SIDE = 64
MOST_PIXELS = 2**26
"""Of an image: a file of a few bytes can claim any number, and is decoded whole."""
Reader = Callable[[Path], tuple[np.ndarray, bool]]
"""An image file as bytes (height, width[, 3]), and whether its size was changed."""
GREY = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")


@dataclass
class Listing:
    """The images of a part as (class, file), and the class folders that hold none."""

    images: list[tuple[str, Path]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def load_folder(root: Path, further: dict[str, Path], read: Reader | None = None) -> Labelled:
    """The folder as `Labelled`; `further` names the folders of the trusted and the test part. `read` is how an image is
    read where that is known, so that all come to one size."""
    parts = listings(root)
    for part, folder in further.items():
        if part in parts:
            raise OptionError(f"{part} is given twice: {root} has a folder {part}, and {folder} was named.")
        parts[part] = listings(folder)["train"]
    main = parts.pop("train")
    classes = tuple(sorted({name for name, _ in main.images}))
    if len(classes) < 2:
        raise DataError(f"{root}: at least 2 classes are needed; the only class folder with images is {classes[0]!r}.")
    why = ""
    if read is None:
        size, mode, why = _common([file for _, file in main.images])
        read = partial(read_pixels, size=size, mode=mode)
    x, kept, notes = _decode(main.images, read, root, why)
    lost = set(classes) - {name for name, _ in kept}
    if lost:
        raise DataError(f"{root}: no image of the class {min(lost)!r} can be decoded.")
    if len(kept) < LEAST_ROWS:
        raise DataError(f"{root}: at least {LEAST_ROWS} images are needed; there are {len(kept)}.")
    if main.empty:
        notes.append(f"Folders without images were passed over: {some_of(main.empty)}.")
    pairs: dict[str, Pair] = {}
    for part, listing in parts.items():
        where = further.get(part, root / part)
        x_part, kept_part, notes_part = _decode(listing.images, read, where)
        notes += [f"{part}: {note}" for note in notes_part if note not in notes]
        pairs[part] = x_part, indices([name for name, _ in kept_part], classes, str(where))
    return Labelled(
        name=root.resolve().name,
        kind="images",
        x=x,
        y=indices([name for name, _ in kept], classes, str(root)),
        classes=classes,
        keys=[file.relative_to(root).as_posix() for _, file in kept],
        trusted=pairs.get("trusted"),
        test=pairs.get("test"),
        notes=tuple(notes),
    )


def listings(root: Path) -> dict[str, Listing]:
    """The images of each part that is there; `train` is the main one."""
    try:
        parts = {name: root / name for name in ("train", "trusted", "test") if _is_part(root / name)}
        found = {name: _listing(folder, set()) for name, folder in parts.items()}
        if "train" not in found:
            found["train"] = _listing(root, set(parts))
    except OSError as error:
        raise DataError(f"{root} cannot be read ({error.strerror}).") from None
    for name, listing in found.items():
        if not listing.images:
            folder = parts.get(name, root)
            raise DataError(
                f"{folder} must hold class folders with images, such as {folder.name}/cat/1.png; none has any."
            )
    return found


def _is_part(folder: Path) -> bool:
    return folder.is_dir() and not _images(folder) and any(path.is_dir() for path in _visible(folder))


def _listing(folder: Path, parts: set[str]) -> Listing:
    found = Listing()
    for path in _visible(folder):
        if path.is_dir() and path.name not in parts:
            images = _images(path)
            found.images += [(path.name, file) for file in images]
            if not images:
                found.empty.append(path.name)
    return found


def _visible(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)


def _images(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.suffix.lower() in SUFFIXES and path.is_file()]


def _common(files: Sequence[Path]) -> tuple[tuple[int, int], str, str]:
    """Width and height, and mode, that all images are brought to, read from their headers; and why, where the images
    are of several sizes."""
    sizes: dict[tuple[int, int], list[Path]] = {}
    grey = True
    for file in files:
        try:
            with warnings.catch_warnings(action="ignore"), Image.open(file) as image:
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                sizes.setdefault((image.height, image.width) if turned else image.size, []).append(file)
                grey = grey and image.mode in GREY
        except Exception:  # decoders raise anything; the file is named when its pixels are read
            continue
    mode, by = "L" if grey else "RGB", sorted(sizes, key=lambda size: len(sizes[size]))
    if len(by) == 1 and max(by[0]) <= SIDE:
        return by[0], mode, ""
    why = ""
    if len(by) > 1:
        (least, most), odd = (f"{size[0]}x{size[1]}" for size in (by[0], by[-1])), sizes[by[0]][0]
        why = f" They are of {len(by)} sizes, such as {most} and {least} ({odd.parent.name}/{odd.name})."
    return (SIDE, SIDE), mode, why


def _decode(
    images: Sequence[tuple[str, Path]], read: Reader, root: Path, why: str = ""
) -> tuple[Tensor, list[tuple[str, Path]], list[str]]:
    """The pixels in [0, 1], the images they are of, and notes."""
    pixels, kept, broken, resized = [], [], [], 0
    for name, file in images:
        try:
            found, fitted = read(file)
        except Exception:  # decoders raise anything on a broken file
            broken.append(file.relative_to(root).as_posix())
            continue
        pixels.append(found)
        kept.append((name, file))
        resized += fitted
    if not kept:
        raise DataError(f"{root}: none of {counted(len(images), 'image')} can be decoded.")
    notes = []
    if broken:
        lost = f"{len(broken)} of {len(images)} images that {agreeing(len(broken), 'does', 'do')} not decode"
        notes.append(f"Left out {lost}: {some_of(broken)}.")
    if resized:
        notes.append(
            f"{resized} of {len(kept)} images {agreeing(resized, 'was', 'were')} resized, and cut at the middle where "
            f"needed, to {pixels[0].shape[1]}x{pixels[0].shape[0]} pixels.{why}"
        )
    stack = torch.from_numpy(np.stack(pixels)).float().div_(255)
    return (stack[:, None] if stack.ndim == 3 else stack.permute(0, 3, 1, 2).contiguous()), kept, notes


def read_pixels(file: Path, size: tuple[int, int], mode: str) -> tuple[np.ndarray, bool]:
    """An image as uint8, and whether its size was changed."""
    with warnings.catch_warnings(action="ignore"), Image.open(file) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError("it is too large")
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits
            image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
        if image.has_transparency_data:
            over = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
        image = image.convert(mode)
        fits = image.size == size
        return np.asarray(image if fits else ImageOps.fit(image, size, Image.Resampling.BILINEAR)), not fits


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
