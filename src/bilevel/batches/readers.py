"""How a pass over the data is read.

A DataLoader over tensors is read by index, from tensors that live on the device; a list from copies of its tensors
there. All else streams: on CUDA from pinned memory, on a stream of its own, so that a copy overlaps with a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from bilevel._util.nested import each_tensor, move
from bilevel.batches.rank_shares import SharedLoader, Sharing, weighted
from bilevel.errors import DataError

ROOM = 0.25
"""The share of a GPU's free memory that data may live in."""
STACKED = 2**30
"""Most bytes of a list of examples that are stacked into one tensor on the CPU, which is a second copy of them."""
LONGEST = 4_000_000
"""Most indices that are drawn at the start of a pass: a longer pass is drawn batch by batch."""
SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""They draw nothing but indices, so that those of a whole pass can be drawn at its start."""
UNINDEXED = (torch.uint16, torch.uint32, torch.uint64)
"""torch selects no rows of these."""

Ready = tuple[Any, "torch.cuda.Event | None"]
"""A batch on the device, and the event that ends its copy: None where the present stream already holds the batch."""


class Shelf:
    """Copies of tensors on the device, each made once, and again where the tensor or its copy was changed in place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = int(ROOM * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
        self._copies: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors are on the device, or there is room for them."""
        missing = {id(t): t.nbytes for t in tensors if t.device != self.device and id(t) not in self._copies}
        return sum(missing.values()) <= self.room

    def takes(self, size: int) -> bool:
        """Whether there is room for `size` bytes more, which are then taken."""
        if self.device.type != "cuda":
            return self.device.type == "cpu" and size <= STACKED
        if size > self.room:
            return False
        self.room -= size
        return True

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        if tensor.device == self.device:
            return tensor
        if not _plain(tensor) or not self.holds([tensor]):
            return tensor.to(self.device, non_blocking=True)
        if id(tensor) in self._copies:
            _, copy, versions = self._copies[id(tensor)]
            if versions == (tensor._version, copy._version):
                return copy
        else:
            self.room -= tensor.nbytes
        version = tensor._version
        copy = tensor.to(self.device, non_blocking=True)
        self._copies[id(tensor)] = tensor, copy, (version, copy._version)
        return copy


class Listed:
    """A list of batches, whose tensors are moved once."""

    def __init__(self, items: Sequence[Any], shelf: Shelf) -> None:
        self.items, self.shelf = items, shelf

    def begin(self, first: int) -> Iterator[Ready]:
        """Start a pass at its batch `first`."""
        return ((each_tensor(self.shelf.copy, batch), None) for batch in islice(self.items, first, None))


class Indexed:
    """A DataLoader over tensors: its indices of a whole pass are drawn at the start, its batches selected by them."""

    def __init__(self, loader: DataLoader[Any], name: str, shelf: Shelf) -> None:
        self.loader, self.name, self.shelf = loader, name, shelf
        self.sharing: Sharing | None = None
        self._stack: tuple[list[tuple[Tensor, int]], Any] = [], None

    @classmethod
    def of(cls, items: Any, name: str, shelf: Shelf) -> Indexed | None:
        """None where the batches would not be those of the loader, or where its data does not fit."""
        if type(items) is not DataLoader or items.num_workers or items.collate_fn is not default_collate:
            return None
        batches = items.batch_sampler
        if type(batches) is not BatchSampler or type(batches.sampler) not in SAMPLERS:
            return None
        sampler: Any = batches.sampler
        if len(sampler) > LONGEST:
            return None
        dataset = _whole(items.dataset)
        tensors = list(dataset.tensors) if type(dataset) is TensorDataset else _examples(dataset)
        if not tensors or not all(_plain(t) and t.dtype not in UNINDEXED for t in tensors):
            return None
        if type(dataset) is not TensorDataset:
            return cls(items, name, shelf) if shelf.takes(sum(t.nbytes for t in tensors)) else None
        if not shelf.holds(tensors):
            return None
        for tensor in tensors:
            shelf.copy(tensor)  # now: what is read later must not take its room
        return cls(items, name, shelf)

    def begin(self, first: int) -> Iterator[Ready]:
        """Start a pass at its batch `first`."""
        loader: Any = self.loader
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed that iter(loader) draws
        index = self._indices(loader.batch_sampler.sampler)
        if self.shelf.device.type == "cuda":
            index = index.pin_memory().to(self.shelf.device, non_blocking=True)
        size, columns = loader.batch_sampler.batch_size, self._columns()
        end = len(index) // size * size if loader.batch_sampler.drop_last else len(index)
        chunks = (index[i : min(i + size, end)] for i in range(size * first, end, size))
        if self.sharing is not None:
            return ((_share(self.sharing, chunk, columns), None) for chunk in chunks)
        return ((each_tensor(partial(_rows, chunk), columns), None) for chunk in chunks)

    def _indices(self, sampler: Iterable[int]) -> Tensor:
        """The rows of the underlying tensors that the sampler names, in order."""
        index = _numbers(sampler)
        dataset: Any = self.loader.dataset
        while True:
            count = len(dataset)
            # Looked at here, on the host: on a GPU a row that does not exist would end the process.
            if ((index < -count) | (index >= count)).any():
                raise DataError(
                    f"the {self.name} data has {count} examples, numbered from 0; its sampler or Subset named examples "
                    f"{int(index.min())} to {int(index.max())}. Make it anew for this dataset."
                )
            index = index.remainder(max(count, 1))
            if type(dataset) is not Subset:
                return index
            index, dataset = _numbers(dataset.indices)[index], dataset.dataset

    def _columns(self) -> Any:
        """What to select rows from, in the shape of a batch: tensors on the device."""
        dataset = _whole(self.loader.dataset)
        if type(dataset) is TensorDataset:
            return [self.shelf.copy(t) for t in dataset.tensors]
        seen = [(t, t._version) for t in _examples(dataset)]
        old, stack = self._stack
        if len(seen) != len(old) or any(t is not s or a != b for (t, a), (s, b) in zip(seen, old, strict=True)):
            stack = each_tensor(lambda t: t.to(self.shelf.device), default_collate(list(dataset)))
            self._stack = seen, stack
        return stack


class Streamed:
    """Any iterable: its batches are moved as they come."""

    def __init__(self, items: Iterable[Any], device: torch.device) -> None:
        self.items, self.device = items, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, first: int) -> Iterator[Ready]:
        """Start a pass at its batch `first`, by drawing up to it."""
        return map(self._send, islice(self.items, first, None))

    def _send(self, batch: Any) -> Ready:
        if self._stream is None:
            return move(batch, self.device), None
        with torch.cuda.stream(self._stream):
            return each_tensor(self._copy, batch), self._stream.record_event()

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and _plain(tensor) and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


class Divided:
    """A rank's share of what another reader reads."""

    def __init__(self, whole: Listed | Streamed, name: str, sharing: Sharing) -> None:
        self.whole, self.name, self.sharing = whole, name, sharing

    def begin(self, first: int) -> Iterator[Ready]:
        """Start a pass at its batch `first`."""
        return ((self.sharing.share(batch, self.name), copied) for batch, copied in self.whole.begin(first))


Reader = Listed | Indexed | Streamed | Divided


def shared_reader(items: Any, found: Reader, name: str, device: torch.device, sharing: Sharing) -> Reader:
    """A reader of this rank's share of each batch. What can be chosen by index is not read by the other ranks."""
    if sharing.divided(items, name) or isinstance(found, Divided):
        return found
    if isinstance(found, Indexed):
        found.sharing = sharing
        return found
    batches = getattr(items, "batch_sampler", None)
    if type(items) is DataLoader and type(batches) is BatchSampler and type(batches.sampler) in SAMPLERS:
        return Streamed(SharedLoader(items, sharing), device)
    return Divided(found, name, sharing)


def reader(items: Iterable[Any], name: str, shelf: Shelf) -> Listed | Indexed | Streamed:
    """The fastest way to read these items that gives the batches that iterating over them would."""
    if isinstance(items, (list, tuple)) and type(items) in (list, tuple):
        found: list[Tensor] = []
        each_tensor(lambda tensor: found.append(tensor) or tensor, items)  # type: ignore[func-returns-value]
        if shelf.holds(found):
            each_tensor(shelf.copy, items)
            return Listed(items, shelf)
    return Indexed.of(items, name, shelf) or Streamed(items, shelf.device)


def receive(ready: Ready, device: torch.device) -> Any:
    """The batch, for use on the present stream of the device."""
    batch, copied = ready
    if copied is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        each_tensor(lambda tensor: _used_on(tensor, stream), batch)
    return batch


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)  # its memory belongs to the stream of the copy, which must not reuse it too early
    return tensor


