"""Implicit differentiation of a convex lower level, and L-BFGS on the upper objective that it defines.

    phi(u) = f(u, v*(u)),     v* = argmin_v g(u, v),     g_vv q = f_v,     phi' = f_u - g_uv q

The penalty method tends to this limit as its price grows (the paper's Lemma 3). On small convex problems we compute it
directly: v* by a few Newton steps from the last v*, and each Newton step and q by conjugate gradients on products with
g_vv, which is never formed. A finite price has a drawback that the limit avoids: if g is nearly flat, as with separable
classes under a small penalty, v also fits the upper data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import move
from bilevel._util.tensor_lists import dot, gradient
from bilevel.errors import ProblemError
from bilevel.measures.lower_minimum import flatten, write
from bilevel.optim.lbfgs import LBFGS
from bilevel.optim.linear_solvers import conjugate_gradients
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

NEWTON, PRODUCTS = 30, 300
"""The most Newton steps for one lower minimum, and the most products for one linear system."""
LOWER_ACCURACY, ADJOINT_ACCURACY = 1e-7, 1e-6
"""|grad_v g| at v* and the residual of q, each relative to its first value."""
HALVINGS = 30
SAVE_EVERY = 5.0
"""Seconds between two checkpoints of a descent."""
Map = Callable[[Tensor], Tensor]
Curvature = Callable[[], tuple[Map, Map]]
"""Returns, at the present u and v, the product with g_vv and a map near its inverse, which preconditions."""
Watch = Callable[[int, float], object]
"""Called with the number of steps done and the upper objective."""


class ImplicitObjective:
    """phi and its derivative, for a problem without data whose lower level is convex; moves u and v in place.

    `first` is the size of |grad_v g| at a v that is far from the minimum; by default its size at the first v.
    """

    def __init__(
        self, problem: Problem, u: Any, v: Any, curvature: Curvature | None = None, first: float | None = None
    ) -> None:
        self.problem, self.curvature = problem, curvature
        self.u, self.v = Variable(u, "u"), Variable(v, "v")
        self.evaluations = self.newton_steps = 0
        self.first = first

    def solve_lower(self) -> None:
        """Move v to the minimum of g at the present u."""
        for _ in range(NEWTON):
            value, slope, graph = self._slope()
            size = slope.norm().item()
            if self.first is None:
                self.first = max(size, 1e-300)
            if not size > LOWER_ACCURACY * self.first:
                return
            # Far from the minimum a rough direction is enough: the residual can be the square root of the slope.
            rough = min(0.1, (size / self.first) ** 0.5)
            move = self._system(graph, -slope, max(rough, 1e-3) if size > 1e-3 * self.first else 1e-6)
            self.newton_steps += 1
            promised = -torch.dot(slope, move).item()
            if not self._descend(value, slope, move) or promised <= rounding(value, slope.dtype):
                return

    def hypergradient(self) -> tuple[float, Tensor]:
        """Return f and its total derivative in u, if v is at the minimum of g."""
        f = self.problem.upper(self.u.value, self.v.value, None)
        both = gradient(f, [*self.v.leaves, *self.u.leaves])
        count = len(self.v.leaves)
        slope = self._slope()[2]
        q = self._system(slope, flatten(both[:count]), ADJOINT_ACCURACY)
        bent = gradient(slope, self.u.leaves, cotangent=self._parts(q))
        return f.item(), flatten(both[count:]) - flatten(bent)

    def phi(self, x: Tensor) -> tuple[float, Tensor, None]:
        """Write x to u; return phi and phi'."""
        write(x, self.u.leaves)
        held = flatten(self.v.leaves)
        self.solve_lower()
        self.evaluations += 1
        value, slope = self.hypergradient()
        if not torch.isfinite(slope).all():
            write(held, self.v.leaves)
        return value, slope, None

    def _slope(self) -> tuple[float, Tensor, list[Tensor]]:
        """Return g, grad_v g, and grad_v g with its graph."""
        g = self.problem.lower(self.u.value, self.v.value, None)
        graph = gradient(g, self.v.leaves, keep_graph=True)
        return g.item(), flatten(graph), graph

    def _system(self, graph: list[Tensor], target: Tensor, accuracy: float) -> Tensor:
        """Solve g_vv x = target, as far as g curves up."""
        near: Map | None
        product, near = (self._product(graph), None) if self.curvature is None else self.curvature()
        found, _ = conjugate_gradients(
            lambda p: [product(p[0])],
            [target],
            dot,
            steps=PRODUCTS,
            accuracy=accuracy,
            precondition=None if near is None else lambda r: [near(r[0])],
        )
        return found[0]

    def _product(self, graph: list[Tensor]) -> Map:
        return lambda p: flatten(gradient(graph, self.v.leaves, cotangent=self._parts(p), retain=True))

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [leaf.numel() for leaf in self.v.leaves])
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, self.v.leaves, strict=True)]

    @torch.no_grad()
    def _descend(self, value: float, slope: Tensor, move: Tensor) -> bool:
        """Move v along a direction, halving the step until g falls; return False if it never falls."""
        start, fall = flatten(self.v.leaves), torch.dot(slope, move).item()
        noise = rounding(value, start.dtype)
        length = 1.0
        for _ in range(HALVINGS):
            write(start + length * move, self.v.leaves)
            if self.problem.lower(self.u.value, self.v.value, None).item() <= value + 1e-4 * length * fall + noise:
                return True
            length /= 2
        write(start, self.v.leaves)
        return False


def rounding(value: float, dtype: torch.dtype) -> float:
    """Return the size below which differences of a function with this value are rounding errors."""
    return 10 * torch.finfo(dtype).eps * abs(value)


