"""Rows of x moved into `trusted` or `test`, class by class; labels made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import in_range, one_of
from bilevel.data.labelled import Labelled, Pair
from bilevel.errors import DataError, OptionError


def split_trusted(data: Labelled, count: int, seed: int) -> Labelled:
    """Move `count` rows of x into `trusted`, in proportion to the classes.

    Each class gives at least one row if `count` allows it. The same `seed` draws the same rows.
    """
    if data.trusted is not None:
        raise OptionError(f"{data.name} already has {len(data.trusted[1])} trusted rows; leave the split out.")
    rest, pair = _split(data, count, seed)
    return replace(rest, trusted=pair)


def split_test(
    data: Labelled, *, share: float | None = None, count: int | None = None, seed: int, keep: int = 0
) -> Labelled:
    """Move a share of the rows of x, or `count` rows, into `test`, in proportion to the classes.

    Give either `share`, between 0 and 1, or `count`. `keep` rows of each class stay in x, unless no class has more.
    """
    if data.test is not None:
        raise OptionError(f"{data.name} already has {len(data.test[1])} test rows; leave the split out.")
    if (share is None) == (count is None):
        raise OptionError(f"Give either share or count; got share={share!r} and count={count!r}.")
    if share is not None:
        in_range("share", share, above=0, below=1)
        count = max(1, round(share * data.count))
    rest, pair = _split(data, count, seed, keep)
    return replace(rest, test=pair)


def _split(data: Labelled, count: int | None, seed: int, keep: int = 0) -> tuple[Labelled, Pair]:
    """Return the data without `count` rows, and these rows."""
    in_range("count", count, least=1, whole=True)
    in_range("seed", seed, least=0, whole=True)
    if count is None or count >= data.count:
        raise OptionError(f"count must be below {data.count}, the number of rows of {data.name}; got {count}.")
    random = np.random.default_rng(seed)
    y = data.y.cpu().numpy()
    members = [random.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    quotas = _quotas([len(rows) for rows in members], count, keep)
    drawn = np.sort(np.concatenate([rows[:quota] for rows, quota in zip(members, quotas, strict=True)]))
    left = np.setdiff1d(np.arange(data.count), drawn)
    at = torch.from_numpy(drawn)
    return data.select(left), (data.x[at], data.y[at])


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

    The rows are drawn at random by `seed`; y does not change. `symmetric` replaces a label by any other of the
    `classes`, each with the same probability; `asymmetric` replaces class c by c + 1, and the last class by 0.

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
