"""How a step is run: as it is written, recorded once and compiled, or captured as one CUDA graph.

A stochastic step has no host read and no branch on a value. One run of it, recorded operator by operator, is therefore
the step for every batch of the same shapes: the tensors that live on (u, v, moments, prices) are read and written in
place. Other shapes, such as those of a last partial batch, are recorded anew. The runs that recording needs are undone,
so that every step of a run, resumed or not, is done by the same code.
"""

from __future__ import annotations

import gc
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .autodiff import Derivatives
from .draws import order_of_draws
from .errors import BilevelWarning, OptionError
from .replay import random_state, set_random_state
from .rewrite import weight_gradients

ENGINES = ("auto", "eager", "compile", "graph", "compile+graph")
Step = Callable[..., Any]
"""A step as a function of batches and tensors; whatever else it reads or writes lives on and is changed in place."""
COMPILE_FROM = {"cpu": 100_000, "cuda": 20_000}
"""Gradients of a run from which `auto` compiles: that takes a minute or two."""
COMPILE_WORK = 2e10
"""Or gradients times weights, on a CPU."""
WHOLE = 32_768
"""Weights times gradients of an upper iteration up to which it is compiled as one: its time is that of the calls."""
MOST_UNITS = 16
"""Records that one run keeps of each kind; steps of further shapes run as they are written."""
PLAIN = (type(None), bool, int, float, str)
"""What a batch may hold beside tensors."""


class UnrecordableError(RuntimeError):
    """What a step does cannot be recorded."""


