"""A run of the penalty method with exact multipliers: L-BFGS on phi(u), with v kept at its minimum.

    phi and phi' by `exact_multipliers`, more accurate as less remains to gain
    remaining = sqrt(<e, H e> / (2 gain)): e is phi' along the set of u, H the inverse curvature of L-BFGS, gain the
    fall of phi since the start. Its square is the share of the gain that is still missing: u can have any unit. A run
    that starts at a minimum has no fall; there the gain is the rise of phi at the first trial point.
    ends when remaining <= goal, or when rounding hides any progress
    at the end: v and q are solved again from other starts; the change of phi' is its error, which counts as remaining
    then v is moved away and g is minimised again; if g falls, v did not minimise g, and the run continues from there

A step is one L-BFGS iteration. It reads values on the host.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import each_tensor
from bilevel.derivatives.prices import Prices
from bilevel.measures.lower_minimum import flatten, lower_point, write
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.exact_multipliers import ExactMultipliers, Point
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.methods.penalty.run_without_data import RunWithoutData
from bilevel.optim.linear_solvers import FlatError
from bilevel.optim.projected_lbfgs import Project, ProjectedLBFGS, RowMap, Tangent
from bilevel.results import Status

# The run continues to this share of its tolerance, so that the answer is better than its certificate promises.
GOAL = 1e-4
# The errors of v and of q, relative to what remains to gain.
LOWER, ADJOINT = 1e-4, 1e-2
# <q, s> at a trial point, relative to the geometric mean of the expected change of phi and the gain.
CORRECTION = 0.1
# The run ends after so many steps that rounding hides and that do not lower `remaining`.
STALLS = 5
# A first step moves v*(u), and phi, by at most this share.
FIRST = 0.1
RESTARTS = 5


def row_derivative(moved: list[Tensor], points: list[Tensor]) -> RowMap:
    """Return the map that multiplies each row of a matrix by the derivative of a projection, which is symmetric."""
    sizes = [point.numel() for point in points]

    def pull(cotangents: list[Tensor], *, batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(moved, points, cotangents, retain_graph=True, is_grads_batched=batched)
        return [x.flatten(1 if batched else 0) for x in found]

    def one(row: Tensor) -> Tensor:
        parts = zip(torch.split(row, sizes), points, strict=True)
        return torch.cat(pull([p.reshape(x.shape) for p, x in parts], batched=False))

    def rows(matrix: Tensor) -> Tensor:
        parts = zip(torch.split(matrix, sizes, 1), points, strict=True)
        try:
            return torch.cat(pull([p.reshape(-1, *x.shape) for p, x in parts], batched=True), 1)
        except RuntimeError:  # an operator that cannot be batched
            return torch.stack([one(row) for row in matrix])

    like = torch.cat([point.detach().reshape(-1) for point in points])
    probe, diagonal = torch.arange(1, len(like) + 1).to(like), one(torch.ones_like(like))
    # If each coordinate is projected for itself, as by a box, the derivative is diagonal.
    return (lambda matrix: matrix * diagonal) if torch.equal(one(probe), probe * diagonal) else rows


class ExactMultipliersRun(RunWithoutData):
    """A run of the deterministic mode while g_vv is positive definite.

    An evaluation of phi evaluates f once, and g once and once more for each Newton step on v.
    """

    solver = "exact multipliers"
    digits, places = 1e-6, 1e4

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self.goal = GOAL * (self.tolerance or 0.0)
        self.exact = ExactMultipliers(self.derivatives)
        self.tightest = 20 * torch.finfo(self.v.dtype).eps
        # A factor on the errors of v and q; a search that fails lowers it.
        self.accuracy_factor = 1.0
        # Whether the augmented Lagrangian has to take over.
        self.failed = False

    def begin(self, *, anew: bool = True) -> None:
        """Start at the present u, and at the present v or, if `anew`, at the start that the problem gives."""
        if anew:
            self.start_lower()
        self.u.project()
        self.v.project()
        self._start()

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

    # -- steps -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a search at the present u and v."""
        self.remaining, self.best, self.stalls, self.error, self.restarted_at = 1.0, math.inf, 0, 0.0, math.inf
        self._set_accuracy(0.0)
        self.exact.restart()
        self.exact.largest_correction = None
        self.search = ProjectedLBFGS.start(self.exact, flatten(self.u.leaves), *self._set())
        self.first = self.search.value
        self.failed = self.search.extra is None
        self._set_accuracy(1.0)
        if not self.failed:
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
        if not size > 0:
            return None
        rates = [FIRST * abs(self.search.value) / size**2]
        self.write_point()
        with suppress(FlatError):
            moved = self.exact.response(slope).norm().item()
            rates += [FIRST * self.search.extra.v.norm().item() / moved] if moved > 0 else []
        known = [rate for rate in rates if rate > 0 and math.isfinite(rate)]
        return min(known, default=None)

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

    def step(self, k: int) -> Tensor:
        before, self.exact.base = self.search.value, self.search.extra.v
        moved = (
            self.search.iterate(self.exact)
            or (self._more_accurate() and self.search.iterate(self.exact))
            or (self._may_restart_search() and self.search.iterate(self.exact))
        )
        self.write_point()
        self.remaining = self._remaining() if moved else self.remaining
        if self.remaining < 0.9 * self.best or abs(self.search.value - before) > self.search.noise:
            self.best, self.stalls = self.remaining, 0
        else:
            self.stalls += 1
        if not moved and not self.exact.finite:
            return self._report()
        if not moved and self.exact.flat:
            self.failed = True
        elif self.remaining <= self.goal or not moved or self.stalls >= STALLS:
            self._check_end(stuck=not moved or self.stalls >= STALLS)
            if self.status is None and not self.exact.finite:
                return self._report()
        else:
            self._set_accuracy(self.remaining)
        return self._record(self.search.extra.f, self.search.extra.g)

    def _report(self) -> Tensor:
        """Return a record with a number that is not finite, which the loop reports."""
        return self._record(self.exact.f, self.exact.newton.value)

    def _more_accurate(self) -> bool:
        """Solve v and q again, more accurately from now on; return False if that was done before."""
        if not self._solved_again():
            return False
        self.accuracy_factor *= 0.1
        return True

    def _may_restart_search(self) -> bool:
        """Restart L-BFGS without its pairs.

        Return False if the expected decrease is below rounding error and the last restart brought no progress.
        """
        useful = (self.tolerance or 0.0) < self.remaining < 0.5 * self.restarted_at
        if self.search.promise <= self.search.noise and not useful:
            return False
        self.restarted_at = self.remaining
        self._forget_model()
        return True

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
        floor: float = torch.finfo(self.v.dtype).eps ** (2 / 3) * abs(self.search.value)
        return max(self.first - self.search.value, self.search.rise) + max(floor, 1e-300)

    def _remaining(self) -> float:
        """Return the root of the share of the gain that a step of L-BFGS promises."""
        return math.sqrt(self.search.promise / (2 * self.gain))

    def _solved_again(self) -> bool:
        """Solve v and q at the present u from other starts, as exactly as possible; note how phi' changes.

        Return whether that had not been done before.
        """
        before, tight = self.search.gradient, self.exact.adjoint_accuracy <= self.tightest
        self._set_accuracy(0.0)
        self.write_point()
        self.exact.base = None
        self.exact.forget()
        v = flatten(self.v.leaves)
        noise = torch.randn(v.shape, generator=self.context.generator, dtype=v.dtype).to(v)
        write(v + torch.finfo(v.dtype).eps ** 0.5 * (1 + v.norm()) / noise.norm() * noise, self.v.leaves)
        value, slope, point = self.exact(self.search.x)
        if point is None:
            self.failed = self.exact.flat
            return False
        self.search.replace(value, slope, point)
        self.error = self.search.face.decrement(slope - before) / math.sqrt(2 * self.gain) if tight else 0.0
        self.remaining = self._remaining()
        return not tight

    def _check_end(self, *, stuck: bool) -> None:
        """End here, unless v and q were inexact; if g has a lower point nearby, continue from there."""
        if self._solved_again():
            if not stuck and self.remaining > self.goal:
                self.stalls = 0
                return
            self._solved_again()
        if self.failed or not self.exact.finite:
            return
        better = lower_point(self.derivatives, self.context.generator, 1e-6, self.search.extra.top, self._minimise)
        self.write_point()
        self.minimiser = better is None
        if better is not None and self.restarts < RESTARTS:
            self.restarts += 1
            self.minimiser = None
            write(better, self.v.leaves)
            self._start()
            if self.failed:
                self.minimiser = False
            return
        self.status = Status.CONVERGED if self.minimiser else Status.STATIONARY
        if max(self.remaining, self.error) > (self.tolerance or 0.0):
            self.status = Status.STALLED

    def _minimise(self) -> float:
        """Minimise g from the present v, with few digits; return its value, infinity if there is no minimum nearby."""
        self.exact.newton.accuracy = LOWER
        try:
            return self.exact.newton.minimise().value
        except FlatError:
            return math.inf

    def _record(self, f: float, g: float) -> Tensor:
        point, search = self.search.extra, self.search
        residual = point.residual.norm().item()
        row = [f, g, search.face.slope.norm().item(), point.grad_v, residual, 0.0, self._gamma(), 0.0]
        row += [min(self.remaining, 1.0), search.length, search.length, 0.0]
        return torch.tensor(row, dtype=torch.float64)

    # -- what solve asks ---------------------------------------------------------------------------------------------

    def finish(self) -> bool | None:
        if self.minimiser is None and self.search.extra is not None:  # the budget ended before the end was checked
            better = lower_point(self.derivatives, self.context.generator, 1e-6, self.search.extra.top, self._minimise)
            self.write_point()
            self.minimiser = better is None
        return self.minimiser

    def _gamma(self) -> float:
        """Return gamma. Any is right; with this one, gamma s is of the size of w if s is of the size of g_vv v."""
        if self.options.gamma is not None:
            return float(self.options.gamma)  # type: ignore[arg-type]
        point = self.search.extra
        size = (1 + point.v.norm().item()) * point.top
        return max(point.w.norm().item() / size, 1e-12) if size > 0 else 1.0

    def prices(self) -> Prices:
        point, gamma = self.search.extra, self._gamma()
        return Prices(
            gamma=torch.tensor(gamma, dtype=self.v.dtype, device=self.v.device),
            nu=self.exact.systems.parts(point.w - gamma * point.residual),
            gamma_h=[],
            mu=[],
        )

    def scales(self) -> tuple[float, float, float, float]:
        """Return the scales of |grad_u F| (for `remaining`), |grad_v F| (the error of q) and |s| (the error of v)."""
        point = self.search.extra
        lower = max(point.top, 1e-300) * (1 + point.v.norm().item())
        return math.sqrt(2 * self.gain / self.unit_step), max(self.exact.size_f_v, 1e-300), lower, 1.0

    @property
    def unit_step(self) -> float:
        """The inverse curvature of phi along its gradient."""
        face = self.search.face
        square = torch.dot(face.slope, face.slope).item()
        left = face.decrement(face.slope) ** 2
        return left / square if square > 0 and math.isfinite(left) and left > 0 else self.search.rate

    def state_dict(self) -> dict[str, Any]:
        d, point = self.derivatives, self.search.extra
        return {
            "solver": self.solver,
            "search": self.search.state_dict(),
            "point": asdict(point) if point else {},
            "exact": self.exact.state_dict(),
            "numbers": [self.remaining, self.best, self.error, self.first, self.restarted_at, self.accuracy_factor],
            "counters": [self.stalls, self.restarts],
            "curvature": d.curvature,
            "evaluations": [d.lower_evaluations, d.upper_evaluations],
            "minimiser": self.minimiser,
            "failed": self.failed,
            "status": self.status.name if self.status else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        d = self.derivatives
        state = each_tensor(lambda tensor: tensor.to(self.v.device), state)
        point = Point(**state["point"]) if state["point"] else None
        project, tangent = self._set()
        self.search = ProjectedLBFGS(**state["search"], project=project, tangent=tangent, extra=point)
        self.exact.load_state_dict(state["exact"])
        self.remaining, self.best, self.error, self.first, self.restarted_at, self.accuracy_factor = state["numbers"]
        self.stalls, self.restarts = state["counters"]
        d.curvature = state["curvature"]
        d.lower_evaluations, d.upper_evaluations = state["evaluations"]
        self.minimiser, self.failed = state["minimiser"], state["failed"]
        self.status = Status[state["status"]] if state["status"] else None
