"""What all step-wise methods share: T lower steps, then an upper one, on draws of both sources.

A method has a subclass of `Steps` that says what one lower and one upper step do. It draws the batches, keeps the
optimizers, gives the steps to the engines, and answers what `solve` asks.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel._util.nested import Pair, detached
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import dot, norm
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.distributed.derivatives import make_derivatives
from bilevel.engines.engine import Engine, Engines
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import BatchScales, measure
from bilevel.measures.certificate import SMALL
from bilevel.measures.lower_minimum import lower_point
from bilevel.methods.base import Setting
from bilevel.optim.variable_optimizer import Descent, OptimizerFactory, adam
from bilevel.problem.variables import Variable
from bilevel.results import Status

Draw = tuple[list[Pair], list[Pair] | None]
"""The batches of one gradient, and those that its cotangent is from where that is another's."""
SCALE_BATCHES = 5
GOLDEN = (math.sqrt(5) - 1) / 2
REACH = 5.0
"""How far a coordinate of u can travel from its start, in either direction, at the default upper rate."""


class Steps(ABC):
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
        setting: Setting,
        *,
        lower_steps: int,
        curvature: Curvature = "auto",
        shared: bool = False,
        warm_up: float = 0.0,
        falling: bool = True,
    ) -> None:
        """`shared`: one draw for a whole upper step. `warm_up`: the share of the steps in which v alone moves.
        `falling`: the learning rates fall linearly to zero."""
        self.setting = setting
        self.problem, self.u, self.v = setting.problem, setting.u, setting.v
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
        if setting.accumulate > 1 and self.problem.start_lower is not None:
            raise OptionError(
                f"accumulate must be 1 with start_lower, which sees one episode; got {setting.accumulate}. Put several "
                "tasks into one batch."
            )
        self.derivatives = make_derivatives(
            setting.problem,
            setting.u,
            setting.v,
            ranks=setting.ranks,
            precision=setting.precision,
            curvature=curvature,
            accumulate=setting.accumulate,
        )
        self.tolerance = setting.tolerance
        self.lower_steps, self.falling = lower_steps, falling
        self.shared = shared or self.problem.prepare is not None or self.problem.start_lower is not None
        self.warm_up = round(warm_up * setting.max_steps)
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
            measured = measure(d, prepared, self.setting.accumulate)
        self._scale_values = measured.sizes
        return measured

    def _sample(self) -> list[Pair]:
        upper, lower, _ = self.setting.sources.sample(self.scale_batches)
        count = max(len(upper), len(lower))
        return list(itertools.islice(zip(itertools.cycle(upper), itertools.cycle(lower), strict=False), count))

    def _upper_descent(
        self, factory: OptimizerFactory | None, measured: BatchScales, u: Variable | None = None
    ) -> Descent:
        """What moves u, or another variable in its place: the user's optimizer, or Adam at the default rate."""
        u = self.u if u is None else u
        if factory is not None:
            return Descent(u, factory, "upper_optimizer")
        moving = max(1, self.setting.max_steps - self.warm_up)
        rows = 2 * REACH / max(1.0, moving * measured.coverage)
        return Descent(u, adam(u, 2 * REACH / moving), "upper_optimizer", row_rate=rows)

    def _lower_rate(self, measured: BatchScales) -> float:
        """The default rate where v descends g alone. Without data it is no less than that of u, which v must follow."""
        moving = max(1, self.setting.max_steps - self.warm_up)
        return max(measured.lower_rate(None), 0.0 if self.setting.sources else 2 * REACH / moving)

    def _lower_descent(self, factory: OptimizerFactory | None, rate: float) -> Descent:
        """What moves v: the user's optimizer, or Adam at this rate."""
        return Descent(self.v, factory or adam(self.v, rate), "lower_optimizer")

    def _ready(self) -> None:
        """All that a step changes is there: count the draws of a step, and make the engines."""
        self.draws = self.setting.accumulate * (1 if self.shared else self.lower_steps + 1)
        each = self.lower_steps + 1
        self.engines = Engines(self.setting.engine, self, gradients=self.setting.max_steps * each, each=each)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        if not self.moving and k >= self.warm_up:
            self.moving = True
            self._warmed(k)
        share = 1.0 - k / self.setting.max_steps if self.falling else 1.0
        left = torch.full((), share, dtype=self.v.dtype, device=self.v.device)
        draws = self._draws(k)
        if not self.engines.whole:
            return self._iteration(draws, left, self.moving)
        held = list(draws)
        if len({_shapes(draw) for draw in held}) > 1:  # a last partial batch among them
            return self._iteration(held, left, self.moving, self.engines.outer)
        record: Tensor = self.engines.outer.call(self._iteration, (held, left), self.moving)
        return record

    def _warmed(self, k: int) -> None:  # noqa: B027
        """Called once, before the first step that moves u."""

    def _draws(self, k: int) -> Iterator[Draw]:
        """The draws of upper iteration k: one for each of its steps, that of the upper step last, or one for all.

        Which of the T + 1 is the upper step's changes without a period: of batches in a fixed order it would else see
        only some.
        """
        if self.shared:
            batches, other = self._draw()
            yield batches, other
            if other is not None:
                for _ in range(self.lower_steps):
                    yield batches, self._draw_other()
            return
        turn = int(k * GOLDEN % 1.0 * (self.lower_steps + 1))
        for i in range(self.lower_steps + 1):
            draw = self._draw()
            if i == turn:
                last = draw
            else:
                yield draw
        yield last

    def _iteration(self, draws: Iterable[Draw], left: Tensor, moving: bool, outer: Engine | None = None) -> Tensor:
        """T lower steps and the upper step. `outer` runs each of them, where it does not run all of this."""
        run = (outer or Engine()).call
        source = iter(draws)
        draw = next(source)
        record: Tensor
        if self.problem.prepare is not None:
            record = run(self._run, (draw, left), self._episode, moving)
            return record
        if self.problem.start_lower is not None:
            run(self._run, (draw, left), self._start_episode)
        for _ in range(self.lower_steps):
            run(self._run, (draw, self._lower_left(left)), self._lower_step, moving)
            draw = next(source, draw)
        record = run(self._run, (draw, left), self._upper_step, moving)
        return record

    def _run(self, draw: Draw, left: Tensor, step: Any, *fixed: Any) -> Any:
        """One step, by the inner engine."""
        return self.engines.inner.call(step, (draw, left), *fixed)

    def _episode(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """An upper iteration on what `prepare` makes of one draw: its graph runs through all of it."""
        batches = self.derivatives.prepare(draw[0], graph=moving)
        still = (detached(batches), draw[1])
        self._start_episode(still, left)
        for _ in range(self.lower_steps):
            self._lower_step(still, self._lower_left(left), moving)
        return self._upper_step((batches, draw[1]), left, moving)

    def _lower_left(self, left: Tensor) -> Tensor:
        """What the rate of v is multiplied by. A lower problem that starts anew needs as many steps at the end of a
        run as at its start."""
        return torch.ones_like(left) if self.problem.start_lower is not None else left

    def _episode_of(self, batches: Sequence[Pair]) -> Any:
        """What `start_lower` receives: what was prepared, or else the pair of batches."""
        return batches[0] if self.problem.prepare is None else batches[0][0]

    def _start_episode(self, draw: Draw, _: Tensor) -> None:
        """Put v at its start, and with it all that belongs to the lower problem of one episode."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._episode_of(draw[0]))
            self.lower.restart()
            self._restart()

    def _restart(self) -> None:  # noqa: B027
        """Called with v at the start of a new episode."""

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        """Move v: down g, where a method has nothing else to say. `left` is what the learning rates are multiplied by;
        `moving` is False in the warm-up."""
        _, slope = self.derivatives.slope(draw[0])
        self.lower.step(slope, (), left)

    @abstractmethod
    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move u where it is `moving`; returns the record."""

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
        sources, count = self.setting.sources, self.setting.accumulate
        if self.problem.start_lower is not None:
            self.before = sources.state_dict()
        self.last = sources.draw(count)
        return self.last, self._draw_other()

    def _draw_other(self) -> list[Pair] | None:
        return None

    # -- what the engines ask --------------------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self.derivatives.shared:
            return "ranks average gradients in the midst of a step, which a record does not hold."
        if self.curved and self.derivatives.curvature == "difference":
            return "curvature='difference' sets the random generators back within a step."
        if self.setting.accumulate > 1:
            return f"accumulate={self.setting.accumulate} sets the random generators back within a step."
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
        if self.setting.sources or self.problem.start_lower is not None:
            return None
        if self.tolerance is None and self.v.size > SMALL:
            return None
        d = self.derivatives
        curvature = norm(d.hessian_product(self._still(), self._unit(), with_u=False)).item()
        return lower_point(d, self.setting.generator, self.tolerance or 1e-6, curvature) is None

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
            self.setting.sources.load_state_dict(self.before)
            self._draw()
        self.derivatives.lower_evaluations, self.derivatives.upper_evaluations = state["evaluations"]


def _shapes(draw: Draw) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in pytree.tree_leaves(draw) if isinstance(leaf, Tensor))
