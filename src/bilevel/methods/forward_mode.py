"""Forward-mode differentiation (FMD in the paper): each step updates v_t and its derivative in u.

    M <- beta M + P g_vv + g_uv,      P <- P - rho M,      then    v <- v - rho m            (t = 0 .. T-1)
    df/du = f_u + P f_v

from P = M = 0, with v_0 and m_0 held fixed. P is a U x V matrix; row i is the derivative of v in the i-th entry of u.
P g_vv + g_uv is the Hessian of g in (u, v) times the rows (e_i, P_i), by the second backward pass of one evaluation of
g for many rows at once. Use it only for a small u: `ReverseMode` computes the same derivative for any u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import check_counts, warn_user
from bilevel._util.nested import detached
from bilevel._util.tensor_lists import gradient
from bilevel.derivatives.double_backward import missing_double_backward
from bilevel.derivatives.prices import Prices
from bilevel.errors import OptionError, ProblemError
from bilevel.measures.certificate import adjoint
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.unrolled import Run, Unrolled, UnrolledOptions

# Give a warning from this number of second backward passes in an upper step.
MANY = 20_000
# The largest size of P, and M with momentum, in GiB.
MEMORY_LIMIT = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class ForwardMode(UnrolledOptions):
    """Forward-mode differentiation: carries the derivative of v in u along with T gradient steps on v.

    For a u of few numbers: it keeps a matrix of U x V numbers, at most 2 GiB (twice that matrix with momentum).

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
        chunk_size: How many rows of the matrix to multiply at once. More rows are faster and need more memory, about
            as much as that many second backward passes. Default: 32.

    >>> ForwardMode(lower_steps=20, chunk_size=8)
    ForwardMode(lower_steps=20, chunk_size=8)
    """

    chunk_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(chunk_size=self.chunk_size)

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        if context.u.rows:
            raise OptionError(
                "ForwardMode differentiates v in all of u at once, so u cannot hold Rows. Use ReverseMode or Penalty, "
                "or a tensor with one row for each example."
            )
        self._refuse_size(context)
        if (count := self.lower_steps * context.u.size // (context.problem.trials or 1)) > MANY:
            warn_user(
                f"ForwardMode takes T x U = {count:,} second backward passes in every upper step. Use ReverseMode or "
                "Penalty for a u of this size."
            )
        return _Run(self, context)

    def _refuse_size(self, context: RunContext) -> None:
        rows, columns = context.u.size // (context.problem.trials or 1), context.v.size
        copies = 2 if self.momentum else 1
        size = copies * rows * sum(leaf.numel() * leaf.element_size() for leaf in context.v.leaves) / 2**30
        if size > MEMORY_LIMIT:
            kept = "two matrices" if copies == 2 else "a matrix"
            raise OptionError(
                f"ForwardMode keeps {kept} of U x V = {rows:,} x {columns:,} numbers: {size:,.2f} GiB; at most "
                f"{MEMORY_LIMIT:g} GiB are allowed. Use ReverseMode or Penalty."
            )


class _Run(Unrolled):
    """A run of `ForwardMode`.

    Each upper step evaluates g T + 1 times (T lower steps and the record), times `accumulate`, and f once. Each lower
    step has U second backward passes.
    """

    curvature = "exact"

    def __init__(self, options: ForwardMode, context: RunContext) -> None:
        try:
            super().__init__(options, context)
        except ProblemError as error:
            if (operator := missing_double_backward(error.__cause__)) is None:
                raise
            raise ProblemError(
                f"ForwardMode needs a double backward of lower, and {operator} has none. Replace it or use ReverseMode."
            ) from error
        self.directions = self.u.size // (self.problem.trials or 1)
        self.chunk = options.chunk_size
        self.adjoint: list[Tensor] | None = None
        self._ready()

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        self.adjoint = None
        return super().step(k)

    def _unrolled(self, run: Run, lower: Sequence[Draw], upper: Draw, left: Tensor) -> Tensor:
        P = [leaf.new_zeros(self.directions, *leaf.shape) for leaf in self.v.leaves]
        M = [torch.zeros_like(p) for p in P] if self.lower.momentum else []
        for draw in self._live(lower, upper):
            P, M = run(self._forward, draw, left, (P, M))
        record: Tensor = run(self._move, upper, left, P)
        return record

    def _forward(self, draw: Draw, left: Tensor, carried: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Take a lower step; return the derivatives of v and m after it."""
        P, M = carried
        d, share, count = self.derivatives, 1.0 / len(draw), len(self.v.leaves)
        slope: list[Tensor] = []
        change = [self.lower.momentum * m for m in M]
        for _, batch in draw:
            with d.differentiating_u(True):
                g = d.lower(batch) * share
                first = gradient(g, [*self.v.leaves, *self.u.leaves], keep_graph=True)
            found = d.mean_over_ranks([*(x.detach() for x in first[:count]), *self._bent(first, P)])
            part, bent = found[:count], found[count:]
            slope = [a + b for a, b in zip(slope, part, strict=True)] if slope else part
            change = [a + b for a, b in zip(change, bent, strict=True)] if change else bent
        P = [p - move for p, move in zip(P, self.lower.scaled(change, left), strict=True)]
        self.lower.step(slope, (), left)
        return P, change if M else []

    def _bent(self, first: Sequence[Tensor], P: Sequence[Tensor]) -> list[Tensor]:
        """Return P g_vv + g_uv, from the gradient of g in v and u and its graph."""
        if not (live := [i for i, x in enumerate(first) if x.requires_grad]):
            return [torch.zeros_like(p) for p in P]
        chunks = []
        for start in range(0, self.directions, self.chunk):
            stop = min(start + self.chunk, self.directions)
            cotangents = [*(p[start:stop] for p in P), *self._units(start, stop)]
            found = torch.autograd.grad(
                [first[i] for i in live],
                self.v.leaves,
                [cotangents[i] for i in live],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            pairs = zip(found, P, strict=True)
            chunks.append([torch.zeros_like(p[start:stop]) if x is None else x.detach() for x, p in pairs])
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*chunks, strict=True)]

    def _units(self, start: int, stop: int) -> list[Tensor]:
        """Return the unit vectors of u from `start` to `stop`, shaped like its leaves; all trials share them."""
        found, offset = [], 0
        trials = self.problem.trials
        for leaf in self.u.leaves:
            shape = leaf.shape if trials is None else leaf.shape[1:]
            size = shape.numel()
            units = leaf.new_zeros(stop - start, size)
            units.diagonal(start - offset).fill_(1)
            rows = units.reshape(-1, *shape)
            found.append(rows if trials is None else rows.unsqueeze(1).expand(-1, trials, *shape))
            offset += size
        return found

    def _move(self, draw: Draw, left: Tensor, P: list[Tensor]) -> Tensor:
        """Move u along f_u + P f_v."""
        d = self.derivatives
        g, slope = d.slope(detached(draw))
        direct = d.direct(draw)
        trials = self.problem.trials
        shape = (self.directions, -1) if trials is None else (self.directions, trials, -1)
        total = torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        for p, x in zip(P, direct.v, strict=True):
            total = total + (p * x).reshape(shape).sum(-1)
        offset = 0
        for i, leaf in enumerate(self.u.leaves):
            size = leaf.numel() // (trials or 1)
            part = total[offset : offset + size].to(leaf.dtype)
            direct.u[i] = direct.u[i] + (part if trials is None else part.T).reshape(leaf.shape)
            offset += size
        self.upper.step(direct.u, (), left)
        return self._record(direct.f, g, direct, d.norm(slope), d.norm(slope), left, True)

    # -- what solve asks -----------------------------------------------------------------------------------------

    def prices(self) -> Prices:
        """Return `Prices` with the adjoint of the present point, from g_vv q = f_v. This reads values on the host."""
        if self.adjoint is None:
            self.adjoint = adjoint(self, self.context.sources)
        return self._adjoint_prices(self.adjoint)