def _plain(tensor: Tensor) -> bool:
    """Whether the tensor is numbers in memory, of which a copy is as good."""
    strided = type(tensor) is Tensor and tensor.layout == torch.strided
    return strided and not tensor.requires_grad and not tensor.is_inference()


def _rows(index: Tensor, tensor: Tensor) -> Tensor:
    return tensor.index_select(0, index)


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(map(operator.index, values), np.int64))


def _share(sharing: Sharing, chunk: Tensor, columns: Any) -> Any:
    """This rank's examples of a batch."""
    start, stop, weight = sharing.part(len(chunk))
    return weighted(each_tensor(partial(_rows, chunk[start:stop]), columns), weight)


def _whole(dataset: Any) -> Any:
    """The dataset that this is a subset of, or itself."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _examples(dataset: Any) -> list[Tensor]:
    """The tensors of a list of examples, each a tensor or a tuple of them, all alike; else none."""
    if type(dataset) not in (list, tuple) or not dataset:
        return []
    rows = [item if type(item) is tuple else (item,) for item in dataset]
    if len({(type(item), len(row)) for item, row in zip(dataset, rows, strict=True)}) > 1:
        return []
    for column in zip(*rows, strict=True):
        if not all(isinstance(t, Tensor) for t in column) or len({(t.shape, t.dtype, t.device) for t in column}) > 1:
            return []
    return [t for row in rows for t in row]
