"""The engine that captures steps as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bilevel.engines._torch_private import pytree
from bilevel.engines.recording import Engine, Recordable, Recorded, recordable


class Captured(Recorded):
    """Captures a step, or a whole upper iteration, as one CUDA graph, with fixed buffers for the batches."""

    name = "graph"

    def __init__(self, host: Recordable, inner: Engine) -> None:
        super().__init__(host)
        self.inner = inner
        self._pool: Any = None

    def _computing(self) -> AbstractContextManager[None]:
        """Return the context in which eager steps are captured; compiled steps need none."""
        plain = not isinstance(self.inner, Recorded) or self.inner.failed
        return recordable(self.host.optimizers()) if plain else nullcontext()

    def fall_back_to_eager(self, why: str, *, quietly: bool = False) -> None:
        super().fall_back_to_eager(why, quietly=quietly or (isinstance(self.inner, Recorded) and self.inner.failed))

    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        held = [tensor.clone() for tensor in tensors]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with self.restoring_state():
                step(held)  # the inner engine compiles here
            with self.restoring_state(), self._computing():
                self._try(step, held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()

        def capture() -> Any:
            # Graphs of one run never run at the same time, and their results are copied: they can share memory.
            # "thread_local": threads of a data loader can pin memory during the capture without spoiling it.
            safe = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with _capturing(), safe, self._computing():
                return step(held)

        with self.restoring_state():
            out, count = self._counted(capture)
        self._pool = self._pool or graph.pool()
        leaves, form = pytree.tree_flatten(out)

        def unit(given: list[Tensor]) -> Any:
            if held:
                torch._foreach_copy_(held, given, non_blocking=True)
            graph.replay()
            count()
            return pytree.tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)

        return unit


@contextmanager
def _capturing() -> Iterator[None]:
    """Collect no garbage inside, as an old graph that frees its memory would spoil the capture."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    except BaseException:
        # After a failed capture, torch's generator cannot draw numbers.
        generator.graphsafe_set_state(before.graphsafe_get_state())
        raise
    finally:
        if collecting:
            gc.enable()
