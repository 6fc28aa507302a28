"""Images by class, for few-shot learning: bytes in memory, with the classes in three disjoint parts.

`load_classes` reads `omniglot`, `cifar-fs`, `mini-imagenet` or a folder. Named sets are looked for in `$BILEVEL_DATA`,
each in the folder with its name; `cifar-fs` in the folder `cifar100`.
"""

from __future__ import annotations

import csv
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import ShortRepr, did_you_mean, in_range, require
from bilevel.data.image_folders import Reader, load_folder, read_pixels
from bilevel.data.labelled import reading
from bilevel.data.named_sets import sheet
from bilevel.errors import DataError, OptionError

ROTATIONS = (0, 90, 180, 270)
# The shares of the classes for meta-training and meta-validation if the data do not say; the others are the test.
SHARES = 0.64, 0.16
OMNIGLOT = ("images_background.zip", "images_evaluation.zip")
# The size of the images; how many of the 1,623 characters are not for the test, in an order drawn by this seed.
OMNIGLOT_SIDE, OMNIGLOT_TRAIN, OMNIGLOT_SEED = 28, 1200, 0
SHEETS = tuple(f"train_{i}.webp" for i in range(3))
CIFAR_LABELS, CIFAR_CLASSES = "labels.npz", "classes_and_splits.json"
MINI_SIDE = 84
LISTS = ("train.csv", "val.csv", "test.csv")
ARCHIVE = "ravi_larochelle_splits.zip"
# The folders of `$BILEVEL_DATA` in which a named set is looked for.
FOLDERS = {"omniglot": ("omniglot",), "cifar-fs": ("cifar100",), "mini-imagenet": ("mini-imagenet", "mini_imagenet")}
FILES = {"omniglot": OMNIGLOT, "cifar-fs": (*SHEETS, CIFAR_LABELS, CIFAR_CLASSES), "mini-imagenet": ()}
NAMES = tuple(FOLDERS)
# The names that the folders of the three parts can have.
PARTS = {"train": ("train",), "validation": ("validation", "val", "valid"), "test": ("test",)}


@dataclass(frozen=True, repr=False)
class ImageClasses(ShortRepr):
    """Images of one size, class after class.

    `images` are bytes of shape (n, channels, height, width), `counts` the numbers of images of the classes, and `names`
    the names of the classes.
    """

    images: Tensor
    # The number of images of each class.
    counts: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"images must be bytes of shape (n, channels, height, width); got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}."
            )
        if len(self.counts) != len(self.names) or sum(self.counts) != len(self.images):
            raise DataError(
                f"counts must have a number for each of the {len(self.names)} classes, {len(self.images)} in all; got "
                f"{len(self.counts)} numbers, {sum(self.counts)} in all."
            )

    @classmethod
    def of(cls, images: Tensor, labels: Tensor, names: Sequence[str]) -> ImageClasses:
        """Sort images in any order by the index of their class; classes without images are left out."""
        order = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=len(names)).tolist()
        kept = [(name, count) for name, count in zip(names, counts, strict=True) if count]
        return cls(images[order], tuple(c for _, c in kept), tuple(name for name, _ in kept))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def firsts(self) -> list[int]:
        """The index of the first image of each class."""
        return [int(end) - count for end, count in zip(np.cumsum(self.counts), self.counts, strict=True)]

    def name_of(self, image: int) -> str:
        """Return the name of the class of an image."""
        return self.names[int(np.searchsorted(np.cumsum(self.counts), image, side="right"))]

    def select(self, classes: Sequence[int]) -> ImageClasses:
        """Return these classes, in this order."""
        firsts = self.firsts
        rows = [i for c in classes for i in range(firsts[c], firsts[c] + self.counts[c])]
        return ImageClasses(
            self.images[torch.tensor(rows, dtype=torch.int64)],
            tuple(self.counts[c] for c in classes),
            tuple(self.names[c] for c in classes),
        )

    def named(self, names: Sequence[str]) -> ImageClasses:
        """Return the classes with these names; raise DataError if a name is unknown."""
        known = {name: i for i, name in enumerate(self.names)}
        if lost := [name for name in names if name not in known]:
            raise DataError(f"the class {lost[0]!r} has no images; {len(lost)} of the {len(names)} classes have none.")
        return self.select([known[name] for name in names])

    def rotated(self) -> ImageClasses:
        """Return each class turned by 0, 90, 180 and 270 degrees, as four classes (Santoro et al. 2016)."""
        _, height, width = self.shape
        if height != width:
            raise OptionError(f"rotations need square images; these are {width}x{height}.")
        turned = torch.cat([torch.rot90(self.images, i, (2, 3)) for i in range(len(ROTATIONS))])
        names = tuple(f"{name} {degrees}°" for degrees in ROTATIONS for name in self.names)
        return ImageClasses(turned.contiguous(), self.counts * len(ROTATIONS), names)


