"""Labelled examples with facts about their source, their labels, splits by class, and label noise.

A label is text, a whole number (1 and 1.0 are the class "1"), or true or false. Classes are sorted by value if all are
numbers, else by name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import ShortRepr, agreeing, check_counts, first_of, in_range, one_of
from bilevel.errors import BilevelError, DataError, OptionError, reason

Kind = Literal["images", "table", "arrays"]
Classes = tuple[str, ...]
# Inputs and their labels.
Pair = tuple[Tensor, Tensor]
# Labels with more different values than this, and than half the number of rows, are not classes.
MANY = 20
LEAST_ROWS = 10
# Reads labels as `class_labels` does.
LabelReader = Callable[[Any, str, Classes | None], tuple[Tensor, Classes]]


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


@dataclass(frozen=True, repr=False)
class Labelled(ShortRepr):
    """Examples whose labels can be wrong; the labels of `trusted` and `test` are right. `load` makes one from a file.

    Args:
        name: The name of the source, for messages and reports.
        kind: "images", "table" or "arrays".
        x: The inputs, float32. Images have the shape (n, channels, height, width) and values in [0, 1]. Tables and
            arrays have the shape (n, columns): numbers have mean 0 and deviation 1 over x and are cut off at 10
            deviations; a category is a column of 0 and 1.
        y: The labels of x: int64 indices into `classes`, or float64 numbers to predict if there are no classes.
        classes: The names of the classes.
        keys: The name of each row of x at its source: the path of an image in its folder; for a table or an array the
            number of the row (from 0) and a checksum of the row and its label. Decisions for other rows are noticed by
            it.
        trusted: Inputs and labels that are right. Default: None, there are none; `split_trusted` draws some.
        test: Inputs and labels that nothing is trained on. Default: None, there are none; `split_test` draws some.
        fields: The columns of a table as they were read, to show to people; one value for each row of x. Default: none.
        notes: Sentences about what the reader did that a user should know, such as rows that were left out. Default:
            none.
        features: The names of the columns of x. Default: none, as for images.
        positions: The position of each row of x in x as `load` returned it; an export names the row by it. Default: 0,
            1, 2, ...
        transformer: Prepares new rows of the source: a pandas.DataFrame, an array or image files. `load` always sets
            it. Default: None, for data that you make yourself.

    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> data = Labelled("toy", "arrays", x, y, classes=("no", "yes"), keys=[f"row {i}" for i in range(40)])
    >>> data.count, data.select([0, 5]).keys
    (40, ['row 0', 'row 5'])
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
    notes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    transformer: Transformer | None = None

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
            raise DataError(f"{self.name} must have a {name} part with right labels; it has none.")
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


def class_labels(values: Any, where: str, classes: Classes | None) -> tuple[Tensor, Classes]:
    """Return labels as indices into the classes, and the classes.

    `values` is an array or a pandas.Series of labels, which `where` names in errors. `classes` are the classes of the
    main part; None: the labels are the main part's, and decide the classes.
    """
    held = values.tolist()
    if several := next((value for value in held if isinstance(value, (list, tuple, set, dict, np.ndarray))), None):
        raise DataError(
            f"{where}: each label must be one class; got {type(several).__name__}s, such as {several!r}. Data with "
            "several labels in a row are not read: clean one label at a time."
        )
    names = [name_of(value) for value in held]
    if missing := [i for i, name in enumerate(names) if name is None]:
        raise DataError(
            f"{where}: {len(missing)} of {len(names)} labels {agreeing(len(missing), 'is', 'are')} missing or not "
            f"finite, in {agreeing(len(missing), 'row', 'rows')} {first_of(missing, 3)} (from 0). Fill or remove "
            f"{agreeing(len(missing), 'it', 'them')}."
        )
    known = [name for name in names if name is not None]
    classes = classes_of(known, where) if classes is None else classes
    return indices(known, classes, where), classes


