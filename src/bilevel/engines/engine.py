"""The choice of the engine that runs the steps: eager, compiled, or captured as one CUDA graph.

A step on minibatches never reads a value on the host and never branches on one. Its record, operator by operator, is
therefore valid for every batch of the same shapes: it reads and writes the tensors of the run (u, v, moments, penalty
weights) in place. Other shapes, such as a smaller last batch, need a second record. The engines are in `recording`,
`compiled` and `cuda_graph`.
"""

from __future__ import annotations

from bilevel.engines.compiled import Compiled
from bilevel.engines.cuda_graph import Captured
from bilevel.engines.recording import Engine, Recordable, Recorded
from bilevel.errors import OptionError

ENGINES = ("auto", "eager", "compile", "graph", "compile+graph")
# `auto` compiles from this number of gradients in a run, as compiling takes a minute or two.
COMPILE_FROM = {"cpu": 100_000, "cuda": 20_000}
# On a CPU, `auto` also compiles from this number of gradients times numbers in v.
COMPILE_WORK = 2e10
# Up to this number of gradients times numbers in v, an upper iteration is compiled as a whole, as calls take most time.
WHOLE = 32_768


class Engines:
    """The two engines of an upper iteration: `inner` runs its steps, `outer` all of it.

    Arguments:
        name: One of `ENGINES`. "auto" chooses by the device, the number of gradients and the size of v.
        host: The run.
        gradients: The number of gradients in the run.
        each: The number of gradients in an upper iteration. Default: 1.
    """

    def __init__(self, name: str, host: Recordable, *, gradients: int, each: int = 1) -> None:
        device = host.derivatives.v.device.type
        if "graph" in name and device != "cuda":
            raise OptionError(f"engine={name!r} needs u and v on a CUDA device; they are on {device}. Use 'compile'.")
        obstacle = host.obstacle()
        if name == "auto":
            heavy = device == "cpu" and gradients * host.derivatives.v.size >= COMPILE_WORK
            long = heavy or gradients >= COMPILE_FROM.get(device, gradients + 1)
            parts = ["compile"] * long + ["graph"] * (device == "cuda")
            name = "eager" if obstacle else "+".join(parts) or "eager"
        self.inner: Engine = Compiled(host) if "compile" in name else Engine()
        self.outer: Engine = Captured(host, self.inner) if "graph" in name else Engine()
        if name == "compile" and each * host.derivatives.v.size <= WHOLE:
            self.inner, self.outer = self.outer, self.inner
        if obstacle:
            for engine in self.made:
                engine.fall_back_to_eager(obstacle)

    @property
    def made(self) -> list[Recorded]:
        return [engine for engine in (self.inner, self.outer) if isinstance(engine, Recorded)]

    @property
    def whole(self) -> bool:
        """Whether one call runs an upper iteration."""
        return isinstance(self.outer, Recorded) and not self.outer.failed

    @property
    def name(self) -> str:
        """The name of the engines that run the steps."""
        return "+".join(engine.name for engine in self.made if not engine.failed) or "eager"
