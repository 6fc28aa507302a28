"""Labelled examples, and what is known about their source."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import BilevelError, DataError, reason

Kind = Literal["images", "table", "arrays"]
Pair = tuple[Tensor, Tensor]
"""Inputs and their labels."""


class Transformer(Protocol):
    """Turns new rows of a source into inputs, by the rules that were fitted on its main part."""

    def transform(self, X: Any, /) -> np.ndarray:
        """Return the inputs, shape (n, columns)."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any exception into a DataError that names the path: decoders raise anything on a broken file."""
    try:
        yield
    except BilevelError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read ({reason(error)}).") from None


def row_keys(rows: Iterable[bytes]) -> list[str]:
    """Return a key for each row: its number, and a checksum."""
    return [f"{i}-{zlib.crc32(row):08x}" for i, row in enumerate(rows)]


@dataclass(frozen=True)
class Labelled:
    """Examples whose labels can be wrong; the labels of `trusted` and `test` are right.

    Inputs are float32. Images have the shape (n, channels, height, width) and values in [0, 1]. Tables and arrays have
    the shape (n, columns): numbers have mean 0 and deviation 1 over x and are cut off at 10 deviations; a category is a
    column of 0 and 1. Labels are int64 indices into `classes`.

    `keys` names each row of x at its source: the path of an image in its folder; for a table or an array the number of
    the row (from 0) and a checksum of the row and its label, so that decisions for other rows are noticed.
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
    """The columns of a table as they were read, to show to people; one value for each row of x."""
    notes: tuple[str, ...] = ()
    """Sentences about what the reader did that a user should know, such as rows that were left out."""
    features: tuple[str, ...] = ()
    """The names of the columns of x; empty for images."""
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """The position of each row of x in x as `load` returned it, by which an export names it. Default: 0, 1, 2, ..."""
    transformer: Transformer | None = None
    """Prepares new rows of a table (a pandas.DataFrame) or of an .npz file; None for other sources."""

    def __post_init__(self) -> None:
        if len(self.positions) == 0:
            object.__setattr__(self, "positions", np.arange(len(self.y)))

    @property
    def count(self) -> int:
        """The number of rows of x."""
        return len(self.y)

    def part(self, name: Literal["trusted", "test"]) -> Pair:
        """Return the trusted or the test part; raise DataError if there is none."""
        found = self.trusted if name == "trusted" else self.test
        if found is None:
            raise DataError(f"{self.name} must have a {name} part, with labels that are right; it has none.")
        return found

    def select(self, rows: np.ndarray) -> Labelled:
        """Return these rows of x with everything that belongs to them; `trusted` and `test` stay."""
        at = torch.from_numpy(np.asarray(rows, dtype=np.int64))
        return replace(
            self,
            x=self.x[at],
            y=self.y[at],
            keys=[self.keys[i] for i in rows],
            fields={name: values[rows] for name, values in self.fields.items()},
            positions=self.positions[rows],
        )
