"""Processes of tests: forked from one server that has imported what they need, where each would take seconds for it."""

from __future__ import annotations

import multiprocessing

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
