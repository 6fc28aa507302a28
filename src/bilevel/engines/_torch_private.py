"""The private names of torch that engines and methods use, tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.utils import _pytree as pytree

__all__ = ["compiling", "preserve_version_counter", "pytree"]


@contextmanager
def compiling() -> Iterator[None]:
    """Make torch's optimizers keep counters and rates as tensors that the host does not read, as when compiling."""
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag
