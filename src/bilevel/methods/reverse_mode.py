"""Reverse-mode differentiation (RMD in the paper): a recursion back from v_T gives the derivative of f(u, v_T(u)).

    forward     m_{t+1} = beta m_t + s(u, v_t),       v_{t+1} = v_t - rho m_{t+1}            t = 0 .. T-1
    backward    w_t = rho q_{t+1} + beta w_{t+1},     q_t = q_{t+1} - g_vv w_t,     p_t = p_{t+1} - g_uv w_t

from q_T = f_v, p_T = f_u and w_T = 0, with s = grad_v g. u descends along p_0; v_0 and m_0 are held fixed. The run
keeps the iterates v_t (V T numbers) but no graph: each step back evaluates g at v_t again, for both products.

The sum of the w_t approximates the adjoint q in T steps: if g is quadratic, p_0 = f_u - g_uv q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import check_counts
from bilevel._util.nested import detached
from bilevel._util.random_state import random_state, set_random_state
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.engines._torch_private import preserve_version_counter
from bilevel.errors import OptionError
from bilevel.methods.base import MethodState, RunContext, copy_state
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.unrolled import Run, Unrolled, UnrolledOptions
from bilevel.problem import Parts, together


@dataclass(frozen=True, kw_only=True, repr=False)
class ReverseMode(UnrolledOptions):
    """Reverse-mode differentiation: u descends the derivative of f through T gradient steps on v, taken backwards.

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
        lower_rate: Step length of v (rho in the paper). Default: 1 / the largest curvature of g on the first batches.
        momentum: Momentum of v, as in torch.optim.SGD. Default: 0.
        lower_decay: Whether the step length of v falls as the rate of u does ("linear" or "root") or stays
            ("constant"). If it falls, v settles on minibatches, but at the end the T steps barely depend on u.
            Default: `decay` with data, "constant" without.
        truncate: How many of the lower steps to differentiate, counted from the last one; only their iterates are
            kept. Default: all.

    >>> ReverseMode(lower_steps=20, truncate=10)
    ReverseMode(lower_steps=20, truncate=10)
    """

    truncate: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(truncate=self.truncate)
        if self.truncate is not None and self.truncate > self.lower_steps:
            raise OptionError(f"truncate must be at most lower_steps={self.lower_steps}; got {self.truncate}.")

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context)


class _Run(Unrolled):
    """A run of `ReverseMode`.

    Each upper step evaluates g T times forward, once for the record and T times back (k times with truncate=k), each
    times `accumulate`, and f once. In the warm-up it evaluates g T + 1 times and f once.
    """

    like_v = (*Unrolled.like_v, "adjoint")

    def __init__(self, options: ReverseMode, context: RunContext) -> None:
        super().__init__(options, context)
        self.kept = options.truncate or options.lower_steps
        self.adjoint = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves]
        self._ready()

    # -- one step ------------------------------------------------------------------------------------------------

    def _unrolled(self, run: Run, lower: Sequence[Draw], upper: Draw, left: Tensor) -> Tensor:
        device = self.v.device
        upper = self.derivatives.detach_prepared(upper)
        first = len(lower) - self.kept
        trace = []
        for t, (draw, live) in enumerate(zip(lower, self._live(lower, upper), strict=True)):
            state = random_state(device) if self.random else None
            point = run(self._forward, draw, left, (), t >= first)
            if t >= first:
                trace.append((live, state, point))
        values, end, q, p, rows = run(self._turn, upper, left, ())
        onward = random_state(device) if self.random else None
        w = [torch.zeros_like(x) for x in q] if self.lower.momentum else []
        total = [torch.zeros_like(x) for x in q]
        for draw, state, point in reversed(trace):
            if state is not None:
                set_random_state(state, device)
            (q, w, p, total), parts = run(self._back, draw, left, (point, q, w, p, total))
            rows = together(rows, parts)
        if onward is not None:
            set_random_state(onward, device)
        record: Tensor = run(self._move, upper, left, (values, end, q, p, rows, total))
        return record

    def _forward(self, draw: Draw, left: Tensor, _: object, noting: bool) -> list[Tensor]:
        """Take a lower step; return the point before it if `noting`."""
        point = self._point() if noting else []
        self._lower_step(draw, left, True)
        return point

    def _turn(
        self, draw: Draw, left: Tensor, _: object
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Parts]:
        """Return (f, g, |s|), the point, f_v, f_u, and the part of f_u that belongs to Rows, at v_T."""
        d = self.derivatives
        g, slope = d.slope(detached(draw))
        direct = d.direct(draw)
        rows = direct.rows or [[] for _ in self.u.rows]
        return [direct.f, g, d.norm(slope)], self._point(), direct.v, direct.u, rows

    def _back(self, draw: Draw, left: Tensor, carried: Any) -> tuple[tuple[list[Tensor], ...], Parts]:
        """Take one step back from (q, w, p, sum of w); return the new ones, and the part of p that belongs to Rows."""
        point, q, w, p, total = carried
        d, share, count = self.derivatives, 1.0 / len(draw), len(self.v.leaves)
        pull = self.lower.scaled(q, left)
        if w:
            pull = [x + self.lower.momentum * y for x, y in zip(pull, w, strict=True)]
        self._put(point)
        parts: Parts = [[] for _ in self.u.rows]
        ends = [*q, *p]
        for pair in draw:  # separately, as each batch reads other rows
            found = d.hessian_product([pair], pull, with_u=True)
            ends = [x - share * y for x, y in zip(ends, found, strict=False)]
            rest = iter(found[len(ends) :])
            for part, tape in zip(parts, d.row_reads, strict=True):
                part += [(index, -share * next(rest)) for index, _ in tape]
        total = [x + y for x, y in zip(total, pull, strict=True)]
        return (ends[:count], pull if w else [], ends[count:], total), parts

    def _move(self, draw: Draw, left: Tensor, carried: Any) -> Tensor:
        """Return v to v_T, move u along p, and keep the adjoint."""
        (f, g, residual), end, q, p, rows, total = carried
        d = self.derivatives
        self._put(end)
        copy_state(self.adjoint, total)
        p, rows = d.backward_through_prepare(p), d.all_rows(rows)
        self.upper.step(p, rows, left)
        moved = Gradients(f=f, g=g, slope=[], residual=[], constraints=[], v=q, u=p, rows=rows)
        # q is f_v - g_vv times the adjoint: the slope of the Lagrangian in v.
        return self._record(f, g, moved, d.norm(q), residual, left, True)

    def _point(self) -> list[Tensor]:
        """Return copies of v and of the buffers that a forward pass changes."""
        return [x.detach().clone() for x in (*self.v.leaves, *self.v.buffers(), *self.u.buffers())]

    def _put(self, point: Sequence[Tensor]) -> None:
        count, buffers = len(self.v.leaves), (*self.v.buffers(), *self.u.buffers())
        copy_state(self.v.leaves, point[:count])
        if buffers:
            # The graph of `prepare` was made with these values, so autograd must not count this as a change.
            with preserve_version_counter(buffers):
                copy_state(buffers, point[count:])

    # -- what the engines and solve ask --------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self.random:
            return "lower draws random numbers, and the steps back reset the generators to draw them again."
        return super().obstacle()

    def prices(self) -> Prices:
        """Return `Prices` with the adjoint of the last step, on its batches; gamma is zero."""
        return self._adjoint_prices(self.adjoint)

    def _tensors(self) -> dict[str, Any]:
        return {"adjoint": self.adjoint}
