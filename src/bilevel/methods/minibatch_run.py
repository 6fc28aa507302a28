"""The run that all methods on minibatches share: T lower steps, then an upper step.

`MinibatchRun` draws the batches, keeps the optimizers, gives the steps to the engines, and answers the questions of
`solve`. The subclass of a method defines one lower step and one upper step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel._util.nested import Pair, detached
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import dot
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients
from bilevel.distributed.derivatives import make_derivatives
from bilevel.engines._torch_private import pytree
from bilevel.engines.engine import Engines
from bilevel.measures.batch_scales import BatchScales, measure
from bilevel.methods.base import RunContext, copy_state
from bilevel.methods.options import check_batch_run
from bilevel.methods.pacing import HALF, Pace
from bilevel.methods.run_answers import RunAnswers
from bilevel.optim.variable_optimizer import OptimizerFactory, VariableOptimizer, adam
from bilevel.problem import Variable
from bilevel.results import Status

# The batches of one gradient.
Draw = list[Pair]
GOLDEN = (math.sqrt(5) - 1) / 2


class _Parts(NamedTuple):
    """The parts of an upper iteration, each run by an engine."""

    start: Callable[..., None]
    lower: Callable[..., None]
    adjoint: Callable[..., None]
    upper: Callable[..., Tensor]


class MinibatchRun(RunAnswers):
    """A run of upper iterations. A subclass sets `lower` and `upper`, then calls `_ready`."""

    mode = "stochastic"
    # The entries of the state with a tensor for each tensor of v; they are sharded as v is (see
    # `bilevel.distributed.sharded_state`).
    like_v: tuple[str, ...] = ("lower",)
    # The number of steps on the adjoint between the lower steps and the upper step.
    adjoint_steps = 0
    # How many batches the scales are measured on.
    scale_batches = 5
    half: float = HALF
    lower: VariableOptimizer
    upper: VariableOptimizer
    engines: Engines

    def __init__(
        self,
        context: RunContext,
        *,
        lower_steps: int,
        curvature: Curvature = "auto",
        shared: bool = False,
        warm_up: float | None = 0.0,
        decay: str = "linear",
    ) -> None:
        """Arguments:

        lower_steps: Lower steps in an upper iteration (T in the paper).
        shared: Whether all steps of an upper iteration use one draw.
        warm_up, decay: See `Pace`.
        """
        self.context = context
        self.problem, self.u, self.v = context.problem, context.u, context.v
        check_batch_run(context, warm_up or 0.0)
        self.derivatives = make_derivatives(
            context.problem,
            context.u,
            context.v,
            ranks=context.ranks,
            precision=context.precision,
            curvature=curvature,
            accumulate=context.accumulate,
        )
        self.tolerance = context.tolerance
        self.lower_steps = lower_steps
        self.shared = shared or self.problem.prepare is not None or self.problem.start_lower is not None
        self.pace = Pace(self.v.leaves, decay=decay, warm_up=warm_up, steps=context.max_steps, half=self.half)
        if self.pace.agreement is not None:
            self.like_v = (*self.like_v, "agreement/earlier")
        self.warm_up = self.pace.warm_up
        # The steps so far.
        self.taken = 0
        self.last: list[Pair] | None = None
        self.before: list[list[int]] = []
        self.moving = False
        self._scale_values = (1.0, 1.0, 1.0)

    # -- before the first step -----------------------------------------------------------------------------------

    def _measured(self) -> BatchScales:
        """Project u and v, and measure f and g there. This reads values on the host."""
        self.u.project(rows=True)
        self.v.project()
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            d = self.derivatives
            prepared = d.prepare(self._sample(), graph=False)
            if self.problem.start_lower is not None:
                with torch.no_grad():
                    self.problem.start_lower(self.v.value, self._episode_of(prepared))
            measured = measure(d, prepared, self.context.accumulate)
        self._scale_values = measured.sizes
        self.coverage = measured.coverage
        return measured

    def _sample(self) -> list[Pair]:
        return self.context.sources.first_pairs(self.scale_batches)

    def _upper_descent(
        self, factory: OptimizerFactory | None, measured: BatchScales, u: Variable | None = None
    ) -> VariableOptimizer:
        """Return the optimizer of u, or of the variable in its place: the user's, or Adam at the default rate."""
        u = self.u if u is None else u
        if factory is not None:
            return VariableOptimizer(u, factory, "upper_optimizer")
        return self.pace.upper_descent(u, measured.coverage)

    def _lower_rate(self, measured: BatchScales) -> float:
        """Return the default rate if v descends only g. Without data it is at least the rate of u, as v follows u."""
        return self.pace.lower_rate(measured, data=bool(self.context.sources))

    def _lower_descent(self, factory: OptimizerFactory | None, rate: float) -> VariableOptimizer:
        """Return the optimizer of v: the user's, or Adam at this rate."""
        return self._following(VariableOptimizer(self.v, factory or adam(self.v, rate), "lower_optimizer"), factory)

    def _following(self, made: VariableOptimizer, factory: OptimizerFactory | None) -> VariableOptimizer:
        """Note an optimizer that follows u, if its rate is not the user's."""
        self.pace.followers += [made] if factory is None and not self.pace.spends else []
        return made

    def _ready(self) -> None:
        """Count the draws of an upper iteration and make the engines. A subclass calls this last in its `__init__`."""
        each = self.lower_steps + self.adjoint_steps + 1
        self.draws = self.context.accumulate * (1 if self.shared else each)
        self.engines = Engines(self.context.engine, self, gradients=self.context.max_steps * each, each=each)
        inner, outer = self.engines.inner.wrap, self.engines.outer.wrap
        upper = self._upper_step if self.problem.prepare is None else self._episode
        steps: list[Callable[..., Any]] = [self._start_episode, self._lower_step, self._adjoint_step, upper]
        self._parts = _Parts(*map(inner, steps))
        self._outer_parts = _Parts(*map(outer, self._parts))
        self._whole: Callable[..., Tensor] = outer(self._iteration)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        draws, left = self._begin(k)
        if self.engines.whole:
            return self._stepped(self._recorded(draws, left))
        for part in self._in_turn(draws, left, self.moving, self._parts):
            record = part()
        return self._stepped(record)

    def _stepped(self, record: Tensor) -> Tensor:
        """Return the record of a step, after any work that follows each step."""
        return record

    def _begin(self, k: int) -> tuple[Iterator[Draw], Tensor]:
        """Return the draws of upper iteration k, and the factor on its learning rates."""
        self.taken = k + 1
        if not self.moving and self.pace.agreement is None and k >= self.warm_up:
            self._start_moving(k)
        left = self.pace.left(k, moving=self.moving)
        return self._draws(k), torch.full((), left, dtype=self.v.dtype, device=self.v.device)

    def _start_moving(self, k: int) -> None:
        """Let u move from step k on. This reads values on the host."""
        self.moving, self.pace.began = True, k
        self.pace.set_rates(self.derivatives, self._sample(), self.coverage, data=bool(self.context.sources))
        self._warmed(k)

    def _warmed(self, k: int) -> None:
        """Called once, before the first step that moves u."""

    def _draws(self, k: int) -> Iterator[Draw]:
        """Yield the draws of upper iteration k: one for each step, the upper step's last, or a single shared one.

        The position of the upper step's draw among the T + 1 changes without a period. Otherwise it would see only
        some of the batches if these come in a fixed order.
        """
        if self.shared:
            yield self._draw()
            return
        count = self.lower_steps + self.adjoint_steps + 1
        turn = int(k * GOLDEN % 1.0 * count)
        for i in range(count):
            draw = self._draw()
            if i == turn:
                last = draw
            else:
                yield draw
        yield last

    def _recorded(self, draws: Iterator[Draw], left: Tensor) -> Tensor:
        """Run an upper iteration by the outer engine: in one piece, or step by step if the shapes of batches differ."""
        held = list(draws)
        shapes = [[x.shape for x in pytree.tree_leaves(draw) if isinstance(x, Tensor)] for draw in held]
        if any(shape != shapes[0] for shape in shapes):  # the last batch of an epoch can be smaller
            return self._iteration(held, left, self.moving, self._outer_parts)
        return self._whole(held, left, self.moving)

    def _iteration(self, draws: Iterable[Draw], left: Tensor, moving: bool, parts: _Parts | None = None) -> Tensor:
        """Run T lower steps and the upper step, as one function for the outer engine."""
        record = left
        for part in self._in_turn(draws, left, moving, self._parts if parts is None else parts):
            record = part()
        return record

    def _in_turn(self, draws: Iterable[Draw], left: Tensor, moving: bool, parts: _Parts) -> Iterator[Callable[[], Any]]:
        """Yield the lower steps and then the upper step, each as a call; only the last returns a record."""
        source = iter(draws)
        draw = next(source)
        if self.problem.prepare is None:
            if self.problem.start_lower is not None:
                yield partial(parts.start, draw)
            for part in [parts.lower] * self.lower_steps + [parts.adjoint] * self.adjoint_steps:
                yield partial(part, draw, self._lower_left(left), moving)
                draw = next(source, draw)
        yield partial(parts.upper, draw, left, moving)

    def _episode(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Run an upper iteration on one draw after `prepare`, whose graph reaches through all steps."""
        batches = self.derivatives.prepare(draw, graph=moving)
        still = detached(batches)
        self._start_episode(still)
        for step in [self._lower_step] * self.lower_steps + [self._adjoint_step] * self.adjoint_steps:
            step(still, self._lower_left(left), moving)
        return self._upper_step(batches, left, moving)

    def _lower_left(self, left: Tensor) -> Tensor:
        """Return the factor on v's learning rate. It stays 1 if every step starts a new lower problem."""
        return torch.ones_like(left) if self.problem.start_lower is not None else left

    def _episode_of(self, batches: Sequence[Pair]) -> Any:
        """Return what `start_lower` receives: the prepared batch, or the pair of batches without `prepare`."""
        return batches[0] if self.problem.prepare is None else batches[0][0]

    def _start_episode(self, draw: Draw) -> None:
        """Call `start_lower`, and reset the state that belongs to one lower problem."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._episode_of(draw))
            self.lower.restart()
            self._restart()

    def _restart(self) -> None:
        """Called when `start_lower` has reset v."""

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        """Move v, by default along grad_v g. `left` multiplies the rates; `moving` is False in the warm-up."""
        _, slope = self.derivatives.slope(draw)
        self.lower.step(slope, (), left)

    def _adjoint_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        """Move the adjoint."""

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move u if `moving`, by default along f_u with v held fixed; return the record."""
        d = self.derivatives
        g, slope = d.slope(draw)
        direct = d.direct(draw, with_v=False)
        direct.rows = d.all_rows(direct.rows)
        if moving:
            self.upper.step(direct.u, direct.rows, left)
        else:
            self._note_agreement(slope)
        return self._record(direct.f, g, direct, d.norm(slope), d.norm(d.residual(slope)), left, moving)

    def _note_agreement(self, slope: Sequence[Tensor]) -> None:
        """Note what v descends in a step that does not move u."""
        if self.pace.agreement is not None:
            self.pace.agreement.note(self.derivatives, slope)

    def _record(
        self, f: Tensor, g: Tensor, moved: Gradients, size_v: Tensor, residual: Tensor, left: Tensor, moving: bool
    ) -> Tensor:
        """Return the record of a method without gamma, from |grad_v| and |r|; `moved` has the gradient in u."""
        zero = torch.zeros_like(f)
        row = [f, g, self._size_u(moved), size_v, residual, zero, zero, zero, zero]
        row += [left * self.upper.rate * moving, self._lower_left(left) * self.lower.rate, zero]
        return torch.stack([x.detach().to(torch.float64).mean() for x in row])

    def _size_u(self, moved: Gradients) -> Tensor:
        """Return the norm of the gradient in u, one for each trial; a row that was read twice counts once."""
        squares = self.upper.row_squares(moved.rows)
        if moved.u:
            squares.append(dot(moved.u, moved.u, trials=self.problem.trials is not None))
        return torch.stack(squares).sum(0).detach().sqrt() if squares else torch.zeros_like(moved.f)

    @contextmanager
    def _at(self, v: Sequence[Tensor], u: Sequence[Tensor] = (), *, buffers: bool = False) -> Iterator[None]:
        """Give v, and u if passed, these values inside. With `buffers`, changes of the buffers last."""
        moved = [*self.v.leaves, *self.u.leaves[: len(u)]]
        with keeping(moved if buffers else [*moved, *self.v.buffers(), *self.u.buffers()]):
            copy_state(moved, [*v, *u])
            yield

    def _draw(self) -> Draw:
        sources, count = self.context.sources, self.context.accumulate
        if self.problem.start_lower is not None:
            self.before = sources.state_dict()
        self.last = sources.draw(count)
        return self.last

    # -- what solve asks -----------------------------------------------------------------------------------------

    @property
    def horizon(self) -> bool:
        """Whether the steps depend on `max_steps`."""
        return self.pace.spends or self.pace.warm_up > 0

    def ended(self) -> Status | None:
        """Let u move if it is time. This is not in a step, because it reads values on the host."""
        pace = self.pace
        timed = pace.upper is not None and pace.agreement is None and self.taken >= self.warm_up
        if not self.moving and (timed or pace.trained(self.taken)):
            self._start_moving(self.taken)
        return None

    def _descents(self) -> dict[str, VariableOptimizer]:
        """Return the optimizers by their names in the state; a subclass adds others."""
        return {"upper": self.upper, "lower": self.lower}

    def _tensors(self) -> dict[str, Any]:
        """Return other tensors that steps change in place, in lists or dicts; a subclass adds them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes in a run, except u and v."""
        return {
            **{name: descent.state_dict() for name, descent in self._descents().items()},
            **self._tensors(),
            "rates": {name: descent.base_rates for name, descent in self._descents().items()},
            "curvature": self.derivatives.curvature,
            "scales": list(self._scale_values),
            "before": self.before,
            "moving": self.moving,
            "taken": self.taken,
            **self.pace.state_dict(),
            "evaluations": [self.derivatives.lower_evaluations, self.derivatives.upper_evaluations],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, descent in self._descents().items():
            descent.load_state_dict(state[name])
            # Rates that were measured before the first step; with another number of steps they can be others.
            if name in state.get("rates", {}) and not state.get("other_steps"):
                descent.base_rates = state["rates"][name]
        copy_state(self._tensors(), state)
        self.derivatives.curvature = state["curvature"]
        self._scale_values = tuple(state["scales"])
        self.before, self.moving = state["before"], state["moving"]
        self.taken = state.get("taken", 0)
        self.pace.load_state_dict(state)
        if self.before:  # v belongs to the batches of the last step: draw them again
            self.context.sources.load_state_dict(self.before)
            self._draw()
        self.derivatives.lower_evaluations, self.derivatives.upper_evaluations = state["evaluations"]
