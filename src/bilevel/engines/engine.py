"""How a step is run: as it is written, recorded once and compiled, or captured as one CUDA graph.

A stochastic step has no host read and no branch on a value. One run of it, recorded operator by operator, is therefore
the step for every batch of the same shapes: the tensors that live on (u, v, moments, prices) are read and written in
place. Other shapes, such as those of a last partial batch, are recorded anew. The ways are in `recording`, `compiled`
and `captured`; the choice among them is here.
"""

from __future__ import annotations

from bilevel.engines.compiled import Compiled
from bilevel.engines.cuda_graph import Captured
from bilevel.engines.recording import Engine, Host, Recorded
from bilevel.errors import OptionError

__all__ = ["COMPILE_FROM", "ENGINES", "Captured", "Compiled", "Engine", "Engines", "Recorded"]

ENGINES = ("auto", "eager", "compile", "graph", "compile+graph")
COMPILE_FROM = {"cpu": 100_000, "cuda": 20_000}
"""Gradients of a run from which `auto` compiles: that takes a minute or two."""
COMPILE_WORK = 2e10
"""Or gradients times weights, on a CPU."""
WHOLE = 32_768
"""Weights times gradients of an upper iteration up to which it is compiled as one: its time is that of the calls."""


class Engines:
    """The pair that runs an upper iteration: `inner` runs its steps, `outer` all of it.

    `name` says what was chosen: `auto` picks by the device, the number of gradients and that of weights. `each` is the
    number of gradients in an upper iteration.
    """

    def __init__(self, name: str, host: Host, *, gradients: int, each: int = 1) -> None:
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
                engine.give_up(obstacle)

    @property
    def made(self) -> list[Recorded]:
        return [engine for engine in (self.inner, self.outer) if isinstance(engine, Recorded)]

    @property
    def whole(self) -> bool:
        """Whether an upper iteration is run by one call."""
        return isinstance(self.outer, Recorded) and not self.outer.failed

    @property
    def name(self) -> str:
        """What runs the steps by now."""
        return "+".join(engine.name for engine in self.made if not engine.failed) or "eager"
