"""Images by class, for few-shot learning: bytes in memory, classes in three disjoint parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import DataError, OptionError

ROTATIONS = (0, 90, 180, 270)
SHARES = 0.64, 0.16
"""Of the classes, for meta-training and meta-validation, where nothing says which; the others are for the test."""


@dataclass(frozen=True)
class ImageClasses:
    """Images of one size as bytes, (n, channels, height, width), those of a class one after another."""

    images: Tensor
    counts: tuple[int, ...]
    """How many images each class has."""
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
        """Images in any order with the index of their class; classes without an image are left out."""
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
        """Where each class begins."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]]).tolist() if self.counts else []

    def name_of(self, image: int) -> str:
        """The name of the class that the image of this number is of."""
        return self.names[int(np.searchsorted(np.cumsum(self.counts), image, side="right"))]

    def select(self, classes: Sequence[int]) -> ImageClasses:
        """These classes, in this order."""
        firsts = self.firsts
        rows = [torch.arange(firsts[c], firsts[c] + self.counts[c]) for c in classes]
        at = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return ImageClasses(
            self.images[at], tuple(self.counts[c] for c in classes), tuple(self.names[c] for c in classes)
        )

    def named(self, names: Sequence[str]) -> ImageClasses:
        """The classes of these names; refuses one that is not there."""
        known = {name: i for i, name in enumerate(self.names)}
        if lost := [name for name in names if name not in known]:
            raise DataError(f"the class {lost[0]!r} of the lists has no images; {len(lost)} of {len(names)} have none.")
        return self.select([known[name] for name in names])

    def rotated(self) -> ImageClasses:
        """Each class turned by 0, 90, 180 and 270 degrees, as classes of their own (Santoro et al. 2016)."""
        _, height, width = self.shape
        if height != width:
            raise OptionError(f"rotations need square images; these are {width}x{height}.")
        turned = torch.cat([torch.rot90(self.images, i, (2, 3)) for i in range(len(ROTATIONS))])
        names = tuple(f"{name} {degrees}°" for degrees in ROTATIONS for name in self.names)
        return ImageClasses(turned.contiguous(), self.counts * len(ROTATIONS), names)


@dataclass(frozen=True)
class ClassSplits:
    """Classes for meta-training, meta-validation and meta-test: none is in two of them."""

    name: str
    train: ImageClasses
    validation: ImageClasses | None
    test: ImageClasses
    notes: tuple[str, ...] = ()
    drawn: bool = False
    """Whether a seed says which class is in which part, and not whoever made the data."""

    def __post_init__(self) -> None:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        seen: dict[str, str] = {}
        for part, classes in parts.items():
            for name in () if classes is None else classes.names:
                if name in seen:
                    raise DataError(f"the class {name!r} is in two parts, {seen[name]} and {part}; it may be in one.")
                seen[name] = part
        shapes = {part.shape for part in parts.values() if part is not None}
        if len(shapes) > 1:
            raise DataError(
                "the images of all parts must have one shape (channels, height, width); got "
                f"{', '.join(map(str, sorted(shapes)))}. Bring them to one size, all grey or all in colour."
            )

    def rotated(self) -> ClassSplits:
        """All parts with rotations as further classes."""
        validation = None if self.validation is None else self.validation.rotated()
        return ClassSplits(self.name, self.train.rotated(), validation, self.test.rotated(), self.notes, self.drawn)

    def joined(self) -> ImageClasses:
        """The classes of all parts."""
        parts = [part for part in (self.train, self.validation, self.test) if part is not None]
        return ImageClasses(
            torch.cat([part.images for part in parts]),
            sum((part.counts for part in parts), ()),
            sum((part.names for part in parts), ()),
        )


def split_classes(name: str, classes: ImageClasses, seed: int = 0, notes: tuple[str, ...] = ()) -> ClassSplits:
    """Split by class at random: 64% for meta-training, 16% for meta-validation, the others for the test."""
    count = len(classes.names)
    if count < 3:
        raise DataError(f"{name}: at least 3 classes are needed, one for each part; there are {count}.")
    train = min(max(1, round(SHARES[0] * count)), count - 2)
    validation = min(max(1, round(SHARES[1] * count)), count - train - 1)
    order = np.random.default_rng(seed).permutation(count).tolist()
    return ClassSplits(
        name,
        classes.select(sorted(order[:train])),
        classes.select(sorted(order[train : train + validation])),
        classes.select(sorted(order[train + validation :])),
        notes,
        drawn=True,
    )
