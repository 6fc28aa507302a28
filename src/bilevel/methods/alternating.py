"""Alternating descent (GD in the paper): v descends g, u descends f with v held.

    v <- v - rho grad_v g(u, v)   (T times),      u <- u - sigma grad_u f(u, v)

The dependence of the lower solution on u is left out: the end is a solution only where that does not matter, and u does
not move at all where f depends on it through v alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel._util.checks import factory
from bilevel.derivatives.prices import Prices
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import Draw, MinibatchRun
from bilevel.methods.options import StepOptions, no_constraints
from bilevel.optim.variable_optimizer import OptimizerFactory


@dataclass(frozen=True, kw_only=True, repr=False)
class Alternating(StepOptions):
    """Alternating descent: v descends g, u descends f with v held fixed.

    It ignores how the lower solution depends on u, so its end is a solution only if that does not matter.

    Options:
        lower_steps: Steps on v before each step on u (T in the paper). Default: 5.
        warm_up: Share of `max_steps` in which only v moves. Default: 0.1; 0 with `start_lower`.
        decay: "linear" (default): the learning rates fall to zero over `max_steps`. "constant": they stay.
        lower_batches: "fresh" (default): a new pair of batches for every lower step. "shared": one pair for the
            lower steps and the upper step.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: Adam, with a rate that
            lets each coordinate move by 5.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v. Default: Adam, whose first step
            reduces g by 6% to first order, with a rate between 1e-4 and 3e-2; without data at least the rate of u.

    >>> Alternating(lower_steps=1)
    Alternating(lower_steps=1)
    """

    lower_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        factory("lower_optimizer", self.lower_optimizer)

    def init(self, context: RunContext) -> MethodState:
        no_constraints("Alternating", context.problem)
        return _Run(self, context)


class _Run(MinibatchRun):
    """Lower evaluations: T + 1 for each upper step, T in the lower steps and one for the record. Upper: one."""

    def __init__(self, options: Alternating, context: RunContext) -> None:
        super().__init__(context, **options.steps(context.problem))
        measured = self._measured()
        self.lower = self._lower_descent(options.lower_optimizer, self._lower_rate(measured))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self._ready()

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        g, slope = d.slope(draw)
        direct = d.direct(draw, with_v=False)
        direct.rows = d.all_rows(direct.rows)
        if moving:
            self.upper.step(direct.u, direct.rows, left)
        return self._record(direct.f, g, direct, d.norm(slope), d.norm(d.residual(slope)), left, moving)

    def prices(self) -> Prices:
        """The adjoint is taken for zero, which is what the method leaves out: the certificate shows it."""
        return self._adjoint_prices([torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves])
