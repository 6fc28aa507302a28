"""The ranks of a data-parallel run, and the collectives between them.

A mean over ranks is one all-reduce of one flat buffer for each dtype. All ranks receive the same bits, so they all
decide the same. Small objects that hosts decide on (a stop, a checkpoint) use a gloo group.
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

from bilevel._util.checks import agreeing
from bilevel.errors import OptionError, RankError, reason

# The timeout of a collective, if the user has not initialised the process group.
TIMEOUT = timedelta(minutes=10)
AGAIN = "Start the job again: with checkpoint= and resume=True it continues from the last checkpoint."


def world() -> int:
    """Return the number of ranks of this job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_rank() -> bool:
    """Return whether this process is rank 0, which writes files and draws progress bars."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return world() == 1 or int(os.environ.get("RANK", "0")) == 0


def restarted() -> bool:
    """Return whether torchrun has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class ProcessGroup:
    """The ranks of a data-parallel run. `payload` counts the bytes that this rank has passed to collectives."""

    # torch's default group, and two gloo groups of the same ranks: one for hosts, and one to find lost ranks.
    #
    # After a timeout gloo closes all connections of a group, also on CPUs. So hosts need their own group, and the
    # search for lost ranks needs another.
    _groups: tuple[Any, Any, Any] = None, None, None
    # The timeout of all three; None: torch's default, because the user has initialised the process group.
    _timeout: timedelta | None = None

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.first, self.payload = self.rank == 0, 0
        if ProcessGroup._groups[0] is not dist.group.WORLD:
            ProcessGroup._groups = (
                dist.group.WORLD,
                dist.new_group(backend="gloo", timeout=ProcessGroup._timeout),
                dist.new_group(backend="gloo", timeout=ProcessGroup._timeout),
            )
        _, self._host, self._asking = ProcessGroup._groups

    @classmethod
    def from_environment(cls, device: torch.device) -> ProcessGroup | None:
        """Return the ranks that torchrun or the user has started; None if there is one process."""
        if world() == 1:
            return None
        if not dist.is_initialized():
            if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
                raise OptionError(
                    f"{missing[0]} must be set if WORLD_SIZE is above 1; got WORLD_SIZE={world()}. Start the ranks "
                    "with torchrun, or unset WORLD_SIZE."
                )
            try:
                store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    timeout=TIMEOUT,
                    device_id=device if device.type == "cuda" else None,
                    rank=rank,
                    world_size=size,
                    store=dist.PrefixStore(_meeting(store, rank, size), store),  # type: ignore[attr-defined]
                )
            except (RuntimeError, ValueError) as error:
                raise RankError(f"the {world()} ranks did not find each other: {reason(error)}. {AGAIN}") from error
            ProcessGroup._timeout = TIMEOUT
            atexit.register(_leave)
        return cls()

    # -- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce_mean_async(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to average the tensors over ranks, in one all-reduce for each dtype; return a function that waits."""
        parts = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
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

        return land

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over ranks of each tensor."""
        return self.all_reduce_mean_async(tensors)() if tensors else []

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, without a derivative."""
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.payload += found.nbytes
        dist.all_reduce(found)
        return found

    def all_gather_counts(self, own: Sequence[int]) -> list[list[int]]:
        """Return, for each count, the counts of all ranks. Hosts exchange them over gloo and wait for no device."""
        mine = torch.tensor(own)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self._host)
        return [list(each) for each in zip(*(counts.tolist() for counts in every), strict=True)]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have one shape."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        self.payload += tensor.nbytes
        dist.all_gather(every, tensor)
        return every

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks, in place."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self.payload += value.nbytes
            dist.broadcast(value, 0)
            tensor.copy_(value)

    # -- objects of the host ------------------------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [None] * self.size
        with self.reporting_lost_ranks():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0."""
        held = [value]
        with self.reporting_lost_ranks():
            dist.broadcast_object_list(held, 0, group=self._host)
        return held[0]

    # -- lost ranks --------------------------------------------------------------------------------------------------

    def wait_for_all(self, timeout: timedelta | None = None) -> None:
        """Wait until all ranks have called this. On rank 0, the error names the ranks that did not."""
        dist.monitored_barrier(self._host, timeout or ProcessGroup._timeout, wait_all_ranks=True)

    @contextmanager
    def reporting_lost_ranks(self) -> Iterator[None]:
        """Raise `RankError` if a collective fails in the block. Rank 0 names the ranks that do not answer."""
        try:
            yield
        except RuntimeError as error:
            # A collective of ours, of a sharded model, or of the user.
            if not (isinstance(error, dist.DistError) or re.search(r"\bgloo\b|monitoredBarrier", str(error))):
                raise
            self._close()
            atexit.unregister(_leave)
            raise RankError(f"{self._sentence(error)}. {AGAIN}") from error

    def _close(self) -> None:
        """Close the connections of torch's group and of the hosts' group, because a rank is lost.

        An operation that still waits for another rank would block the end of this process, and the other rank could be
        waiting for this one. gloo closes all connections of a group when a receive times out: pending operations fail,
        here and on the other ranks.
        """
        word = torch.zeros(1)
        for group in (dist.group.WORLD, self._host):
            for rank in set(range(self.size)) - {self.rank}:
                with suppress(RuntimeError):
                    dist.irecv(word, rank, group).wait(timedelta(milliseconds=1))  # type: ignore[union-attr]

    def _sentence(self, error: RuntimeError) -> str:
        """Return the message: on rank 0, which ranks are lost; on the others, that rank 0 knows."""
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", str(error))
        lost = [int(rank) for rank in re.findall(r"\d+", named[1])] if named else self._lost()
        # The first sentence of the error, without the line of gloo's source.
        cause = reason(RuntimeError(re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". ")[0]))
        if lost:
            ranks = agreeing(len(lost), "rank", "ranks")
            return f"{ranks} {', '.join(map(str, lost))} of {self.size} did not answer rank 0: {cause}"
        return (
            f"rank {self.rank} of {self.size} lost the other ranks: {cause}. The messages of rank 0 and of torchrun "
            "name the rank that failed first"
        )

    def _lost(self) -> list[int]:
        """Send a message to rank 0. On rank 0, return the ranks whose process has ended, or else the silent ones."""
        word = torch.zeros(1)
        if not self.first:
            with suppress(RuntimeError):
                dist.send(word, 0, self._asking)
            return []
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for rank in range(1, self.size):
            try:
                answers[rank] = dist.irecv(word, rank, self._asking)
            except RuntimeError as error:
                errors[rank] = str(error)
        for rank, answer in answers.items():
            try:
                answer.wait(timedelta(seconds=5))
            except RuntimeError as error:
                errors[rank] = str(error)
        return [rank for rank, error in errors.items() if "time" not in error.lower()] or list(errors)


def _meeting(store: Any, rank: int, size: int) -> str:
    """Return a name that only the ranks of this start share.

    torchrun keeps one store for all restarts, with the addresses of dead ranks in it, and counts of restarts differ
    between machines. So rank 0 draws a name. Each other rank asks for it under a random key, and rank 0
    answers until all have read the name.
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
