"""Newton steps that bring v to the minimum v* of g, for a problem without data.

A step m takes the residual s to s'. The distance that remains is about |m| |s'| / |s|. The steps end when it is small
next to the distance that v* has moved since the first u. Sizes of s would say less: if u scales a penalty, the
curvature of g changes by powers of ten. The equations of a step are solved only as accurately as the step is useful.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel.measures.lower_minimum import flatten, minimise, write
from bilevel.methods.penalty.lower_systems import LowerSystems, Slope, joined
from bilevel.optim.linear_solvers import FlatError

# The most steps for one minimum of g.
STEPS = 30
# How often projected gradient steps take over in one minimum.
PATIENCE = 3
HALVINGS = 30
# After a step of which at most this share was taken, the next one begins at this many times that share.
SHORT, LONGER = 0.05, 4
# Differences of g below this many units in the last place are rounding errors.
ROUNDING = 10
# The steps go on while g can still fall by this share of itself.
VISIBLE = 1e-8
# An earlier inverse of g_vv that leaves more than this share of s is computed again.
SLOW = 0.3
TINY = 1e-300
# The attributes that a checkpoint keeps.
STATE = ("origin", "distance", "size_s", "accuracy")


class Newton(NamedTuple):
    """The length of a Newton step, and the factors of the residual: in total, and from the nonlinearity of s only.

    `share` is how much of the step was taken.
    """

    length: float = math.inf
    factor: float = 1.0
    nonlinear: float = 0.1
    share: float = 1.0

    def needed_accuracy(self, enough: float) -> float:
        """Return how accurately to solve the equations of a step like this one. More accuracy would not help."""
        return min(0.1, 0.3 * max(enough / self.length if self.length > 0 else 1.0, self.nonlinear))

    @property
    def first_share(self) -> float:
        """The share of the next step that is tried first: all of it, unless this one was much too long."""
        return 1.0 if self.share > SHORT else LONGER * self.share

    def next(self) -> Newton:
        """Return what to expect of the step after this one."""
        return Newton(self.length * self.factor, self.factor, self.nonlinear * self.factor, self.share)


class LowerNewton:
    """Moves v to the minimum of g at the present u, from the present v."""

    def __init__(self, systems: LowerSystems) -> None:
        self.systems, self.d = systems, systems.d
        # The error of v at the end, relative to the distance that v* has moved.
        self.accuracy = 1e-7
        self.steps, self.limit = 0, STEPS
        # The largest |s| met.
        self.size_s = 0.0
        # g at its last evaluation.
        self.value = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget where v* was."""
        # The first v*, the largest distance of v* from it, and the first step of the last minimisation.
        self.origin: Tensor | None = None
        self.distance = 0.0
        self.first = Newton()

    def minimise(self) -> Slope:
        """Move v to the minimum of g at the present u; return s there."""
        slope, start = self.slope(), flatten(self.d.v.leaves)
        first = slope.value
        if self.origin is None:
            self.distance = start.norm().item()
        advance = self._advance_projected if self.d.v.projected else self._advance
        expected, patience, least = self.first, PATIENCE, ROUNDING * torch.finfo(start.dtype).eps
        for k in range(self.limit):
            size = self.residual(slope).norm().item()
            if not math.isfinite(size):
                raise FlatError
            if size <= TINY:
                break
            self.steps += 1
            enough = max(self.accuracy * self.distance, least * flatten(self.d.v.leaves).norm().item(), TINY)
            moved, slope, took = advance(slope, expected.needed_accuracy(enough), expected.first_share)
            if not took:
                if not self.d.v.projected:  # rounding hides any progress
                    break
                patience -= 1
                if patience < 0:
                    break
                continue
            v = flatten(self.d.v.leaves)
            self.distance = max(self.distance, (v - (start if self.origin is None else self.origin)).norm().item())
            if k == 0:
                self.first = moved._replace(share=1.0)
            expected = moved.next()
            near = expected.length <= max(enough, self.accuracy * self.distance)
            if near and (self.d.v.projected or self._fall(slope) <= VISIBLE * (abs(slope.value) + first - slope.value)):
                break
        if self.origin is None:
            self.origin, self.distance = flatten(self.d.v.leaves), 0.0
        return slope

    def _fall(self, slope: Slope) -> float:
        """Return |s|^2 / |g_vv|, which g can fall by: to a number of v with a large curvature, a short step matters."""
        size: float = slope.flat.norm().item()
        return size / max(self.systems.top, self.systems.largest, TINY) * size

    def slope(self) -> Slope:
        """Evaluate g and s at the present u and v."""
        d = self.d
        batch = d.prepare([(None, None)], graph=True)[0]
        try:
            with self.systems.measuring_graph():
                g = d.lower(batch[1])
                graph = d.gradient(g, d.v.leaves, keep_graph=True)
        except RuntimeError:
            if self.systems.batched is not None:
                raise
            self.systems.batched = True  # transforms of torch.func cannot be measured
            return self.slope()
        self.value = g.item()
        return Slope(self.value, joined(graph).detach(), graph, batch)

    def _advance(self, slope: Slope, needed: float, share: float) -> tuple[Newton, Slope, bool]:
        """Take a share of a Newton step on g, or less; return what it was like, s at its end, and whether g fell."""
        start = flatten(self.d.v.leaves)
        self.size_s = max(self.size_s, slope.flat.norm().item())
        quick = self.systems.by_inverse(slope, -slope.flat, self.size_s)
        if quick is None:
            move, _ = self.systems.solve(slope, None, -slope.flat, needed, scale=self.size_s)
        else:
            move, needed = quick, 0.0
        fall, before, length = torch.dot(slope.flat, move).item(), slope.flat.norm().item(), move.norm().item()
        # If rounding hides the fall of g, |s| has to halve.
        noise = ROUNDING * torch.finfo(start.dtype).eps * abs(slope.value)
        for _ in range(HALVINGS):
            write(start + share * move, self.d.v.leaves)
            trial = self.slope()
            if -fall <= noise:
                better = trial.flat.norm().item() <= 0.5 * before
                break
            if better := trial.value <= slope.value + 1e-4 * share * fall + noise:
                break
            share /= 2
        if quick is not None:
            self.systems.correct_inverse(share * move, trial.flat - slope.flat)
        factor = trial.flat.norm().item() / before
        stale = quick is not None and not self.systems.is_exact(slope)
        if stale and not (better and factor <= SLOW):
            self.systems.forget_inverse()
        if not better:
            write(start, self.d.v.leaves)
            slope = self.slope()
            return self._advance(slope, needed, 1.0) if stale else (Newton(), slope, False)
        return Newton(share * length, min(factor, 1.0), max(factor - needed, 0.0), share), trial, True

    def _advance_projected(self, slope: Slope, needed: float, share: float) -> tuple[Newton, Slope, bool]:
        """Take a Newton step on r = v - P(v - s) = 0; return what it was like, s at its end, and whether |r| halved.

        The step is -r + D x with (D - D^2 + D g_vv D) x = D (g_vv r - r). If |r| does not halve, projected gradient
        steps take over for a while.
        """
        d = self.d
        start, r = flatten(d.v.leaves), self.residual(slope)
        derivative, product = self.systems.tangent(slope.flat), self.systems.product(slope)
        move, _ = self.systems.solve(slope, derivative, product(r) - r, 1e-6)
        write(start - r + move, d.v.leaves)
        d.v.project()
        trial = self.slope()
        factor = (self.residual(trial).norm() / r.norm()).item()
        if factor <= 0.5:
            return Newton((flatten(d.v.leaves) - start).norm().item(), factor), trial, True
        write(start, d.v.leaves)
        minimise(d, self.accuracy)
        return Newton(), self.slope(), False

    def residual(self, slope: Slope) -> Tensor:
        """Return v - P(v - s), which is s without a projection."""
        return joined(self.d.residual(self.systems.parts(slope.flat)))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next minimisation depends on, in addition to u and v."""
        return {name: getattr(self, name) for name in STATE} | {"first": list(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
        self.first = Newton(*state["first"])
