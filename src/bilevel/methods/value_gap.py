"""The value-gap penalty: first order only, with a price on how far g is above its minimum.

    F(u, w) = f(u, w) + gamma (g(u, w) - min_v g(u, v))
    v descends g,     w descends f / gamma + g     (T times),     u descends f_u(u, w) + gamma (g_u(u, w) - g_u(u, v))

Kwon, Kwon, Wright and Nowak, *A fully first-order method for stochastic bilevel optimization*, ICML 2023; Shen and
Chen, *On penalty-based bilevel gradient descent method*, ICML 2023. With v and w at their minima, the step on u is the
hypergradient up to O(1/gamma). gamma grows by the same factor in each step on u. Two evaluations of g are subtracted
and multiplied by gamma: they share their batch, but not the masks of dropout, which does not belong into such a g.
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
class ValueGap(StepOptions):
    """Options of the value-gap penalty."""

    gamma: float | None = None
    """The first price of the gap. None: |f_v| / |grad_v g| at the start."""
    gamma_growth: float = 100.0
    """The last gamma as a multiple of the first."""
    lower_optimizer: OptimizerFactory | None = None
    """What moves v and, in an instance of its own, w. None: Adam whose first step takes away 6% of g to first order, at
    a rate between 1e-4 and 3e-2; without data, at no less than the rate of u."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("gamma", self.gamma, above=0)
        in_range("gamma_growth", self.gamma_growth, least=1)
        factory("lower_optimizer", self.lower_optimizer)

    def init(self, setting: Setting) -> State:
        no_constraints("ValueGap", setting.problem)
        return _Run(self, setting)


class _Run(ValueSteps):
    """Evaluations: see `ValueSteps`."""

    def __init__(self, options: ValueGap, setting: Setting) -> None:
        self.options = options
        super().__init__(options, options.lower_optimizer, setting)

    def _start(self, measured: BatchScales) -> None:
        first = measured.lam if self.options.gamma is None else self.options.gamma
        self.gamma = torch.full_like(self.price, first)
        self.growth: float = self.options.gamma_growth ** (1.0 / max(1, self.setting.max_steps - self.warm_up - 1))

    def _priced(self, gap: Tensor) -> Tensor:
        return self.gamma.clone()

    def _scale(self) -> Tensor:
        return self.gamma

    def _advance(self) -> float:
        self.gamma.mul_(self.growth)
        return 1.0 / self.growth

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"gamma": self.gamma}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.gamma.copy_(state["gamma"])
