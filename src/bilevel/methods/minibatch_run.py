"""The run that all step-wise methods share: T lower steps, then an upper one, on draws of both sources.

`MinibatchRun` draws the batches, keeps the optimizers, gives the steps to the engines, and answers what `solve` asks. A
method's subclass says what one lower and one upper step do.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel._util.nested import Pair, detached
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import dot, norm
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.distributed.derivatives import make_derivatives
from bilevel.engines.engine import Engines
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import BatchScales, measure
from bilevel.measures.certificate import SMALL
from bilevel.measures.lower_minimum import lower_point
from bilevel.methods.base import RunContext
from bilevel.optim.variable_optimizer import Descent, OptimizerFactory, adam
from bilevel.problem.variables import Variable
from bilevel.results import Status

Draw = list[Pair]
"""The batches of one gradient."""
SCALE_BATCHES = 5
GOLDEN = (math.sqrt(5) - 1) / 2
REACH = 5.0
"""How far a coordinate of u can travel from its start, in either direction, at the default upper rate."""


class _Parts(NamedTuple):
    """The parts of an upper iteration, each run by an engine."""

    start: Callable[..., None]
    lower: Callable[..., None]
    upper: Callable[..., Tensor]


class MinibatchRun(ABC):
    """A run, step by step. A subclass sets `lower` and `upper`, then calls `_ready`."""

    mode = "stochastic"
    curved = True
    """Whether a step takes second derivatives."""
    like_v: tuple[str, ...] = ("lower",)
    """Where in the state each tensor of v has one of its shape: shards where v is sharded (see
    `bilevel.distributed.sharded_state`)."""
    scale_batches = SCALE_BATCHES
    """How many batches the scales are measured on."""
    lower: Descent
    upper: Descent
    engines: Engines

    def __init__(
        self,
        context: RunContext,
        *,
        lower_steps: int,
        curvature: Curvature = "auto",
        shared: bool = False,
        warm_up: float = 0.0,
        falling: bool = True,
    ) -> None:
        """`shared`: one draw for a whole upper step. `warm_up`: the share of the steps in which v alone moves.
        `falling`: the learning rates fall linearly to zero."""
        self.context = context
        self.problem, self.u, self.v = context.problem, context.u, context.v
        if self.problem.constrained_below:
            raise OptionError(
                "lower_equalities and lower_inequalities need Penalty(), which prices the KKT conditions of the lower "
                "level. Use it, or project_lower where v lives in a set with a known projection (Box, Ball, Simplex)."
            )
        if self.problem.prepare is not None and self.u.rows:
            raise OptionError("u cannot hold Rows where the problem has prepare. Use a tensor with a row an example.")
        if warm_up and self.problem.start_lower is not None:
            raise OptionError(
                f"warm_up must be 0 with start_lower, which puts v at its start in every step; got {warm_up}."
            )
        if context.accumulate > 1 and self.problem.start_lower is not None:
            raise OptionError(
                f"accumulate must be 1 with start_lower, which sees one episode; got {context.accumulate}. Put several "
                "tasks into one batch."
            )
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
        self.lower_steps, self.falling = lower_steps, falling
        self.shared = shared or self.problem.prepare is not None or self.problem.start_lower is not None
        self.warm_up = round(warm_up * context.max_steps)
        self.last: list[Pair] | None = None
        self.before: list[list[int]] = []
        self.moving = False
        self._scale_values = (1.0, 1.0, 1.0)

    # -- before the first step -----------------------------------------------------------------------------------

    def _measured(self) -> BatchScales:
        """Put u and v into their sets, and measure f and g there. Reads values on the host."""
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
        return measured

    def _sample(self) -> list[Pair]:
        upper, lower, _ = self.context.sources.sample(self.scale_batches)
        count = max(len(upper), len(lower))
        return list(itertools.islice(zip(itertools.cycle(upper), itertools.cycle(lower), strict=False), count))

    def _upper_descent(
        self, factory: OptimizerFactory | None, measured: BatchScales, u: Variable | None = None
    ) -> Descent:
        """What moves u, or another variable in its place: the user's optimizer, or Adam at the default rate."""
        u = self.u if u is None else u
        if factory is not None:
            return Descent(u, factory, "upper_optimizer")
        moving = max(1, self.context.max_steps - self.warm_up)
        rows = 2 * REACH / max(1.0, moving * measured.coverage)
        return Descent(u, adam(u, 2 * REACH / moving), "upper_optimizer", row_rate=rows)

    def _lower_rate(self, measured: BatchScales) -> float:
        """The default rate where v descends g alone. Without data it is no less than that of u, which v must follow."""
        moving = max(1, self.context.max_steps - self.warm_up)
        return max(measured.lower_rate(None), 0.0 if self.context.sources else 2 * REACH / moving)

    def _lower_descent(self, factory: OptimizerFactory | None, rate: float) -> Descent:
        """What moves v: the user's optimizer, or Adam at this rate."""
        return Descent(self.v, factory or adam(self.v, rate), "lower_optimizer")

    def _ready(self) -> None:
        """Count the draws of a step and make the engines. Call this when all that a step changes is there."""
        self.draws = self.context.accumulate * (1 if self.shared else self.lower_steps + 1)
        each = self.lower_steps + 1
        self.engines = Engines(self.context.engine, self, gradients=self.context.max_steps * each, each=each)
        inner, outer = self.engines.inner.wrap, self.engines.outer.wrap
        upper = self._upper_step if self.problem.prepare is None else self._episode
        self._parts = _Parts(inner(self._start_episode), inner(self._lower_step), inner(upper))
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
        """Called after each step with its record, which it returns."""
        return record

    def _begin(self, k: int) -> tuple[Iterator[Draw], Tensor]:
        """Return the draws of upper iteration k, and the factor on its learning rates."""
        if not self.moving and k >= self.warm_up:
            self.moving = True
            self._warmed(k)
        share = 1.0 - k / self.context.max_steps if self.falling else 1.0
        return self._draws(k), torch.full((), share, dtype=self.v.dtype, device=self.v.device)

    def _warmed(self, k: int) -> None:  # noqa: B027
        """Called once, before the first step that moves u."""

    def _draws(self, k: int) -> Iterator[Draw]:
        """Yield the draws of upper iteration k: one for each step, the upper step's last, or a single shared one.

        The position of the upper step's draw among the T + 1 changes without a period. Otherwise it would see only
        some of the batches if these come in a fixed order.
        """
        if self.shared:
            yield self._draw()
            return
        turn = int(k * GOLDEN % 1.0 * (self.lower_steps + 1))
        for i in range(self.lower_steps + 1):
            draw = self._draw()
            if i == turn:
                last = draw
            else:
                yield draw
        yield last

    def _recorded(self, draws: Iterator[Draw], left: Tensor) -> Tensor:
        """Run an upper iteration by the outer engine: in one piece, or step by step if a batch has another shape."""
        held = list(draws)
        if len({_shapes(draw) for draw in held}) > 1:  # a last partial batch is among them
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
            for _ in range(self.lower_steps):
                yield partial(parts.lower, draw, self._lower_left(left), moving)
                draw = next(source, draw)
        yield partial(parts.upper, draw, left, moving)

    def _episode(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Run an upper iteration on what `prepare` makes of one draw: its graph runs through all of it."""
        batches = self.derivatives.prepare(draw, graph=moving)
        still = detached(batches)
        self._start_episode(still)
        for _ in range(self.lower_steps):
            self._lower_step(still, self._lower_left(left), moving)
        return self._upper_step(batches, left, moving)

    def _lower_left(self, left: Tensor) -> Tensor:
        """Return the factor on v's learning rate. It stays 1 if every step starts a new lower problem."""
        return torch.ones_like(left) if self.problem.start_lower is not None else left

    def _episode_of(self, batches: Sequence[Pair]) -> Any:
        """Return what `start_lower` receives: the prepared batch, or the pair of batches without `prepare`."""
        return batches[0] if self.problem.prepare is None else batches[0][0]

    def _start_episode(self, draw: Draw) -> None:
        """Put v at its start, and reset all that belongs to the lower problem of one episode."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._episode_of(draw))
            self.lower.restart()
            self._restart()

    def _restart(self) -> None:  # noqa: B027
        """Called with v at the start of a new episode."""

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        """Move v, by default down g. `left` is the factor on the learning rates; `moving` is False in the warm-up."""
        _, slope = self.derivatives.slope(draw)
        self.lower.step(slope, (), left)

    @abstractmethod
    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move u if `moving`; return the record."""

    def _record(
        self, f: Tensor, g: Tensor, moved: Gradients, size_v: Tensor, residual: Tensor, left: Tensor, moving: bool
    ) -> Tensor:
        """The record of a step of a method without prices, from |grad_v| and |r|; `moved` has the gradient in u."""
        zero = torch.zeros_like(f)
        row = [
            f,
            g,
            self._size_u(moved),
            size_v,
            residual,
            zero,
            zero,
            zero,
            zero,
            left * self.upper.rate * moving,
            self._lower_left(left) * self.lower.rate,
            zero,
        ]
        return torch.stack([x.detach().to(torch.float64).mean() for x in row])

    def _size_u(self, moved: Gradients) -> Tensor:
        """|the gradient in u|, of each trial where there are trials; a row that was read twice counts once."""
        squares = self.upper.row_squares(moved.rows)
        if moved.u:
            squares.append(dot(moved.u, moved.u, trials=self.problem.trials is not None))
        return torch.stack(squares).sum(0).detach().sqrt() if squares else torch.zeros_like(moved.f)

    def _draw(self) -> Draw:
        sources, count = self.context.sources, self.context.accumulate
        if self.problem.start_lower is not None:
            self.before = sources.state_dict()
        self.last = sources.draw(count)
        return self.last

    # -- what the engines ask --------------------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self.derivatives.shared:
            return "ranks average gradients in the midst of a step, which a record does not hold."
        if self.curved and self.derivatives.curvature == "difference":
            return "curvature='difference' sets the random generators back within a step."
        if self.context.accumulate > 1:
            return f"accumulate={self.context.accumulate} sets the random generators back within a step."
        for name, descent in (("lower_optimizer", self.lower), ("upper_optimizer", self.upper)):
            if not descent.recordable:
                return f"{name} is {type(descent.optimizer).__name__}, whose first state is not zero. Use Adam or SGD."
        if self.problem.start_lower is not None and not self.lower.restarts_in_place:
            return f"start_lower needs a new {type(self.lower.optimizer).__name__} each time; use Adam."
        return ""

    def live(self) -> list[Tensor]:
        held = pytree.tree_leaves(self.state_dict())
        return [*self.u.tensors().values(), *self.v.tensors().values(), *(t for t in held if isinstance(t, Tensor))]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [d.optimizer for d in (self.lower, self.upper) if d.optimizer is not None]

    # -- what solve asks -----------------------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        return self.engines.name

    def ended(self) -> Status | None:
        return None

    def finish(self) -> bool | None:
        """Without data, whether v minimises g can be tried; on minibatches it is not.

        Of a v that is not small it is tried only where a tolerance makes the status depend on it: g is minimised anew.
        """
        if self.context.sources or self.problem.start_lower is not None:
            return None
        if self.tolerance is None and self.v.size > SMALL:
            return None
        d = self.derivatives
        curvature = norm(d.hessian_product(self._still(), self._unit(), with_u=False)).item()
        return lower_point(d, self.context.generator, self.tolerance or 1e-6, curvature) is None

    def _still(self) -> list[Pair]:
        return self.derivatives.prepare([(None, None)], graph=False)

    def _unit(self) -> list[Tensor]:
        direction = [torch.randn_like(leaf) for leaf in self.v.leaves]
        return [x / norm(direction) for x in direction]

    def scales(self) -> tuple[float, float, float, float]:
        return self._scale_values[0], *self._scale_values

    def episode(self) -> list[Pair] | None:
        return self.last if self.problem.start_lower is not None else None

    @abstractmethod
    def prices(self) -> Prices:
        """What the certificate is measured with: nu + gamma s is minus the adjoint q."""

    def _adjoint_prices(self, q: Sequence[Tensor]) -> Prices:
        """The prices of a method that has an estimate of the adjoint and no gamma."""
        return Prices(gamma=torch.zeros((), dtype=self.v.dtype, device=self.v.device), nu=[-x for x in q])

    def lam(self) -> Tensor:
        return torch.zeros((), dtype=self.v.dtype, device=self.v.device)

    def state_dict(self) -> dict[str, Any]:
        """All that changes in a run, beside u and v; a subclass adds its own."""
        return {
            "upper": self.upper.state_dict(),
            "lower": self.lower.state_dict(),
            "curvature": self.derivatives.curvature,
            "scales": list(self._scale_values),
            "before": self.before,
            "moving": self.moving,
            "evaluations": [self.derivatives.lower_evaluations, self.derivatives.upper_evaluations],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.upper.load_state_dict(state["upper"])
        self.lower.load_state_dict(state["lower"])
        self.derivatives.curvature = state["curvature"]
        self._scale_values = tuple(state["scales"])
        self.before, self.moving = state["before"], state["moving"]
        if self.before:  # v belongs to the batches of the last step: draw them again
            self.context.sources.load_state_dict(self.before)
            self._draw()
        self.derivatives.lower_evaluations, self.derivatives.upper_evaluations = state["evaluations"]


def _shapes(draw: Draw) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in pytree.tree_leaves(draw) if isinstance(leaf, Tensor))
