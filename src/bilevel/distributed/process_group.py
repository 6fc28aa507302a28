"""Means over ranks: what makes `solve` data-parallel under torchrun. On one process there are no ranks, and no cost.

Every quantity that ranks agree on is averaged in one all-reduce of one flat buffer for each type of number, and is then
the same bits on all of them: what is decided from it is decided alike everywhere. Small things that the host decides
on (a stop, a checkpoint) go over a group of its own on the CPU.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bilevel.errors import OptionError, RankError, reason

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank, if the user has not initialised the process group."""
GRACE = timedelta(seconds=5)
"""How long the first rank waits for an answer of each other rank after a collective has failed."""
AGAIN = "Start the job again: with checkpoint= and resume=True it continues from the last checkpoint."


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


class PendingMean:
    """A mean that is under way."""

    def __init__(self, land: Callable[[], list[Tensor]]) -> None:
        self._land = land

    def wait(self) -> list[Tensor]:
        """The mean over ranks, one tensor for each that was handed in."""
        return self._land()


class ProcessGroup:
    """The processes of a data-parallel run; `payload` counts the bytes that this one has handed to collectives."""

    _groups: tuple[Any, Any] = None, None
    """The group of all ranks, and the gloo group of their hosts, which is made once."""
    _timeout: timedelta | None = None
    """How long both wait; None: torch's default, because the user has initialised the process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.payload = 0
        everyone = dist.group.WORLD
        if ProcessGroup._groups[0] is not everyone:
            # A group of its own on CPUs, too: it still works when a collective of the other group has failed.
            ProcessGroup._groups = everyone, dist.new_group(backend="gloo", timeout=ProcessGroup._timeout)
        self._host = ProcessGroup._groups[1]

    @classmethod
    def from_environment(cls, device: torch.device) -> ProcessGroup | None:
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
            ProcessGroup._timeout = TIMEOUT
            atexit.register(_leave)
        return cls(device)

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce_mean_async(self, tensors: Sequence[Tensor]) -> PendingMean:
        """Begin to average these over the ranks, in one all-reduce for each type of number."""
        kinds: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            kinds.setdefault(tensor.dtype, []).append(i)
        parts = []
        for indices in kinds.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
            self.payload += flat.nbytes
            parts.append((indices, flat, dist.all_reduce(flat, async_op=True)))

        def land() -> list[Tensor]:
            found: list[Tensor] = list(tensors)
            for indices, flat, work in parts:
                work.wait()
                pieces = torch.split(flat.div_(self.size), [tensors[i].numel() for i in indices])
                for i, piece in zip(indices, pieces, strict=True):
                    found[i] = piece.view(tensors[i].shape)
            return found

        return PendingMean(land)

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over ranks of each."""
        return self.all_reduce_mean_async(tensors).wait() if tensors else []

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, without a derivative."""
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.payload += found.nbytes
        dist.all_reduce(found)
        return found

    def all_gather_counts(self, own: Sequence[int]) -> list[list[int]]:
        """For each of these counts, that of every rank. Hosts tell it over their own group: no device is waited for."""
        mine = torch.tensor(own)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self._host)
        found: list[list[int]] = torch.stack(every, 1).tolist()
        return found

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank; they are of one shape."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        self.payload += tensor.nbytes
        dist.all_gather(every, tensor)
        return every

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the values of the first, in place."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self.payload += value.nbytes
            dist.broadcast(value, 0)
            with torch.no_grad():
                tensor.copy_(value)

    # -- what the host decides ---------------------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank, on all of them."""
        found: list[Any] = [None] * self.size
        with self.reporting_lost_ranks():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's value, on all of them."""
        held = [value]
        with self.reporting_lost_ranks():
            dist.broadcast_object_list(held, 0, group=self._host)
        return held[0]

    # -- lost ranks --------------------------------------------------------------------------------------------------

    def wait_for_all(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has come here. On the first rank, the error names the ranks that did not."""
        dist.monitored_barrier(self._host, timeout or ProcessGroup._timeout, wait_all_ranks=True)

    @contextmanager
    def reporting_lost_ranks(self) -> Iterator[None]:
        """Raise `RankError` if a collective fails inside. The first rank names the ranks that do not answer."""
        try:
            yield
        except RuntimeError as error:
            if not _from_collective(error):
                raise
            raise RankError(f"{self._sentence(error)}. {AGAIN}") from error

    def _sentence(self, error: RuntimeError) -> str:
        """Say which ranks are lost if this is the first rank, and point to it if not."""
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", str(error))
        lost = [int(rank) for rank in re.findall(r"\d+", named[1])] if named else self._lost()
        if lost:
            who = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            return f"{who} of {self.size} did not answer rank 0: {_cause(error)}"
        return (
            f"rank {self.rank} of {self.size} lost the other ranks: {_cause(error)}. The messages of rank 0 and of "
            "torchrun name the rank that failed first"
        )

    def _lost(self) -> list[int]:
        """Send a word to the first rank, which returns the ranks that are gone, or else those that are silent."""
        word = torch.zeros(1)
        if not self.first:
            with suppress(RuntimeError):
                dist.send(word, 0, self._host)
            return []
        lost, silent, answers = [], [], {}
        for rank in range(1, self.size):
            try:
                answers[rank] = dist.irecv(word, rank, self._host)
            except RuntimeError:
                lost.append(rank)
        for rank, answer in answers.items():
            try:
                answer.wait(GRACE)
            except RuntimeError as error:
                (silent if re.search("[Tt]ime", str(error)) else lost).append(rank)
        return lost or silent


def _from_collective(error: RuntimeError) -> bool:
    """Whether a collective raised the error: one of ours, of a sharded model, or of the user."""
    return isinstance(error, dist.DistError) or re.search(r"\bgloo\b|monitoredBarrier", str(error)) is not None


def _cause(error: Exception) -> str:
    """The error's first sentence, without the place in the source of gloo."""
    return reason(RuntimeError(re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". ")[0]))


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
