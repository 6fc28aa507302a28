"""Repeats a forward pass: restores the generators that it draws from and the buffers that it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of the global generators that a forward pass on this device draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: Any, device: torch.device) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[torch.Generator]:
    """Seed the global generators of the CPU and this device, and restore them at the end; yield another generator."""
    device = device or torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed, device)
        yield torch.Generator().manual_seed(seed)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the global generators of the CPU and this device; `torch.manual_seed` would seed all GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def derived(seed: int, name: str) -> int:
    """Return a seed for one part of a run. Neighbouring seeds and other parts share no draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")


@contextmanager
def undisturbed(device: torch.device, buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore the buffers, and the global generators of the CPU and this device, at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), keeping(buffers):
        yield


@contextmanager
def keeping(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore the buffers at the end."""
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                # `.data` hides the change from autograd: a graph that saved the buffer has seen this value.
                buffer.data.copy_(value)
