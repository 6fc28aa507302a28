"""phi(u) = f(u, v*(u)) on its way down by L-BFGS (see `nested`), in steps that can be kept and gone on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel.applications.tuning.nested import Curvature, Nested
from bilevel.errors import ProblemError
from bilevel.measures.lower_minimum import flatten, write
from bilevel.optim.lbfgs import LBFGS
from bilevel.problem.problem import Problem
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

SAVE_EVERY = 5.0
"""Seconds between two states of a descent that is kept."""
Watch = Callable[[int, float], object]
"""Told the steps done, and the upper objective at its present value."""


@dataclass(frozen=True)
class Descended:
    """The end of a descent: the path of phi and of the seconds, and why it ended."""

    path: list[float]
    seconds: list[float]
    converged: bool
    interrupted: bool = False
    evaluations: int = 0
    newton_steps: int = 0
    """Of the lower level, in all evaluations."""


class _LateError(Exception):
    """The seconds of a descent are spent."""


@dataclass(frozen=True)
class Place:
    """The folder that a descent is kept in, and what makes it this descent and no other."""

    folder: Path
    task: Mapping[str, Any]

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, where there is one."""
        if not store.exists(self.folder):
            return None
        state = store.load(self.folder)
        with store.understood(self.folder):
            compare(state["task"], self.task, self.folder)
        return state


class _Descent:
    """phi on its way down by L-BFGS: what it has come to, and how to go on from what was kept of it."""

    def __init__(self, nested: Nested, place: Place | None, clock: Callable[[], float], seconds: float | None) -> None:
        self.nested, self.place, self.clock, self.seconds = nested, place, clock, seconds
        self.began, self.saved = clock(), time.monotonic()
        self.converged = self.ended = False
        state = None if place is None else place.load()
        if state is not None and place is not None:
            with store.understood(place.folder):
                self._restore(state)
            return
        search = LBFGS.start(self.phi, flatten(nested.u.leaves), memory=50)
        if not search.value == search.value or not bool(torch.isfinite(search.gradient).all()):
            raise ProblemError("the validation loss is not finite at the start. Scale the inputs.")
        size = search.gradient.norm().item()
        search.metric = torch.full_like(search.x, 1.0 / max(size, 1e-12)) if size > 0 else None  # a first move of 1
        self.search, self.path, self.times = search, [search.value], [clock() - self.began]
        self.note()

    def phi(self, x: Tensor) -> tuple[float, Tensor, None]:
        if self.late and self.nested.evaluations > 1:
            raise _LateError  # a line search may take many evaluations
        return self.nested.phi(x)

    @property
    def late(self) -> bool:
        return self.seconds is not None and self.clock() - self.began >= self.seconds

    def note(self) -> None:
        """Remember where this step ended: a stop amid the next one goes back to it."""
        nested = self.nested
        self.state: dict[str, Any] = {
            "search": self.search.state_dict(),
            "v": flatten(nested.v.leaves),
            "path": list(self.path),
            "seconds": list(self.times),
            "first": nested.first,
            "ended": self.ended,
            "converged": self.converged,
            "evaluations": nested.evaluations,
            "newton_steps": nested.newton_steps,
        }

    def save(self, every: float = 0.0) -> None:
        """Write what `note` remembers, where the last time is as many seconds ago."""
        if self.place is not None and time.monotonic() - self.saved >= every:
            store.save(self.place.folder, {"task": dict(self.place.task), **self.state})
            self.saved = time.monotonic()

    def _restore(self, state: dict[str, Any]) -> None:
        nested, like = self.nested, flatten(self.nested.u.leaves)
        here = {name: _moved(value, like) for name, value in state["search"].items()}
        self.search, self.path, self.times = LBFGS(**here), list(state["path"]), list(state["seconds"])
        write(self.search.x, nested.u.leaves)
        write(state["v"].to(like.device), nested.v.leaves)
        nested.first, self.ended, self.converged = state["first"], state["ended"], state["converged"]
        nested.evaluations, nested.newton_steps = state["evaluations"], state["newton_steps"]
        self.began -= self.times[-1]
        self.note()


def _moved(value: Any, like: Tensor) -> Any:
    """Tensors of a saved state, on the device of `like`."""
    if isinstance(value, list):
        return [_moved(item, like) for item in value]
    return value.to(like.device) if isinstance(value, Tensor) else value


def descend(
    problem: Problem,
    u: Any,
    v: Any,
    *,
    max_steps: int,
    tolerance: float = 1e-5,
    seconds: float | None = None,
    watch: Watch | None = None,
    curvature: Curvature | None = None,
    first: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    begin: Callable[[], object] | None = None,
    place: Place | None = None,
) -> Descended:
    """Minimise phi from the present u; leaves u and v at the least value found. `first` is that of `Nested`.

    It ends where phi has fallen by less than `tolerance` of itself in five steps, after `max_steps`, after `seconds`
    by the clock, or with Ctrl-C. `begin` is called before each step. What is done is kept in `place`, every few seconds
    and at the end, and gone on from where it holds a state.
    """
    nested = Nested(problem, u, v, curvature, first)
    run = _Descent(nested, place, clock, seconds)
    search, path, kept, interrupted = run.search, run.path, run.ended, False
    try:
        while not run.ended:
            if len(path) > 5 and path[-6] - path[-1] <= tolerance * abs(path[-1]):
                run.converged = True
                break
            if len(path) > max_steps or (len(path) > 1 and run.late):
                break
            if begin is not None:
                begin()
            # What a step can save, to first order: less than rounding tells would be searched for in vain.
            promised = -torch.dot(search.gradient, search.direction()).item()
            if promised <= 0.1 * tolerance * abs(search.value) or not search.iterate(run.phi):
                run.converged = True
                break
            path.append(search.value)
            run.times.append(clock() - run.began)
            run.note()
            run.save(SAVE_EVERY)
            if watch is not None:
                watch(len(path) - 1, search.value)
    except _LateError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    write(run.state["search"]["x"], nested.u.leaves)
    if not run.ended and not interrupted:
        try:
            nested.solve_lower()
            run.ended = True
            run.note()
        except KeyboardInterrupt:
            interrupted = True
    if not kept:
        run.save()
    found = run.state
    return Descended(
        found["path"], found["seconds"], run.converged, interrupted, nested.evaluations, nested.newton_steps
    )
