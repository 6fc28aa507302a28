"""From what a user names to classes in three parts: `omniglot`, `cifar-fs`, `mini-imagenet`, or a folder.

Named sets are looked for in `$BILEVEL_DATA`, each in the folder of its name; `cifar-fs` in that of `cifar100`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from bilevel._util.checks import did_you_mean, in_range
from bilevel.data.class_images import ClassSplits, ImageClasses, split_classes
from bilevel.data.files import sheet
from bilevel.data.image_folders import Reader, load_folder, read_pixels
from bilevel.errors import DataError, OptionError

OMNIGLOT = ("images_background.zip", "images_evaluation.zip")
OMNIGLOT_SIDE, OMNIGLOT_TRAIN, OMNIGLOT_SEED = 28, 1200, 0
"""The size of the images, and how many of the 1,623 characters are not for the test, in an order drawn by this seed."""
SHEETS = tuple(f"train_{i}.webp" for i in range(3))
CIFAR_LABELS, CIFAR_CLASSES = "labels.npz", "classes_and_splits.json"
MINI_SIDE = 84
LISTS = ("train.csv", "val.csv", "test.csv")
ARCHIVE = "ravi_larochelle_splits.zip"
FOLDERS = {"omniglot": ("omniglot",), "cifar-fs": ("cifar100",), "mini-imagenet": ("mini-imagenet", "mini_imagenet")}
"""The folders of `$BILEVEL_DATA` that a named set is looked for in."""
NAMES = tuple(FOLDERS)
PARTS = {"train": ("train",), "validation": ("validation", "val", "valid"), "test": ("test",)}
"""What the folders of the three parts may be called."""


def load_classes(
    source: str | Path,
    *,
    lists: str | Path | None = None,
    validation: int = 100,
    seed: int = 0,
    read: Reader | None = None,
) -> ClassSplits:
    """Read images by class, split by class.

    `source` is `omniglot` (1,200 characters of 1,623 to learn from, `validation` of them for meta-validation),
    `cifar-fs`, `mini-imagenet`, a folder in mini-ImageNet's form, or a folder of class folders. The latter is split by
    `seed`, unless it has the folders train, val and test, or `lists` names a folder or zip file with train.csv, val.csv
    and test.csv, whose column `label` has the classes. `read` is how an image of class folders is read, `read_like` for
    example; by default all come to one size.
    """
    in_range("validation", validation, least=0, most=OMNIGLOT_TRAIN - 1, whole=True)
    if lists is not None and source in ("omniglot", "cifar-fs"):
        raise DataError(f"{source} has a split of its own; leave the lists (--lists) out.")
    if source == "omniglot":
        return _omniglot(_folder(source), validation)
    if source == "cifar-fs":
        return _cifar_fs(_folder(source))
    if source == "mini-imagenet":
        return _mini_imagenet(_folder(source), lists)
    root = Path(source)
    if not root.is_dir():
        hint = did_you_mean(str(source).lower(), NAMES)
        raise DataError(
            f"{str(source)!r} is neither a folder nor a named set.{hint} The named sets are {', '.join(NAMES)}."
        )
    if all((root / name).is_file() for name in LISTS):
        return _mini_imagenet(root, lists)
    return _class_folders(root, lists, seed, read)


def read_like(shape: Sequence[int], *, characters: bool) -> Reader:
    """How images are read that are to be like those of this shape (channels, height, width), or, where these are
    `characters`, like Omniglot's."""
    channels, height, width = shape
    if characters:
        return lambda file: (ink(file), False)
    return partial(read_pixels, size=(width, height), mode="L" if channels == 1 else "RGB")


def found_in(name: str) -> Path | None:
    """The folder that has the files of a named set; None where one is missing. Of images one is looked for."""
    try:
        folder = _folder(name)
        if name == "mini-imagenet":
            file, label = _read_lists(folder)["train"][0]
            return folder if any(path.is_file() for path in _places(folder, file, label)) else None
    except DataError:
        return None
    files = OMNIGLOT if name == "omniglot" else (*SHEETS, CIFAR_LABELS, CIFAR_CLASSES)
    return folder if all((folder / file).is_file() for file in files) else None