@dataclass(frozen=True)
class ClassSplits:
    """Classes for meta-training, meta-validation and meta-test; no class is in two of them."""

    name: str
    train: ImageClasses
    validation: ImageClasses | None
    test: ImageClasses
    notes: tuple[str, ...] = ()
    # Whether a seed divided the classes; False if the data say which class is in which part.
    drawn: bool = False

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for part, classes in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            for name in () if classes is None else classes.names:
                if name in seen:
                    raise DataError(f"the class {name!r} is in two parts, {seen[name]} and {part}; it must be in one.")
                seen[name] = part
        shapes = {part.shape for part in self._parts()}
        if len(shapes) > 1:
            raise DataError(
                "the images of all parts must have one shape (channels, height, width); got "
                f"{', '.join(map(str, sorted(shapes)))}. Bring them to one size, all grey or all in colour."
            )

    def _parts(self) -> list[ImageClasses]:
        return [part for part in (self.train, self.validation, self.test) if part is not None]

    def rotated(self) -> ClassSplits:
        """Return all parts with rotations as more classes."""
        validation = None if self.validation is None else self.validation.rotated()
        return replace(self, train=self.train.rotated(), validation=validation, test=self.test.rotated())

    def joined(self) -> ImageClasses:
        """Return the classes of all parts together."""
        parts = self._parts()
        counts, names = sum((part.counts for part in parts), ()), sum((part.names for part in parts), ())
        return ImageClasses(torch.cat([part.images for part in parts]), counts, names)


def split_classes(name: str, classes: ImageClasses, seed: int = 0, notes: tuple[str, ...] = ()) -> ClassSplits:
    """Split by class at random: 64% for meta-training, 16% for meta-validation, the others for the test."""
    if (count := len(classes.names)) < 3:
        raise DataError(f"{name}: at least 3 classes are needed, one for each part; there are {count}.")
    train = min(max(1, round(SHARES[0] * count)), count - 2)
    end = train + min(max(1, round(SHARES[1] * count)), count - train - 1)
    order = np.random.default_rng(seed).permutation(count).tolist()
    first, held, last = (classes.select(sorted(some)) for some in (order[:train], order[train:end], order[end:]))
    return ClassSplits(name, first, held, last, notes, drawn=True)


