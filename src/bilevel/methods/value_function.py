"""The value-function interior-point method (BVFIM), a first-order method with a barrier around the lower solutions.

    m(u) = min_v  g(u, v);  w can exceed it by a margin
    w descends f(u, w) + P(g(u, w) - m(u) - margin)
    u descends f_u(u, w) + P'(g(u, w) - m(u) - margin) (g_u(u, w) - g_u(u, v))
    P(t) = -tau ln(-t) for t <= -delta,    tau/2 (((t + 2 delta) / delta)^2 - 1) - tau ln(delta) for larger t

Liu, Liu, Yuan, Zeng and Zhang, *A value-function-based interior-point method for non-convex bilevel optimization*, ICML
2021. Among several lower solutions w finds one that is good for f. The method needs no curvature of g and no unique
lower solution. At t = -delta = -margin/2 the parabola has the value and the first two derivatives of the barrier. It
pulls w back from outside, and no logarithm has a negative argument. Each step on u multiplies tau by the same factor
and the margin by its square, so that the penalty weight P' of the gap grows like 1 / tau.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import in_range
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.options import OptimizerOptions
from bilevel.methods.two_lower_variables import TwoLowerVariablesRun


@dataclass(frozen=True, kw_only=True, repr=False)
class ValueFunction(OptimizerOptions):
    """Value-function interior-point method (BVFIM): a barrier keeps a second lower variable w near the minimum of g.

    First order only. Among several lower solutions, w finds one that is good for f.

    Options:
        lower_steps: Steps on v before each step on u (T in the paper). Default: 5.
        warm_up: Share of `max_steps` in which only v moves. Default: 0.1 with decay="linear", otherwise until v is
            trained roughly; 0 with `start_lower`.
        decay: "linear" (default): a run spends a known number of steps; the learning rates fall to zero over
            `max_steps`. "root": nothing depends on `max_steps`; they fall like the root of the number of steps.
            "constant": the same, but they stay.
        lower_batches: "fresh" (default): a new pair of batches for every lower step. "shared": one pair for the
            lower steps and the upper step.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: Adam, with a rate that
            lets each coordinate move by 5, or, without decay="linear", with a first step of 0.03 or less.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v, and again for w. Default: Adam,
            whose first step reduces g by 6% to first order, with a rate between 1e-4 and 3e-2; without data at least
            the rate of u.
        barrier: First weight tau of the barrier. Default: such that the first penalty weight, tau / margin, is
            |f_v| / |grad_v g| at the start.
        margin: How far g at w can exceed its minimum at first. Default: |s|^3 / |g_vv s| at the start, with
            s = grad_v g.
        shrink: tau after 1,000 steps on u, or at the end with decay="linear", as a multiple of the first; the margin
            shrinks by the square of it. Default: 0.01.

    >>> ValueFunction(shrink=0.1)
    ValueFunction(shrink=0.1)
    """

    barrier: float | None = None
    margin: float | None = None
    shrink: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("barrier", "margin"):
            in_range(name, getattr(self, name), above=0)
        in_range("shrink", self.shrink, above=0, most=1)

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context)


class _Run(TwoLowerVariablesRun):
    """A run of `ValueFunction`; `TwoLowerVariablesRun` counts the evaluations."""

    options: ValueFunction

    def _start(self, measured: BatchScales) -> None:
        options = self.options
        # |s| / |g_vv s| is gamma / lam: both divide |f_v|, by |g_vv s| and by |s|.
        margin = measured.sizes[1] ** 2 * measured.gamma / measured.lam if options.margin is None else options.margin
        tau = measured.lam * margin if options.barrier is None else options.barrier
        self.margin, self.tau = (torch.full_like(self.price, x) for x in (margin, tau))

    def _grown(self) -> float:
        return 1.0 / self.options.shrink

    def _priced(self, gap: Tensor) -> Tensor:
        return barrier_slope(self.margin - gap, self.tau, self.margin / 2)

    def _scale(self) -> Tensor:
        return self.tau / self.margin

    def _advance(self) -> Tensor:
        self.tau.div_(self.growth)
        self.margin.div_(self.growth**2)
        return torch.ones_like(self.growth)  # w can be far from v, at a lower solution that is better for f

    def _tensors(self) -> dict[str, Any]:
        return super()._tensors() | {"tau": self.tau, "margin": self.margin}


def barrier_slope(slack: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
    """Return P'(-slack): tau / slack, or its tangent at `delta` if slack is below `delta`."""
    inside = slack > delta
    return tau * torch.where(inside, 1.0 / torch.where(inside, slack, delta), (2 * delta - slack) / delta**2)
