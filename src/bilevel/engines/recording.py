"""What engines that make a record of a step share: a record for each set of shapes, and the step as it is written.

The runs that recording needs are undone, so that every step of a run, resumed or not, is done by the same code.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel._util.checks import warn_user
from bilevel._util.random_state import random_state, set_random_state
from bilevel.problem.variables import Variable

Step = Callable[..., Any]
"""A step as a function of batches and tensors; whatever else it reads or writes lives on and is changed in place."""
MOST_UNITS = 16
"""Records that one run keeps of each kind; steps of further shapes run as they are written."""
PLAIN = (type(None), bool, int, float, str)
"""What a batch may hold beside tensors."""


class UnrecordableError(RuntimeError):
    """What a step does cannot be recorded."""


class Counts(Protocol):
    """The variable that a step moves, and the evaluations that it counts."""

    v: Variable
    lower_evaluations: int
    upper_evaluations: int


class Host(Protocol):
    """The run that an engine works for."""

    @property
    def derivatives(self) -> Counts: ...

    def live(self) -> list[Tensor]:
        """All tensors that a step changes in place and that exist by now."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def obstacle(self) -> str:
        """Why a step cannot be recorded; empty where it can."""
        ...


class Engine:
    """Runs the step as it is written; the others build on it."""

    def wrap(self, step: Step) -> Step:
        """Return the step as this engine runs it. Its tensors change from call to call; other arguments select a
        variant."""
        return step


class Recorded(Engine):
    """An engine that makes a unit of each step and each set of shapes on first sight."""

    name: str

    def __init__(self, host: Host) -> None:
        self.host = host
        self.failed = self._told_full = False
        self._wrapped: dict[Step, Step] = {}
        self._units: dict[Any, Callable[[list[Tensor]], Any]] = {}

    def wrap(self, step: Step) -> Step:
        return self._wrapped.setdefault(step, partial(self._run, step))

    def _run(self, step: Step, *arguments: Any) -> Any:
        """Run the step by its record, which is made if these shapes are new."""
        if self.failed:
            return step(*arguments)
        leaves, form = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if strange := [leaf for leaf in others if not isinstance(leaf, PLAIN)]:
            self.give_up(f"a batch holds {type(strange[0]).__name__}, which a record would freeze. Use tensors.")
            return step(*arguments)
        if odd := [tensor.layout for tensor in tensors if tensor.layout is not torch.strided]:
            self.give_up(f"a batch holds a tensor of layout {odd[0]}, which has no strides. Use dense tensors.")
            return step(*arguments)
        sizes = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        key = (step, form, others, sizes)
        unit = self._units.get(key)
        if unit is None:
            if len(self._units) >= MOST_UNITS:
                self._say_full()
                return step(*arguments)

            def filled(given: Sequence[Tensor]) -> Any:
                source = iter(given)
                values = [next(source) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return step(*pytree.tree_unflatten(values, form))

            try:
                unit = self._units[key] = self._make(filled, tensors)
            except Exception as error:
                self.give_up(str(error).splitlines()[0] if isinstance(error, UnrecordableError) else _told(error))
                return step(*arguments)
        return unit(tensors)

    def give_up(self, why: str, *, quietly: bool = False) -> None:
        """Run plainly from here on, and say so."""
        self.failed = True
        self._units.clear()
        if quietly:
            return
        warn_user(f"engine {self.name!r} cannot run these steps: {why} They run as they are written (engine='eager').")

    @abstractmethod
    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """The step as a function of tensors of these shapes."""

    def _say_full(self) -> None:
        if not self._told_full:
            self._told_full = True
            warn_user(
                f"engine {self.name!r} has recorded {MOST_UNITS} steps of different shapes; others run as they are "
                "written. Give the batches fewer shapes (drop_last=True), and keep text and numbers out of them."
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


@contextmanager
def recordable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
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
