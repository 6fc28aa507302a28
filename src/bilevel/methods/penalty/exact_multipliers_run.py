"""A run of the penalty method with exact multipliers: L-BFGS on phi(u), with v kept at its minimum.

    phi and phi' by `exact_multipliers`, more accurate as less remains to gain
    remaining = sqrt(<e, H e> / (2 gain)): e is phi' along the set of u, H the inverse curvature of L-BFGS, gain the
    fall of phi since the start. Its square is the share of the gain that is still missing: u can have any unit. A run
    that starts at a minimum has no fall; there the gain is the rise of phi at the first trial point.
    ends when remaining <= goal, after as many steps again as it took to the tolerance, or when rounding hides progress

At the end:

    v and q are solved again from other starts; the change of phi' is its error, which counts as remaining
    the second derivative is explored in a few directions (`optim.second_order`). If phi curves down, or a Newton step
    promises more than L-BFGS, the run continues from what was learned. The gain counts as at most `VARIATIONS` times
    the variation of phi near u, or a tenth of |phi|: the fall from a start that was far off is no unit
    v is moved away and g is minimised again; if g falls, v did not minimise g, and the run continues from there

A step is one L-BFGS iteration. It reads values on the host.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import each_tensor
from bilevel.derivatives.prices import Prices
from bilevel.measures.lower_minimum import flatten, lower_point, write
from bilevel.methods.penalty.exact_multipliers import Point
from bilevel.methods.penalty.exact_multipliers_search import LOWER, ExactMultipliersSearch
from bilevel.methods.penalty.lower_newton import STEPS
from bilevel.optim.linear_solvers import FlatError
from bilevel.optim.projected_lbfgs import ProjectedLBFGS
from bilevel.optim.second_order import explore
from bilevel.results import Status

# The run ends after so many steps that rounding hides and that do not lower `remaining`.
STALLS = 5
# How often a run starts again at a lower point of g.
RESTARTS = 5
# An exploration takes at most a tenth of the evaluations so far, between these two numbers. A run has at most so many.
EXPLORED, EXPLORATIONS = (4, 10), 10
# The accuracy of v and q in an exploration.
EXPLORING = 1e-7
# The most Newton steps from a point at which the end check looks for a lower g.
PROBING = 8
# phi is unbounded if it falls by this many times its value at the start.
UNBOUNDED = 1e30
# The attributes that a checkpoint keeps.
NUMBERS = ("remaining", "best", "change", "first", "restarted_at", "accuracy_factor", "explored", "variation", "unseen")
COUNTERS = ("stalls", "restarts", "taken", "reached", "explorations")


class ExactMultipliersRun(ExactMultipliersSearch):
    """A run of the deterministic mode while g_vv is positive definite.

    An evaluation of phi evaluates f once, and g once and once more for each Newton step on v.
    """

    def begin(self, *, anew: bool = True) -> None:
        """Start at the present u, and at the present v or, if `anew`, at the start that the problem gives."""
        if anew:
            self.start_lower()
        self.u.project()
        self.v.project()
        self._start()

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        before, self.exact.base, self.exact.negative = self.search.value, self.search.extra.v, False
        moved = (
            self.search.iterate(self.exact)
            or (self._more_accurate() and self.search.iterate(self.exact))
            or (self._may_restart_search() and self.search.iterate(self.exact))
        )
        self.write_point()
        self.taken += 1
        self.remaining = self._remaining() if moved else self.remaining
        if self.remaining < 0.9 * self.best or abs(self.search.value - before) > self.search.noise:
            self.best, self.stalls = self.remaining, 0
        else:
            self.stalls += 1
        if not self.reached and self.remaining <= (self.tolerance or 0.0):
            self.reached = self.taken
        if self.search.value < self.mark[0] - 1e-3 * self.gain:
            self.mark = self.search.value, self.search.x
        if self.search.value < self.first - UNBOUNDED * (1 + abs(self.first)):
            self.status, self.doubt = Status.DIVERGED, "f seems to be unbounded below: add bounds on u (project_upper)."
        elif self.search.x.norm().item() > UNBOUNDED * (1 + self.origin.norm().item()):
            self.status, self.doubt = Status.DIVERGED, "u runs to infinity: add bounds on u (project_upper)."
        elif not moved and self.exact.negative:
            self.failed = True
        elif self.remaining <= self.goal or self._long_enough() or not moved or self.stalls >= STALLS:
            self._check_end(stuck=not moved or self.stalls >= STALLS, near=moved or self.exact.finite)
        else:
            self._set_accuracy(self.remaining)
        if self.failed and not self.exact.finite:  # not even at u: the loop reports it
            return self._record(self.exact.f, self.exact.newton.value)
        return self._record(self.search.extra.f, self.search.extra.g)

    def _long_enough(self) -> bool:
        """Return whether the run has taken as many steps again as it took to the tolerance."""
        return 0 < self.reached <= (self.taken - STALLS) / 2

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
        # Relative to each number: they can have different units.
        write(v * (1 + torch.finfo(v.dtype).eps ** 0.5 * noise), self.v.leaves)
        value, slope, point = self.exact(self.search.x)
        if point is None:
            self.failed = True
            self.doubt = "At the end, g does not curve up in some direction of v, up to rounding."
            return False
        self.search.replace(value, slope, point)
        self.change = self.search.face.decrement(slope - before) if tight else 0.0
        self.slope_error = slope - before
        self.remaining = self._remaining()
        return not tight

    @property
    def error(self) -> float:
        """The error of phi', in the unit of `remaining`."""
        return self.change / math.sqrt(2 * self.gain)

    def _check_end(self, *, stuck: bool, near: bool = True, last: bool = False) -> None:
        """End here, unless v and q were inexact, phi falls along some direction, or g has a lower point nearby.

        Args:
            stuck: Whether the search found no better point.
            near: Whether f and g were finite at the last trial point. Default: True.
            last: Whether the run cannot continue. Default: False.
        """
        tolerance = self.tolerance or 0.0
        if self._solved_again():
            if not stuck and not last and self.remaining > self.goal and not self._long_enough():
                self.stalls = 0
                return
            self._solved_again()
        if self.failed or (self._explore(stuck) and not last):
            return
        flat = self.exact.systems.null_directions
        better = lower_point(
            self.derivatives,
            self.context.generator,
            1e-6,
            descend=self._minimise,
            first=self.first_v,
            along=[] if flat is None else list(flat.T),
        )
        self.write_point()
        self.minimiser = better is None
        if better is not None and self.restarts < RESTARTS and not last:
            self.restarts += 1
            self.minimiser = None
            write(better, self.v.leaves)
            self._start()
            if self.failed:
                self.minimiser = False
            return
        self.status = Status.CONVERGED if self.minimiser else Status.STATIONARY
        if max(self.remaining, self.error, self.unseen) > tolerance:
            self.status = Status.STALLED
            self.doubt = self._reason(near) if stuck else ""

    def _reason(self, near: bool) -> str:
        """Return why the run ends before its tolerance."""
        if not near:
            return "f or g is not finite right beyond u: bounds on u (project_upper) can keep it away from there."
        if self.error > (self.tolerance or 0.0):
            return f"The hypergradient is known only to {self.error:.0e}, relative: g_vv is badly conditioned."
        return (
            "No lower value was found along the descent directions: f or g is not smooth here, or g_vv is badly "
            "conditioned."
        )

    def _explore(self, stuck: bool) -> bool:
        """Look at the second derivative of phi; return whether the run goes on with what was learned."""
        tolerance, search = self.tolerance or 0.0, self.search
        if self.explorations >= EXPLORATIONS or search.value >= self.explored - search.noise:
            return False
        self.explorations, self.explored = self.explorations + 1, search.value
        self._set_accuracy(0.0)
        self.exact.newton.accuracy = self.exact.adjoint_accuracy = max(EXPLORING, self.tightest)
        self.exact.largest_correction, self.exact.base = None, search.extra.v
        count = min(max(self.exact.evaluations // 10, EXPLORED[0]), EXPLORED[1])
        random = torch.randn(search.x.shape, generator=self.context.generator, dtype=search.x.dtype).to(search.x)
        found = explore(search, lambda x: self._slope_at(x), self._length, self.slope_error, random, count)
        lower = found.down is not None and self._go_down(found.down)
        self.exact.largest_correction = self._largest_correction
        self.write_point()
        self.variation = found.variation
        self.remaining, self.unseen = self._remaining(), math.sqrt(found.decrease / (2 * self.gain))
        if not lower and max(self.remaining, self.unseen) <= tolerance:
            return False
        for pair in found.pairs:
            search.learn(*pair)
        self.remaining = self._remaining()
        self.best, self.stalls, self.reached = math.inf, 0, 0
        self._set_accuracy(self.remaining)
        return lower or not stuck or self.unseen > tolerance

    def _slope_at(self, x: Tensor) -> Tensor | None:
        _, slope, point = self.exact(x)
        return None if point is None else slope

    def _go_down(self, direction: Tensor) -> bool:
        """Move along a direction in which phi curves down, if phi falls, and start the search again there."""
        search, length = self.search, self._length(direction)
        for move in (sign * length * share * direction for share in (1.0, 0.1) for sign in (1, -1)):
            value, slope, point = self.exact(search.trial(move))
            if point is not None and value < search.value - search.noise:
                search.x = search.trial(move)
                search.replace(value, slope, point)
                self._forget_model()
                return True
        return False

    def _minimise(self) -> float:
        """Minimise g from the present v, with few digits; return its value, infinity if there is no minimum nearby."""
        newton = self.exact.newton
        newton.accuracy, newton.limit = LOWER, PROBING
        try:
            return newton.minimise().value
        except FlatError:
            return math.inf
        finally:
            newton.limit = STEPS

    def _record(self, f: float, g: float) -> Tensor:
        point, search = self.search.extra, self.search
        residual = point.residual.norm().item()
        row = [f, g, search.face.slope.norm().item(), point.grad_v, residual, 0.0, self._gamma(), 0.0]
        row += [min(self.remaining, 1.0), search.length, search.length, 0.0]
        return torch.tensor(row, dtype=torch.float64)

    # -- what solve asks ---------------------------------------------------------------------------------------------

    @property
    def message(self) -> str:
        """What the status does not say about the end."""
        origin, (_, x) = self.origin, self.mark
        if self.search.gradient.norm().item() == 0 and self.explorations and self.variation == 0:
            return "f does not change with u, here or nearby."
        if (self.search.x - x).norm().item() <= (x - origin).norm().item() or self.status is Status.DIVERGED:
            return self.doubt
        far = "u moved far in directions in which f hardly changes: add bounds on u (project_upper)."
        return f"{self.doubt} {far}".strip()

    def finish(self) -> bool | None:
        if self.minimiser is None:  # the budget ended before the end was checked
            self._check_end(stuck=False, last=True)
        return self.minimiser

    def _gamma(self) -> float:
        """Return gamma. Any is right; with this one, gamma s is of the size of w if s is of the size of g_vv v."""
        if self.options.gamma is not None:
            return float(self.options.gamma)  # type: ignore[arg-type]
        point = self.search.extra
        size = (1 + point.v.norm().item()) * point.top
        return max(point.w.norm().item() / size, torch.finfo(self.v.dtype).tiny) if size > 0 else 1.0

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
            "numbers": [getattr(self, name) for name in NUMBERS],
            "counters": [getattr(self, name) for name in COUNTERS],
            "mark": [self.origin, *self.mark],
            "doubt": self.doubt,
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
        for name, value in zip([*NUMBERS, *COUNTERS], [*state["numbers"], *state["counters"]], strict=True):
            setattr(self, name, value)
        self.origin, *mark = state["mark"]
        self.mark, self.doubt = tuple(mark), state["doubt"]
        d.curvature = state["curvature"]
        d.lower_evaluations, d.upper_evaluations = state["evaluations"]
        self.minimiser, self.failed = state["minimiser"], state["failed"]
        self.status = Status[state["status"]] if state["status"] else None
