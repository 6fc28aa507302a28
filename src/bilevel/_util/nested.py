"""Batches: whatever a source yields, with tensors somewhere in its tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Any, Any]
"""(upper batch, lower batch)"""


def each_tensor(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with `function` applied to every tensor in its tuples, lists and dicts."""
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
    """The batches, cut from the graph of `prepare`."""
    return [each_tensor(Tensor.detach, pair) for pair in batches]


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return each_tensor(lambda tensor: tensor.to(device, non_blocking=True), batch)
