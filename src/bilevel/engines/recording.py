"""The base of the engines that record a step: one record for each set of shapes; other steps run eagerly.

Recording runs the step, and the engine then undoes these runs. The record therefore takes every step of a run,
resumed or not.
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

from bilevel._util.checks import warn_user
from bilevel._util.random_state import random_state, set_random_state
from bilevel.engines._torch_private import compiling, pytree

# A function of batches and tensors. It changes all other state in place.
Step = Callable[..., Any]
# The most records that an engine keeps; steps with other shapes then run eagerly.
MOST_UNITS = 16
# The types that a batch can hold, other than tensors.
PLAIN = (type(None), bool, int, float, str)


class UnrecordableError(RuntimeError):
    """A step cannot be recorded."""


class Recordable(Protocol):
    """The run whose steps an engine runs."""

    @property
    def derivatives(self) -> Any:
        """The variable `v` that a step moves, and the numbers of evaluations, `lower_` and `upper_evaluations`."""

    def live(self) -> list[Tensor]:
        """Return all tensors that exist so far and that a step changes in place."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that a step uses."""

    def obstacle(self) -> str:
        """Return the reason why a step cannot be recorded, or an empty string."""


class Engine:
    """Runs a step eagerly. Other engines derive from it."""

    def wrap(self, step: Step) -> Step:
        """Return the step as this engine runs it. Tensors can differ between calls; other values select a record."""
        return step


class Recorded(Engine):
    """An engine that records a step when it sees a new set of shapes."""

    name: str

    def __init__(self, host: Recordable) -> None:
        self.host = host
        self.failed = self._full = False
        self._wrapped: dict[Step, Step] = {}
        self._units: dict[Any, Callable[[list[Tensor]], Any]] = {}

    def wrap(self, step: Step) -> Step:
        return self._wrapped.setdefault(step, partial(self._run, step))

    def _run(self, step: Step, *arguments: Any) -> Any:
        """Run the step by its record; record it first if these shapes are new."""
        if self.failed:
            return step(*arguments)
        leaves, form = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if strange := [leaf for leaf in others if not isinstance(leaf, PLAIN)]:
            self.fall_back_to_eager(
                f"a batch holds {type(strange[0]).__name__}, which a record would keep constant. Use tensors."
            )
            return step(*arguments)
        if odd := [tensor.layout for tensor in tensors if tensor.layout is not torch.strided]:
            self.fall_back_to_eager(
                f"a batch holds a tensor of layout {odd[0]}, which has no strides. Use dense tensors."
            )
            return step(*arguments)
        key = (step, form, others, tuple((t.shape, t.stride(), t.dtype) for t in tensors))
        unit = self._units.get(key)
        if unit is None:
            if len(self._units) >= MOST_UNITS:
                if not self._full:
                    self._full = True
                    warn_user(
                        f"engine {self.name!r} has recorded {MOST_UNITS} steps of several shapes. Others run eagerly. "
                        "Use batches of fewer shapes (drop_last=True), without text and numbers."
                    )
                return step(*arguments)

            def filled(given: Sequence[Tensor]) -> Any:
                source = iter(given)
                values = [next(source) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return step(*pytree.tree_unflatten(values, form))

            try:
                unit = self._units[key] = self._make(filled, tensors)
            except Exception as error:
                self.fall_back_to_eager(
                    str(error).splitlines()[0] if isinstance(error, UnrecordableError) else _reason(error)
                )
                return step(*arguments)
        return unit(tensors)

    def fall_back_to_eager(self, why: str, *, quietly: bool = False) -> None:
        """Run all later steps eagerly, with a warning that says why unless `quietly`."""
        self.failed = True
        self._units.clear()
        if not quietly:
            warn_user(f"engine {self.name!r} cannot run these steps: {why} They run eagerly (engine='eager').")

    @abstractmethod
    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """Return the recorded step, a function of tensors with these shapes."""

    def _try(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> None:
        """Run the step once, so that all state exists, and refuse a step that a record would not repeat."""
        before = _host_generators()
        step(tensors)
        if _host_generators() != before:
            raise UnrecordableError("the objectives draw from Python's or numpy's generator. Draw from torch's.")
        if obstacle := self.host.obstacle():
            raise UnrecordableError(obstacle)

    @contextmanager
    def restoring_state(self) -> Iterator[None]:
        """Undo the steps inside: live tensors return to their values, and new ones to zero."""
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
        """Return the result of `run`, and a function that counts its evaluations again."""
        d = self.host.derivatives
        before = d.lower_evaluations, d.upper_evaluations
        out = run()
        lower, upper = d.lower_evaluations - before[0], d.upper_evaluations - before[1]

        def count() -> None:
            d.lower_evaluations += lower
            d.upper_evaluations += upper

        return out, count


def _host_generators() -> tuple[Any, ...]:
    """Return the states of the generators that a record does not repeat."""
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), keys.tobytes(), *rest  # type: ignore[union-attr]


def _reason(error: Exception) -> str:
    """Return the reason of an error as a sentence."""
    texts = str(error) + str(error.__context__)  # a failed capture raises a second error
    if "_local_scalar_dense" in texts or "stream is capturing" in texts:
        return "an objective reads a value on the host (.item(), float(), a branch on a tensor)."
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first.rstrip('.')}."


@contextmanager
def recordable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Make torch's optimizers keep counters and rates as tensors inside, without reading them on the host."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # All optimizers except Adam need their `foreach` form to compute with a rate that is a tensor.
    foreach = [None if isinstance(o, torch.optim.Adam) else True for o in optimizers for _ in o.param_groups]
    wanted = [{"capturable": True, "fused": None, "foreach": each} for each in foreach]
    held = [{name: group[name] for name in new if name in group} for group, new in zip(groups, wanted, strict=True)]
    for group, new, old in zip(groups, wanted, held, strict=True):
        group.update({name: new[name] for name in old})
    try:
        with compiling():
            yield
    finally:
        for group, old in zip(groups, held, strict=True):
            group.update(old)
