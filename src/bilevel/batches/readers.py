"""How a pass over the data is read.

A DataLoader over a TensorDataset is read by index, from tensors that are on the device; a list of batches from copies
of its tensors there. Everything else streams, on CUDA through pinned memory. Over ranks, a reader
gives the share of each batch that `bilevel.batches.rank_shares` determines.
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

from bilevel._util.nested import each_tensor
from bilevel.batches.rank_shares import RankShares, SharedLoader, leaves_of
from bilevel.errors import DataError

# The share of a GPU's free memory that data can fill.
ROOM = 0.25
# They draw only indices, so that all indices of a pass can be drawn at its start.
SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# torch cannot select rows of tensors with these types.
UNINDEXED = (torch.uint16, torch.uint32, torch.uint64)


class DeviceCopies:
    """Copies of tensors on the device. Each copy is made once and does not follow later changes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = int(ROOM * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors are plain, and on the device already or small enough to be copied there."""
        missing = {id(t): t.nbytes for t in tensors if t.device != self.device and id(t) not in self._copies}
        return all(map(_plain, tensors)) and sum(missing.values()) <= self.room

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device."""
        if tensor.device == self.device:
            return tensor
        if id(tensor) not in self._copies:
            self.room -= tensor.nbytes
            self._copies[id(tensor)] = tensor, tensor.to(self.device, non_blocking=True)
        return self._copies[id(tensor)][1]


class StreamReader:
    """Reads any iterable: its batches are moved to the device as they come."""

    def __init__(self, items: Iterable[Any], name: str, device: torch.device, shares: RankShares | None) -> None:
        self.items, self.name, self.device, self.shares = items, name, device, shares

    def begin(self, first: int) -> Iterator[Any]:
        """Start a pass at its batch `first`, by drawing all batches before it."""
        return map(self._received, islice(self.items, first, None))

    def _received(self, batch: Any) -> Any:
        batch = each_tensor(self._moved, batch)
        return batch if self.shares is None else self.shares.divide(batch, self.name)

    def _moved(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda" and tensor.device.type == "cpu" and _plain(tensor):
            tensor = tensor.pin_memory()  # so that the copy does not wait for the device
        return tensor.to(self.device, non_blocking=True)


class ListReader(StreamReader):
    """Reads a list of batches, whose tensors are moved once."""

    def __init__(self, items: Sequence[Any], name: str, copies: DeviceCopies, shares: RankShares | None) -> None:
        super().__init__(items, name, copies.device, shares)
        self._moved = copies.copy  # type: ignore[method-assign]
        each_tensor(copies.copy, items)  # at once, so that data read later cannot take the room


class IndexReader:
    """Reads a DataLoader over tensors: the indices of a pass are drawn at its start, and select rows on the device."""

    def __init__(self, loader: DataLoader[Any], name: str, copies: DeviceCopies, shares: RankShares | None) -> None:
        self.loader, self.name, self.shares = loader, name, shares
        self.columns = [copies.copy(tensor) for tensor in _underlying(loader.dataset).tensors]

    def begin(self, first: int) -> Iterator[Any]:
        """Start a pass at its batch `first`."""
        loader: Any = self.loader
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed that iter(loader) draws
        index = self._indices(loader.batch_sampler.sampler)
        if self.columns[0].is_cuda:
            index = index.pin_memory().to(self.columns[0].device, non_blocking=True)
        size = loader.batch_sampler.batch_size
        end = len(index) // size * size if loader.batch_sampler.drop_last else len(index)
        return (self._selected(index[i : min(i + size, end)]) for i in range(size * first, end, size))

    def _selected(self, index: Tensor) -> Any:
        select = partial(_rows, self.columns)
        return select(index) if self.shares is None else self.shares.chosen(index, select)

    def _indices(self, sampler: Iterable[int]) -> Tensor:
        """The rows of the underlying tensors that the sampler names, in order."""
        index = _numbers(sampler)
        dataset: Any = self.loader.dataset
        while True:
            count = len(dataset)
            # Checked here, on the host: on a GPU a row that does not exist would end the process.
            if ((index < -count) | (index >= count)).any():
                raise DataError(
                    f"the {self.name} data has {count} examples, numbered from 0; its sampler or Subset named examples "
                    f"{int(index.min())} to {int(index.max())}. Make a new one for this dataset."
                )
            index = index.remainder(max(count, 1))
            if type(dataset) is not Subset:
                return index
            index, dataset = _numbers(dataset.indices)[index], dataset.dataset


Reader = StreamReader | IndexReader


def reader(items: Any, name: str, copies: DeviceCopies, shares: RankShares | None) -> Reader:
    """Return the fastest reader whose batches equal the batches of plain iteration.

    With `shares`, it gives this rank's share of each batch.
    """
    shares = None if shares is None or shares.divided(items, name) else shares
    if type(items) in (list, tuple) and copies.fit([leaf for leaf in leaves_of(items) if isinstance(leaf, Tensor)]):
        return ListReader(items, name, copies, shares)
    batches = getattr(items, "batch_sampler", None)
    if type(items) is not DataLoader or type(batches) is not BatchSampler or type(batches.sampler) not in SAMPLERS:
        return StreamReader(items, name, copies.device, shares)
    dataset = _underlying(items.dataset)
    if type(dataset) is TensorDataset and not items.num_workers and items.collate_fn is default_collate:
        tensors = list(dataset.tensors)
        if copies.fit(tensors) and not any(t.dtype in UNINDEXED for t in tensors):
            return IndexReader(items, name, copies, shares)
    return StreamReader(items if shares is None else SharedLoader(items, shares), name, copies.device, None)


def _underlying(dataset: Any) -> Any:
    """Return the dataset that this one is a subset of, or the dataset itself."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _plain(tensor: Tensor) -> bool:
    """Return whether the tensor is dense and has no gradient, so that a copy can take its place."""
    strided = type(tensor) is Tensor and tensor.layout == torch.strided
    return strided and not tensor.requires_grad and not tensor.is_inference()


def _rows(columns: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [column.index_select(0, index) for column in columns]


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(map(operator.index, values), np.int64))
