"""Map functions over the tensors in nested tuples, lists and dicts, as batches are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# (upper batch, lower batch)
Pair = tuple[Any, Any]


def each_tensor(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to every tensor in the batch's tuples, lists and dicts, and return the result."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(function, item) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(each_tensor(function, item) for item in batch)
    if isinstance(batch, dict):
        return {key: each_tensor(function, item) for key, item in batch.items()}
    return batch


@torch.no_grad()
def copy_state(mine: Any, saved: Any) -> None:
    """Copy tensors in place into a tensor, list or dict of the same structure."""
    if isinstance(mine, Tensor):
        mine.copy_(saved)
        return
    pairs = [(mine[key], saved[key]) for key in mine] if isinstance(mine, dict) else zip(mine, saved, strict=True)
    for a, b in pairs:
        copy_state(a, b)


def detached(batches: Sequence[Pair]) -> list[Pair]:
    """Return the batches detached from the graph of `prepare`."""
    return [each_tensor(Tensor.detach, pair) for pair in batches]