def load_classes(
    source: str | Path,
    *,
    validation: int = 100,
    seed: int = 0,
    read: Reader | None = None,
) -> ClassSplits:
    """Read images by class, in three parts without a common class: meta-training, meta-validation, meta-test.

    `source` is one of:

    - `omniglot`: 1,200 of the 1,623 characters are for training and validation;
    - `cifar-fs` or `mini-imagenet`, with their published parts;
    - a folder in the form of mini-ImageNet: images, and the lists train.csv, val.csv and test.csv;
    - a folder with the folders train, val (optional) and test, each with a folder of images for each class;
    - a folder with a folder of images for each class, split at random: 64%, 16% and 20% of the classes.

    `validation` (default 100) is the number of characters of Omniglot for meta-validation. `seed` (default 0) draws a
    random split. `read` reads an image of a class folder, for example `read_like(...)`; by default all images are
    brought to one size.
    """
    in_range("validation", validation, least=0, most=OMNIGLOT_TRAIN - 1, whole=True)
    if source == "omniglot":
        return _omniglot(_folder(source), validation)
    if source == "cifar-fs":
        return _cifar_fs(_folder(source))
    root = _folder(source) if source == "mini-imagenet" else Path(source)
    if not root.is_dir():
        raise DataError(
            f"{str(source)!r} is neither a folder nor a named set.{did_you_mean(str(source).lower(), NAMES)} "
            f"The named sets are {', '.join(NAMES)}."
        )
    if source == "mini-imagenet" or all((root / name).is_file() for name in LISTS):
        return _mini_imagenet(root)
    return _class_folders(root, seed, read)


def read_like(shape: Sequence[int], *, characters: bool) -> Reader:
    """Return a reader of images that brings them to this shape (channels, height, width).

    If `characters` is true, it prepares them as Omniglot's.
    """
    channels, height, width = shape
    if characters:
        return lambda file: (ink(file), False)
    return partial(read_pixels, size=(width, height), mode="L" if channels == 1 else "RGB")


def found_in(name: str) -> Path | None:
    """Return the folder with the files of a named set, or None if a file is missing.

    Of the images of mini-ImageNet, only the first is looked for.
    """
    try:
        folder = _folder(name)
        if name == "mini-imagenet":
            _path_of(folder, *_read_lists(folder)[0][0])
    except DataError:
        return None
    return folder if all((folder / file).is_file() for file in FILES[name]) else None


def _folder(name: str) -> Path:
    """Return the folder of a named set."""
    given = os.environ.get("BILEVEL_DATA")
    for word in FOLDERS[name]:
        if given and (Path(given) / word).is_dir():
            return Path(given) / word
    raise DataError(
        f"{name} is not here: put it into a folder {FOLDERS[name][0]}, and name the folder above it in the environment "
        f"variable BILEVEL_DATA ({f'it is {given}' if given else 'it is not set'}). docs/few-shot.md lists its files."
    )


def _by_class(pixels: Tensor, labels: Sequence[str]) -> ImageClasses:
    """Return images with the names of their classes, the classes sorted by name."""
    names, places = np.unique(np.array(labels), return_inverse=True)
    return ImageClasses.of(pixels, torch.from_numpy(places), names.tolist())


