"""Alternating descent (GD in the paper): v descends g, u descends f with v held fixed.

    v <- v - rho grad_v g(u, v)   (T times),      u <- u - sigma grad_u f(u, v)

The method ignores how the lower solution depends on u. Its end is a solution only if this dependence does not matter,
and u does not move at all if f depends on it only through v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bilevel.derivatives.prices import Prices
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import MinibatchRun
from bilevel.methods.options import OptimizerOptions


@dataclass(frozen=True, kw_only=True, repr=False)
class Alternating(OptimizerOptions):
    """Alternating descent: v descends g, u descends f with v held fixed.

    It ignores how the lower solution depends on u, so its end is a solution only if that does not matter.

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
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v. Default: Adam, whose first step
            reduces g by 6% to first order, with a rate between 1e-4 and 3e-2; without data at least the rate of u.

    >>> Alternating(lower_steps=1)
    Alternating(lower_steps=1)
    """

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context)


class _Run(MinibatchRun):
    """A run of `Alternating`.

    Each upper step evaluates g T + 1 times (T lower steps and the record) and f once.
    """

    def __init__(self, options: Alternating, context: RunContext) -> None:
        super().__init__(context, **options.steps(context.problem))
        measured = self._measured()
        self.lower = self._lower_descent(options.lower_optimizer, self._lower_rate(measured))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self._ready()

    def prices(self) -> Prices:
        """Return `Prices` with an adjoint of zero, as the method ignores it; the certificate shows the difference."""
        return self._adjoint_prices([torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves])
