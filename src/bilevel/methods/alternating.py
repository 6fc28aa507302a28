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
from bilevel.methods.base import Setting, State
from bilevel.methods.minibatch_run import Draw, Steps
from bilevel.methods.options import StepOptions, no_constraints
from bilevel.optim.variable_optimizer import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Alternating(StepOptions):
    """Options of alternating descent."""

    lower_optimizer: OptimizerFactory | None = None
    """None: Adam whose first step takes away 6% of g to first order, at a
    rate between 1e-4 and 3e-2; without data, at no less than the rate of u."""

    def __post_init__(self) -> None:
        super().__post_init__()
        factory("lower_optimizer", self.lower_optimizer)

    def init(self, setting: Setting) -> State:
        no_constraints("Alternating", setting.problem)
        return _Run(self, setting)


class _Run(Steps):
    """Lower evaluations: T + 1 for each upper step, T in the lower steps and one for the record. Upper: one."""

    def __init__(self, options: Alternating, setting: Setting) -> None:
        super().__init__(setting, **options.steps(setting.problem))
        measured = self._measured()
        self.lower = self._lower_descent(options.lower_optimizer, self._lower_rate(measured))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self._ready()

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        g, slope = d.slope(draw[0])
        direct = d.direct(draw[0], with_v=False)
        direct.rows = d.all_rows(direct.rows)
        if moving:
            self.upper.step(direct.u, direct.rows, left)
        return self._record(direct.f, g, direct, d.norm(slope), d.norm(d.residual(slope)), left, moving)

    def prices(self) -> Prices:
        """The adjoint is taken for zero, which is what the method leaves out: the certificate shows it."""
        return self._adjoint_prices([torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves])
