"""The run that `ValueGap` and `ValueFunction` share: a second lower variable w, and first-order gradients at v and w.

With s = grad_v g(u, v), or v - P(v - s) if the lower variable is projected,

    v descends g(u, .),     w descends f(u, .) + p (g(u, .) - <s, .>)     (T times)
    u descends f_u(u, w) + p (g_u(u, w) - g_u(u, v))

The user's v is the lower solution. f pulls w away from v, and the gap g(u, w) - g(u, v) has the penalty weight p. Then
p (v - w) estimates the adjoint (g_vv)^-1 f_v. Each method defines p. The term in s is zero if v minimises g. Otherwise
(while u moves, and on minibatches) it removes from v - w the part that v and w have in common, which p would multiply.
For the same reason, w also makes every move of v.

To evaluate at w, the tensors of v hold the values of w for a moment. BatchNorm's statistics follow only v.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import broadcast_trials
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.base import RECORD, RunContext, copy_state
from bilevel.methods.minibatch_run import Draw, MinibatchRun
from bilevel.methods.options import OptimizerOptions
from bilevel.optim.variable_optimizer import VariableOptimizer, adam
from bilevel.problem import Variable, together

GAMMA = RECORD.index("gamma")
# Without a known number of steps, the penalty weight grows like a power of 1 + t / SLOW in step t on u.
LONG, SLOW = 1000, 10


class TwoLowerVariablesRun(MinibatchRun):
    """A run with two lower variables.

    Each upper step evaluates g 2 (T + 1) times and f T + 1 times; in the warm-up, in which only v moves, T + 1 times
    and once.
    """

    curved = False
    like_v = (*MinibatchRun.like_v, "w", "shadow")

    def __init__(self, options: OptimizerOptions, context: RunContext) -> None:
        self.options = options
        # The steps are of first order; the measurements before and after them must not need second derivatives.
        super().__init__(context, curvature="difference", **options.steps(context.problem))
        measured = self._measured()
        second = {name: leaf.detach().clone().requires_grad_() for name, leaf in self.v.named()}
        rate = self._lower_rate(measured)
        self.lower = self._lower_descent(options.lower_optimizer, rate)
        w = Variable(second, "v", self.problem.project_lower)
        made = VariableOptimizer(w, options.lower_optimizer or adam(self.v, rate), "lower_optimizer")
        self.second_optimizer = self._following(made, options.lower_optimizer)
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self.w = w.leaves
        shape = () if self.problem.trials is None else (self.problem.trials,)
        self.price = torch.zeros(shape, dtype=self.v.dtype, device=self.v.device)
        # The factor on the penalty weight in this step.
        self.growth = torch.ones((), dtype=self.v.dtype, device=self.v.device)
        self._start(measured)
        self._ready()

    # -- what a method defines --------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, measured: BatchScales) -> None:
        """Set the first penalty weights."""

    @abstractmethod
    def _priced(self, gap: Tensor) -> Tensor:
        """Return p for the gap on one draw."""

    @abstractmethod
    def _scale(self) -> Tensor:
        """Return the usual size of p. It divides the gradient in w, so that v and w can share a learning rate."""

    @abstractmethod
    def _advance(self) -> Tensor:
        """Change the penalty weights after a step on u; return the factor on w - v that follows from this."""

    @abstractmethod
    def _grown(self) -> float:
        """Return the last penalty weight as a multiple of the first, or that after `LONG` steps on u."""

    # -- one step ------------------------------------------------------------------------------------------------

    def _begin(self, k: int) -> tuple[Iterator[Draw], Tensor]:
        found = super()._begin(k)
        if self.pace.spends:
            self.growth.fill_(self._grown() ** (1.0 / max(1, self.pace.moving_steps - 1)))
        elif self.moving:
            t, power = k - self.pace.began, math.log(self._grown()) / math.log(1 + LONG / SLOW)
            self.growth.fill_(((SLOW + t + 1) / (SLOW + t)) ** power)
        return found

    def _warmed(self, k: int) -> None:
        copy_state(self.w, self.v.leaves)

    def _restart(self) -> None:
        copy_state(self.w, self.v.leaves)
        self.second_optimizer.restart()

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        d = self.derivatives
        g, slope = d.slope(draw)
        if not moving:
            self.lower.step(slope, (), left)
            return
        with self._at(self.w):
            found = d.first_order(draw, None)
        residual, scale = d.residual(slope), self._scale()
        pull = self._pull(found.v, found.slope, residual, self._priced(self._gap(found.g, g, residual)))
        with torch.no_grad():
            held = [leaf.clone() for leaf in self.v.leaves]
            self.lower.step(slope, (), left)
            for w, leaf, old in zip(self.w, self.v.leaves, held, strict=True):
                w += leaf - old
        self.second_optimizer.step([x / broadcast_trials(scale, x) for x in pull], (), left)

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        if not moving:
            return super()._upper_step(draw, left, moving)
        batches = d.detach_prepared(draw)
        below = d.direct(batches, lower=True)
        with self._at(self.w):
            above = d.direct(batches, lower=True)
            direct = d.direct(batches)
        residual = d.residual(below.v)
        p = self._priced(self._gap(above.g, below.g, residual))
        total = Gradients(
            f=direct.f,
            g=below.g,
            slope=below.v,
            residual=residual,
            constraints=[],
            v=self._pull(direct.v, above.v, residual, p),
            u=d.backward_through_prepare(
                [f + broadcast_trials(p, f) * (a - b) for f, a, b in zip(direct.u, above.u, below.u, strict=True)]
            ),
            rows=together(
                direct.rows,
                [[(i, p * x) for i, x in pairs] for pairs in above.rows],
                [[(i, -p * x) for i, x in pairs] for pairs in below.rows],
            ),
        )
        total.rows = d.all_rows(total.rows)
        self.upper.step(total.u, total.rows, left)
        record = self._record(total.f, total.g, total, d.norm(total.v), d.norm(residual), left, moving)
        record[GAMMA] = p.mean()
        factor = self._advance()
        self.price.copy_(p / factor)
        with torch.no_grad():
            for w, leaf in zip(self.w, self.v.leaves, strict=True):
                w.copy_(leaf + factor * (w - leaf))
        return record

    def _gap(self, above: Tensor, below: Tensor, residual: list[Tensor]) -> Tensor:
        """Return g(u, w) - g(u, v) - <s, w - v>."""
        apart = [w.detach() - leaf.detach() for w, leaf in zip(self.w, self.v.leaves, strict=True)]
        return above - below - self.derivatives.dot(residual, apart)

    def _pull(self, f_v: list[Tensor], slope: list[Tensor], residual: list[Tensor], p: Tensor) -> list[Tensor]:
        """Return the gradient along which w descends."""
        return [f + broadcast_trials(p, s) * (s - r) for f, s, r in zip(f_v, slope, residual, strict=True)]

    # -- what the engines and solve ask --------------------------------------------------------------------------

    def prices(self) -> Prices:
        """Return `Prices` with nu = p (w - v)."""
        pairs = zip(self.w, self.v.leaves, strict=True)
        nu = [broadcast_trials(self.price, w) * (w - leaf).detach() for w, leaf in pairs]
        return Prices(gamma=torch.zeros_like(self.price), nu=nu)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"growth": self.growth} | state)  # checkpoints of version 0.1 have no growth

    def _descents(self) -> dict[str, VariableOptimizer]:
        return super()._descents() | {"shadow": self.second_optimizer}

    def _tensors(self) -> dict[str, Any]:
        return {"w": self.w, "price": self.price, "growth": self.growth}
