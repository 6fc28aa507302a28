"""Map functions over the tensors in nested tuples, lists and dicts, as batches are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def detached(batches: Sequence[Pair]) -> list[Pair]:
    """Return the batches detached from the graph of `prepare`."""
    return [each_tensor(Tensor.detach, pair) for pair in batches]
