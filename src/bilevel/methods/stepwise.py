"""The penalty method on minibatches: T descent steps on v, one on u, and a schedule that raises the prices.

    v descends F + lam g, u descends F           (F: see `bilevel.autodiff`; the schedule: see `bilevel.schedule`)

With data and no options, the scales come from the first batches (see `bilevel.batch_scales`), gamma at the end of the
warm-up. In the warm-up v descends f + lam g. The learning rates fall linearly to zero. The step on u moves v, too
(`joint`), so that T may be 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autodiff import Derivatives, Gradients, Prices, norm, violation
from ..batch_scales import BatchScales, gamma_now, measure
from ..batches import Pair, detached
from ..descent import Descent
from ..engine import Engine, Engines
from ..errors import OptionError
from ..lower_level import lower_point
from ..method import Setting
from ..replay import keeping
from ..schedule import Schedule
from ..solution import Status

if TYPE_CHECKING:
    from .penalty import Penalty

Draw = tuple[list[Pair], list[Pair] | None]
"""The batches of one gradient, and those that its cotangent is from where that is another's."""
SCALE_BATCHES = 5
GOLDEN = (math.sqrt(5) - 1) / 2
REACH = 5.0
"""How far a coordinate of u can travel from its start, in either direction, at the default upper rate."""


