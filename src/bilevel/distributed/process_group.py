"""Means over ranks: what makes `solve` data-parallel under torchrun. On one process there are no ranks, and no cost.

Every quantity that ranks agree on is averaged in one all-reduce of one flat buffer for each type of number, and is then
the same bits on all of them: what is decided from it is decided alike everywhere. Small things that the host decides
on (a stop, a checkpoint) go over a group of its own on the CPU.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bilevel.distributed.doors import Doors
from bilevel.distributed.lost import AGAIN, Search, between_ranks
from bilevel.errors import OptionError, RankError, reason

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank, where the user has not set up the ranks."""


def world() -> int:
    """How many ranks this job has."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_rank() -> bool:
    """Whether this process is the one that writes files and draws bars."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return world() == 1 or int(os.environ.get("RANK", "0")) == 0


def restarted() -> bool:
    """Whether torchrun has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class Flight:
    """A mean that is under way."""

    def __init__(self, land: Callable[[], list[Tensor]]) -> None:
        self._land = land

    def wait(self) -> list[Tensor]:
        """The mean over ranks, one tensor for each that was handed in."""
        return self._land()


class Ranks:
    """The processes of a data-parallel run; `payload` counts the bytes that this one has handed to collectives."""

    _runs = 0
    _talk: tuple[Any, Any, Any] = None, None, None
    """The group of all ranks, that of their CPUs, and their doors, which are made once."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.payload = 0
        backends = dist.get_backend_config()
        everyone = dist.group.WORLD
        if new := Ranks._talk[0] is not everyone:
            host = everyone if "cpu" in str(backends) else dist.new_group(backend="gloo")
            Ranks._talk = everyone, host, Doors(self.rank)
        _, self._host, self._doors = Ranks._talk
        Ranks._runs += 1
        self._search = Search(self._doors, self.size, Ranks._runs)
        if new:
            self._doors.meet(self.gather(self._doors.own))

    @classmethod
    def here(cls, device: torch.device) -> Ranks | None:
        """The ranks that torchrun or the user has started; None where there is one process."""
        if world() == 1:
            return None
        if not dist.is_available():
            raise OptionError("this build of torch has no torch.distributed, which WORLD_SIZE above 1 needs.")
        if not dist.is_initialized():
            if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
                raise OptionError(
                    f"WORLD_SIZE={world()} asks for ranks, but {missing[0]} is not set. Start the ranks with torchrun, "
                    "or unset WORLD_SIZE."
                )
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
                store = dist.PrefixStore(_meeting(store, rank, size), store)  # type: ignore[attr-defined]
                dist.init_process_group(
                    backend,
                    timeout=TIMEOUT,
                    device_id=device if device.type == "cuda" else None,
                    rank=rank,
                    world_size=size,
                    store=store,
                )
            except (RuntimeError, ValueError) as error:
                raise RankError(f"the {world()} ranks did not find each other: {reason(error)}. {AGAIN}") from error
            atexit.register(_leave)
        return cls(device)

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- tensors ---------------------------------------------------------------------------------------------------

    def start(self, tensors: Sequence[Tensor]) -> Flight:
        """Begin to average these over the ranks, in one all-reduce for each type of number."""
        kinds: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            kinds.setdefault(tensor.dtype, []).append(i)
        parts = []
        for indices in kinds.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
            self.payload += flat.nbytes
            with self._watched():
                parts.append((indices, flat, dist.all_reduce(flat, async_op=True)))

        def land() -> list[Tensor]:
            found: list[Tensor] = list(tensors)
            for indices, flat, work in parts:
                with self._watched():
                    work.wait()
                pieces = torch.split(flat.div_(self.size), [tensors[i].numel() for i in indices])
                for i, piece in zip(indices, pieces, strict=True):
                    found[i] = piece.view(tensors[i].shape)
            return found

        return Flight(land)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over ranks of each."""
        return self.start(tensors).wait() if tensors else []

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, without a derivative."""
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.payload += found.nbytes
        with self._watched():
            dist.all_reduce(found)
        return found

    def counts(self, own: Sequence[int]) -> list[list[int]]:
        """For each of these counts, that of every rank. Hosts tell it over their own group: no device is waited for."""
        mine = torch.tensor(own)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watched():
            dist.all_gather(every, mine, group=self._host)
        found: list[list[int]] = torch.stack(every, 1).tolist()
        return found

    def each(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank; they are of one shape."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        self.payload += tensor.nbytes
        with self._watched():
            dist.all_gather(every, tensor)
        return every

    def handed(self, parts: Sequence[Tensor]) -> Tensor:
        """Each rank has a part for every rank, all of one shape: those for this one, stacked."""
        sent = torch.stack(list(parts))
        found = torch.empty_like(sent)
        self.payload += sent.nbytes
        with self._watched():
            dist.all_to_all_single(found, sent)
        return found

    def at_first(self, tensor: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Every rank's rows, `counts` of them, one after another, on the host of the first; None on the others."""
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:], device="cpu")
        padded[: len(tensor)] = tensor.detach()
        sent = padded.reshape(-1).view(torch.uint8)
        every = [torch.empty_like(sent) for _ in counts] if self.first else None
        with self._watched():
            dist.gather(sent, every, 0, group=self._host)
        if every is None:
            return None
        found = [x.view(tensor.dtype).view(padded.shape)[:n] for x, n in zip(every, counts, strict=True)]
        return torch.cat(found)

    def same(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Give every rank the values of the first, or of another, in place."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self.payload += value.nbytes
            with self._watched():
                dist.broadcast(value, source)
            with torch.no_grad():
                tensor.copy_(value)

    # -- what the host decides ---------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on all of them."""
        found: list[Any] = [None] * self.size
        with self._watched():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def share(self, value: Any) -> Any:
        """The first rank's value, on all of them."""
        held = [value]
        with self._watched():
            dist.broadcast_object_list(held, 0, group=self._host)
        return held[0]

    # -- who is lost -------------------------------------------------------------------------------------------------

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Leave word of an error that ends this rank, for the others to name."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and between_ranks(error):
                raise RankError(self._search.sentence(error)) from error
            self._search.leave(
                f"{type(error).__name__}: {reason(error)}" if isinstance(error, Exception) else "stopped"
            )
            raise

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn the failure of a collective into a sentence that names the rank that is not there any more."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if isinstance(error, NotImplementedError):
                raise
            raise RankError(self._search.sentence(error)) from error


def _meeting(store: Any, rank: int, size: int) -> str:
    """A name that the ranks which are there now, and no others, have in common.

    torchrun keeps one store for all restarts, in which the addresses of dead ranks stay behind. Counts of restarts
    differ between machines. The first rank therefore draws a name, and answers each of the others, which ask by a name
    of their own, until all have heard it.
    """
    own = secrets.token_hex(8)
    if rank > 0:
        store.set(f"bilevel/asks/{rank}", own)
        name: str = store.get(f"bilevel/answer/{own}").decode()
        store.set(f"{name}/heard/{rank}", "")
        return name
    name, end = f"bilevel/{own}", time.monotonic() + TIMEOUT.total_seconds()
    while deaf := [r for r in range(1, size) if not store.check([f"{name}/heard/{r}"])]:
        for r in deaf:
            if store.check([f"bilevel/asks/{r}"]):
                store.set(f"bilevel/answer/{store.get(f'bilevel/asks/{r}').decode()}", name)
        if time.monotonic() > end:
            raise RuntimeError(f"rank {deaf[0]} did not come within {TIMEOUT}")
        time.sleep(0.01)
    return name


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
