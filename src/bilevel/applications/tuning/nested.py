"""A convex lower level kept at its minimum: phi(u) = f(u, v*(u)) and its derivative, the exact hypergradient.

    v* = argmin_v g(u, v),     g_vv q = f_v,     phi' = f_u - g_uv q

The penalty method tends to this as its price grows (the paper's Lemma 3). On small convex problems the limit itself is
to be had: v* by a few Newton steps from the last one, each solved, as q is, by conjugate gradients on products with
g_vv, which is never formed. What the limit avoids: where g is nearly flat, as that of separable classes is under a
small penalty, a finite price lets v fit the upper data, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import gradient
from bilevel.measures.lower_minimum import flatten, write
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable

NEWTON, PRODUCTS = 30, 300
"""Most Newton steps of a lower level, and most products of one linear system."""
LOWER_ACCURACY, ADJOINT_ACCURACY = 1e-7, 1e-6
"""|grad_v g| at v*, and the residual of q, both as shares of what they began with."""
HALVINGS = 30
Map = Callable[[Tensor], Tensor]
Curvature = Callable[[], tuple[Map, Map]]
"""At the present u and v: the product with g_vv, and a map near its inverse, which speeds up conjugate gradients."""


class Nested:
    """A problem without data whose lower level is convex; u and v are moved in place."""

    def __init__(
        self, problem: Problem, u: Any, v: Any, curvature: Curvature | None = None, first: float | None = None
    ) -> None:
        """`first` is what |grad_v g| is at a v that is not near the minimum; None: what it is at the present v."""
        self.problem, self.curvature = problem, curvature
        self.u, self.v = Variable(u, "u"), Variable(v, "v")
        self.evaluations = self.newton_steps = 0
        self.first = first

    def solve_lower(self) -> None:
        """Bring v to the minimum of g at the present u."""
        for _ in range(NEWTON):
            value, slope, graph = self._slope()
            size = slope.norm().item()
            if self.first is None:
                self.first = max(size, 1e-300)
            if not size > LOWER_ACCURACY * self.first:
                return
            # Far from the minimum a rough direction does: the residual may be as large as the square root of the slope.
            rough = min(0.1, (size / self.first) ** 0.5)
            move = self._system(graph, -slope, max(rough, 1e-3) if size > 1e-3 * self.first else 1e-6)
            self.newton_steps += 1
            promised = -torch.dot(slope, move).item()
            if not self._descend(value, slope, move) or promised <= rounding(value, slope.dtype):
                return

    def hypergradient(self) -> tuple[float, Tensor]:
        """f and its total derivative in u, where v is at the minimum of g."""
        f = self.problem.upper(self.u.value, self.v.value, None)
        both = gradient(f, [*self.v.leaves, *self.u.leaves])
        count = len(self.v.leaves)
        slope = self._slope()[2]
        q = self._system(slope, flatten(both[:count]), ADJOINT_ACCURACY)
        bent = gradient(slope, self.u.leaves, cotangent=self._parts(q))
        return f.item(), flatten(both[count:]) - flatten(bent)

    def phi(self, x: Tensor) -> tuple[float, Tensor, None]:
        """phi and phi' at x, which is written to u."""
        write(x, self.u.leaves)
        held = flatten(self.v.leaves)
        self.solve_lower()
        self.evaluations += 1
        value, slope = self.hypergradient()
        if not torch.isfinite(slope).all():
            write(held, self.v.leaves)
        return value, slope, None

    def _slope(self) -> tuple[float, Tensor, list[Tensor]]:
        """g, grad_v g, and the same with its graph."""
        g = self.problem.lower(self.u.value, self.v.value, None)
        graph = gradient(g, self.v.leaves, keep_graph=True)
        return g.item(), flatten(graph), graph

    def _system(self, graph: list[Tensor], target: Tensor, accuracy: float) -> Tensor:
        """x of g_vv x = target by conjugate gradients, as far as g curves up."""
        product, near = self._maps(graph) if self.curvature is None else self.curvature()
        x, r = torch.zeros_like(target), target.clone()
        p = near(r)
        square = torch.dot(r, p).item()
        goal = torch.dot(r, r).item() * accuracy**2
        for _ in range(PRODUCTS):
            if not torch.dot(r, r).item() > goal:
                break
            bent = product(p)
            bend = torch.dot(p, bent).item()
            if not bend > 0:
                break
            length = square / bend
            x.add_(p, alpha=length)
            r.sub_(bent, alpha=length)
            turned = near(r)
            square, before = torch.dot(r, turned).item(), square
            p = turned + (square / before) * p
        return x

    def _maps(self, graph: list[Tensor]) -> tuple[Map, Map]:
        def product(p: Tensor) -> Tensor:
            return flatten(gradient(graph, self.v.leaves, cotangent=self._parts(p), retain=True))

        return product, torch.clone

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [leaf.numel() for leaf in self.v.leaves])
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, self.v.leaves, strict=True)]

    @torch.no_grad()
    def _descend(self, value: float, slope: Tensor, move: Tensor) -> bool:
        """Move v along a direction, half as far until g falls; False where it does not."""
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
    """Differences of a function of this value that are not told from rounding."""
    return 10 * torch.finfo(dtype).eps * abs(value)