def _folder(name: str) -> Path:
    """The folder of a named set."""
    given = os.environ.get("BILEVEL_DATA")
    for word in FOLDERS[name]:
        if given and (Path(given) / word).is_dir():
            return Path(given) / word
    where = FOLDERS[name][0]
    now = f"it is {given}" if given else "it is not set"
    raise DataError(
        f"{name} is not here: put it into a folder {where}, and name the folder above it in the environment variable "
        f"BILEVEL_DATA ({now}). docs/few-shot.md has its files."
    )


def _omniglot(folder: Path, validation: int) -> ClassSplits:
    pixels, names = [], []
    for file in OMNIGLOT:
        try:
            with zipfile.ZipFile(folder / file) as archive:
                for member in sorted(name for name in archive.namelist() if name.endswith(".png")):
                    with archive.open(member) as png:
                        pixels.append(ink(png))
                    names.append("/".join(member.split("/")[-3:-1]))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{folder / file} cannot be read ({error}): a download that broke off, or another file."
            ) from None
    known = sorted(set(names))
    numbers = {name: i for i, name in enumerate(known)}
    classes = ImageClasses.of(
        torch.from_numpy(np.stack(pixels))[:, None], torch.tensor([numbers[name] for name in names]), known
    )
    count = min(OMNIGLOT_TRAIN, len(known) * OMNIGLOT_TRAIN // 1623)
    order = np.random.default_rng(OMNIGLOT_SEED).permutation(len(known)).tolist()
    learnt = count - min(validation, count - 1)
    held = classes.select(order[learnt:count]) if validation else None
    return ClassSplits("omniglot", classes.select(order[:learnt]), held, classes.select(order[count:]))


def ink(file: str | Path | IO[bytes]) -> np.ndarray:
    """A character as 28x28 bytes, in which ink is 255."""
    with Image.open(file) as image:
        small = image.convert("L").resize((OMNIGLOT_SIDE, OMNIGLOT_SIDE), Image.Resampling.BOX)
    return 255 - np.asarray(small)


def _cifar_fs(folder: Path) -> ClassSplits:
    try:
        images = torch.from_numpy(np.concatenate([sheet(folder / name) for name in SHEETS]))
        with np.load(folder / CIFAR_LABELS, allow_pickle=False) as labels:
            y = torch.from_numpy(labels["fine"].astype(np.int64))
        known = json.loads((folder / CIFAR_CLASSES).read_text(encoding="utf-8"))
    except Exception as error:  # decoders raise anything on a broken file
        raise DataError(f"The sheets of CIFAR-100 in {folder} cannot be read ({error}).") from None
    classes = ImageClasses.of(images, y, known["fine_label_names"])
    parts = {part: classes.named(names) for part, names in known["cifar_fs"].items()}
    note = f"CIFAR-FS here has {classes.counts[0]} images a class; the published set has 600."
    return ClassSplits("cifar-fs", parts["train"], parts["val"], parts["test"], (note,))


def _mini_imagenet(folder: Path, lists: str | Path | None) -> ClassSplits:
    """Images in `images/`, in the folder itself or in class folders, with the lists of Ravi and Larochelle."""
    rows = _read_lists(Path(lists) if lists is not None else folder)
    parts = {}
    for part, pairs in rows.items():
        names = sorted({label for _, label in pairs})
        numbers = {name: i for i, name in enumerate(names)}
        pixels = torch.from_numpy(np.stack([_photo(folder, file, label) for file, label in pairs]))
        y = torch.tensor([numbers[label] for _, label in pairs])
        parts[part] = ImageClasses.of(pixels.permute(0, 3, 1, 2).contiguous(), y, names)
    return ClassSplits("mini-imagenet", parts["train"], parts["val"], parts["test"])


def _places(folder: Path, file: str, label: str) -> tuple[Path, ...]:
    """Where an image of the lists may be."""
    return folder / "images" / file, folder / file, folder / label / file, folder / "images" / label / file


def _photo(folder: Path, file: str, label: str) -> np.ndarray:
    for path in _places(folder, file, label):
        if path.is_file():
            try:
                with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
                    fitted = ImageOps.fit(image.convert("RGB"), (MINI_SIDE,) * 2, Image.Resampling.BILINEAR)
            except Exception as error:  # decoders raise anything on a broken file
                raise DataError(f"{path} cannot be decoded ({error}).") from None
            return np.asarray(fitted)
    raise DataError(
        f"{folder} must hold the images of the lists; there is no images/{file}, {file} or {label}/{file}. Its images "
        "come from ImageNet and are not part of the lists."
    )


def _read_lists(place: Path) -> dict[str, list[tuple[str, str]]]:
    """(file, class) of each row of train.csv, val.csv and test.csv, in a folder or in a zip file there."""
    archive = place if place.suffix == ".zip" else place / ARCHIVE
    if not place.exists():
        raise DataError(f"the lists are looked for in {place}, which is not there.")
    found = {}
    for name in LISTS:
        try:
            if archive.is_file() and not (place / name).is_file():
                with zipfile.ZipFile(archive) as opened:
                    text = opened.read(name).decode()
            else:
                text = (place / name).read_text(encoding="utf-8")
        except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile):
            raise DataError(
                f"{place} must hold the lists {', '.join(LISTS)}, or {ARCHIVE}; {name} is not there, or cannot be read."
            ) from None
        reader = csv.DictReader(io.StringIO(text))
        if "label" not in (reader.fieldnames or ()):
            raise DataError(
                f"{place / name} must have the column `label` (filename,label); it has {reader.fieldnames}."
            )
        found[name.removesuffix(".csv")] = [(row.get("filename") or "", row["label"]) for row in reader]
        if not found[name.removesuffix(".csv")]:
            raise DataError(f"{place / name} has no row.")
    return found


