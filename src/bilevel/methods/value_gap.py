"""The value-gap penalty, a first-order method with a penalty on how far g is above its minimum.

    F(u, w) = f(u, w) + gamma (g(u, w) - min_v g(u, v))
    v descends g,     w descends f / gamma + g     (T times),     u descends f_u(u, w) + gamma (g_u(u, w) - g_u(u, v))

Kwon, Kwon, Wright and Nowak, *A fully first-order method for stochastic bilevel optimization*, ICML 2023; Shen and
Chen, *On penalty-based bilevel gradient descent method*, ICML 2023. With v and w at their minima, the step on u is the
hypergradient up to O(1/gamma). gamma grows like a power of the number of steps on u, or, with
decay="linear", by the same factor in each. The method multiplies the difference
of two evaluations of g by gamma. Both use the same batch but not the same dropout masks: do not use dropout in g.
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
class ValueGap(OptimizerOptions):
    """Value-gap penalty: penalises how far g at a second lower variable w is above its minimum. First order only.

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
        gamma: First penalty weight of the gap. Default: |f_v| / |grad_v g| at the start.
        gamma_growth: gamma after 1,000 steps on u, or at the end with decay="linear", as a multiple of the first.
            Default: 100.

    >>> ValueGap(gamma_growth=1000.0)
    ValueGap(gamma_growth=1000.0)
    """

    gamma: float | None = None
    gamma_growth: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("gamma", self.gamma, above=0)
        in_range("gamma_growth", self.gamma_growth, least=1)

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context)


class _Run(TwoLowerVariablesRun):
    """A run of `ValueGap`; `TwoLowerVariablesRun` counts the evaluations."""

    options: ValueGap

    def _start(self, measured: BatchScales) -> None:
        first = measured.lam if self.options.gamma is None else self.options.gamma
        self.gamma = torch.full_like(self.price, first)

    def _grown(self) -> float:
        return self.options.gamma_growth

    def _priced(self, gap: Tensor) -> Tensor:
        return self.gamma.clone()

    def _scale(self) -> Tensor:
        return self.gamma

    def _advance(self) -> Tensor:
        self.gamma.mul_(self.growth)
        return 1.0 / self.growth

    def _tensors(self) -> dict[str, Any]:
        return super()._tensors() | {"gamma": self.gamma}
