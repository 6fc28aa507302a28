"""The search of exact multipliers: what is left to gain, in units of the problem, and how accurate v and q must be.

`exact_multipliers_run` states the rules, and takes the steps.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from bilevel.measures.lower_minimum import flatten, write
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.exact_multipliers import ExactMultipliers
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.methods.penalty.run_without_data import RunWithoutData
from bilevel.optim.linear_solvers import FlatError
from bilevel.optim.projected_lbfgs import Project, ProjectedLBFGS, RowMap, Tangent, row_derivative

# The run continues to this share of its tolerance, so that the answer is better than its certificate promises.
GOAL = 1e-4
# The errors of v and of q, relative to what remains to gain.
LOWER, ADJOINT = 1e-3, 1e-2
# <q, s> at a trial point, relative to the geometric mean of the expected change of phi and the gain.
CORRECTION = 0.1
# A first step moves v*(u), and phi, by at most this share.
FIRST = 0.1
# The gain counts as at most this many times the variation of phi over a first step.
VARIATIONS = 1e4


class ExactMultipliersSearch(RunWithoutData):
    """The state of a run with exact multipliers, and its units."""

    solver = "exact multipliers"
    digits, places = 1e-6, 1e4

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self.goal = GOAL * (self.tolerance or 0.0)
        self.exact = ExactMultipliers(self.derivatives)
        self.tightest = 20 * torch.finfo(self.v.dtype).eps
        # A factor on the errors of v and q; a search that fails lowers it.
        self.accuracy_factor = 1.0
        # Whether the augmented Lagrangian has to take over, and why the end is not trusted.
        self.failed, self.doubt = False, ""
        self.explorations = 0

    def _start(self) -> None:
        """Start a search at the present u and v."""
        self.remaining, self.best, self.stalls, self.change, self.restarted_at = 1.0, math.inf, 0, 0.0, math.inf
        self.taken, self.reached, self.explored, self.variation, self.unseen = 0, 0, math.inf, 0.0, 0.0
        self._set_accuracy(0.0)
        self.exact.restart()
        self.exact.largest_correction = None
        search = ProjectedLBFGS.start(self.exact, flatten(self.u.leaves), *self._set())
        self.failed = search.extra is None
        self._set_accuracy(1.0)
        if self.failed:
            return
        self.search, self.first, self.origin, self.mark = search, search.value, search.x, (search.value, search.x)
        self._forget_model()
        self.exact.largest_correction = self._largest_correction

    def _forget_model(self) -> None:
        """Start L-BFGS without pairs; the first move follows the slope along the face, which depends on the rate."""
        self.search.forget(self._first_rate(self.search.gradient))
        if self.u.projected:
            self.search.forget(self._first_rate(self.search.face.slope))

    def _first_rate(self, slope: Tensor) -> float | None:
        """Return the rate at which v*(u) moves by a tenth of its size, and phi by a tenth of its value, at most.

        Neither depends on the unit of u. None if the rate is not known.
        """
        size = slope.norm().item()
        if not 0 < size < math.inf:
            return None
        rates = [FIRST * abs(self.search.value) / size / size, self._reach(slope / size) / size]
        known = [rate for rate in rates if 0 < rate < math.inf]
        return min(known, default=None)

    def _reach(self, direction: Tensor) -> float:
        """Return how far v*(u) moves by a tenth of its size along a direction; infinity if it does not move."""
        self.write_point()
        with suppress(FlatError):
            moved = self.exact.response(direction).norm().item()
            return FIRST * self.search.extra.v.norm().item() / moved if moved > 0 else math.inf
        return math.inf

    def _set_accuracy(self, left: float) -> None:
        """Set how accurate v and q have to be while `left` is left to gain; 0: as accurate as possible."""
        share = self.accuracy_factor * min(left, 1.0)
        self.exact.newton.accuracy = max(LOWER * share, self.tightest)
        self.exact.adjoint_accuracy = max(ADJOINT * share, self.tightest)

    def _largest_correction(self, u: Tensor) -> float:
        """Return how large <q, s> can be at a trial point if the change of phi is to be known."""
        expected = abs(torch.dot(self.search.gradient, u - self.search.x).item())
        # The error of phi is about the square of <q, s>, relative to the gain.
        return CORRECTION * math.sqrt(expected * max(self.gain, expected)) if expected > 0 else math.inf

    def write_point(self) -> None:
        """Write the point of the search to u and v: the line search can have left another trial there."""
        write(self.search.x, self.u.leaves)
        if self.search.extra is not None:
            write(self.search.extra.v, self.v.leaves)

    @property
    def gain(self) -> float:
        """The fall of phi since the start.

        At least its rise at the first trial point, if the run starts at a minimum, and what rounding leaves unknown.
        """
        floor: float = torch.finfo(self.v.dtype).eps ** (2 / 3) * max(abs(self.search.value), self.variation)
        most = max(VARIATIONS * self.variation, FIRST * abs(self.search.value)) if self.variation > 0 else math.inf
        return min(max(self.first - self.search.value, self.search.rise), most) + max(floor, 1e-300)

    def _remaining(self) -> float:
        """Return the root of the share of the gain that a step of L-BFGS promises."""
        return math.sqrt(self.search.promise / (2 * self.gain))

    def _length(self, direction: Tensor) -> float:
        """Return the length of a first step along a direction: a tenth of the size of v*, and of 1 + |u|, at most."""
        most: float = FIRST * (1 + self.search.x.norm().item())
        reach = self._reach(direction)
        # A v of rounding errors says nothing.
        return min(most, reach) if reach > 1e3 * torch.finfo(self.v.dtype).eps * most else most

    # -- the set of u ----------------------------------------------------------------------------------------------

    def _set(self) -> tuple[Project | None, Tangent | None]:
        """Return the projection of the flat u, and its derivative at a point."""
        if not self.u.projected:
            return None, None

        def project(x: Tensor) -> Tensor:
            return flatten(self.u.project_leaves(self._parts(x)))

        def tangent(x: Tensor) -> RowMap:
            points = [part.detach().requires_grad_() for part in self._parts(x)]
            with torch.enable_grad():
                moved = self.u.project_leaves(points)
            return row_derivative(moved, points)

        return project, tangent

    def _parts(self, x: Tensor) -> list[Tensor]:
        parts = torch.split(x, [leaf.numel() for leaf in self.u.leaves])
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, self.u.leaves, strict=True)]
