"""Labelled examples, and what is known of where they come from."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import DataError

Kind = Literal["images", "table", "arrays"]
Pair = tuple[Tensor, Tensor]
"""Inputs and their labels."""


def row_keys(rows: Iterable[bytes]) -> list[str]:
    """A key for each row: its number, and a checksum."""
    return [f"{i}-{zlib.crc32(row):08x}" for i, row in enumerate(rows)]


@dataclass(frozen=True)
class Labelled:
    """Examples with labels that may be wrong; `trusted` and `test` have labels that are right.

    Inputs are float32: images as (n, channels, height, width) in [0, 1]; tables and arrays as (n, columns), where
    numbers have mean 0 and deviation 1 over x and end at 10 deviations, and categories are columns of 0 and 1. Labels
    are int64 indices into `classes`. `keys` says what each row of x is called at its source: the path of an image in
    its folder; of a table or an array the number of a row (from 0) and a checksum of it and its label, by which
    decisions on other rows are told apart.
    """

    name: str
    kind: Kind
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    keys: Sequence[str]
    trusted: Pair | None = None
    test: Pair | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The columns of a table as they were read, for people to look at; one value for each row of x."""
    notes: tuple[str, ...] = ()
    """Sentences on what the reader did that a user should know, such as rows that were left out."""
    features: tuple[str, ...] = ()
    """What the columns of x are called; none for images."""
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Where each row of x stood in x as `load` gave it, which is how an export names it. Not given: 0, 1, 2, ..."""

    def __post_init__(self) -> None:
        if len(self.positions) == 0:
            object.__setattr__(self, "positions", np.arange(len(self.y)))

    @property
    def count(self) -> int:
        return len(self.y)

    def part(self, name: Literal["trusted", "test"]) -> Pair:
        """The trusted or the test part; data without it is refused."""
        found = self.trusted if name == "trusted" else self.test
        if found is None:
            raise DataError(f"{self.name} must have a {name} part, with labels that are right; it has none.")
        return found

    def select(self, rows: np.ndarray) -> Labelled:
        """These rows of x with all that belongs to them; `trusted` and `test` stay."""
        at = torch.from_numpy(np.asarray(rows, dtype=np.int64))
        return replace(
            self,
            x=self.x[at],
            y=self.y[at],
            keys=[self.keys[i] for i in rows],
            fields={name: values[rows] for name, values in self.fields.items()},
            positions=self.positions[rows],
        )
