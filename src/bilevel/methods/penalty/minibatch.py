"""The penalty method on minibatches: T descent steps on v, one on u, and a schedule that raises the penalty weights.

    v descends F + lam g,       u descends F

`bilevel.derivatives.penalised_objective` defines F, and `bilevel.methods.penalty.schedule` the schedule. By default the
scales come from the first batches (see `bilevel.measures.batch_scales`), and gamma from the end of the warm-up, in
which v descends f + lam g. The learning rates fall linearly to zero. The step on u also moves v (`joint`), so that T
can be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import broadcast_trials
from bilevel.derivatives.prices import Gradients, Prices, violation
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import gamma_now
from bilevel.methods.base import RunContext
from bilevel.methods.minibatch_run import Draw, MinibatchRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.methods.penalty.schedule import Schedule
from bilevel.optim.variable_optimizer import VariableOptimizer
from bilevel.results import REASONS

# If the number of steps is not known: the steps of u before the first advance of the schedule, and how much longer each
# interval is than the one before. Twenty advances take about 1,900 steps.
FIRST_ADVANCE, LONGER = 10, 1.2


class PenaltyMinibatchRun(MinibatchRun):
    """A run of the penalty method on minibatches.

    Each of the T + 1 gradients evaluates f and g once; docs/method.md lists the exceptions.
    """

    like_v = (*MinibatchRun.like_v, "running", *(f"schedule/{name}" for name in ("nu", "nu_start", "mean")))

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        self.options = options
        super().__init__(
            context,
            lower_steps=options.lower_steps or 0,
            curvature=options.curvature,
            shared=options.lower_batches == "shared",
            warm_up=options.warm_up,
            decay=str(options.decay),
        )
        given = (options.gamma, options.lam, options.upper_optimizer, options.lower_optimizer)
        if context.problem.start_lower is not None and all(option is not None for option in given):
            self.scale_batches = 1  # no default needs the scales, and an episode can be a pass through a large network
        self._start()
        self.running: list[Tensor] = [torch.zeros_like(leaf) for leaf in self.v.leaves]
        self.running_weight = torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        self._ready()

    # -- before the first step -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Measure the scales, and make the schedule and the optimizers. This reads values on the host."""
        options = self.options
        measured = self._measured()
        trials, new = self.problem.trials, self._first_weight
        lam = measured.lam if options.lam is None else options.lam
        shapes = measured.shapes
        gamma_h = measured.gamma_h if options.gamma_h is None else [options.gamma_h] * len(shapes)
        prices = Prices(
            gamma=new("gamma", measured.gamma if options.gamma is None else options.gamma),
            nu=[torch.full_like(leaf, options.nu or 0.0, requires_grad=False) for leaf in self.v.leaves],
            gamma_h=[new("gamma_h", c) for c in gamma_h],
            mu=[torch.zeros(shape, dtype=self.v.dtype, device=self.v.device) for shape in shapes],
            multipliers=bool(options.multipliers or options.nu),
        )
        every: float | None = options.advance_every
        if every is None and options.advances:
            every = max(1, self.pace.moving_steps // options.advances) if self.pace.spends else FIRST_ADVANCE
        growing = options.advance_every is None and not self.pace.spends
        self.schedule = Schedule(
            prices,
            new("lam", lam),
            None if options.epsilon is None else new("epsilon", options.epsilon),
            factors=(options.gamma_factor or 1.0, options.lam_factor or 1.0, options.epsilon_factor or 1.0),
            every=every,
            multipliers=bool(options.multipliers),
            averaged=bool(options._average_residual),
            equalities=len(self.problem.equalities),
            shrinking=self._shrinking(),
            longer=LONGER if growing else 1.0,
        )
        self.lower = self._lower_descent(options.lower_optimizer, measured.lower_rate(self.schedule.lam.mean().item()))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self.lower_power, self.upper_power = (self._rate_power(descent) for descent in (self.lower, self.upper))
        if trials and (self.lower_power or self.upper_power):
            raise OptionError("rate_power must be 0 with trials, which share their learning rates. Use Adam.")

    def _first_weight(self, name: str, value: float | Sequence[float]) -> Tensor:
        """Return a first penalty weight as a tensor, with one number for each trial."""
        trials = self.problem.trials
        shape = () if trials is None else (trials,)
        if isinstance(value, (int, float)):
            return torch.full(shape, value, dtype=self.v.dtype, device=self.v.device)
        if shape != (len(value),):
            raise OptionError(
                f"{name} must be one number, or one for each trial; got {len(value)} numbers and trials={trials}."
            )
        return torch.tensor(value, dtype=self.v.dtype, device=self.v.device)

    def _rate_power(self, descent: VariableOptimizer) -> float:
        """Return how fast a learning rate falls with gamma. The steps of SGD grow with the gradient, Adam's do not."""
        if self.options.rate_power is not None:
            return self.options.rate_power
        return 1.0 if isinstance(descent.optimizer, torch.optim.SGD) else 0.0

    def _measure_gamma(self) -> None:
        """Set the first gamma at the end of the warm-up; before it, v is untrained and its slopes say little."""
        d, weights = self.derivatives, (self.schedule.prices.gamma, self.schedule.gamma_start)
        counts = d.lower_evaluations, d.upper_evaluations
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            gamma = gamma_now(d, d.prepare(self._sample(), graph=False))
        for weight in weights:
            weight.copy_(torch.where(torch.isfinite(gamma) & (gamma > 0), gamma, weight))
        d.lower_evaluations, d.upper_evaluations = counts

    # -- one step ------------------------------------------------------------------------------------------------

    def _stepped(self, record: Tensor) -> Tensor:
        if self.moving and self.schedule.count():
            record[-1:].fill_(REASONS.index("steps"))  # an assignment would wait for the GPU
        return record

    def _warmed(self, k: int) -> None:
        if k > 0 and self.options.gamma is None:
            self._measure_gamma()

    def _restart(self) -> None:
        self.schedule.restart_multipliers()

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        d, lam = self.derivatives, self.schedule.lam
        if not moving:
            gradients = d.first_order(draw, lam)
        else:
            gradients = d.penalised(draw, self.schedule.prices, with_u=False, slope=self._mean_slope(), lam=lam)
            self._note_slope(gradients.slope)
        self.lower.step(gradients.v, (), self._factor(self.lower_power, left))

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move u, and v if `joint`; advance the schedule; return the record of the step."""
        d, schedule = self.derivatives, self.schedule
        factor = self._factor(self.lower_power, self._lower_left(left))
        upper_factor = self._factor(self.upper_power, left)
        if moving:
            gradients = d.penalised(draw, schedule.prices, with_u=True, slope=self._mean_slope())
            self._note_slope(gradients.slope)
        else:
            gradients = d.first_order(draw, None)
        gradients.rows = d.all_rows(gradients.rows)
        lowered = self._lowered(gradients)
        if not moving:
            self._note_agreement(lowered)
        if self.options.joint:
            self.lower.step(lowered, (), factor)
        self._move_upper(gradients, (upper_factor, factor), moving)
        h = gradients.constraints
        worst = violation(h, len(self.problem.equalities)) if h else torch.zeros_like(schedule.lam)
        size_u, size_v, residual = self._size_u(gradients), d.norm(lowered), d.norm(gradients.residual)
        record = [
            gradients.f,
            gradients.g,
            size_u,
            size_v,
            residual,
            worst,
            schedule.prices.gamma,
            schedule.lam,
            schedule.epsilon,
            upper_factor * self.upper.rate * moving,
            factor * self.lower.rate,
        ]
        row = torch.stack([x.detach().to(torch.float64).mean() for x in record])
        reason = torch.zeros_like(row[0])
        if moving:
            reason = schedule.observe(size_u**2 + size_v**2, gradients)
        return torch.cat([row, reason.to(torch.float64).amax().reshape(1)])

    def _lowered(self, gradients: Gradients) -> list[Tensor]:
        """Return the derivative of F + lam g in v."""
        lam = self.schedule.lam
        return [(broadcast_trials(lam, s) * s).add_(x) for x, s in zip(gradients.v, gradients.slope, strict=True)]

    def _move_upper(self, gradients: Gradients, factors: tuple[Tensor, Tensor], moving: bool) -> None:
        """Move u if `moving`; `factors` multiply the learning rates of u and of v."""
        if moving:
            self.upper.step(gradients.u, gradients.rows, factors[0])

    def _shrinking(self) -> list[tuple[Tensor, float]]:
        """Return other tensors that an advance of the schedule multiplies, each with its factor."""
        return []

    def _factor(self, power: float, left: Tensor) -> Tensor:
        """Return the factor on a learning rate: `left`, divided by a power of the growth of gamma."""
        return left if power == 0 else self.schedule.gamma_growth() ** -power * left

    def _mean_slope(self) -> list[Tensor] | None:
        """Return the running mean of s if it is the cotangent; None if s of the batch is."""
        if self.options.cotangent != "running":
            return None
        weight = torch.where(self.running_weight > 0, self.running_weight, torch.ones_like(self.running_weight))
        return [m / weight for m in self.running]

    def _note_slope(self, slope: list[Tensor]) -> None:
        if self.options.cotangent == "running":
            torch._foreach_lerp_(self.running, slope, 0.1)
            self.running_weight.lerp_(torch.ones_like(self.running_weight), 0.1)

    # -- what solve asks -----------------------------------------------------------------------------------------

    def prices(self) -> Prices:
        return self.schedule.prices

    def lam(self) -> Tensor:
        return self.schedule.lam

    def _tensors(self) -> dict[str, Any]:
        return {"running": self.running, "running_weight": self.running_weight}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
