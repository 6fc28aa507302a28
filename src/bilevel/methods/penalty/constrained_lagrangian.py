"""The deterministic mode for a lower level with constraints: the same rounds, on its KKT conditions.

    v solves the lower problem first, which gives the first multipliers; t = 0.1 (1 + |v|)
    smooth rounds on F with phi_t; t /= 10 in each that met its epsilon, until it is 1e-4 (1 + |v|)
    piece: rounds on F with the active constraints held fixed, to the last digits; then the next piece, if f falls there
    at the end: solve the lower problem again from several points; if g falls, add a cut there and continue;
            if g ties at a point with a smaller f, add a cut here and continue from that point

See `bilevel.derivatives.lower_constraints` for the conditions and `augmented_lagrangian` for a round.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import gradient, norm
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.prices import violation
from bilevel.measures.constrained_lower_minimum import LowerPoint, Resolved, minimise_constrained, resolve
from bilevel.measures.lower_minimum import flatten, write
from bilevel.measures.problem_scales import Scales, lower_curvature
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.augmented_lagrangian import AugmentedLagrangianRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.methods.penalty.run_without_data import default_tolerance

# The default, relative. Penalties of several kinds leave fewer digits than a problem without lower constraints.
TOLERANCE = 1e-7
# The goal of the smooth rounds, relative to the sizes of the problem.
SMOOTH_GOAL = 1e-4
SMOOTH_ROUNDS = 15
# Factors on the first penalty weights, in turn over several starts: large weights keep a run near its start, small ones
# let it cross barriers. Every second start also leaves out the smooth rounds.
PRICES = (1.0, 100.0, 0.1, 100.0)
# The largest number of pieces in a run.
PIECES = 30
# The largest number of restarts if each of them halves the gap; otherwise `augmented_lagrangian.RESTARTS`.
HALVINGS = 20
FEASIBLE = 1e-6
# A run continues at another lower solution if f is smaller there by this much, relative to 1 + |f|.
LESS = 1e-6


class ConstrainedLagrangianRun(AugmentedLagrangianRun):
    """A run with lower constraints.

    Each gradient of F evaluates f, g and each lower constraint once; each cut evaluates g and the constraints again.
    """

    patience = 8
    shortest = 1e-4

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        context.u.make_dense()
        if context.tolerance is None:
            dtypes = [leaf.dtype for leaf in (*context.u.leaves, *context.v.leaves)]
            context = replace(context, tolerance=default_tolerance(dtypes, TOLERANCE, self.places))
        prepare = context.problem.prepare
        batch = None if prepare is None else prepare(context.u.value, None)
        self.kkt = KKT(context.problem, context.u, context.v, batch)
        self.pieces, self.rounds = 0, 0
        self.exact_goal = 0.0
        self.resolved: Resolved | None = None
        self.gaps = [math.inf, math.inf]
        self.tie = self.closing = False
        super().__init__(options, replace(context, problem=self.kkt.problem(), u=self.kkt.u))
        self.derivatives.kkt = self.kkt

    # -- the start -----------------------------------------------------------------------------------------------------

    def _minimise_lower(self) -> None:
        d = self.derivatives
        self.kkt.measure(self._batches(graph=False)[0][1], lower_curvature(d, self.context.generator))
        point = minimise_constrained(d, self.kkt, self.goal)
        self.kkt.measure(self._batches(graph=False)[0][1], lower_curvature(d, self.context.generator))
        self.kkt.write(point.alpha, point.beta)
        self.exact_goal = min(self.goal, 0.1 * (self.tolerance or 1.0))
        if self.context.start % 2:
            self._piece()
        else:
            self._smooth()

    def _smooth(self) -> None:
        """Start the smooth rounds."""
        self.rounds = 0
        self.kkt.active = None
        self.kkt.t.fill_(0.1 * (1 + norm(self.v.leaves).item()))
        self.goal = max(SMOOTH_GOAL, self.exact_goal)
        self._set_problem()

    def _piece(self) -> None:
        """Start with the piece of the present point."""
        self.kkt.choose_piece(self._batches(graph=False)[0][1])
        self.goal = self.exact_goal
        self._set_problem()

    def _set_problem(self) -> None:
        self.problem = self.derivatives.problem = self.kkt.problem()

    def _measure(self) -> None:
        super()._measure()
        factor = PRICES[self.context.start % len(PRICES)]
        for price in (self.price.gamma, *self.price.gamma_h, self.set_price):
            price.mul_(factor)

    def _sizes(self) -> Scales:
        """Return the measured sizes, with at least 1 for the KKT conditions: their units give them this size."""
        scales = super()._sizes()
        upper = self._upper()
        sizes = [size if i in upper else max(size, 1.0) for i, size in enumerate(scales.jacobians)]
        d = self.derivatives
        leaves = [*self.kkt.plain_u.leaves, *self.v.leaves]
        slope = norm(gradient(d.upper(self._batches(graph=True)[0][0]), leaves)).item()
        # Objectives can be linear here. Then f changes by its slope over the size of z, and a multiplier in the unit
        # of v changes the slope of g by `bend`.
        bend = max(scales.f, slope / self._reach())
        return replace(scales, f=bend, g=max(scales.g, self.kkt.bend), jacobians=sizes, unit_u=1.0)

    def _upper(self) -> list[int]:
        """Return the positions of the upper level's constraints among all constraints."""
        equal, less = len(self.kkt.source.equalities), len(self.kkt.source.inequalities)
        first = equal + len(self.kkt.a) + len(self.kkt.b)
        return [*range(equal), *range(first, first + less)]

    def scales(self) -> tuple[float, float, float, float]:
        sizes = self._constraint_scales()
        return *super().scales()[:3], min((sizes[i] for i in self._upper()), default=self._reach())

    def _reach(self) -> float:
        """Return the size of u and v without the multipliers of the lower level, which can be unbounded."""
        return 1 + norm([*self.kkt.plain_u.leaves, *self.v.leaves]).item()

    def _evaluating(self) -> AbstractContextManager[None]:
        return self.kkt.sharing()

    # -- phases --------------------------------------------------------------------------------------------------------

    def _tighten(self, met: bool) -> bool:
        self.rounds += 1
        least = SMOOTH_GOAL * (1 + norm(self.v.leaves).item())
        if self.kkt.active is not None or not met or self.kkt.t <= least:
            return False
        self.kkt.t.copy_((self.kkt.t / 10).clamp(min=least))
        return True

    def _over(self) -> bool:
        return self.kkt.active is None and self.rounds >= SMOOTH_ROUNDS

    def _check_end(self) -> None:
        batch = self._batches(graph=False)[0][1]
        if self.kkt.active is None:
            if self.kkt.t > 2 * SMOOTH_GOAL * (1 + norm(self.v.leaves).item()) and self.rounds < SMOOTH_ROUNDS:
                self._tighten(True)
                self._new_round()
                return
            self._piece()
            self._next()
            return
        if self.pieces < PIECES:
            reach = 1 + norm(self.v.leaves).item()
            pulls = self.derivatives.constraint_cotangents(self.at().constraints, self.price)
            wrong = self.kkt.wrong(batch, pulls, max(1e-5, 10 * self.goal) * reach)
            if any(bool(w.any()) for w in wrong):
                self.pieces += 1
                self.kkt.active = [a ^ w for a, w in zip(self.kkt.active, wrong, strict=True)]
                self._next()
                return
        super()._check_end()

    def _next(self) -> None:
        """Start another piece from the present point; keep nu."""
        nu = self.price.nu
        self._set_problem()
        self.stalls = 0
        self._measure()
        self.price.nu = nu
        self._start()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _lower_point(self) -> Tensor | None:
        slope = norm(self.derivatives.slope(self._batches(graph=False))[1]).item()
        self.resolved = found = resolve(self.derivatives, self.kkt, self.context.generator, self.goal, slope)
        self.kkt.gap, self.kkt.gap_starts = found.gap, found.starts
        self.gaps = [self.gaps[1], found.gap]
        self.tie = False
        if found.better is None and not self.closing and self._may_restart():
            found.better = self._preferred(found.tied)
            self.tie = found.better is not None
        return None if found.better is None else found.better.v

    def _may_restart(self) -> bool:
        halved = self.restarts < HALVINGS and self.gaps[1] <= self.gaps[0] / 2 and self.restarts > 0
        return halved or super()._may_restart()

    @torch.no_grad()
    def _preferred(self, points: list[LowerPoint]) -> LowerPoint | None:
        """Return the feasible lower solution with the smallest f, if f is smaller there than here."""
        held = flatten(self.v.leaves)
        source, best = self.kkt.source, None
        least = self.at().f.item()
        least -= LESS * (1 + abs(least))
        for point in points:
            write(point.v, self.v.leaves)
            u, batch = self.kkt.plain_u.value, self._batches(graph=False)[0][0]
            values = [h(u, self.v.value, batch) for h in (*source.equalities, *source.inequalities)]
            outside = violation(values, len(source.equalities)).item() if values else 0.0
            f = self.derivatives.upper(batch).item()
            if f < least and outside <= FEASIBLE * self._reach():
                best, least = point, f
        write(held, self.v.leaves)
        return best

    def _restart(self, better: Tensor) -> None:
        """Add a cut at the better point; continue from there or, every second time, from here.

        The order depends on the start: if minimisers tie, each of them leads to another solution. If the better point
        ties and has a smaller f, add the cut at the present point and continue from the better one.
        """
        if self.resolved is None or self.resolved.better is None:
            raise RuntimeError("a restart needs a better point; there is none.")
        self.kkt.cuts.add(flatten(self.v.leaves) if self.tie else better)
        if self.tie or (self.restarts + self.context.start // 2) % 2:
            write(better, self.v.leaves)
            self.kkt.write(self.resolved.better.alpha, self.resolved.better.beta)
        if self.tie or self.context.start % 2:
            self._piece()
        else:
            self._smooth()
        self.stalls = 0
        self._measure()
        self._start()

    def finish(self) -> bool | None:
        self.closing = True
        if self.kkt.active is None:
            self._piece()
            self._measure()
        found = super().finish()
        # If the lower problem could not be solved again, v is not known to solve it.
        unknown = self.resolved is not None and not self.resolved.met
        beyond = self.kkt.cuts.violation(self._batches(graph=False)[0][1])
        return False if unknown or beyond > (self.tolerance or 0.0) * self._reach() else found

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "kkt": self.kkt.state_dict(),
            "pieces": self.pieces,
            "rounds": self.rounds,
            "goals": [self.goal, self.exact_goal],
            "gaps": list(self.gaps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kkt.load_state_dict(state["kkt"])
        self.pieces, self.rounds = state["pieces"], state["rounds"]
        self.goal, self.exact_goal = state["goals"]
        self.gaps = list(state["gaps"])
        super().load_state_dict(state)
        self._set_problem()
        write(self.search.x, self.leaves)
