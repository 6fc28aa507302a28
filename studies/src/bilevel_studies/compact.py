"""Read SVHN and mini-ImageNet as the studies store them: compact, and coded with loss.

The library reads the published forms. The compact ones are in `$BILEVEL_DATA`, in `svhn` (contact sheets) and in
`mini_imagenet` (the WebP codes of all images of a part, one after another). To write the published form of
mini-ImageNet, its images and lists:

    python -m bilevel_studies.compact FOLDER
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import typer
from PIL import Image

from bilevel import data
from bilevel.data import Labelled, Pair, class_images
from bilevel.data.class_images import ARCHIVE, ClassSplits, ImageClasses
from bilevel.data.labelled import reading
from bilevel.data.named_sets import DIGITS

# Pixels of an image of a contact sheet, and images in its row.
SIDE, ROW = 32, 100
PARTS = "train", "val", "test"
LOSSY = "The images were coded with loss; they are not the published ones."


def load(name: str) -> Labelled:
    """Return a named data set; SVHN in its compact form if that is here."""
    folder = _folder("svhn")
    return svhn(folder) if name == "svhn" and (folder / "labels.npz").is_file() else data.load(name)


def load_classes(name: str, *, validation: int = 100) -> ClassSplits:
    """Return images by class; mini-ImageNet in its compact form if that is here."""
    folder = _folder("mini_imagenet")
    if name == "mini-imagenet" and (folder / "train.bin").is_file():
        return mini_imagenet(folder)
    return class_images.load_classes(name, validation=validation)


def _folder(name: str) -> Path:
    return Path(os.environ.get("BILEVEL_DATA", "data")) / name


def svhn(folder: Path) -> Labelled:
    """Return SVHN from contact sheets. The last sheet of a part has fewer rows, and black images at its end."""
    pairs: list[Pair] = []
    with reading(folder), np.load(folder / "labels.npz", allow_pickle=False) as labels:
        for part in ("train", "test"):
            y = torch.from_numpy(labels[part].astype(np.int64))
            x = np.concatenate([_sheet(path) for path in sorted(folder.glob(f"{part}_*.webp"))])[: len(y)]
            pairs.append((torch.from_numpy(x).float().div_(255), y))
    (x_main, y_main), test = pairs
    keys = [str(i) for i in range(len(y_main))]
    return Labelled("svhn", "images", x_main, y_main, DIGITS, keys, test=test, notes=(LOSSY,))


def _sheet(path: Path) -> np.ndarray:
    return _pixels(path).reshape(-1, SIDE, ROW, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)


def _pixels(file: Path | io.BytesIO) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def mini_imagenet(folder: Path) -> ClassSplits:
    parts: list[ImageClasses] = []
    for part in PARTS:
        with reading(folder / f"{part}.bin"), np.load(folder / f"{part}.npz", allow_pickle=False) as index:
            pixels = np.stack([_pixels(io.BytesIO(code)) for _, code in _codes(folder, part)])
            images, labels = torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(index["labels"].astype(int))
            parts.append(ImageClasses.of(images.contiguous(), labels, index["wnids"].tolist()))
    train, held, test = parts
    return ClassSplits("mini-imagenet", train, held, test, (LOSSY,))


def _codes(folder: Path, part: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the WebP code of each image of a part."""
    whole = (folder / f"{part}.bin").read_bytes()
    with np.load(folder / f"{part}.npz", allow_pickle=False) as index:
        ends, names = index["offsets"].tolist(), index["names"].tolist()
    for name, begin, end in zip(names, ends[:-1], ends[1:], strict=True):
        yield name, whole[begin:end]


def write_mini_imagenet(compact: Path, folder: Path) -> None:
    """Write the published form of mini-ImageNet from the compact one: the lists, and the images in `images`.

    A file has the published name, but its content stays WebP: JPEG would lose more, and Pillow reads by content.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with reading(compact / ARCHIVE), zipfile.ZipFile(compact / ARCHIVE) as lists:
        lists.extractall(folder)
    for part in PARTS:
        with reading(compact / f"{part}.bin"):
            for name, code in _codes(compact, part):
                (folder / "images" / name).write_bytes(code)


def main(folder: Path) -> None:
    """Write the published form of mini-ImageNet to a folder."""
    write_mini_imagenet(_folder("mini_imagenet"), folder)


if __name__ == "__main__":
    typer.run(main)