class Host(Protocol):
    """The run that an engine works for."""

    derivatives: Derivatives

    def live(self) -> list[Tensor]:
        """All tensors that a step changes in place and that exist by now."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def obstacle(self) -> str:
        """Why a step cannot be recorded; empty where it can."""
        ...


class Engine:
    """Runs the step as it is written; the others build on it."""

    def call(self, step: Step, arguments: Sequence[Any], *fixed: Any) -> Any:
        """step(*arguments, *fixed). The tensors in `arguments` change from call to call; `fixed` selects a variant."""
        return step(*arguments, *fixed)


class Recorded(Engine):
    """An engine that makes a unit of each step and each set of shapes on first sight."""

    name: str

    def __init__(self, host: Host) -> None:
        self.host = host
        self.failed = self._told_full = False
        self._units: dict[Any, Callable[[list[Tensor]], Any]] = {}

    def call(self, step: Step, arguments: Sequence[Any], *fixed: Any) -> Any:
        if self.failed:
            return step(*arguments, *fixed)
        leaves, form = pytree.tree_flatten(tuple(arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if strange := [leaf for leaf in others if not isinstance(leaf, PLAIN)]:
            self.give_up(f"a batch holds {type(strange[0]).__name__}, which a record would freeze. Use tensors.")
            return step(*arguments, *fixed)
        if odd := [tensor.layout for tensor in tensors if tensor.layout is not torch.strided]:
            self.give_up(f"a batch holds a tensor of layout {odd[0]}, which has no strides. Use dense tensors.")
            return step(*arguments, *fixed)
        sizes = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        key = (getattr(step, "__func__", step), fixed, form, others, sizes)
        unit = self._units.get(key)
        if unit is None:
            if len(self._units) >= MOST_UNITS:
                self._say_full()
                return step(*arguments, *fixed)

            def filled(given: Sequence[Tensor]) -> Any:
                source = iter(given)
                values = [next(source) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return step(*pytree.tree_unflatten(values, form), *fixed)

            try:
                unit = self._units[key] = self._make(filled, tensors)
            except Exception as error:
                self.give_up(str(error).splitlines()[0] if isinstance(error, UnrecordableError) else _told(error))
                return step(*arguments, *fixed)
        return unit(tensors)

    def give_up(self, why: str, *, quietly: bool = False) -> None:
        """Run plainly from here on, and say so."""
        self.failed = True
        self._units.clear()
        if quietly:
            return
        warnings.warn(
            f"engine {self.name!r} cannot run these steps: {why} They run as they are written (engine='eager').",
            BilevelWarning,
            stacklevel=2,
        )

    @abstractmethod
    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """The step as a function of tensors of these shapes."""

    def _say_full(self) -> None:
        if not self._told_full:
            self._told_full = True
            warnings.warn(
                f"engine {self.name!r} has recorded {MOST_UNITS} steps of different shapes; others run as they are "
                "written. Give the batches fewer shapes (drop_last=True), and keep text and numbers out of them.",
                BilevelWarning,
                stacklevel=2,
            )

    def _try(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> None:
        """Run the step once, which creates what is created lazily, and look for what a record would freeze."""
        before = _host_generators()
        step(tensors)
        if _host_generators() != before:
            raise UnrecordableError("the objectives draw from Python's or numpy's generator. Draw from torch's.")
        if obstacle := self.host.obstacle():
            raise UnrecordableError(obstacle)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo what is done inside: what lives on goes back to its value, what was created there to zero."""
        d, device = self.host.derivatives, self.host.derivatives.v.device
        before = [(tensor, tensor.detach().clone()) for tensor in self.host.live()]
        known = {id(tensor) for tensor, _ in before}
        state, counts = random_state(device), (d.lower_evaluations, d.upper_evaluations)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
                for tensor in self.host.live():
                    if id(tensor) not in known:
                        tensor.zero_()
            set_random_state(state, device)
            d.lower_evaluations, d.upper_evaluations = counts

    def _counted(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """The result of `run`, and what adds the evaluations it made to the count again."""
        d = self.host.derivatives
        before = d.lower_evaluations, d.upper_evaluations
        out = run()
        lower, upper = d.lower_evaluations - before[0], d.upper_evaluations - before[1]

        def count() -> None:
            d.lower_evaluations += lower
            d.upper_evaluations += upper

        return out, count


class Compiled(Recorded):
    """Records the operators of a step, second backward and optimizers included, and compiles the record."""

    name = "compile"

    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        forms: list[Any] = []
        # A tensor that comes in twice, or that the objectives hold on to, would be recorded and compiled as one.
        tensors = [_copied(tensor) for tensor in tensors]

        def recorded(*given: Tensor) -> list[Any]:
            out, form = pytree.tree_flatten(step(given))
            forms.append(form)
            return out

        with self._undone():
            self._try(step, tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, and those of the step for a second time
            from torch._inductor import compile as compile_graph
            from torch.fx.experimental.proxy_tensor import make_fx

            with self._undone(), _recordable(self.host.optimizers()):
                graph, count = self._counted(lambda: make_fx(recorded, tracing_mode="real")(*tensors))
            lived = _lift(graph, len(tensors))
            weight_gradients(graph)
            inputs: list[Any] = [*tensors, *lived]
            with self._undone(), torch.no_grad():
                options = _options(self.host.derivatives.v.device) | order_of_draws(graph.graph)
                compiled = compile_graph(graph, inputs, options=options)
                compiled(*inputs)  # while it can still be given up

        def unit(given: list[Tensor]) -> Any:
            with torch.no_grad():
                out = compiled(*_apart(given), *lived)
            count()
            return pytree.tree_unflatten(list(out), forms[-1])

        return unit


class Captured(Recorded):
    """Captures a step, or a whole upper iteration, as one CUDA graph, with buffers of its own for the batches."""

    name = "graph"

    def __init__(self, host: Host, inner: Engine) -> None:
        super().__init__(host)
        self.inner = inner
        self._pool: Any = None

    def _computing(self) -> AbstractContextManager[None]:
        """What the steps run in, where no compiled ones are captured."""
        plain = not isinstance(self.inner, Recorded) or self.inner.failed
        return _recordable(self.host.optimizers()) if plain else nullcontext()

    def give_up(self, why: str, *, quietly: bool = False) -> None:
        super().give_up(why, quietly=quietly or (isinstance(self.inner, Recorded) and self.inner.failed))

    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        held = [tensor.clone() for tensor in tensors]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with self._undone():
                step(held)  # an engine inside this one compiles here
            with self._undone(), self._computing():
                self._try(step, held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()

        def capture() -> Any:
            # Graphs of one run never run at the same time, and what they return is copied: they share their memory.
            # Threads of a loader may pin memory meanwhile: only what this one does can spoil the capture.
            safe = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with _capturing(), safe, self._computing():
                return step(held)

        with self._undone():
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
    """No garbage is collected inside: an old graph among it would free its memory, which spoils a capture."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    except BaseException:
        # torch leaves the generator inside a capture that failed, where nothing can be drawn from it.
        generator.graphsafe_set_state(before.graphsafe_get_state())
        raise
    finally:
        if collecting:
            gc.enable()


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


def _options(device: torch.device) -> dict[str, Any]:
    """What inductor is told. Random numbers are eager's.

    On a CPU, convolutions in channels-last cost more copies than they save; on a GPU, the many small kernels of moments
    and prices become few. With these, inductor's reordering of loops fails on an assertion of its own (torch 2.11).
    """
    cuda = {"combo_kernels": True, "loop_ordering_after_fusion": False}
    own = {"layout_optimization": False} if device.type == "cpu" else cuda
    return {"fallback_random": True} | own


def _host_generators() -> tuple[Any, ...]:
    """The states of the generators that no record follows."""
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), keys.tobytes(), *rest  # type: ignore[union-attr]


def _told(error: Exception) -> str:
    """What went wrong, in a sentence."""
    texts = str(error) + str(error.__context__)  # a capture ends with an error of its own
    if "_local_scalar_dense" in texts or "stream is capturing" in texts:
        return "an objective reads a value on the host (.item(), float(), a branch on a tensor)."
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first.rstrip('.')}."


def _copied(tensor: Tensor) -> Tensor:
    """A copy of the same strides; where these overlap, as after `expand`, another name for the same memory."""
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor.detach()


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those that share memory with one before as copies: what is compiled takes them to be apart."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if memory in seen else tensor)
        seen.add(memory)
    return found


def _name(tensor: Tensor) -> tuple[Any, ...]:
    """What a leaf and its `detach` have in common. As two inputs, they would be merged anew in every call."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _lift(graph: torch.fx.GraphModule, count: int) -> list[Tensor]:
    """Turn the tensors that the record holds on to into inputs, each once; returns them."""
    nodes = list(graph.graph.nodes)
    start = nodes[count] if count < len(nodes) else nodes[-1]
    lived: list[Tensor] = []
    inputs: dict[Any, Any] = {}
    held = {node: _name(getattr(graph, node.target)) for node in nodes if node.op == "get_attr"}
    for node, name in held.items():
        if name not in inputs:
            with graph.graph.inserting_before(start):
                inputs[name] = graph.graph.placeholder(f"lived_{len(lived)}")
            lived.append(getattr(graph, node.target).detach())
    for node, name in held.items():
        node.replace_all_uses_with(inputs[name])
        graph.graph.erase_node(node)
    for node in reversed(graph.graph.nodes):
        if str(node.target).startswith("profiler."):  # marks of torch's profiler around an optimizer's step
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return lived


@contextmanager
def _recordable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """torch's optimizers compute with counters and rates, rather than read them, while something is being compiled."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # Those other than Adam compute with a rate that is a tensor in their `foreach` form alone.
    foreach = [None if isinstance(o, torch.optim.Adam) else True for o in optimizers for _ in o.param_groups]
    wanted = [{"capturable": True, "fused": None, "foreach": each} for each in foreach]
    held = [{name: group[name] for name in new if name in group} for group, new in zip(groups, wanted, strict=True)]
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    for group, new, old in zip(groups, wanted, held, strict=True):
        group.update({name: new[name] for name in old})
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag
        for group, old in zip(groups, held, strict=True):
            group.update(old)
