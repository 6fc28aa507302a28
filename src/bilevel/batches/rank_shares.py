"""What a rank is given of each batch: neighbouring examples, as many as the other ranks have, or one more.

Every rank draws the same batches from the same seed, and takes its share of each. Where shares are of different sizes,
an objective that is a mean over examples is multiplied by the share's `weight`, ranks times its part of the examples,
so that the mean over ranks is the mean over the batch. A batch of fewer examples than ranks is given to all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from bilevel._util.nested import each_tensor
from bilevel.errors import DataError


class Share(NamedTuple):
    """A rank's part of a batch, where it is not as large as the others'."""

    batch: Any
    weight: float


class Sharing:
    """How batches are divided among `size` ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def part(self, count: int) -> tuple[int, int, float]:
        """Which of `count` examples are this rank's, and their weight."""
        if count < self.size:
            return 0, count, 1.0
        start, stop = count * self.rank // self.size, count * (self.rank + 1) // self.size
        return start, stop, (stop - start) * self.size / count

    def share(self, batch: Any, name: str) -> Any:
        """This rank's part of a whole batch."""
        tensors: list[Tensor] = []
        each_tensor(lambda t: tensors.append(t) or t, batch)  # type: ignore[func-returns-value]
        if not tensors:
            return batch
        shapes = [tuple(t.shape) for t in tensors]
        if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1 or _arrays(batch):
            raise DataError(
                f"under torchrun every tensor of a batch must have a row for each example, so that ranks can share it; "
                f"the {name} data gave {'numpy arrays' if _arrays(batch) else f'shapes {shapes}'}. Give tensors of one "
                "length, or each rank batches of its own: an iterable with per_rank = True."
            )
        start, stop, weight = self.part(shapes[0][0])
        return weighted(each_tensor(lambda t: t[start:stop], batch), weight)

    def divided(self, items: Any, name: str) -> bool:
        """Whether the source gives each rank batches of its own already."""
        samplers = [getattr(items, "sampler", None), getattr(getattr(items, "batch_sampler", None), "sampler", None)]
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler):
                if sampler.num_replicas != self.size or sampler.rank != self.rank:
                    raise DataError(
                        f"the {name} data has a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}; "
                        f"this is rank {self.rank} of {self.size}. Leave the sampler out: solve divides the batches."
                    )
                return True
        return bool(getattr(items, "per_rank", False))


def weighted(batch: Any, weight: float) -> Any:
    return batch if weight == 1.0 else Share(batch, weight)


def _arrays(batch: Any) -> bool:
    """Whether a batch holds numpy arrays, which are not divided."""
    if isinstance(batch, dict):
        return any(_arrays(item) for item in batch.values())
    if isinstance(batch, (tuple, list)):
        return any(_arrays(item) for item in batch)
    return isinstance(batch, np.ndarray)


class SharedLoader:
    """A DataLoader of which a rank loads its own examples alone, with the weights of its batches."""

    def __init__(self, loader: DataLoader[Any], sharing: Sharing) -> None:
        self._weights: deque[float] = deque()
        batches = _Shared(loader.batch_sampler, sharing, self._weights)  # type: ignore[arg-type]
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
                "timeout": loader.timeout,
                "worker_init_fn": loader.worker_init_fn,
            }
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            **workers,
        )

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        for batch in self._loader:
            yield weighted(batch, self._weights.popleft())


class _Shared(BatchSampler):
    """The indices of this rank's examples, batch by batch."""

    def __init__(self, batches: BatchSampler, sharing: Sharing, weights: deque[float]) -> None:
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self._batches, self._sharing, self._weights = batches, sharing, weights

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            indices: Sequence[int] = batch
            start, stop, weight = self._sharing.part(len(indices))
            self._weights.append(weight)
            yield list(indices[start:stop])

    def __len__(self) -> int:
        return len(self._batches)
