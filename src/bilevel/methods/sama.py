"""SAMA, a first-order method: the adjoint is f_v, scaled as one step of the lower optimizer scales a gradient.

    v <- v - rho grad_v g   (T times),     q = rho f_v / sqrt(w),     u <- u - sigma (f_u - g_uv q)

Choe, Mehta, Ahn, Neiswanger, Xie, Strubell and Xing, *Making scalable meta learning practical*, NeurIPS 2023. w is
Adam's running mean of the squared entries of grad_v g; sqrt(w) is 1 with an optimizer that has none. g_uv q is a
central difference of g_u along q. The inverse of g_vv is thus replaced by the derivative of one step: q has about the
direction of the adjoint but not its length, so the method needs an f that depends on u only through v, or a small f_u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.methods.adjoint_run import AdjointRun
from bilevel.methods.base import MethodState, RunContext, copy_state
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.options import OptimizerOptions, no_projection

# sqrt(w) counts as at least this share of its root mean square: an entry that g does not use has w = 0.
LEAST = 1e-3


@dataclass(frozen=True, kw_only=True, repr=False)
class SAMA(OptimizerOptions):
    """SAMA: one step of the lower optimizer along f_v takes the place of the adjoint. First order only.

    The part of the hypergradient that goes through v has the length of one step. So the end is a solution only if f
    depends on u through v alone.

    Options:
        lower_steps: Steps on v before each step on u (T in the paper). Default: 5.
        warm_up: Share of `max_steps` in which only v moves. Default: 0.1 with decay="linear", otherwise until v is
            trained roughly; 0 with `start_lower`.
        decay: "linear" (default): a run spends a known number of steps; the learning rates fall to zero over
            `max_steps`. "root": nothing depends on `max_steps`; they fall like the root of the number of steps.
            "constant": the same, but they stay. q is scaled by the first rate.
        lower_batches: "fresh" (default): a new pair of batches for every lower step. "shared": one pair for the
            lower steps and the upper step.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: Adam, with a rate that
            lets each coordinate move by 5, or, without decay="linear", with a first step of 0.03 or less.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v. Default: Adam, whose first step
            reduces g by 6% to first order, with a rate between 1e-4 and 3e-2; without data at least the rate of u.

    >>> SAMA(lower_steps=1)
    SAMA(lower_steps=1)
    """

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        no_projection("SAMA", context.problem)
        return _Run(self, context)


class _Run(AdjointRun):
    """A run of `SAMA`.

    Each upper step evaluates g T + 3 times and f twice (in the warm-up T + 1 times and once). With `accumulate=k`, the
    upper step evaluates g 4k times and f 2k times.
    """

    like_v = (*AdjointRun.like_v, "q")

    def __init__(self, options: SAMA, context: RunContext) -> None:
        super().__init__(context, curvature="difference", **options.steps(context.problem))
        measured = self._measured()
        self.lower = self._lower_descent(options.lower_optimizer, self._lower_rate(measured))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self.q = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves]
        self._ready()

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        if not moving:
            return super()._upper_step(draw, left, moving)
        copy_state(self.q, self._scaled(d.direct(draw).v))
        return self._move_u(d.penalised(draw, self.prices(), with_u=True), left)

    @torch.no_grad()
    def _scaled(self, gradient: list[Tensor]) -> list[Tensor]:
        """Return a gradient as a step of the lower optimizer at its first rate scales it."""
        rate, optimizer = self.lower.rate, self.lower.optimizer
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            return [rate * x for x in gradient]
        scales = []
        for group in optimizer.param_groups:
            for state in (optimizer.state[leaf] for leaf in group["params"]):
                seen = 1 - group["betas"][1] ** state["step"]
                scales.append((state["exp_avg_sq"] / seen.to(self.v.device)).sqrt())
        size = self.derivatives.norm(scales).amax() / self.v.size**0.5
        return [rate * x / w.clamp(min=LEAST * size) for x, w in zip(gradient, scales, strict=True)]

    def _tensors(self) -> dict[str, Any]:
        return {"q": self.q}
