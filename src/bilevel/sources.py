"""Where batches come from: two iterables, each cycled on its own.

Each pass over a source starts from the seed (seed, source, pass), so that a resumed run draws what the straight one
drew: it replays the pass it was in up to the batch it had reached.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batches import Pair, move
from .errors import DataError


class _Generators:
    """A state of torch's, numpy's and Python's global generators, entered to draw a batch and left as it was found."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state(), np.random.get_state(), random.getstate()
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)
            np.random.seed(self._seed % 2**32)
            random.seed(self._seed)
            self._seed = None
        else:
            self._set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._set(self._outside)

    @staticmethod
    def _set(state: Any) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


class Source:
    """One iterable, cycled; `position` is (pass, batches drawn in it)."""

    def __init__(self, items: Iterable[Any], name: str, seed: int, device: torch.device) -> None:
        if isinstance(items, Iterator):
            raise DataError(
                f"the {name} data is a one-shot iterator ({type(items).__name__}), which cannot be cycled or resumed. "
                "Pass the list, the DataLoader or an object whose __iter__ starts anew."
            )
        if not isinstance(items, Iterable):
            raise DataError(f"the {name} data must be an iterable of batches; got {type(items).__name__}.")
        if isinstance(items, Tensor):
            raise DataError(
                f"the {name} data must be an iterable of batches; got a tensor. Wrap it in a list for one full batch, "
                "or in a DataLoader."
            )
        self.items, self.name, self.device = items, name, device
        self._seed = seed
        self._go_to(0)

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.taken = epoch, 0
        self._iterator: Iterator[Any] | None = None
        self._generators: AbstractContextManager[None]

    def _own_generators(self) -> list[torch.Generator]:
        """The generators that the loader or its sampler was given by the user."""
        found = [getattr(owner, "generator", None) for owner in (self.items, *self._samplers())]
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _samplers(self) -> list[Any]:
        batches = getattr(self.items, "batch_sampler", None)
        return [getattr(self.items, "sampler", None), batches, getattr(batches, "sampler", None)]

    def _start(self) -> None:
        seed = hash_seed(self._seed, self.name, self.epoch)
        # A list draws nothing at random: its batches need no generators of their own.
        self._generators = nullcontext() if isinstance(self.items, (list, tuple)) else _Generators(seed)
        for generator in self._own_generators():
            generator.manual_seed(seed)
        for sampler in self._samplers():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self.epoch)
        with self._generators:
            self._iterator = iter(self.items)

    def draw(self) -> Any:
        if self._iterator is None:
            self._start()
        while True:
            try:
                with self._generators:
                    batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                if self.taken == 0:
                    raise DataError(f"the {self.name} data is empty: it gave no batch. Pass at least one.") from None
                self._go_to(self.epoch + 1)
                self._start()
                continue
            self.taken += 1
            return move(batch, self.device)

    def peek(self, most: int) -> tuple[list[Any], bool]:
        """The first batches of pass 0, at most `most`, and whether these were all. The position is not moved."""
        probe = Source(self.items, self.name, self._seed, self.device)
        held = [(generator, generator.get_state()) for generator in self._own_generators()]
        batches: list[Any] = []
        try:
            probe._start()
            with probe._generators:
                for batch in probe._iterator or ():
                    if len(batches) == most:
                        return batches, False
                    batches.append(move(batch, self.device))
        finally:
            for generator, state in held:
                generator.set_state(state)
            if getattr(self.items, "persistent_workers", False) and self._iterator is not None:
                self.seek(self.position)  # such a loader has one iterator only, and it was just restarted
        if not batches:
            raise DataError(f"the {self.name} data is empty: it gave no batch. Pass at least one.")
        return batches, True

    @property
    def position(self) -> list[int]:
        return [self.epoch, self.taken]

    def seek(self, position: list[int]) -> None:
        """Go to a position by drawing up to it."""
        self._go_to(position[0])
        for _ in range(position[1]):
            self.draw()


class Sources:
    """The pair of sources, or none."""

    def __init__(self, data: object, seed: int, device: torch.device) -> None:
        self.pair: tuple[Source, Source] | None = None
        if data is None:
            return
        if not isinstance(data, (tuple, list)) or len(data) != 2:
            raise DataError(
                "data must be None or a pair (upper, lower) of iterables of batches; "
                f"got {type(data).__name__}{f' of {len(data)}' if isinstance(data, (tuple, list)) else ''}."
            )
        self.pair = (Source(data[0], "upper", seed, device), Source(data[1], "lower", seed, device))

    def __bool__(self) -> bool:
        return self.pair is not None

    def draw(self, count: int = 1) -> list[Pair]:
        """The next `count` pairs."""
        if self.pair is None:
            return [(None, None)]
        upper, lower = self.pair
        return [(upper.draw(), lower.draw()) for _ in range(count)]

    def draw_lower(self, count: int = 1) -> list[Pair]:
        """The next `count` lower batches, without an upper one."""
        if self.pair is None:
            return [(None, None)]
        return [(None, self.pair[1].draw()) for _ in range(count)]

    def sample(self, most: int) -> tuple[list[Any], list[Any], bool]:
        """The first batches of both sources, at most `most` of each, without moving."""
        if self.pair is None:
            return [None], [None], True
        (upper, full_u), (lower, full_l) = (source.peek(most) for source in self.pair)
        return upper, lower, full_u and full_l

    def state_dict(self) -> list[list[int]]:
        return [] if self.pair is None else [source.position for source in self.pair]

    def load_state_dict(self, state: list[list[int]]) -> None:
        for source, position in zip(self.pair or (), state, strict=True):
            source.seek(position)


def hash_seed(seed: int, name: str, epoch: int) -> int:
    """A seed for this pass of this source; neighbouring seeds and passes are unrelated."""
    return int(np.random.SeedSequence([seed, *name.encode(), epoch]).generate_state(1, np.uint64)[0] >> 1)
