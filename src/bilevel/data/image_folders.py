"""Images in class folders: `folder/<class>/<any name>.png`, and optionally `train`, `test` and `trusted` above them.

A folder named `train`, `test` or `trusted` that holds folders and no images is that part; without `train` the other
folders are the classes. Hidden files are skipped, and classes and files are sorted by name. All images are brought to
one size and one number of channels, which the main part decides. If its images have one size of at most 64 pixels, they
keep it; else the shorter side becomes 64 pixels and the middle is cut out. They are grey if all of the main part are,
else RGB. Transparent parts become white, and the first frame of an animation is used. An image that does not decode, or
has more than 64 million pixels, is left out, with a note that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import agreeing, counted, require
from bilevel.data.labelled import LEAST_ROWS, Labelled, Pair, indices, reading
from bilevel.errors import BilevelError, DataError, OptionError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
SIDE = 64
# The largest image that is read: a file of a few bytes can claim any number of pixels, and is decoded whole.
MOST_PIXELS = 2**26
# Returns an image file as bytes (height, width[, 3]), and whether its size was changed.
Reader = Callable[[Path], tuple[np.ndarray, bool]]
GREY = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")
# The images of each class folder of a part.
Listing = dict[str, list[Path]]


def load_folder(root: Path, further: dict[str, Path], read: Reader | None = None) -> Labelled:
    """Return the folder as `Labelled`.

    `further` has the folders of the parts `trusted` and `test`. `read` reads an image; default: brings all images to
    the size and the number of channels that the main part decides.
    """
    parts = listings(root)
    for part, folder in further.items():
        if part in parts:
            raise OptionError(f"{part} is given twice: {root} has a folder {part}, and {folder} was named.")
        parts[part] = listings(folder)["train"]
    main = parts.pop("train")
    classes = tuple(sorted(name for name, images in main.items() if images))
    if len(classes) < 2:
        raise DataError(f"{root}: at least 2 classes are needed; the only class folder with images is {classes[0]!r}.")
    why, rules = "", None
    if read is None:
        size, mode, why = _common(files_of(main))
        rules = ImageRules(*size, mode)
        read = rules.read
    x, names, kept, notes = _decode(main, read, root, why)
    if lost := set(classes) - set(names):
        raise DataError(f"{root}: no image of the class {min(lost)!r} can be decoded.")
    if len(kept) < LEAST_ROWS:
        raise DataError(f"{root}: at least {LEAST_ROWS} images are needed; there are {len(kept)}.")
    if empty := [name for name, images in main.items() if not images]:
        notes.append(f"Folders without images were skipped: {some_of(empty)}.")
    pairs: dict[str, Pair] = {}
    for part, listing in parts.items():
        where = further.get(part, root / part)
        x_part, names_part, _, notes_part = _decode(listing, read, where)
        notes += [f"{part}: {note}" for note in notes_part if note not in notes]
        pairs[part] = x_part, indices(names_part, classes, str(where))
    return Labelled(
        name=root.resolve().name,
        kind="images",
        x=x,
        y=indices(names, classes, str(root)),
        classes=classes,
        keys=[file.relative_to(root).as_posix() for file in kept],
        trusted=pairs.get("trusted"),
        test=pairs.get("test"),
        notes=tuple(notes),
        transformer=rules,
    )


@dataclass(frozen=True)
class ImageRules:
    """Brings image files to one size in pixels and one mode, "L" (grey) or "RGB"."""

    width: int
    height: int
    mode: str

    def read(self, file: Path) -> tuple[np.ndarray, bool]:
        """Return an image as bytes, and whether its size was changed."""
        return read_pixels(file, (self.width, self.height), self.mode)

    def transform(self, X: Sequence[Path], /) -> np.ndarray:
        """Return the image files that decode as float32 (n, channels, height, width), with values in [0, 1]."""
        return self.decode(X, Path())[0]

    def decode(self, files: Sequence[Path], root: Path) -> tuple[np.ndarray, list[Path], list[str]]:
        """Return the images that decode as float32 in [0, 1], their files, and the names below `root` of the others."""
        pixels, kept, broken, _ = read_images(files, self.read, root)
        return pixels.float().div_(255).numpy(), kept, broken


def images_below(folder: Path) -> list[Path]:
    """Return all images in a folder and the folders in it, sorted; hidden ones are skipped."""
    with reading(folder):
        found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    hidden = [path for path in found if any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not (files := sorted({*found} - {*hidden})):
        raise DataError(f"{folder} has no images.")
    return files


def listings(root: Path) -> dict[str, Listing]:
    """Return the images of each part of a folder; `train` is the main part."""
    with reading(root):
        main = _listing(root)
        parts = {name: _listing(root / name) for name in ("train", "trusted", "test") if main.get(name) == []}
        found = {name: listing for name, listing in parts.items() if listing}
        found.setdefault("train", {name: images for name, images in main.items() if name not in found})
    for name, listing in found.items():
        if not files_of(listing):
            raise DataError(f"{root} must hold class folders with images, such as cat/1.png; {name} has no images.")
    return found


def _listing(folder: Path) -> Listing:
    return {
        path.name: [file for file in _visible(path) if file.suffix.lower() in SUFFIXES and file.is_file()]
        for path in _visible(folder)
        if path.is_dir()
    }


def files_of(listing: Listing) -> list[Path]:
    """Return the images of all classes."""
    return [file for files in listing.values() for file in files]


def _visible(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)


def _common(files: Sequence[Path]) -> tuple[tuple[int, int], str, str]:
    """Return the width and height, and the mode, for all images, and a sentence if they have several sizes.

    Only the headers of the images are read.
    """
    pillow = require("PIL.Image", "apps")
    sizes: dict[tuple[int, int], list[Path]] = {}
    grey = True
    for file in files:
        # Decoders raise anything; the file is named when its pixels are read.
        with suppress(Exception), warnings.catch_warnings(action="ignore"), pillow.open(file) as image:
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            sizes.setdefault((image.height, image.width) if turned else image.size, []).append(file)
            grey = grey and image.mode in GREY
    mode, by = "L" if grey else "RGB", sorted(sizes, key=lambda size: len(sizes[size]))
    if len(by) == 1 and max(by[0]) <= SIDE:
        return by[0], mode, ""
    why = ""
    if len(by) > 1:
        (least, most), odd = (f"{size[0]}x{size[1]}" for size in (by[0], by[-1])), sizes[by[0]][0]
        why = f" They have {len(by)} sizes, such as {most} and {least} ({odd.parent.name}/{odd.name})."
    return (SIDE, SIDE), mode, why


def _decode(
    listing: Listing, read: Reader, root: Path, why: str = ""
) -> tuple[Tensor, list[str], list[Path], list[str]]:
    """Return the pixels in [0, 1], the classes and the files of the images that decode, and notes."""
    images = {file: name for name, files in listing.items() for file in files}
    pixels, kept, broken, resized = read_images(list(images), read, root)
    notes = []
    if broken:
        lost = f"{len(broken)} of {len(images)} images that {agreeing(len(broken), 'does', 'do')} not decode"
        notes.append(f"Left out {lost}: {some_of(broken)}.")
    if resized:
        notes.append(
            f"{resized} of {len(kept)} images {agreeing(resized, 'was', 'were')} resized, and cut at the middle if "
            f"needed, to {pixels.shape[3]}x{pixels.shape[2]} pixels.{why}"
        )
    return pixels.float().div_(255), [images[file] for file in kept], kept, notes


def read_images(files: Sequence[Path], read: Reader, root: Path) -> tuple[Tensor, list[Path], list[str], int]:
    """Return the images as bytes (n, channels, height, width), and the files that decode.

    Also return the names below `root` of the files that do not, and how many images changed their size.
    """
    found, broken, resized = {}, [], 0
    for file in files:
        try:
            found[file], changed = read(file)
            resized += changed
        except BilevelError:  # the package that decodes is not installed
            raise
        except Exception:  # decoders raise anything on a broken file
            broken.append(file.relative_to(root).as_posix())
    if not found:
        raise DataError(f"{root}: none of {counted(len(files), 'image')} can be decoded.")
    stack = torch.from_numpy(np.stack(list(found.values())))
    return stack[:, None] if stack.ndim == 3 else stack.permute(0, 3, 1, 2).contiguous(), list(found), broken, resized


def read_pixels(file: Path, size: tuple[int, int], mode: str) -> tuple[np.ndarray, bool]:
    """Return an image of this size (width, height) as uint8, and whether its size was changed."""
    pillow, operations = require("PIL.Image", "apps"), require("PIL.ImageOps", "apps")
    with warnings.catch_warnings(action="ignore"), pillow.open(file) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError("it is too large")
        image = operations.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits
            image = pillow.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
        if image.has_transparency_data:
            over = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", over.size, "white"), over)
        image = image.convert(mode)
        fits = image.size == size
        return np.asarray(image if fits else operations.fit(image, size, pillow.Resampling.BILINEAR)), not fits


def some_of(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
