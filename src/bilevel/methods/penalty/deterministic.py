"""The deterministic mode: which algorithm runs, and when the other one takes over.

Exact multipliers run if g_vv exists and is positive definite at the start. The augmented Lagrangian runs if there are
upper-level constraints, if g_vv is only known by differences, and if conjugate gradients meet a direction in which g
does not curve up, at the start or later. It also takes over if exact multipliers end although their model of f promises
more. If g_vv is positive definite at its end, exact multipliers confirm this end or continue from there; their earlier
end stands if it is better. The column `solver` of the history names the
algorithm of each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.measures.lower_minimum import flatten, write
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.augmented_lagrangian import AugmentedLagrangianRun
from bilevel.methods.penalty.exact_run import ExactMultipliersRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.results import Status

AnyRun = ExactMultipliersRun | AugmentedLagrangianRun


def _margin(kept: ExactMultipliersRun) -> float:
    """Return the difference of f that does not count."""
    return 1e-6 * (1 + abs(kept.search.value))


class DeterministicRun:
    """A run without data and without lower constraints. What is asked of it is asked of the present algorithm."""

    mode = "deterministic"
    engine = "eager"
    draws = 0

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        self.options, self.context = options, context
        problem = context.problem
        self.constrained = bool(problem.equalities or problem.inequalities)
        # An end of exact multipliers before the augmented Lagrangian, and whether they run again after it.
        self.kept: ExactMultipliersRun | None = None
        self.returned = False
        self.current: AnyRun
        self.derivatives: PenalisedObjective
        self.tolerance: float | None
        self._use(self._first())
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
                if not exact.failed:
                    return exact
                write(held, exact.leaves)
        return self._second(d)

    def _second(self, before: PenalisedObjective) -> AugmentedLagrangianRun:
        """Return the augmented Lagrangian from the present u and v; evaluations are counted on."""
        run = AugmentedLagrangianRun(self.options, self.context)
        self._count_on(run, before)
        run.begin()
        return run

    def _use(self, run: AnyRun) -> None:
        self.current, self.derivatives, self.tolerance = run, run.derivatives, run.tolerance
        self.step = run.step  # without a frame of its own: users see these calls in a debugger

    def ended(self) -> Status | None:
        """Return how the run ended; change the algorithm first if the other one has something to gain."""
        run = self.current
        if isinstance(run, ExactMultipliersRun):
            if run.failed or (run.status is Status.STALLED and run.search.promise > run.search.noise):
                run.failed, run.status = False, Status.STALLED
                if not self.returned:
                    self.kept = run
                    self._use(self._second(run.derivatives))
                    return None
        elif run.status is not None:
            self._return()
        return self.current.status

    def _return(self) -> None:
        """After the augmented Lagrangian, go on with exact multipliers where g_vv is positive definite.

        They confirm its end, or continue from there. An end of theirs before that is kept if it is better.
        """
        run, kept = self.current, self.kept
        if isinstance(run, ExactMultipliersRun) or self.returned or self.constrained or run.at().f.isnan():
            return
        held = flatten(run.leaves)
        exact = ExactMultipliersRun(self.options, self.context)
        self._count_on(exact, run.derivatives)
        if run.derivatives.curvature != "difference":
            exact.begin(anew=False)
        if run.derivatives.curvature == "difference" or exact.failed:
            write(held, run.leaves)
            f = float(run.at().f)
            better = run.status is Status.CONVERGED and (kept is None or f <= kept.search.value + _margin(kept))
        else:
            better = kept is None or exact.search.value <= kept.search.value + _margin(kept)
            self.returned = True
            self._use(exact)
        if kept is not None and not better:
            self._count_on(kept, self.derivatives)
            kept.write_point()
            self._use(kept)
        self.kept = None

    def _count_on(self, run: AnyRun, before: PenalisedObjective) -> None:
        """Let a run count evaluations on from those of another."""
        d = run.derivatives
        d.curvature, d.lower_evaluations = before.curvature, before.lower_evaluations
        d.upper_evaluations = before.upper_evaluations

    # -- what solve asks ---------------------------------------------------------------------------------------------

    @property
    def solver(self) -> str:
        return self.current.solver

    def finish(self) -> bool | None:
        if self.current.status is None:
            self._return()
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
    def unit_step(self) -> float:
        return self.current.unit_step

    def state_dict(self) -> dict[str, Any]:
        kept = {} if self.kept is None else {"kept": self.kept.state_dict()}
        return self.current.state_dict() | {"solver": self.solver, "returned": self.returned} | kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Checkpoints of version 0.1 do not name the algorithm: there was one.
        kind = ExactMultipliersRun if state.get("solver") == ExactMultipliersRun.solver else AugmentedLagrangianRun
        run = kind(self.options, self.context)
        run.load_state_dict(state)
        self._use(run)
        self.kept, self.returned = None, bool(state.get("returned"))
        if "kept" in state:
            self.kept = ExactMultipliersRun(self.options, self.context)
            self.kept.load_state_dict(state["kept"])