def _class_folders(root: Path, lists: str | Path | None, seed: int, read: Reader | None) -> ClassSplits:
    given = {part: next((root / n for n in names if _holds_folders(root / n)), None) for part, names in PARTS.items()}
    train, validation, test = given["train"], given["validation"], given["test"]
    if train is not None and test is not None:
        if lists is not None:
            raise OptionError(f"lists must be left out: {root} has folders for the parts already.")
        first, third = _classes_of(train, read), _classes_of(test, read)
        held = (None, ()) if validation is None else _classes_of(validation, read)
        return ClassSplits(root.resolve().name, first[0], held[0], third[0], (*first[1], *held[1], *third[1]))
    if there := [folder.name for folder in (train, validation, test) if folder is not None]:
        missing = " and ".join(name for name, folder in (("train", train), ("test", test)) if folder is None)
        raise DataError(
            f"{root} has class folders in {' and '.join(there)}, and none in {missing}. Give both, or class folders "
            "alone, which are split by --seed."
        )
    classes, notes = _classes_of(root, read)
    name = root.resolve().name
    if lists is None:
        return split_classes(name, classes, seed, notes)
    rows = _read_lists(Path(lists))
    parts = [classes.named(sorted({label for _, label in rows[part]})) for part in ("train", "val", "test")]
    return ClassSplits(name, parts[0], parts[1], parts[2], notes)


def _holds_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def _classes_of(folder: Path, read: Reader | None) -> tuple[ImageClasses, tuple[str, ...]]:
    data = load_folder(folder, {}, read)
    return ImageClasses.of(_bytes(data.x), data.y, data.classes), data.notes


def _bytes(x: Tensor) -> Tensor:
    return (x * 255).round().to(torch.uint8)
