"""How many threads torch has: small tensors gain nothing from several, and wait for them on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The count of input values up to which one thread is as fast as several.
SMALL = 5_000_000


@contextmanager
def threads_for(numbers: int) -> Iterator[None]:
    """Give torch one thread inside if there are few numbers; put the setting back at the end."""
    before = torch.get_num_threads()
    if numbers < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
