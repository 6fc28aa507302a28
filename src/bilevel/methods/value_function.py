"""The value-function interior-point method (BVFIM): first order only, a barrier keeps w among the lower solutions.

    m(u) = min_v  g(u, v) + mu/2 |v|^2,  and a margin on top
    w descends f(u, w) + theta/2 |w|^2 + P(g(u, w) - m(u) - margin)
    u descends f_u(u, w) + P'(g(u, w) - m(u) - margin) (g_u(u, w) - g_u(u, v))
    P(t) = -tau ln(-t) up to t = -delta,    tau/2 (((t + 2 delta) / delta)^2 - 1) - tau ln(delta) from there on

Liu, Liu, Yuan, Zeng and Zhang, *A value-function-based interior-point method for non-convex bilevel optimization*, ICML
2021. Among several lower solutions w finds one that is good for f: no curvature of g is asked for, and no uniqueness.
The parabola, with delta = margin/2, has the value and two derivatives of the barrier where they meet: a w outside is
pulled back, and nothing is ever the logarithm of a negative number. tau, mu and theta shrink by the same factor in each
step on u, and the margin by its square, so that the price P' of the gap grows as the reciprocal of tau.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import factory, in_range
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.base import Setting, State
from bilevel.methods.options import StepOptions, no_constraints
from bilevel.methods.two_lower_variables import ValueSteps
from bilevel.optim.variable_optimizer import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class ValueFunction(StepOptions):
    """Options of the value-function interior-point method."""

    barrier: float | None = None
    """The first tau. None: so that the first price, tau / margin, is |f_v| / |grad_v g| at the start."""
    margin: float | None = None
    """How far g may first be above its minimum at w. None: |s|^3 / |g_vv s|, for s = grad_v g at the start."""
    lower_regularisation: float = 0.0
    """The first mu. Positive where g has no minimum of its own."""
    upper_regularisation: float = 0.0
    """The first theta. Positive where f does not determine w among the lower solutions."""
    shrink: float = 0.01
    """The last tau, mu and theta as multiples of the first; of the margin, its square."""
    lower_optimizer: OptimizerFactory | None = None
    """What moves v and, in an instance of its own, w. None: Adam whose first step takes away 6% of g to first order, at
    a rate between 1e-4 and 3e-2; without data, at no less than the rate of u."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("barrier", "margin"):
            in_range(name, getattr(self, name), above=0)
        for name in ("lower_regularisation", "upper_regularisation"):
            in_range(name, getattr(self, name), least=0)
        in_range("shrink", self.shrink, above=0, most=1)
        factory("lower_optimizer", self.lower_optimizer)

    def init(self, setting: Setting) -> State:
        no_constraints("ValueFunction", setting.problem)
        return _Run(self, setting)


class _Run(ValueSteps):
    """Evaluations: see `ValueSteps`."""

    def __init__(self, options: ValueFunction, setting: Setting) -> None:
        self.options = options
        super().__init__(options, options.lower_optimizer, setting)

    def _start(self, measured: BatchScales) -> None:
        options = self.options
        # |s| / |g_vv s| is gamma / lam: both are |f_v| over one of them.
        margin = measured.sizes[1] ** 2 * measured.gamma / measured.lam if options.margin is None else options.margin
        tau = measured.lam * margin if options.barrier is None else options.barrier
        self.margin, self.tau, self.level = (torch.full_like(self.price, x) for x in (margin, tau, 1.0))
        self.factor: float = options.shrink ** (1.0 / max(1, self.setting.max_steps - self.warm_up - 1))

    def _priced(self, gap: Tensor) -> Tensor:
        return barrier_slope(self.margin - gap, self.tau, self.margin / 2)

    def _scale(self) -> Tensor:
        return self.tau / self.margin

    def _advance(self) -> float:
        self.level.mul_(self.factor)
        self.tau.mul_(self.factor)
        self.margin.mul_(self.factor**2)
        return 1.0  # w may be far from v, at a lower solution that is better for f

    def _regular(self) -> tuple[Tensor, Tensor] | None:
        mu, theta = self.options.lower_regularisation, self.options.upper_regularisation
        return (mu * self.level, theta * self.level) if mu or theta else None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"level": self.level, "tau": self.tau, "margin": self.margin}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("level", "tau", "margin"):
            getattr(self, name).copy_(state[name])


def barrier_slope(slack: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
    """P'(-slack): tau / slack, and its tangent from `delta` down."""
    inside = slack > delta
    return tau * torch.where(inside, 1.0 / torch.where(inside, slack, delta), (2 * delta - slack) / delta**2)