class Stepwise:
    """A run of the penalty method, step by step.

    Lower evaluations: one for each of the T + 1 gradients; docs/method.md has the exceptions.
    """

    mode = "stochastic"

    def __init__(self, options: Penalty, setting: Setting) -> None:
        self.options, self.setting = options, setting
        self.problem, self.u, self.v = setting.problem, setting.u, setting.v
        if self.problem.prepare is not None and self.u.rows:
            raise OptionError("u cannot hold Rows where the problem has prepare. Use a tensor with a row an example.")
        if options.cotangent == "other" and (self.problem.prepare or self.problem.start_lower):
            raise OptionError(
                "cotangent='other' cannot be used with prepare or start_lower: another batch is another lower problem. "
                "Use cotangent='same'."
            )
        if options.warm_up and self.problem.start_lower is not None:
            raise OptionError(
                f"warm_up must be 0 with start_lower, which puts v at its start in every step; got {options.warm_up}."
            )
        if setting.accumulate > 1 and self.problem.start_lower is not None:
            raise OptionError(
                f"accumulate must be 1 with start_lower, which sees one episode; got {setting.accumulate}. Put several "
                "tasks into one batch."
            )
        self.derivatives = Derivatives(self.problem, self.u, self.v, options.curvature, setting.precision)
        self.tolerance = setting.tolerance
        self.lower_steps = options.lower_steps or 0
        episodic = self.problem.prepare is not None or self.problem.start_lower is not None
        self.shared = episodic or options.lower_batches == "shared"
        self.warm_up = round((options.warm_up or 0.0) * setting.max_steps)
        self._start()
        self.running: list[Tensor] = [torch.zeros_like(leaf) for leaf in self.v.leaves]
        self.running_weight = torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        self.last: list[Pair] | None = None
        self.before: list[list[int]] = []
        self.moving = False
        self.draws = setting.accumulate * (1 if self.shared else self.lower_steps + 1)
        self.engines = Engines(setting.engine, self, gradients=setting.max_steps * (self.lower_steps + 1))

    # -- before the first step -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Scales, schedule and optimizers. Reads values on the host: this is before the first step."""
        options = self.options
        if options.lower_optimizer is not None:
            self.lower = Descent(self.v, options.lower_optimizer, "lower_optimizer")
        if options.upper_optimizer is not None:
            self.upper = Descent(self.u, options.upper_optimizer, "upper_optimizer")
        self.u.project(rows=True)
        self.v.project()
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            measured = self._measured()
        self._scale_values = measured.sizes
        new = partial(torch.tensor, dtype=self.v.dtype, device=self.v.device)
        lam = measured.lam if options.lam is None else options.lam
        shapes = measured.shapes
        gamma_h = measured.gamma_h if options.gamma_h is None else [options.gamma_h] * len(shapes)
        prices = Prices(
            gamma=new(measured.gamma if options.gamma is None else options.gamma),
            nu=[torch.full_like(leaf, options.nu or 0.0, requires_grad=False) for leaf in self.v.leaves],
            gamma_h=[new(c) for c in gamma_h],
            mu=[torch.zeros(shape, dtype=self.v.dtype, device=self.v.device) for shape in shapes],
            multipliers=bool(options.multipliers or options.nu),
        )
        every = options.advance_every
        if every is None and options.advances:
            every = max(1, (self.setting.max_steps - self.warm_up) // options.advances)
        self.schedule = Schedule(
            prices, new(lam), None if options.epsilon is None else new(options.epsilon),
            factors=(options.gamma_factor or 1.0, options.lam_factor or 1.0, options.epsilon_factor or 1.0),
            every=every, smoothing=options.smoothing, multipliers=bool(options.multipliers),
            averaged=bool(options.average_residual), equalities=len(self.problem.equalities),
            like=[*self.u.leaves, *self.v.leaves],
        )  # fmt: skip
        if options.lower_optimizer is None:
            rate = measured.lower_rate(lam)
            self.lower = Descent(self.v, partial(torch.optim.Adam, lr=rate), "lower_optimizer")
        if options.upper_optimizer is None:
            moving = max(1, self.setting.max_steps - self.warm_up)
            rows = 2 * REACH / max(1.0, moving * measured.coverage)
            self.upper = Descent(
                self.u, partial(torch.optim.Adam, lr=2 * REACH / moving), "upper_optimizer", row_rate=rows
            )
        self.lower_power, self.upper_power = (self._rate_power(descent) for descent in (self.lower, self.upper))

    def _rate_power(self, descent: Descent) -> float:
        """How fast a learning rate falls with gamma: plain SGD needs it, Adam's steps do not grow with the gradient."""
        if self.options.rate_power is not None:
            return self.options.rate_power
        return 1.0 if isinstance(descent.optimizer, torch.optim.SGD) else 0.0

    def _sample(self) -> list[Pair]:
        upper, lower, _ = self.setting.sources.sample(SCALE_BATCHES)
        count = max(len(upper), len(lower))
        return list(itertools.islice(zip(itertools.cycle(upper), itertools.cycle(lower), strict=False), count))

    def _measured(self) -> BatchScales:
        d = self.derivatives
        prepared = d.prepare(self._sample(), graph=False)
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._episode_of(prepared))
        return measure(d, prepared, self.setting.accumulate)

    def _measure_gamma(self) -> None:
        """Set the first gamma by what the warm-up has led to: at its start the slopes are those of an untrained v."""
        d, prices = self.derivatives, (self.schedule.prices.gamma, self.schedule.gamma_start)
        counts = d.lower_evaluations, d.upper_evaluations
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            gamma = gamma_now(d, d.prepare(self._sample(), graph=False))
        for price in prices:
            price.copy_(torch.where(torch.isfinite(gamma) & (gamma > 0), gamma, price))
        d.lower_evaluations, d.upper_evaluations = counts

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        if not self.moving and k >= self.warm_up:
            self.moving = True
            if k > 0 and self.options.gamma is None:
                self._measure_gamma()
        moving = self.moving
        share = 1.0 - k / self.setting.max_steps if self.options.decay == "linear" else 1.0
        left = torch.full((), share, dtype=self.v.dtype, device=self.v.device)
        draws = self._draws(k)
        if not self.engines.whole:
            return self._iteration(draws, left, moving)
        held = list(draws)
        if len({_shapes(draw) for draw in held}) > 1:  # a last partial batch among them
            return self._iteration(held, left, moving, self.engines.outer)
        record: Tensor = self.engines.outer.call(self._iteration, (held, left), moving)
        return record

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
            run(self._run, (draw, left), self._lower_step, moving)
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
            self._lower_step(still, left, moving)
        return self._upper_step((batches, draw[1]), left, moving)

    def _episode_of(self, batches: Sequence[Pair]) -> Any:
        """What `start_lower` receives: what was prepared, or else the pair of batches."""
        return batches[0] if self.problem.prepare is None else batches[0][0]

    def _start_episode(self, draw: Draw, _: Tensor) -> None:
        """Put v at its start, and with it all that belongs to the lower problem of one episode."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._episode_of(draw[0]))
            self.lower.restart()
            self.schedule.restart_multipliers()

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        gradients = self._gradients(draw, moving, with_u=False, lam=self.schedule.lam)
        self.lower.step(gradients.v, (), self._factor(self.lower_power, left))

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move u, and v where that is `joint`, then the schedule; returns the record of the step."""
        schedule = self.schedule
        factor, upper_factor = (self._factor(power, left) for power in (self.lower_power, self.upper_power))
        gradients = self._gradients(draw, moving, with_u=moving)
        lowered = [x + schedule.lam * s for x, s in zip(gradients.v, gradients.slope, strict=True)]
        if self.options.joint:
            self.lower.step(lowered, (), factor)
        if moving:
            self.upper.step(gradients.u, gradients.rows, upper_factor)
        moved = [*gradients.u, *(g for parts in gradients.rows for _, g in parts)]
        size_u = norm(moved) if moved else torch.zeros_like(gradients.f)
        size_v = norm(lowered)
        record = [
            gradients.f, gradients.g, size_u, size_v, norm(gradients.residual), self._worst(gradients.constraints),
            schedule.prices.gamma, schedule.lam, schedule.epsilon,
            upper_factor * self.upper.rate * moving, factor * self.lower.rate,
        ]  # fmt: skip
        row = torch.stack([x.detach().to(torch.float64) for x in record])
        reason = torch.zeros_like(row[0])
        if moving:
            reason = schedule.observe(size_u**2 + size_v**2, gradients, [*gradients.u, *lowered])
        return torch.cat([row, reason.to(torch.float64).reshape(1)])

    def _draw(self) -> Draw:
        sources, count = self.setting.sources, self.setting.accumulate
        if self.problem.start_lower is not None:
            self.before = sources.state_dict()
        self.last = sources.draw(count)
        return self.last, self._draw_other()

    def _draw_other(self) -> list[Pair] | None:
        if self.options.cotangent != "other":
            return None
        return self.setting.sources.draw_lower(self.setting.accumulate)

    def _factor(self, power: float, left: Tensor) -> Tensor:
        """What a learning rate is multiplied by: `left` of it, and less as gamma grows."""
        return left if power == 0 else self.schedule.gamma_growth() ** -power * left

    def _gradients(self, draw: Draw, moving: bool, *, with_u: bool, lam: Tensor | None = None) -> Gradients:
        """The derivative of F, in the warm-up that of f: nothing is paid yet. With lam g where lam is given."""
        if not moving:
            return self.derivatives.first_order(draw[0], lam)
        return self._penalised(draw, with_u=with_u, lam=lam)

    def _penalised(self, draw: Draw, *, with_u: bool, lam: Tensor | None = None) -> Gradients:
        (batches, other), d, slope = draw, self.derivatives, None
        if other is not None:
            _, slope = d.slope(other)
        elif self.options.cotangent == "running":
            weight = torch.where(self.running_weight > 0, self.running_weight, torch.ones_like(self.running_weight))
            slope = [m / weight for m in self.running]
        gradients = d.penalised(batches, self.schedule.prices, with_u=with_u, slope=slope, lam=lam)
        if self.options.cotangent == "running":
            torch._foreach_lerp_(self.running, gradients.slope, 0.1)
            self.running_weight.lerp_(torch.ones_like(self.running_weight), 0.1)
        return gradients

    def _worst(self, values: Sequence[Tensor]) -> Tensor:
        return violation(values, len(self.problem.equalities)) if values else torch.zeros_like(self.schedule.lam)

    # -- what the engines ask --------------------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self.derivatives.curvature == "difference":
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
        """Without data, whether v minimises g can be tried; on minibatches it is not."""
        if self.setting.sources or self.problem.start_lower is not None:
            return None
        d = self.derivatives
        curvature = norm(d.hessian_product(self._still(), self._unit(), with_u=False)).item()
        return lower_point(d, self.setting.generator, self.tolerance or 1e-6, curvature) is None

    def _still(self) -> list[Pair]:
        return self.derivatives.prepare([(None, None)], graph=False)

    def _unit(self) -> list[Tensor]:
        direction = [torch.randn_like(leaf) for leaf in self.v.leaves]
        return [x / norm(direction) for x in direction]

    def scales(self) -> tuple[float, float, float]:
        return self._scale_values

    def episode(self) -> list[Pair] | None:
        return self.last if self.problem.start_lower is not None else None

    def prices(self) -> Prices:
        return self.schedule.prices

    def lam(self) -> Tensor:
        return self.schedule.lam

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.state_dict(), "upper": self.upper.state_dict(), "lower": self.lower.state_dict(),
            "running": self.running, "running_weight": self.running_weight, "curvature": self.derivatives.curvature,
            "scales": list(self._scale_values), "before": self.before, "moving": self.moving,
            "evaluations": [self.derivatives.lower_evaluations, self.derivatives.upper_evaluations],
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.upper.load_state_dict(state["upper"])
        self.lower.load_state_dict(state["lower"])
        for mine, saved in zip(self.running, state["running"], strict=True):
            mine.copy_(saved)
        self.running_weight.copy_(state["running_weight"])
        self.derivatives.curvature = state["curvature"]
        self._scale_values = tuple(state["scales"])
        self.before, self.moving = state["before"], state["moving"]
        if self.before:  # v belongs to the batches of the last step: draw them again
            self.setting.sources.load_state_dict(self.before)
            self._draw()
        self.derivatives.lower_evaluations, self.derivatives.upper_evaluations = state["evaluations"]


def _shapes(draw: Draw) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in pytree.tree_leaves(draw) if isinstance(leaf, Tensor))
