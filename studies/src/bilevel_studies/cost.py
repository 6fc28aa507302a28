"""Count the cost of one upper step: arithmetic of matrix products, and bytes that are alive at the same time.

If all work of g is in products with a matrix, the floating-point operations of a step divided by the operations of one
gradient of g are the cost of the step in gradients. No count depends on the machine.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bilevel import Problem
from bilevel.batches.sources import Sources
from bilevel.measures.problem_check import variables
from bilevel.methods.base import Method, RunContext

# Upper steps of the run that the counted step belongs to: many, so that the warm-up does not distort the count.
HORIZON = 10**6


@dataclass(frozen=True)
class Cost:
    """The cost of an upper step that moves u; not of the first step, which makes the state of the optimizers."""

    # Its operations, as a number of gradients of g in v.
    gradients: float
    # The peak of the bytes of its tensors, without the tensors that existed before.
    bytes: int
    # Evaluations of the lower objective.
    evaluations: int
    seconds: float


class Peak(TorchDispatchMode):
    """Measures the peak of the bytes of the tensors that are made under this mode, graphs included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):  # an unknown tensor existed before
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage(), new=False)
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage(), new=True)
        return out

    def _see(self, storage: Any, *, new: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def cost(problem: Problem, method: Method, u: Any, v: Any, *, repeats: int = 1) -> Cost:
    """Take a few eager steps and count. u and v are moved."""
    upper, lower = variables(problem, u, v)
    setting = RunContext(
        problem=problem,
        u=upper,
        v=lower,
        sources=Sources(None, 0, lower.device),
        max_steps=HORIZON,
        tolerance=None,
        generator=torch.Generator().manual_seed(0),
        engine="eager",
    )
    state = method.init(setting)
    state.step(0)
    first: int = getattr(state, "warm_up", 0)
    if first:  # step 0 did not move u
        state.step(first)
    first += 1
    began = state.derivatives.lower_evaluations
    with FlopCounterMode(display=False) as operations:
        state.step(first)
    evaluations = state.derivatives.lower_evaluations - began
    with Peak() as memory:
        state.step(first + 1)
    times = []
    for k in range(first + 2, first + 2 + repeats):
        start = time.perf_counter()
        state.step(k)
        times.append(time.perf_counter() - start)
    with FlopCounterMode(display=False) as one:
        state.derivatives.slope([(None, None)])
    return Cost(operations.get_total_flops() / one.get_total_flops(), memory.most, evaluations, min(times, default=0.0))
