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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import each_tensor
from bilevel._util.tensor_lists import dot, gradient
from bilevel.errors import ProblemError
from bilevel.measures.lower_minimum import flatten, write
from bilevel.optim.lbfgs import LBFGS
from bilevel.optim.linear_solvers import conjugate_gradients
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

# The most Newton steps for one lower minimum, and the most products for one linear system.
NEWTON, PRODUCTS = 30, 300
# |grad_v g| at v* and the residual of q, each relative to its first value.
LOWER_ACCURACY, ADJOINT_ACCURACY = 1e-7, 1e-6
HALVINGS = 30
# Seconds between two checkpoints of a descent.
SAVE_EVERY = 5.0
Map = Callable[[Tensor], Tensor]
# Returns, at the present u and v, the product with g_vv and a map near its inverse, which preconditions.
Curvature = Callable[[], tuple[Map, Map]]
# Called with the number of steps done and the upper objective.
Watch = Callable[[int, float], object]


class ImplicitObjective:
    """phi and its derivative, for a problem without data whose lower level is convex; moves u and v in place.

    `first` is the size of |grad_v g| at a v that is far from the minimum; by default its size at the first v.
    """

    def __init__(
        self, problem: Problem, u: Any, v: Any, curvature: Curvature | None = None, first: float | None = None
    ) -> None:
        self.problem, self.curvature, self.first = problem, curvature, first
        self.u, self.v = Variable(u, "u"), Variable(v, "v")
        self.evaluations = self.newton_steps = 0

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

    def phi(self, x: Tensor) -> tuple[float, Tensor, None]:
        """Write x to u; return phi and phi'."""
        write(x, self.u.leaves)
        held = flatten(self.v.leaves)
        self.solve_lower()
        self.evaluations += 1
        f = self.problem.upper(self.u.value, self.v.value, None)
        both = gradient(f, [*self.v.leaves, *self.u.leaves])
        count = len(self.v.leaves)
        slope = self._slope()[2]
        q = self._system(slope, flatten(both[:count]), ADJOINT_ACCURACY)
        bent = gradient(slope, self.u.leaves, cotangent=self._parts(q))
        total = flatten(both[count:]) - flatten(bent)
        if not torch.isfinite(total).all():
            write(held, self.v.leaves)
        return f.item(), total, None

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


def descend(
    problem: Problem,
    u: Any,
    v: Any,
    *,
    max_steps: int,
    tolerance: float = 1e-5,
    late: Callable[[], bool] = lambda: False,
    watch: Watch = lambda *_: None,
    curvature: Curvature | None = None,
    first: float | None = None,
    begin: Callable[[], object] = lambda: None,
    checkpoint: Path | None = None,
    task: Mapping[str, Any] | None = None,
) -> list[float]:
    """Minimise phi from the present u by L-BFGS, in place; return phi at the start and after each step.

    The descent ends if phi has fallen by less than `tolerance` of itself in five steps, after `max_steps`, or if
    `late()` is true. `begin` is called before each step, `watch` after it. `curvature` and `first` are passed to
    `ImplicitObjective`. The state is saved in the folder `checkpoint` every few seconds, and also at the end or if the
    descent is interrupted. A state in the folder is resumed, or refused if its `task` is another.
    """
    objective = ImplicitObjective(problem, u, v, curvature, first)
    search, path, ended = _begun(objective, checkpoint, task or {})
    if ended:
        return path

    def snapshot() -> dict[str, Any]:
        state = {"task": dict(task or {}), "search": search.state_dict(), "v": flatten(objective.v.leaves)}
        return state | {"path": list(path), "first": objective.first, "ended": ended}

    def phi(x: Tensor) -> tuple[float, Tensor, None]:
        """Return phi and phi'; infinity if it is late, because a line search can take many evaluations."""
        if late() and objective.evaluations > 1:
            return float("inf"), search.gradient, None
        return objective.phi(x)

    state, saved = snapshot(), time.monotonic()
    try:
        while not ended:
            flat = len(path) > 5 and path[-6] - path[-1] <= tolerance * abs(path[-1])
            ended = flat or len(path) > max_steps or (len(path) > 1 and late())
            if not ended:
                begin()
                # If the fall to first order is below what rounding hides, a search would be in vain.
                promised = -torch.dot(search.gradient, search.direction()).item()
                ended = promised <= 0.1 * tolerance * abs(search.value) or not search.iterate(phi)
            if ended:
                write(search.x, objective.u.leaves)
                objective.solve_lower()
            else:
                path.append(search.value)
            state = snapshot()
            if checkpoint is not None and time.monotonic() - saved >= SAVE_EVERY:
                store.save(checkpoint, state)
                saved = time.monotonic()
            if not ended:
                watch(len(path) - 1, search.value)
    finally:
        if checkpoint is not None:
            store.save(checkpoint, state)
    return path


def _begun(
    objective: ImplicitObjective, checkpoint: Path | None, task: Mapping[str, Any]
) -> tuple[LBFGS, list[float], bool]:
    """Return a search, its path and whether it has ended: from the checkpoint if there is one, else a new one."""
    device = objective.u.device
    if checkpoint is None or not store.exists(checkpoint):
        search = LBFGS.start(objective.phi, flatten(objective.u.leaves), memory=50)
        if not search.value == search.value or not bool(torch.isfinite(search.gradient).all()):
            raise ProblemError("the validation loss is not finite at the start. Scale the inputs.")
        size = search.gradient.norm().item()
        search.metric = torch.full_like(search.x, 1.0 / max(size, 1e-12)) if size > 0 else None  # the first move is 1
        return search, [search.value], False
    state = store.load(checkpoint)
    with store.understood(checkpoint):
        compare(state["task"], task, checkpoint)
        search, objective.first = LBFGS(**each_tensor(lambda t: t.to(device), state["search"])), state["first"]
        write(search.x, objective.u.leaves)
        write(state["v"].to(device), objective.v.leaves)
        return search, list(state["path"]), bool(state["ended"])