@dataclass(frozen=True)
class Descended:
    """The end of a descent: phi and the seconds after each step, and why it ended."""

    path: list[float]
    seconds: list[float]
    converged: bool
    interrupted: bool = False
    evaluations: int = 0
    newton_steps: int = 0
    """Newton steps of the lower level, over all evaluations."""


class _LateError(Exception):
    """The time limit of a descent is reached."""


class _Descent:
    """A descent of phi by L-BFGS. `state` is what a checkpoint holds: the search, v, the path and the counters."""

    def __init__(
        self,
        objective: ImplicitObjective,
        clock: Callable[[], float],
        seconds: float | None,
        checkpoint: Path | None,
        task: Mapping[str, Any],
    ) -> None:
        self.objective, self.clock, self.seconds = objective, clock, seconds
        self.checkpoint, self.task = checkpoint, dict(task)
        self.began, self.saved = clock(), time.monotonic()
        self.converged = self.ended = False
        if checkpoint is not None and store.exists(checkpoint):
            state = store.load(checkpoint)
            with store.understood(checkpoint):
                compare(state["task"], self.task, checkpoint)
                self._restore(state)
        else:
            self._start()
        self.note()

    def _start(self) -> None:
        search = LBFGS.start(self.phi, flatten(self.objective.u.leaves), memory=50)
        if not search.value == search.value or not bool(torch.isfinite(search.gradient).all()):
            raise ProblemError("the validation loss is not finite at the start. Scale the inputs.")
        size = search.gradient.norm().item()
        search.metric = torch.full_like(search.x, 1.0 / max(size, 1e-12)) if size > 0 else None  # the first move is 1
        self.search, self.path, self.times = search, [search.value], [self.clock() - self.began]

    def _restore(self, state: dict[str, Any]) -> None:
        objective, device = self.objective, self.objective.u.device
        self.search = LBFGS(**move(state["search"], device))
        self.path, self.times = list(state["path"]), list(state["seconds"])
        write(self.search.x, objective.u.leaves)
        write(state["v"].to(device), objective.v.leaves)
        objective.first, self.ended, self.converged = state["first"], state["ended"], state["converged"]
        objective.evaluations, objective.newton_steps = state["evaluations"], state["newton_steps"]
        self.began -= self.times[-1]

    def phi(self, x: Tensor) -> tuple[float, Tensor, None]:
        if self.late and self.objective.evaluations > 1:
            raise _LateError  # a line search can take many evaluations
        return self.objective.phi(x)

    @property
    def late(self) -> bool:
        return self.seconds is not None and self.clock() - self.began >= self.seconds

    def note(self) -> None:
        """Remember the end of this step; a stop during the next step returns to it."""
        objective = self.objective
        self.state: dict[str, Any] = {
            "task": self.task,
            "search": self.search.state_dict(),
            "v": flatten(objective.v.leaves),
            "path": list(self.path),
            "seconds": list(self.times),
            "first": objective.first,
            "ended": self.ended,
            "converged": self.converged,
            "evaluations": objective.evaluations,
            "newton_steps": objective.newton_steps,
        }

    def save(self, every: float = 0.0) -> None:
        """Write the remembered state, unless the last save is less than `every` seconds ago."""
        if self.checkpoint is not None and time.monotonic() - self.saved >= every:
            store.save(self.checkpoint, self.state)
            self.saved = time.monotonic()

    def step(self, tolerance: float) -> bool:
        """Take one step; return False if no step is worth taking."""
        search = self.search
        # If the fall to first order is below what rounding hides, a search would be in vain.
        promised = -torch.dot(search.gradient, search.direction()).item()
        self.converged = promised <= 0.1 * tolerance * abs(search.value) or not search.iterate(self.phi)
        if self.converged:
            return False
        self.path.append(search.value)
        self.times.append(self.clock() - self.began)
        self.note()
        self.save(SAVE_EVERY)
        return True

    def run(self, max_steps: int, tolerance: float, begin: Callable[[], object], watch: Watch) -> None:
        """Take steps until one of the limits is reached, and write the best point to u and v."""
        path = self.path
        with suppress(_LateError):
            while not self.ended:
                self.converged = len(path) > 5 and path[-6] - path[-1] <= tolerance * abs(path[-1])
                if self.converged or len(path) > max_steps or (len(path) > 1 and self.late):
                    break
                begin()
                if not self.step(tolerance):
                    break
                watch(len(path) - 1, self.search.value)

    def finish(self) -> None:
        """Solve the lower level at the end point."""
        if not self.ended:
            self.objective.solve_lower()
            self.ended = True
            self.note()


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
    checkpoint: Path | None = None,
    task: Mapping[str, Any] | None = None,
) -> Descended:
    """Minimise phi from the present u; leave u and v at the lowest value found.

    The descent ends if phi has fallen by less than `tolerance` of itself in five steps, after `max_steps`, after
    `seconds` by the `clock`, or with Ctrl-C. `begin` is called before each step, `watch` after it. `curvature` and
    `first` are passed to `ImplicitObjective`. The state is kept in the folder `checkpoint`, every few seconds and at
    the end; a state that is there is resumed, or refused if its `task` is another.
    """
    objective = ImplicitObjective(problem, u, v, curvature, first)
    run = _Descent(objective, clock, seconds, checkpoint, task or {})
    finished, interrupted = run.ended, False
    try:
        run.run(max_steps, tolerance, begin or (lambda: None), watch or (lambda *_: None))
    except KeyboardInterrupt:
        interrupted = True
    write(run.state["search"]["x"], objective.u.leaves)
    if not interrupted:
        try:
            run.finish()
        except KeyboardInterrupt:
            interrupted = True
    if not finished:
        run.save()
    found = run.state
    return Descended(
        found["path"],
        found["seconds"],
        run.converged,
        interrupted,
        objective.evaluations,
        objective.newton_steps,
    )
