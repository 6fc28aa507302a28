"""What ranks share in a run: arguments, u and v, records and the end. Each rank has its own random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bilevel._util.nested import copy_state
from bilevel._util.random_state import derived, seed_generators, set_random_state
from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import BilevelError, RankError
from bilevel.problem import Variable

# The parts of a fingerprint that must be equal on all ranks. Data, and functions that close over it, can differ.
ALIKE = ("u", "v", "method", "options", "accumulate", "seed", "precision")


def run_on_first(ranks: ProcessGroup, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 and return its result on all ranks. An error of rank 0 is raised on all of them."""
    found: Any = None
    if ranks.first:
        try:
            found = make()
        except BilevelError as error:
            found = error
    found = ranks.broadcast_object(found)
    if isinstance(found, BilevelError):
        found.reported = not ranks.first
        raise found
    return found


def check_same_arguments(ranks: ProcessGroup, identity: Mapping[str, Any], u: Variable, v: Variable) -> None:
    """Raise RankError if ranks have different arguments. Copy u and v of rank 0 to all ranks."""
    for rank, other in enumerate(ranks.all_gather_object({name: identity[name] for name in ALIKE})):
        for name, value in other.items():
            if value != identity[name]:
                raise RankError(
                    f"every rank must call solve with the same arguments; {name} is {identity[name]} on rank "
                    f"{ranks.rank} and {value} on rank {rank}."
                )
    ranks.broadcast_([t for variable in (u, v) if not variable.shards for t in variable.tensors().values()])


def seed_by_rank(ranks: ProcessGroup, seed: int, device: torch.device, step: int = 0) -> None:
    """Seed the global generators by rank, so that different examples have different dropout masks."""
    if not ranks.first:
        seed_generators(derived(seed, f"rank {ranks.rank} step {step}"), device)


def restore_generators(ranks: ProcessGroup, saved: Mapping[str, Any], device: torch.device) -> None:
    """Restore this rank's generators. If the number of ranks has changed, seed new ones."""
    states = saved.get("ranks") or []
    if len(states) == ranks.size:
        set_random_state(states[ranks.rank], device)
    else:
        seed_by_rank(ranks, saved["seed"], device, saved["step"])


def agree_on_end(
    ranks: ProcessGroup, table: Sequence[Sequence[float]], finite: bool, interrupted: bool, step: int
) -> tuple[bool, bool]:
    """Return whether all ranks are finite and whether any was interrupted. Raise RankError if their records differ."""
    ranks.wait_for_all()
    found = ranks.all_gather_object((zlib.crc32(repr(table).encode()), finite, interrupted))
    for rank, (digest, *_) in enumerate(found):
        if digest != found[0][0]:
            raise RankError(
                f"the records of rank {rank} and of rank 0 differ at step {step}, so ranks could decide "
                "differently. Run all ranks on the same kind of machine, with the same release of torch."
            )
    return all(x[1] for x in found), any(x[2] for x in found)


def average_buffers(ranks: ProcessGroup, variables: Sequence[Variable]) -> None:
    """Replace the floating-point buffers of modules by their means over ranks."""
    buffers = [b for variable in variables for b in variable.buffers() if b.is_floating_point()]
    copy_state(buffers, ranks.all_reduce_mean(buffers))