def _omniglot(folder: Path, validation: int) -> ClassSplits:
    pixels, names = [], []
    for file in OMNIGLOT:
        with reading(folder / file), zipfile.ZipFile(folder / file) as archive:
            for member in sorted(name for name in archive.namelist() if name.endswith(".png")):
                with archive.open(member) as png:
                    pixels.append(ink(png))
                names.append("/".join(member.split("/")[-3:-1]))
    classes = _by_class(torch.from_numpy(np.stack(pixels))[:, None], names)
    known = len(classes.names)
    count = min(OMNIGLOT_TRAIN, known * OMNIGLOT_TRAIN // 1623)
    order = np.random.default_rng(OMNIGLOT_SEED).permutation(known).tolist()
    train = count - min(validation, count - 1)
    held = classes.select(order[train:count]) if validation else None
    return ClassSplits("omniglot", classes.select(order[:train]), held, classes.select(order[count:]))


def ink(file: str | Path | IO[bytes]) -> np.ndarray:
    """Return a character as 28x28 bytes, in which ink is 255."""
    pillow = require("PIL.Image", "apps")
    with pillow.open(file) as image:
        small = image.convert("L").resize((OMNIGLOT_SIDE, OMNIGLOT_SIDE), pillow.Resampling.BOX)
    return 255 - np.asarray(small)


def _cifar_fs(folder: Path) -> ClassSplits:
    with reading(folder):
        images = torch.from_numpy(np.concatenate([sheet(folder / name) for name in SHEETS]))
        with np.load(folder / CIFAR_LABELS, allow_pickle=False) as labels:
            y = torch.from_numpy(labels["fine"].astype(np.int64))
        known = json.loads((folder / CIFAR_CLASSES).read_text(encoding="utf-8"))
    classes = ImageClasses.of(images, y, known["fine_label_names"])
    train, held, test = (classes.named(known["cifar_fs"][part]) for part in ("train", "val", "test"))
    note = f"CIFAR-FS here has {classes.counts[0]} images a class; the published set has 600."
    return ClassSplits("cifar-fs", train, held, test, (note,))


def _mini_imagenet(folder: Path) -> ClassSplits:
    """Read images in `images/`, in the folder or in class folders, with the lists of Ravi and Larochelle."""
    parts = []
    for pairs in _read_lists(folder):
        pixels = torch.from_numpy(np.stack([_photo(_path_of(folder, *pair)) for pair in pairs]))
        parts.append(_by_class(pixels.permute(0, 3, 1, 2).contiguous(), [label for _, label in pairs]))
    train, held, test = parts
    return ClassSplits("mini-imagenet", train, held, test)


def _path_of(folder: Path, file: str, label: str) -> Path:
    """Return the path of an image of the lists."""
    for place in (f"images/{file}", file, f"{label}/{file}", f"images/{label}/{file}"):
        if (folder / place).is_file():
            return folder / place
    raise DataError(
        f"{folder} must hold the images of the lists; images/{file}, {file} and {label}/{file} do not exist. The "
        "images come from ImageNet and are not part of the lists."
    )


def _photo(path: Path) -> np.ndarray:
    with reading(path):
        return read_pixels(path, (MINI_SIDE, MINI_SIDE), "RGB")[0]


def _read_lists(folder: Path) -> list[list[tuple[str, str]]]:
    """Return (file, class) of each row of train.csv, val.csv and test.csv, in the folder or in a zip file there."""
    found = []
    for name in LISTS:
        path = folder / name
        try:
            text = (path if path.is_file() else zipfile.Path(folder / ARCHIVE, name)).read_text(encoding="utf-8")
        except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile):
            raise DataError(
                f"{folder} must hold the lists {', '.join(LISTS)}, or {ARCHIVE}; {name} is missing or cannot be read."
            ) from None
        rows = csv.DictReader(text.split("\n"))
        if "label" not in (rows.fieldnames or ()):
            raise DataError(f"{path} must have the column `label` (filename,label); it has {rows.fieldnames}.")
        pairs = [(row.get("filename") or "", row["label"]) for row in rows]
        if not pairs:
            raise DataError(f"{path} has no rows.")
        found.append(pairs)
    return found


def _class_folders(root: Path, seed: int, read: Reader | None) -> ClassSplits:
    parts = {part: root / n for part, names in PARTS.items() for n in reversed(names) if any((root / n).glob("[!.]*/"))}
    name = root.resolve().name
    if not parts:
        classes, notes = _classes_of(root, read)
        return split_classes(name, classes, seed, notes)
    if missing := [part for part in ("train", "test") if part not in parts]:
        raise DataError(
            f"{root} has class folders in {' and '.join(folder.name for folder in parts.values())}, and none in "
            f"{' and '.join(missing)}. Give both, or class folders only, which are split by --seed."
        )
    found = {part: _classes_of(folder, read) for part, folder in parts.items()}
    held = found["validation"][0] if "validation" in found else None
    notes = tuple(note for _, notes in found.values() for note in notes)
    return ClassSplits(name, found["train"][0], held, found["test"][0], notes)


def _classes_of(folder: Path, read: Reader | None) -> tuple[ImageClasses, tuple[str, ...]]:
    data = load_folder(folder, {}, read)
    return ImageClasses.of((data.x * 255).round().to(torch.uint8), data.y, data.classes), data.notes
