"""SOBA, the stochastic bilevel algorithm: v, the adjoint q and u move at once, on one pair of batches.

    v <- v - rho_t grad_v g,     q <- q - rho_t (g_vv q - f_v),     u <- u - sigma_t (f_u - g_uv q)

Dagréou, Ablin, Vaiter and Moreau, *A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms*, NeurIPS 2022. All derivatives are taken at the same point, before anything moves, and those of g
share one graph: f - <q, grad_v g> is differentiated once, with q held fixed. rho_t and sigma_t fall like t^(-1/2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bilevel._util.checks import one_of
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.single_loop import SingleLoopOptions, SingleLoopRun


@dataclass(frozen=True, kw_only=True, repr=False)
class SOBA(SingleLoopOptions):
    """SOBA: the lower variable, the adjoint q and u take one step at once, on the same pair of batches.

    A step evaluates f and g once, and g has a second backward pass.

    Options:
        lower_rate: First rate rho of the plain gradient steps on v and q. Default: 1 over the largest curvature of g on
            the first batches.
        upper_rate: First rate of plain gradient steps on u. Default: Adam moves u instead (see `upper_optimizer`).
        decay: "root" (default): the rates are multiplied by t^(-1/2) in step t, so that they do not depend on
            `max_steps`. "linear": they fall to zero over `max_steps`. "constant": they stay.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v, and again for q. Default:
            torch.optim.SGD with `lower_rate`.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: SGD with `upper_rate` if
            that is given; otherwise Adam with a first rate of 1, or, with another `decay`, one that lets each
            coordinate move by 5.
        curvature: How to take products with second derivatives. "exact": by a second backward pass. "difference": by
            differences of gradients, with two more evaluations of g. "auto" (default): exact, by differences if an
            operator has no double backward.

    >>> SOBA(lower_rate=1.0, upper_rate=1e4)
    SOBA(lower_rate=1.0, upper_rate=10000.0)
    """

    curvature: Literal["auto", "exact", "difference"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("curvature", self.curvature, ("auto", "exact", "difference"))

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context, curvature=self.curvature)


class _Run(SingleLoopRun):
    """A run of `SOBA`.

    Each step evaluates f and g once. With `accumulate=k`, f is evaluated k times and g 2k times; with
    `curvature="difference"`, g is evaluated three times as often.
    """

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        return self._move(self.derivatives.penalised(draw, self.prices(), with_u=True), left)
