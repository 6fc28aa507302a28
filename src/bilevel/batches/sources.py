"""The sources of batches: two iterables that are cycled independently.

Each pass over a source starts from the seed (seed, source, pass). A resumed run therefore draws the same batches as an
uninterrupted run: it starts its pass again and skips to its batch. `bilevel.batches.readers` reads the passes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.random_state import random_state, seed_generators, set_random_state
from bilevel.batches.rank_shares import RankShares
from bilevel.batches.readers import DeviceCopies, IndexReader, ListReader, reader
from bilevel.errors import DataError


class _Generators:
    """A state of the global generators (torch's, numpy's, Python's) that is active only inside a `with` block."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._inside: Any = None  # before the first block

    def __enter__(self) -> None:
        self._outside = self._get()
        if self._inside is not None:
            self._set(self._inside)
        else:
            seed_generators(self._seed, self._device)
            np.random.seed(self._seed % 2**32)
            random.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        self._inside = self._get()
        self._set(self._outside)

    def _get(self) -> Any:
        return random_state(self._device), np.random.get_state(), random.getstate()

    def _set(self, state: Any) -> None:
        set_random_state(state[0], self._device)
        np.random.set_state(state[1])
        random.setstate(state[2])


END = object()


class Source:
    """One iterable, cycled; `position` is (pass, batches drawn in it)."""

    def __init__(
        self, items: Iterable[Any], name: str, seed: int, copies: DeviceCopies, shares: RankShares | None = None
    ) -> None:
        if isinstance(items, Iterator):
            raise DataError(
                f"the {name} data is a one-shot iterator ({type(items).__name__}), which cannot be cycled or resumed. "
                "Pass the list, the DataLoader or an object whose __iter__ starts again."
            )
        if not isinstance(items, Iterable):
            raise DataError(f"the {name} data must be an iterable of batches; got {type(items).__name__}.")
        if isinstance(items, Tensor):
            raise DataError(
                f"the {name} data must be an iterable of batches; got a tensor. Wrap it in a list for one full batch, "
                "or in a DataLoader."
            )
        self.items, self.name, self.device, self._seed = items, name, copies.device, seed
        self._empty = f"the {name} data is empty: it gave no batch. Pass at least one."
        self._reader = reader(items, name, copies, shares)
        self.position = [0, 0]
        self._batches: Iterator[Any] | None = None
        self._generators: AbstractContextManager[None] = nullcontext()

    def _own_generators(self) -> list[torch.Generator]:
        """Return the generators that the user passed to the loader or its sampler."""
        found = [getattr(owner, "generator", None) for owner in (self.items, *self._samplers())]
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _samplers(self) -> list[Any]:
        batches = getattr(self.items, "batch_sampler", None)
        return [getattr(self.items, "sampler", None), batches, getattr(batches, "sampler", None)]

    def _open(self, epoch: int, first: int = 0) -> tuple[Iterator[Any], AbstractContextManager[None]]:
        """Start a pass at its batch `first`; return the batches, and the generators to draw each of them with."""
        if isinstance(self._reader, ListReader):  # draws nothing at random
            return self._reader.begin(first), nullcontext()
        seed = hash_seed(self._seed, self.name, epoch)
        for generator in self._own_generators():
            generator.manual_seed(seed)
        _set_epochs((sampler, epoch) for sampler in self._samplers())
        generators = _Generators(seed, self.device)
        with generators:
            batches = self._reader.begin(first)
        return batches, nullcontext() if isinstance(self._reader, IndexReader) else generators

    def draw(self) -> Any:
        """Return the next batch."""
        while True:
            epoch, taken = self.position
            if self._batches is None:
                self._batches, self._generators = self._open(epoch, taken)
            with self._generators:
                batch = next(self._batches, END)
            if batch is not END:
                self.position = [epoch, taken + 1]
                return batch
            if taken == 0:
                raise DataError(self._empty)
            self.position, self._batches = [epoch + 1, 0], None

    def first_pass(self) -> Generator[Any]:
        """Yield the batches of pass 0. Close the iterator: the position and the user's generators stay as they are."""
        held = [(generator, generator.get_state()) for generator in self._own_generators()]
        epochs = [(sampler, sampler.epoch) for sampler in self._samplers() if hasattr(sampler, "epoch")]
        try:
            found, generators = self._open(0)
            batch = None
            while batch is not END:
                with generators:
                    batch = next(found, END)
                if batch is not END:
                    yield batch
        finally:
            for generator, state in held:
                generator.set_state(state)
            _set_epochs(epochs)
            if getattr(self.items, "persistent_workers", False):
                self.seek(self.position)  # such a loader has one iterator only, and it was just restarted

    def peek(self, most: int) -> tuple[list[Any], bool]:
        """Return the first batches of pass 0, at most `most`, and whether these are all; the position stays."""
        with closing(self.first_pass()) as found:
            batches = list(islice(found, most + 1))
        if not batches:
            raise DataError(self._empty)
        return batches[:most], len(batches) <= most

    def seek(self, position: list[int]) -> None:
        """Set the position. The next draw starts its pass."""
        self.position = list(position)
        self._batches, self._generators = None, nullcontext()


def _set_epochs(samplers: Iterable[tuple[Any, int]]) -> None:
    """Set the epochs of the samplers that have one."""
    for sampler, epoch in samplers:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


class Sources:
    """The pair of sources, or none."""

    def __init__(self, data: object, seed: int, device: torch.device, shares: RankShares | None = None) -> None:
        self.pair: tuple[Source, Source] | None = None
        self.device = device
        # Seconds that the run has waited for data.
        self.waited = 0.0
        if data is None:
            return
        if not isinstance(data, (tuple, list)) or len(data) != 2:
            raise DataError(
                "data must be None or a pair (upper, lower) of iterables of batches; "
                f"got {type(data).__name__}{f' of {len(data)}' if isinstance(data, (tuple, list)) else ''}."
            )
        copies = DeviceCopies(device)
        self.pair = Source(data[0], "upper", seed, copies, shares), Source(data[1], "lower", seed, copies, shares)

    def __bool__(self) -> bool:
        return self.pair is not None

    def draw(self, count: int = 1) -> list[Pair]:
        """Return the next `count` pairs."""
        if self.pair is None:
            return [(None, None)]
        upper, lower = self.pair
        return [(self._draw(upper), self._draw(lower)) for _ in range(count)]

    def _draw(self, source: Source) -> Any:
        """Draw a batch and count the time as waiting; on CUDA only if the device is idle at the end."""
        work = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        started = time.perf_counter()
        batch = source.draw()
        if work is None or work.query():
            self.waited += time.perf_counter() - started
        return batch

    def sample(self, most: int) -> tuple[list[Any], list[Any], bool]:
        """Return the first batches of both sources, at most `most` of each, and whether these are all."""
        if self.pair is None:
            return [None], [None], True
        (upper, full_u), (lower, full_l) = (source.peek(most) for source in self.pair)
        return upper, lower, full_u and full_l

    def first_pairs(self, most: int) -> list[Pair]:
        """Return pairs of the first batches, at most `most`; the source with fewer batches repeats them."""
        upper, lower, _ = self.sample(most)
        return [(upper[i % len(upper)], lower[i % len(lower)]) for i in range(max(len(upper), len(lower)))]

    def first_passes(self) -> tuple[Iterable[Any], Iterable[Any]]:
        """Return the batches of a whole pass over each source; without data, one batch that is None."""
        return ([None], [None]) if self.pair is None else (self.pair[0].first_pass(), self.pair[1].first_pass())

    def state_dict(self) -> list[list[int]]:
        return [] if self.pair is None else [source.position for source in self.pair]

    def load_state_dict(self, state: list[list[int]]) -> None:
        for source, position in zip(self.pair or (), state, strict=True):
            source.seek(position)


def known_length(items: Any) -> int | None:
    """Return the number of batches of a pass; None if the user's iterable does not know it."""
    try:
        return len(items)
    except TypeError:
        return None


def hash_seed(seed: int, name: str, epoch: int) -> int:
    """Return a seed for this pass of this source; neighbouring seeds and passes are unrelated."""
    return int(np.random.SeedSequence([seed, *name.encode(), epoch]).generate_state(1, np.uint64)[0] >> 1)
