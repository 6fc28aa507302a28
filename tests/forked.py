"""Processes of tests: forked from one server that has imported what they need, where each would take seconds for it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its compiler at the first step of an optimizer, and the sharded tensors with the first ranks. There is
# one server for all tests: its list stands in one place.
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.utils.data",
        "torch.distributed.tensor",
        "sklearn.datasets",
        "sklearn.metrics",
        "bilevel",
        "bilevel.cli.main",
        "pytest",
    ]
)


@contextmanager
def same_bits() -> Iterator[ProcessPoolExecutor]:
    """Yield a process in which a computation has the same last bits on CPUs of different makers and ages.

    MKL takes other kernels on each of them, even if torch's own kernels are the same. With MKL_CBWR=COMPATIBLE it takes
    the same ones on all. It reads this at its first call, so the process has to be a new one, not a fork.
    """
    before = os.environ.get("MKL_CBWR")
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _one_thread) as process:
            process.submit(int).result()  # starts it
            yield process
    finally:
        os.environ.pop("MKL_CBWR")
        if before is not None:
            os.environ["MKL_CBWR"] = before


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


PATIENCE = 300.0
"""The seconds after which a process has gone wrong: much longer than it takes on a busy machine."""


def wait_for(condition: Callable[[], object], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until the condition holds, while the process lives."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"the process ended with code {process.returncode} before"
        assert time.monotonic() < limit, f"nothing has happened in {PATIENCE:g} seconds"
        time.sleep(0.02)
