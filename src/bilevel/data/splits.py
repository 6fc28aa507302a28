"""Rows moved out of x into `trusted` or `test`, every class in its share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from bilevel._util.checks import in_range
from bilevel.data.labelled import Labelled, Pair
from bilevel.errors import OptionError


def split_trusted(data: Labelled, count: int, seed: int) -> Labelled:
    """Move `count` rows of x into `trusted`, drawn by class: at least one of each where `count` allows it."""
    if data.trusted is not None:
        raise OptionError(f"{data.name} has {len(data.trusted[1])} trusted rows already; none can be drawn from x.")
    rest, pair = _drawn(data, count, seed)
    return replace(rest, trusted=pair)


def split_test(
    data: Labelled, *, share: float | None = None, count: int | None = None, seed: int, keep: int = 0
) -> Labelled:
    """Move a share of the rows of x, or `count` rows, into `test`, drawn by class as in `split_trusted`.

    `keep` rows of each class stay in any case, unless all would.
    """
    if data.test is not None:
        raise OptionError(f"{data.name} has {len(data.test[1])} test rows already; none can be drawn from x.")
    if share is not None and count is None:
        in_range("share", share, above=0, below=1)
        count = max(1, round(share * data.count))
    elif share is not None or count is None:
        raise OptionError(f"Give either share or count; got share={share!r} and count={count!r}.")
    rest, pair = _drawn(data, count, seed, keep)
    return replace(rest, test=pair)


def _drawn(data: Labelled, count: int, seed: int, keep: int = 0) -> tuple[Labelled, Pair]:
    in_range("count", count, least=1, whole=True)
    in_range("seed", seed, least=0, whole=True)
    if count >= data.count:
        raise OptionError(
            f"count must be below the {data.count} rows of {data.name}, so that some are left; got {count}."
        )
    random = np.random.default_rng(seed)
    y = data.y.cpu().numpy()
    members = [random.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    quotas = _quotas([len(rows) for rows in members], count, keep)
    drawn = np.sort(np.concatenate([rows[:quota] for rows, quota in zip(members, quotas, strict=True)]))
    left = np.setdiff1d(np.arange(data.count), drawn)
    at = torch.from_numpy(drawn)
    return data.select(left), (data.x[at], data.y[at])


def _quotas(sizes: list[int], count: int, keep: int) -> list[int]:
    """How many of `count` each class gives: its share, rounded so that the sum fits; at least one where that can be."""
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
