"""How a batch is divided among the ranks of a run.

A rank gets a part of each batch: neighbouring examples, as many as the other ranks have, or one more. Every rank draws
the same batches from the same seed, and takes its share of each. If shares have different sizes, an objective that is
a mean over examples is multiplied by the share's `weight`, the number of ranks times the share's part of the examples,
so that the mean over ranks is the mean over the batch. A batch with fewer examples than ranks is given to all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from bilevel._util.nested import each_tensor
from bilevel.errors import DataError


class BatchShare(NamedTuple):
    """A rank's part of a batch, with its weight, if the parts have different sizes.

    `shared`: the part is the whole batch, which all ranks have.
    """

    batch: Any
    weight: float
    shared: bool = False


class RankShares:
    """How batches are divided among `size` ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def part(self, count: int) -> tuple[int, int, float]:
        """Return which of `count` examples are this rank's, and their weight."""
        if count < self.size:
            return 0, count, 1.0
        start, stop = count * self.rank // self.size, count * (self.rank + 1) // self.size
        return start, stop, (stop - start) * self.size / count

    def chosen(self, index: Any, select: Callable[[Any], Any]) -> Any:
        """Return this rank's share of the batch that `select` makes of an index."""
        start, stop, weight = self.part(len(index))
        return weighted(select(index[start:stop]), weight, shared=len(index) < self.size)

    def divide(self, batch: Any, name: str) -> Any:
        """Return this rank's share of a whole batch."""
        leaves = leaves_of(batch)
        shapes = [tuple(t.shape) for t in leaves if isinstance(t, Tensor)]
        arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves)
        if not shapes:
            return batch
        if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1 or arrays:
            raise DataError(
                f"under torchrun every tensor of a batch must have a row for each example, so that ranks can share it; "
                f"the {name} data gave {'numpy arrays' if arrays else f'shapes {shapes}'}. Pass tensors of one length, "
                "or an iterable with per_rank = True, which gives each rank its own batches."
            )
        return self.chosen(range(shapes[0][0]), lambda rows: each_tensor(lambda t: t[rows.start : rows.stop], batch))

    def divided(self, items: Any, name: str) -> bool:
        """Return whether the source already gives each rank its own batches."""
        for owner in (items, getattr(items, "batch_sampler", None)):
            sampler = getattr(owner, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                if sampler.num_replicas != self.size or sampler.rank != self.rank:
                    raise DataError(
                        f"the {name} data has a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}; "
                        f"this is rank {self.rank} of {self.size}. Leave the sampler out: solve divides the batches."
                    )
                return True
        return bool(getattr(items, "per_rank", False))


def weighted(batch: Any, weight: float, *, shared: bool = False) -> Any:
    """Return the batch, with its weight if that is not one, or if all ranks have the batch."""
    return BatchShare(batch, weight, shared) if shared or weight != 1.0 else batch


def leaves_of(batch: Any) -> list[Any]:
    """Return all entries of nested tuples, lists and dicts."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [leaf for item in batch for leaf in leaves_of(item)] if isinstance(batch, (tuple, list)) else [batch]


class SharedLoader:
    """A DataLoader from which a rank loads its own examples only, with the weights of its batches."""

    def __init__(self, loader: DataLoader[Any], shares: RankShares) -> None:
        self._weights: deque[tuple[float, bool]] = deque()
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=_SharedSampler(loader.batch_sampler, shares, self._weights),  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
        )

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        for batch in self._loader:
            weight, shared = self._weights.popleft()
            yield weighted(batch, weight, shared=shared)


class _SharedSampler(BatchSampler):
    """The indices of this rank's examples, batch by batch."""

    def __init__(self, batches: BatchSampler, shares: RankShares, weights: deque[tuple[float, bool]]) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self._batches, self._shares, self._weights = batches, shares, weights

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            start, stop, weight = self._shares.part(len(batch))
            self._weights.append((weight, len(batch) < self._shares.size))
            yield batch[start:stop]
