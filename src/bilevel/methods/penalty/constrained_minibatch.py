"""The penalty method on minibatches for a lower level with constraints: F penalises its KKT conditions.

With L = g + <alpha, c> + <beta, d>, s = grad_v L, and d = 0 and phi_t(alpha, -c) = 0 as equalities (see
`bilevel.derivatives.lower_constraints`),

    v descends F + lam A,   alpha and beta descend F together with v,   u descends F
    A = g + rho/2 |max(0, c + alpha/rho)|^2 - |alpha|^2 / (2 rho) + <beta, d> + rho/2 |d|^2

A is the augmented Lagrangian of the lower level, with alpha and beta held fixed. If the conditions hold, its slope is
s = 0: it then moves nothing, but keeps v at a minimum. In the warm-up v descends f + lam A with alpha = beta = 0. At
the end of the warm-up A gives their values: alpha = max(0, rho c), beta = rho d. Each advance of the schedule
multiplies t by 0.7.

The constraints depend only on u and v: with data their batch is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import broadcast_trials, gradient, norm
from bilevel.derivatives.lower_constraints import KKT, TINY
from bilevel.derivatives.prices import Gradients
from bilevel.distributed.derivatives import make_derivatives
from bilevel.engines.compiled import Compiled
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import BatchScales
from bilevel.measures.constrained_lower_minimum import resolve
from bilevel.measures.problem_scales import lower_curvature
from bilevel.methods.base import RunContext
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.penalty.minibatch import PenaltyMinibatchRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.optim.variable_optimizer import OptimizerFactory, VariableOptimizer, adam
from bilevel.problem.problem import Objective
from bilevel.problem.variables import Variable

# The first t, relative to the size of an entry of v.
FIRST_T = 0.1
T_FACTOR = 0.7
# The penalty weight of a lower constraint in A, relative to the curvature of g.
RHO = 1.0


class ConstrainedMinibatchRun(PenaltyMinibatchRun):
    """A run on minibatches with lower constraints.

    Each gradient evaluates f and g once, and each lower constraint three times: in L, in its own condition, and in A.
    """

    multipliers: VariableOptimizer

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        problem = context.problem
        for name in ("prepare", "start_lower"):
            if getattr(problem, name) is not None:
                raise OptionError(
                    f"{name} cannot be used with lower_equalities or lower_inequalities on minibatches, because these "
                    "constraints depend only on u and v. Use project_lower, or pass data=None."
                )
        if context.v.shards or context.u.shards:
            raise OptionError(
                "lower_equalities and lower_inequalities cannot be used if fully_shard shards v. Use project_lower."
            )
        alone = replace(
            problem,
            lower_equalities=[without_batch(h) for h in problem.lower_equalities],
            lower_inequalities=[without_batch(h) for h in problem.lower_inequalities],
        )
        self.kkt = KKT(alone, context.u, context.v, None)
        self._measure_units(context)
        super().__init__(options, replace(context, problem=self.kkt.problem(), u=self.kkt.u))
        self.derivatives.kkt = self.kkt
        # Compiled for a GPU, these steps give other results than eager ones (torch 2.11); CUDA graphs do not.
        for engine in self.engines.made if context.v.device.type == "cuda" else []:
            if isinstance(engine, Compiled):
                why = "on a GPU, steps with lower constraints are not compiled."
                engine.fall_back_to_eager(why, quietly=self.context.engine == "auto")

    # -- before the first step -----------------------------------------------------------------------------------

    def _measure_units(self, context: RunContext) -> None:
        """Measure |g_vv| on the first batches and |J| of each constraint, and set the first t."""
        kkt = self.kkt
        d = make_derivatives(kkt.problem(), kkt.u, context.v, ranks=context.ranks, precision=context.precision)
        upper, lower, _ = context.sources.sample(1)
        pairs = [(upper[0], lower[0])]
        slope, size = d.size(d.slope(pairs)[1]).item(), 1 + norm(context.v.leaves).item()
        kkt.bend = max(lower_curvature(d, context.generator, pairs), slope / size, TINY)
        kkt.measure_rows(None)
        kkt.t.fill_(FIRST_T * size / context.v.size**0.5)

    def _measured(self) -> BatchScales:
        measured = super()._measured()
        equal, less = len(self.kkt.source.equalities), len(self.kkt.source.inequalities)
        first = equal + len(self.kkt.a) + len(self.kkt.b)
        own = [measured.sizes_h[i] for i in (*range(equal), *range(first, first + less))]
        self._scale_values = (*measured.sizes[:2], min(own, default=1.0) or 1.0)
        return measured

    def _shrinking(self) -> list[tuple[Tensor, float]]:
        return [(self.kkt.t, T_FACTOR)]

    def _upper_descent(
        self, factory: OptimizerFactory | None, measured: BatchScales, u: Variable | None = None
    ) -> VariableOptimizer:
        return super()._upper_descent(factory, measured, self.kkt.plain_u if u is None else u)

    def _lower_descent(self, factory: OptimizerFactory | None, rate: float) -> VariableOptimizer:
        self.multipliers = VariableOptimizer(self.kkt.alone, factory or adam(self.kkt.alone, rate), "lower_optimizer")
        return super()._lower_descent(factory, rate)

    # -- one step ------------------------------------------------------------------------------------------------

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        """Move v, alpha and beta."""
        factor = self._factor(self.lower_power, left)
        if not moving:
            gradients = self.derivatives.first_order(draw, None)
        else:
            with self._holding_u():
                gradients = self.derivatives.penalised(
                    draw, self.schedule.prices, with_u=True, slope=self._mean_slope()
                )
            self._note_slope(gradients.slope)
        self.lower.step(self._lowered(gradients), (), factor)
        self._move_multipliers(gradients.u, factor, moving)

    @contextmanager
    def _holding_u(self) -> Iterator[None]:
        """Differentiate only in v, alpha and beta inside."""
        d = self.derivatives
        d.u = self.kkt.alone
        for leaf in self.kkt.plain_u.leaves:
            leaf.requires_grad_(False)
        try:
            yield
        finally:
            d.u = self.kkt.u
            for leaf in self.kkt.plain_u.leaves:
                leaf.requires_grad_(True)

    def _move_upper(self, gradients: Gradients, factors: tuple[Tensor, Tensor], moving: bool) -> None:
        count = len(self.kkt.plain_u.leaves)
        if moving:
            self.upper.step(gradients.u[:count], gradients.rows, factors[0])
        if self.options.joint:
            self._move_multipliers(gradients.u[count:], factors[1], moving)

    def _move_multipliers(self, slopes: Sequence[Tensor], factor: Tensor, moving: bool) -> None:
        if moving:
            self.multipliers.step(slopes, (), factor)

    def _warmed(self, k: int) -> None:
        kkt = self.kkt
        if k > 0:
            with torch.no_grad():
                c, d = kkt.constraints(None)
                for a, x, size in zip(kkt.a, c, kkt.sizes_c, strict=True):
                    a.copy_((RHO * x / size).clamp(min=0))
                for b, x, size in zip(kkt.b, d, kkt.sizes_d, strict=True):
                    b.copy_(RHO * x / size)
        super()._warmed(k)

    def _lowered(self, gradients: Gradients) -> list[Tensor]:
        kkt, lam = self.kkt, self.schedule.lam
        with self._holding_u(), torch.enable_grad():
            c, d = kkt.constraints(None)
            pulls = []
            for a, x, size in zip(kkt.a, c, kkt.sizes_c, strict=True):
                held = a.detach()
                pulls.append(((held + RHO * x.detach() / size).clamp(min=0) - held) * kkt.bend / size)
            pulls += [RHO * kkt.bend * x.detach() / size**2 for x, size in zip(d, kkt.sizes_d, strict=True)]
            # The slope of A has max(0, alpha + rho c) and beta + rho d in place of alpha and beta: add the difference.
            more = gradient([*c, *d], self.v.leaves, cotangent=pulls)
        lowered = super()._lowered(gradients)
        return [x + broadcast_trials(lam, m) * m for x, m in zip(lowered, more, strict=True)]

    # -- what solve asks -----------------------------------------------------------------------------------------

    def finish(self) -> bool | None:
        """Without data, solve the lower problem again from several points."""
        if self.context.sources:
            return None
        d, kkt = self.derivatives, self.kkt
        slope = norm(d.slope([(None, None)])[1]).item()
        found = resolve(d, kkt, self.context.generator, self.tolerance or 1e-6, slope)
        kkt.gap, kkt.gap_starts = found.gap, found.starts
        return found.better is None and found.met > 0

    def _descents(self) -> dict[str, VariableOptimizer]:
        return super()._descents() | {"multipliers": self.multipliers}

    def _tensors(self) -> dict[str, Any]:
        kkt = self.kkt
        own = {"a": list(kkt.a), "b": list(kkt.b), "t": kkt.t, "sizes_c": kkt.sizes_c, "sizes_d": kkt.sizes_d}
        return super()._tensors() | own

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"bend": self.kkt.bend}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.kkt.bend = state["bend"]


def without_batch(function: Objective) -> Objective:
    """Return the constraint with None as its batch."""

    def constraint(u: Any, v: Any, _: Any) -> Tensor:
        return function(u, v, None)

    return constraint
