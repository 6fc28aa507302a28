"""The run that `ReverseMode` and `ForwardMode` share: it differentiates through T steps of gradient descent on g.

    m <- beta m + grad_v g(u, v),      v <- v - rho m            (heavy ball; gradient descent if beta = 0)

`Unrolled` draws the batches, estimates rho and takes the steps of the warm-up. A subclass differentiates all others.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import in_range, one_of
from bilevel._util.nested import Pair, detached
from bilevel._util.random_state import keeping, random_state
from bilevel._util.tensor_lists import broadcast_trials
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import largest_curvature
from bilevel.methods.base import RECORD, RunContext, copy_state
from bilevel.methods.minibatch_run import Draw, MinibatchRun, _Parts
from bilevel.methods.options import DECAYS, Decay, StepOptions, no_projection
from bilevel.optim.variable_optimizer import VariableOptimizer
from bilevel.problem import Variable

# `run(step, *arguments)` runs a step by the engines if they can.
Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class UnrolledOptions(StepOptions):
    """The options that `ReverseMode` and `ForwardMode` share."""

    lower_rate: float | None = None
    momentum: float = 0.0
    lower_decay: Decay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("lower_rate", self.lower_rate, above=0)
        in_range("momentum", self.momentum, least=0, below=1)
        one_of("lower_decay", self.lower_decay, DECAYS, optional=True)
        if self.lower_decay not in (None, "constant", self.decay):
            raise OptionError(f"lower_decay must be 'constant' or as decay={self.decay!r}; got {self.lower_decay!r}.")


class HeavyBall(VariableOptimizer):
    """The steps of torch.optim.SGD, with a length for each trial. SGD would read such a tensor on the host."""

    def __init__(self, variable: Variable, lengths: Tensor, momentum: float, *, falling: bool) -> None:
        super().__init__(variable, partial(torch.optim.SGD, lr=lengths.mean().item()), "lower_rate")
        self.lengths, self.momentum, self.falling = lengths, momentum, falling
        self.moments = [torch.zeros_like(leaf, requires_grad=False) for leaf in variable.leaves] if momentum else []

    def scaled(self, tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Multiply one tensor for each leaf, or a stack of such tensors, by rho."""
        rho = factor * self.lengths if self.falling else self.lengths
        return [broadcast_trials(rho, v).to(x.dtype) * x for x, v in zip(tensors, self.variable.leaves, strict=True)]

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], rows: Sequence[Sequence[tuple[Tensor, Tensor]]], factor: Tensor
    ) -> None:
        moves = list(gradients)
        if self.momentum:
            torch._foreach_mul_(self.moments, self.momentum)
            torch._foreach_add_(self.moments, moves)
            moves = self.moments
        for leaf, move in zip(self.variable.leaves, self.scaled(moves, factor), strict=True):
            leaf.sub_(move)

    @property
    def restarts_in_place(self) -> bool:
        return True

    def restart(self) -> None:
        for moment in self.moments:
            moment.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "lengths": self.lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_state(self.state_dict(), state)
        self.rates = [(rate, self.lengths.mean().item()) for rate, _ in self.rates]


class Unrolled(MinibatchRun):
    """A run of T differentiated steps on v and one on u. In the warm-up each iteration evaluates g T + 1 times."""

    lower: HeavyBall
    curvature: Curvature = "auto"

    def __init__(self, options: UnrolledOptions, context: RunContext) -> None:
        no_projection(type(options).__name__, context.problem)
        super().__init__(context, curvature=self.curvature, **options.steps(context.problem))
        measured = self._measured()
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            pairs = self.derivatives.prepare(self._sample(), graph=False)
            self.random = self._draws_numbers(pairs)
            lengths = self._lengths(pairs, options.lower_rate)
        decay = options.lower_decay or (options.decay if context.sources else "constant")
        self.lower = HeavyBall(self.v, lengths, options.momentum, falling=decay != "constant")
        self.upper = self._upper_descent(options.upper_optimizer, measured)

    # -- before the first step -----------------------------------------------------------------------------------

    def _draws_numbers(self, pairs: Sequence[Pair]) -> bool:
        """Return whether g draws random numbers, as dropout does."""
        before = random_state(self.v.device)
        self.derivatives.slope(pairs[:1])
        both = zip(before, random_state(self.v.device), strict=True)
        return any(a is not None and b is not None and not torch.equal(a, b) for a, b in both)

    def _lengths(self, pairs: Sequence[Pair], rate: float | None) -> Tensor:
        """Return rho, one number for each trial: as given, or 1 / the largest |g_vv| on these batches."""
        trials = self.problem.trials
        shape = () if trials is None else (trials,)
        if rate is not None:
            return torch.full(shape, rate, dtype=self.v.dtype, device=self.v.device)
        return (1 / largest_curvature(self.derivatives, pairs, self.context.generator)).to(self.v.dtype)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        draws, left = self._begin(k)
        return self._recorded(draws, left) if self.engines.whole else self._iteration(draws, left, self.moving)

    def _iteration(self, draws: Iterable[Draw], left: Tensor, moving: bool, parts: _Parts | None = None) -> Tensor:
        if not moving or self.problem.prepare is not None:
            return super()._iteration(draws, left, moving, parts)
        inner, outer = self.engines.inner.wrap, self.engines.outer.wrap
        held = list(draws)
        if self.problem.start_lower is not None:
            (parts or self._parts).start(held[0])

        def run(step: Any, *arguments: Any) -> Any:
            return (inner(step) if parts is None else outer(inner(step)))(*arguments)

        return self._unrolled(run, held[:-1] or held * self.lower_steps, held[-1], left)

    def _episode(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        if not moving:
            return super()._episode(draw, left, moving)
        batches = self.derivatives.prepare(draw, graph=True)
        still = detached(batches)
        self._start_episode(still)
        return self._unrolled(operator.call, [still] * self.lower_steps, batches, left)

    @abstractmethod
    def _unrolled(self, run: Run, lower: Sequence[Draw], upper: Draw, left: Tensor) -> Tensor:
        """Take T steps on v and one on u along the derivative through them; return the record.

        The draw of the upper step has the graph of `prepare`; the draws in `lower` have not.
        """

    def _live(self, lower: Sequence[Draw], upper: Draw) -> Sequence[Draw]:
        """Return the draws of the lower steps with the graph of `prepare`."""
        return lower if self.problem.prepare is None else [upper] * len(lower)

    def _record(
        self, f: Tensor, g: Tensor, moved: Gradients, size_v: Tensor, residual: Tensor, left: Tensor, moving: bool
    ) -> Tensor:
        row = super()._record(f, g, moved, size_v, residual, left, moving)
        if not self.lower.falling:
            column = RECORD.index("lower_rate")
            row[column : column + 1].fill_(self.lower.rate)  # an assignment would wait for the device
        return row
