"""F2SA with a central difference, a first-order method with two lower variables on either side of v.

    v+ descends g + h f,     v- descends g - h f     (T times)
    u descends (f_u(v+) + f_u(v-)) / 2 + (g_u(v+) - g_u(v-)) / (2h)

Kwon, Kwon, Wright and Nowak, *A fully first-order method for stochastic bilevel optimization*, ICML 2023; for the
central difference, whose error is O(h^2) instead of O(h), Chen, Li, Chayti and Zhang, *Faster gradient methods for
highly-smooth stochastic bilevel optimization*, ICLR 2026. h falls like t^(-1/7). The run stores v = (v+ + v-) / 2
and q = (v- - v+) / (2h), which tends to the adjoint: v descends the mean of the two objectives and q their difference
over 2h. With plain gradient steps this is the recursion above, and other optimizers do not multiply their noise by 1/h.
All derivatives of a step use one pair of batches, so that the difference has no noise of two batches. They do not have
the same dropout masks: do not use dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bilevel._util.checks import check_counts, in_range
from bilevel._util.tensor_lists import difference
from bilevel.derivatives.prices import Gradients
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.single_loop import SingleLoopOptions, SingleLoopRun
from bilevel.problem import together

T = TypeVar("T")
# The first h moves v+ from v by this share of 1 + |v|.
APART = 0.01
WEIGHT_POWER = 1 / 7


@dataclass(frozen=True, kw_only=True, repr=False)
class F2SA(SingleLoopOptions):
    """F2SA with a central difference: two lower variables descend g + h f and g - h f. First order only.

    It costs 2 (T + 1) evaluations of f and of g for each step on u, about four times as many as `Alternating`, and
    no second derivatives.

    Options:
        lower_steps: Steps on v+ and v- before each step on u (T in the paper). Default: 10.
        lower_rate: First rate of the plain gradient steps on v+ and v-. Default: 1 over the largest curvature of g on
            the first batches.
        upper_rate: First rate of plain gradient steps on u. Default: Adam moves u instead (see `upper_optimizer`).
        decay: "root" (default): the rates are multiplied by t^(-1/2) in step t, so that they do not depend on
            `max_steps`. "linear": they fall to zero over `max_steps`. "constant": they stay.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for the mean of v+ and v-, and again for
            their difference. Default: torch.optim.SGD with `lower_rate`.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: SGD with `upper_rate` if
            that is given; otherwise Adam with a first rate of 1, or, with another `decay`, one that lets each
            coordinate move by 5.
        weight: First weight h of f. Default: such that v+ is about 0.01 (1 + |v|) from v.
        weight_power: h is `weight` t^(-weight_power) in step t; 0 keeps it fixed. Default: 1/7.

    >>> F2SA(lower_steps=5, weight=0.1, weight_power=0)
    F2SA(lower_steps=5, weight=0.1, weight_power=0)
    """

    lower_steps: int = 10
    weight: float | None = None
    weight_power: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(lower_steps=self.lower_steps)
        in_range("weight", self.weight, above=0)
        in_range("weight_power", self.weight_power, least=0)

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        # The measurements before and after the steps must not need second derivatives either.
        return _Run(self, context, lower_steps=self.lower_steps, curvature="difference")


class _Run(SingleLoopRun):
    """A run of `F2SA`. Each upper step evaluates f and g 2 (T + 1) times."""

    options: F2SA
    curved = False

    def _start(self, measured: BatchScales) -> None:
        # |q| is about |f_v| / |g_vv|, and |g_vv| is about |g_vv s| / |s|.
        size = measured.gamma * measured.sizes[1]
        default = APART * (1.0 + self.derivatives.norm(self.v.leaves).amax().item()) / size
        self.first = default if self.options.weight is None else self.options.weight
        self.power = WEIGHT_POWER if self.options.weight_power is None else self.options.weight_power
        self.h = torch.full((), self.first, dtype=self.v.dtype, device=self.v.device)

    def _begin(self, k: int) -> tuple[Iterator[Draw], Tensor]:
        self.h.fill_(self.first * (k + 1) ** -self.power)
        return super()._begin(k)

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        d = self.derivatives
        plus, minus = self._at_both(lambda: d.first_order(draw, None))
        self.lower.step(self._mean_slope(plus.slope, minus.slope, plus.v, minus.v), (), left)
        pull = self._central((plus.v, minus.v), (plus.slope, minus.slope))
        self.adjoint.step([-x for x in pull], (), left)

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        batches = d.detach_prepared(draw)
        (f, g), (f_, g_) = self._at_both(lambda: (d.direct(batches), d.direct(batches, lower=True)))
        slope, half, over = self._mean_slope(g.v, g_.v, f.v, f_.v), 0.5, 0.5 / self.h
        parts = ((f, half), (f_, half), (g, over), (g_, -over))
        found = Gradients(
            f=(f.f + f_.f) / 2,
            g=(g.g + g_.g) / 2,
            slope=slope,
            residual=slope,
            constraints=[],
            v=self._central((f.v, f_.v), (g.v, g_.v)),
            u=d.backward_through_prepare(self._central((f.u, f_.u), (g.u, g_.u))),
            rows=together(*([[(i, c * x) for i, x in pairs] for pairs in part.rows] for part, c in parts)),
        )
        return self._move_u(found, left)

    def _at_both(self, evaluate: Callable[[], T]) -> tuple[T, T]:
        """Evaluate at v+ = v - h q and at v- = v + h q. Buffers follow v-."""
        apart = [self.h * q.detach() for q in self.q]
        minus = [v.detach() + x for v, x in zip(self.v.leaves, apart, strict=True)]
        with self._at(difference([v.detach() for v in self.v.leaves], apart)):
            plus = evaluate()
        with self._at(minus, buffers=True):
            return plus, evaluate()

    def _mean_slope(
        self, g: Sequence[Tensor], g_: Sequence[Tensor], f: Sequence[Tensor], f_: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the mean of the gradients of g + h f at v+ and of g - h f at v-."""
        return [(a + b + self.h * (c - e)) / 2 for a, b, c, e in zip(g, g_, f, f_, strict=True)]

    def _central(self, f: tuple[Sequence[Tensor], ...], g: tuple[Sequence[Tensor], ...]) -> list[Tensor]:
        """Return the mean of f's gradients at v+ and v-, plus the difference of g's over 2h."""
        pairs = zip(*f, *g, strict=True)
        return [(a + b) / 2 + (c - e) / (2 * self.h) for a, b, c, e in pairs]

    def _tensors(self) -> dict[str, Any]:
        return super()._tensors() | {"h": self.h}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.first = state.get("first", self.first)