def name_of(value: object) -> str | None:
    """Return the class name of a label, or None if it is missing: None, NaN, an infinite number, empty text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else repr(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' marks; it need not be installed
        return None
    return str(value) or None


def classes_of(names: Sequence[str], where: str) -> Classes:
    """Return the sorted classes of the main part; raise DataError for labels that cannot be classes."""
    if len(names) < LEAST_ROWS:
        raise DataError(f"{where}: at least {LEAST_ROWS} rows are needed; there are {len(names)}.")
    found = set(names)
    numbers = {name: number for name in found if (number := _number(name)) is not None}
    all_numbers = len(numbers) == len(found)
    classes = sorted(found, key=lambda name: (numbers[name], name)) if all_numbers else sorted(found)
    if len(classes) < 2:
        raise DataError(f"{where}: at least 2 classes are needed; every label is {classes[0]!r}.")
    fractions = [name for name, number in numbers.items() if not number.is_integer()]
    if all_numbers and len(fractions) > MANY:
        raise DataError(
            f"{where}: the labels are numbers with {len(found)} different values, such as "
            f"{float(min(fractions)):.6g}; this looks like regression, and classes are needed. To predict numbers, use "
            "`bilevel tune --model ridge` or `--model mlp --numbers`."
        )
    if len(classes) > MANY and len(classes) > len(names) / 2:
        raise DataError(
            f"{where}: the labels have {len(classes)} different values in {len(names)} rows; this looks like an "
            "identifier or a measurement, and classes are needed."
        )
    return tuple(classes)


def indices(names: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """Return the place of each name in `classes`, as int64; raise DataError for a name that is missing."""
    place = {name: i for i, name in enumerate(classes)}
    if strange := sorted({name for name in names if name not in place}):
        raise DataError(
            f"{where}: the labels {first_of(map(repr, strange), 10)} do not occur in the main part, whose classes are "
            f"{first_of(map(repr, classes), 10)}."
        )
    return torch.tensor([place[name] for name in names], dtype=torch.int64)


def _number(name: str) -> float | None:
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def split_trusted(data: Labelled, count: int, seed: int) -> Labelled:
    """Return the data with some rows of x moved into `trusted`, in proportion to the classes.

    Args:
        data: The data, without trusted rows.
        count: The number of rows. Each class gives at least one if `count` allows it.
        seed: The seed of the draw; the same seed draws the same rows.

    >>> len(split_trusted(load("digits"), 50, seed=0).trusted[1])
    50
    """
    if data.trusted is not None:
        raise OptionError(f"{data.name} already has {len(data.trusted[1])} trusted rows; leave the split out.")
    rest, pair = _split(data, count, seed)
    return replace(rest, trusted=pair)


def split_test(
    data: Labelled, *, share: float | None = None, count: int | None = None, seed: int, keep: int = 0
) -> Labelled:
    """Return the data with some rows of x moved into `test`, in proportion to the classes.

    Args:
        data: The data, without test rows.
        share: The share of the rows, between 0 and 1. None (default): `count` says how many.
        count: The number of rows. None (default): `share` says how many. Give exactly one of the two.
        seed: The seed of the draw; the same seed draws the same rows.
        keep: The least number of rows of each class that stay in x, unless no class has more. Default: 0.

    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> data = Labelled("toy", "arrays", x, y, classes=("no", "yes"), keys=[f"row {i}" for i in range(40)])
    >>> parted = split_test(data, share=0.25, seed=0)
    >>> parted.count, len(parted.test[1])
    (30, 10)
    """
    if data.test is not None:
        raise OptionError(f"{data.name} already has {len(data.test[1])} test rows; leave the split out.")
    if (share is None) == (count is None):
        raise OptionError(f"Pass either share or count; got share={share!r} and count={count!r}.")
    if share is not None:
        in_range("share", share, above=0, below=1)
        count = max(1, round(share * data.count))
    rest, pair = _split(data, count, seed, keep)
    return replace(rest, test=pair)


def _split(data: Labelled, count: int | None, seed: int, keep: int = 0) -> tuple[Labelled, Pair]:
    """Return the data without `count` rows, and these rows."""
    check_counts(count=count)
    in_range("seed", seed, least=0, whole=True)
    if count is None or count >= data.count:
        raise OptionError(f"count must be below {data.count}, the number of rows of {data.name}; got {count}.")
    random = np.random.default_rng(seed)
    y = data.y.cpu().numpy()
    members = [random.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    quotas = _quotas([len(rows) for rows in members], count, keep)
    drawn = np.sort(np.concatenate([rows[:quota] for rows, quota in zip(members, quotas, strict=True)]))
    at = torch.from_numpy(drawn)
    return data.select(np.setdiff1d(np.arange(data.count), drawn)), (data.x[at], data.y[at])


def _quotas(sizes: list[int], count: int, keep: int) -> list[int]:
    """Divide `count` among the classes: by size, rounded so that the sum is right, at least one each if possible."""
    room = np.maximum(np.array(sizes) - keep, 0)
    room = room if room.any() else np.array(sizes)
    count = min(count, int(room.sum()))
    share = np.array(sizes) * (count / sum(sizes))
    quotas = np.minimum(np.maximum(np.floor(share), 1 if count >= len(sizes) else 0), room).astype(int)
    while quotas.sum() > count:
        quotas[np.argmax(np.where(quotas > 1, quotas - share, -np.inf))] -= 1
    while quotas.sum() < count:
        quotas[np.argmax(np.where(quotas < room, share - quotas, -np.inf))] += 1
    return [int(quota) for quota in quotas]


def corrupt(
    y: Tensor, rate: float, classes: int, seed: int, kind: Literal["symmetric", "asymmetric"] = "symmetric"
) -> Tensor:
    """Return labels with exactly round(rate * n) wrong ones, to measure how well wrong labels are found.

    Args:
        y: The labels, whole numbers from 0. They do not change.
        rate: The share of labels to make wrong, in [0, 1).
        classes: The number of classes.
        seed: The seed of the draw.
        kind: "symmetric" (default) replaces a label by any other class with the same probability. "asymmetric" replaces
            class c by c + 1, and the last class by 0, as if neighbours were mixed up.

    >>> int((corrupt(torch.zeros(10, dtype=torch.int64), 0.3, classes=4, seed=0) != 0).sum())
    3
    """
    in_range("rate", rate, least=0, below=1)
    in_range("classes", classes, least=2, whole=True)
    in_range("seed", seed, least=0, whole=True)
    one_of("kind", kind, ("symmetric", "asymmetric"))
    if y.ndim != 1 or y.is_floating_point() or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes):
        raise DataError(f"y must be a vector of whole numbers from 0 to {classes - 1}.")
    random = np.random.default_rng(seed)
    rows = random.permutation(len(y))[: round(rate * len(y))]
    shift = random.integers(1, classes, len(rows)) if kind == "symmetric" else np.ones(len(rows), np.int64)
    at = torch.from_numpy(rows).to(y.device)
    new = y.clone()
    new[at] = (y[at] + torch.from_numpy(shift).to(y)) % classes
    return new
