"""The bilevel methods that the denoising studies compare with ours, as Appendix E.2 has them.

The importance of an example is (tanh u + 1) / 2. ApproxGrad solves its linear system by Adam, as the paper does:
conjugate gradients assume that g_vv is positive definite, which that of a network is not.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.penalty import Penalty

PAPER_T = 20
"""Lower steps in each upper step; ApproxGrad takes as many for the linear system."""
SOLVER: Final = "adam"
"""Of ApproxGrad's linear system; among the settings of its cells."""
DAMPING = 0.1
LOWER_RATE, UPPER_RATE = 1e-5, 3.0
"""rho and sigma in the paper."""
NEAREST = 1e-3
"""How near to 0 and to 1 an importance may start."""


def approx_grad(T: int, rate: float) -> ApproxGrad:
    adam = partial(torch.optim.Adam, lr=rate)
    return ApproxGrad(lower_steps=T, linear_steps=T, linear_solver=SOLVER, damping=DAMPING, lower_optimizer=adam)


def algorithm_2(T: int, nu: float) -> Penalty:
    return Penalty.algorithm_2(
        lower_steps=T, gamma=0.01, epsilon=0.01, lam=0.01, nu=nu, upper_rate=UPPER_RATE, lower_rate=LOWER_RATE
    )


def importance(u: Tensor) -> Tensor:
    return (torch.tanh(u) + 1) / 2


def start(probability: Tensor) -> Tensor:
    """The u whose importance is this probability."""
    return torch.logit(probability.clamp(NEAREST, 1 - NEAREST)) / 2
