"""The mode without data: which algorithm runs, and when the other one takes over.

1. Exact multipliers run if g_vv exists and is positive definite at the first v, or at the minimum of g that L-BFGS
   finds from there.
2. Otherwise, the augmented Lagrangian runs. It also runs with upper-level constraints, or if g_vv is only known by
   differences, and it takes over if exact multipliers get stuck where g certainly curves down, or at a kink of v* on
   the set of v. A trial point at which g_vv is singular to rounding, or at which its systems take too many products,
   is only rejected: u can run to infinity, and nothing is gained there.
3. If g_vv is positive definite at the end of the augmented Lagrangian, exact multipliers confirm this end or continue
   from there. If g_vv turns out to be singular, the end of the augmented Lagrangian stands.

Of two ends, the better one is returned. The column `solver` of the history names the algorithm of each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.measures.lower_minimum import flatten, minimise, write
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.augmented_lagrangian import AugmentedLagrangianRun
from bilevel.methods.penalty.exact_multipliers_run import ExactMultipliersRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.results import Status

AnyRun = ExactMultipliersRun | AugmentedLagrangianRun
# Differences of f below this share of 1 + |f| do not count.
EQUAL = 1e-6
# The accuracy of a first minimum of g by L-BFGS.
MINIMUM = 1e-6


class Ended(NamedTuple):
    """A run that another algorithm follows, with f and (u, v) at its end."""

    run: AnyRun
    f: float
    point: Tensor

    def better_than(self, f: float) -> bool:
        return self.f < f - EQUAL * (1 + abs(self.f))


class DeterministicRun:
    """A run without data and without lower constraints. It delegates to the current algorithm."""

    mode = "deterministic"
    engine = "eager"
    draws = 0

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        self.options, self.context = options, context
        problem = context.problem
        self.constrained = bool(problem.equalities or problem.inequalities)
        # The end of the algorithm before the current one, and whether the current one confirms it.
        self.previous: Ended | None = None
        self.confirming = False
        self.current: AnyRun
        self.derivatives: PenalisedObjective
        self.first_v = flatten(context.v.leaves)
        self.tolerance: float | None
        self._switch_to(self._first())
        self.current.warn_of_precision()

    def _first(self) -> AnyRun:
        """Return the algorithm for the present u and v."""
        exact = ExactMultipliersRun(self.options, self.context)
        held = flatten(exact.leaves)
        d = exact.derivatives
        if not self.constrained:
            still = d.prepare([(None, None)], graph=False)
            d.hessian_product(still, [torch.ones_like(leaf) for leaf in d.v.leaves], with_u=False)
            if d.curvature != "difference":
                exact.begin()
                if exact.failed:
                    # g can curve down at the first v and up at its minimum.
                    write(held, exact.leaves)
                    exact.start_lower()
                    minimise(d, MINIMUM)
                    exact.begin(anew=False)
                if not exact.failed:
                    return exact
                write(held, exact.leaves)
        return self._augmented_lagrangian(d)

    def _augmented_lagrangian(self, before: PenalisedObjective) -> AugmentedLagrangianRun:
        """Return the augmented Lagrangian, started at the present u and v."""
        run = AugmentedLagrangianRun(self.options, self.context)
        _copy_counts(before, run)
        run.begin()
        return run

    def _switch_to(self, run: AnyRun) -> None:
        self.current, self.derivatives, self.tolerance = run, run.derivatives, run.tolerance
        run.first_v = self.first_v
        self.step = run.step  # directly: users see fewer calls in a debugger

    def ended(self) -> Status | None:
        """Return how the run ended. If the other algorithm can gain something, switch to it and return None."""
        run = self.current
        if isinstance(run, AugmentedLagrangianRun):
            if run.status is not None:
                self._confirm()
        elif run.failed or self._at_kink(run):
            kink, run.failed, run.status = not run.failed, False, Status.STALLED
            if not self.confirming and (kink or run.exact.negative):
                # If g was found to be lower elsewhere, f at this end means nothing.
                self.previous = None if run.minimiser is False else Ended(run, run.search.value, flatten(run.leaves))
                self._switch_to(self._augmented_lagrangian(run.derivatives))
            elif self.confirming and not kink and self.previous and not self.previous.better_than(run.search.value):
                self._restore_previous()
        return self.current.status

    @staticmethod
    def _at_kink(run: ExactMultipliersRun) -> bool:
        """Return whether the run is stuck at a point where another face of the set of v begins."""
        stuck = run.status is Status.STALLED and run.search.promise > run.search.noise
        return stuck and run.v.projected and run.coarse == "float64"

    def _confirm(self) -> None:
        """Continue with exact multipliers from the end of the augmented Lagrangian, if g_vv is positive definite there.

        Return to an earlier end of exact multipliers if it is better.
        """
        run = self.current
        if isinstance(run, ExactMultipliersRun) or self.constrained or run.at().f.isnan():
            return
        end = Ended(run, float(run.at().f), flatten(run.leaves))
        exact = ExactMultipliersRun(self.options, self.context)
        _copy_counts(run.derivatives, exact)
        possible = run.derivatives.curvature != "difference"
        if possible:
            exact.begin(anew=False)
            possible = not exact.failed
        f = exact.search.value if possible else end.f
        if self.previous and (self.previous.better_than(f) or not (possible or run.status is Status.CONVERGED)):
            self._restore_previous()
        elif possible:
            self.previous, self.confirming = end, True
            self._switch_to(exact)
        else:
            write(end.point, run.leaves)

    def _restore_previous(self) -> None:
        """Return to the end of the previous algorithm."""
        if self.previous is not None:
            run = self.previous.run
            _copy_counts(self.derivatives, run)
            write(self.previous.point, run.leaves)
            self.previous = None
            self._switch_to(run)

    # -- what solve asks ---------------------------------------------------------------------------------------------

    @property
    def solver(self) -> str:
        return self.current.solver

    def finish(self) -> bool | None:
        if self.current.status is None:
            self._confirm()
        return self.current.finish()

    def episode(self) -> list[Pair] | None:
        return None

    def prices(self) -> Prices:
        return self.current.prices()

    def lam(self) -> Tensor:
        return self.current.lam()

    def scales(self) -> tuple[float, float, float, float]:
        return self.current.scales()

    @property
    def doubt(self) -> str:
        """Why the end is not trusted; empty if it is."""
        return getattr(self.current, "doubt", "")

    @property
    def message(self) -> str:
        """What the status does not say about the end."""
        doubt = getattr(self.current, "message", "")
        coarse = self.current.coarse != "float64" and self.current.status is Status.STALLED
        return f"{doubt} Try float64.".strip() if coarse else doubt

    @property
    def unit_step(self) -> float:
        return self.current.unit_step

    def state_dict(self) -> dict[str, Any]:
        previous = {}
        if self.previous is not None:
            run, f, point = self.previous
            previous = {"previous": {"run": run.state_dict() | {"solver": run.solver}, "f": f, "point": point}}
        return (
            self.current.state_dict()
            | {"solver": self.solver, "confirming": self.confirming, "first_v": self.first_v}
            | previous
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first_v = state.get("first_v", self.first_v).to(self.context.u.device)
        self._switch_to(self._loaded(state))
        self.previous, self.confirming = None, bool(state.get("confirming"))
        if "previous" in state:
            held = state["previous"]
            self.previous = Ended(self._loaded(held["run"]), held["f"], held["point"].to(self.current.u.device))

    def _loaded(self, state: dict[str, Any]) -> AnyRun:
        """Return a run in the given state. Checkpoints of version 0.1 name no algorithm: there was one."""
        kind = ExactMultipliersRun if state.get("solver") == ExactMultipliersRun.solver else AugmentedLagrangianRun
        run = kind(self.options, self.context)
        run.load_state_dict(state)
        return run


def _copy_counts(before: PenalisedObjective, run: AnyRun) -> None:
    """Let a run continue the evaluation counts of another one."""
    d = run.derivatives
    d.curvature, d.lower_evaluations = before.curvature, before.lower_evaluations
    d.upper_evaluations = before.upper_evaluations
