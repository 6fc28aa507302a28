"""The penalty method on minibatches: T descent steps on v, one on u, and a schedule that raises the prices.

    v descends F + lam g, u descends F           (F: see `bilevel.autodiff`; the schedule: see `bilevel.schedule`)

With data and no options, the scales come from the first batches,

    gamma = 0.3 sum |f_v| / sum |g_vv s|,   lam = sum |f_v| / sum |s|,

the first steps move v only, and the learning rates fall linearly to zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..autodiff import Derivatives, Gradients, Prices, gradient, norm
from ..batches import Pair, detached
from ..descent import Descent
from ..errors import OptionError
from ..method import Setting
from ..schedule import Schedule
from ..solution import Status

if TYPE_CHECKING:
    from .penalty import Penalty

SCALE_BATCHES = 5
REACH = 5.0
"""How far a coordinate of u can travel from its start, in either direction, at the default upper rate."""
LOWER_RATE = 5e-3
GAMMA_SHARE = 0.3
"""The first gamma |g_vv s| as a share of |f_v|: v must reach a minimum of g before the penalty holds it there."""


class Stepwise:
    """A run of the penalty method, step by step. Lower evaluations: T + 1 a step, one for each gradient."""

    mode = "stochastic"

    def __init__(self, options: Penalty, setting: Setting) -> None:
        self.options, self.setting = options, setting
        self.problem, self.u, self.v = setting.problem, setting.u, setting.v
        if self.problem.prepare is not None and self.u.rows:
            raise OptionError("prepare cannot read Rows: keep per-example variables out of prepare, in lower.")
        self.derivatives = Derivatives(self.problem, self.u, self.v, options.curvature)
        self.tolerance = setting.tolerance
        episodic = self.problem.prepare is not None or self.problem.start_lower is not None
        self.shared = episodic or options.lower_batches == "shared"
        self.warm_up = round((options.warm_up or 0.0) * setting.max_steps)
        self._start()
        self.running: list[Tensor] = [torch.zeros_like(leaf) for leaf in self.v.leaves]
        self.running_weight = torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        self.last: list[Pair] | None = None

    # -- before the first step -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Scales, schedule and optimizers. Reads values on the host: this is before the first step."""
        options = self.options
        batches = self._sample()
        measured = self._scales(batches)
        filled = {name: getattr(options, name) for name in ("gamma", "lam", "epsilon", "gamma_h")}
        new = partial(torch.tensor, dtype=self.v.dtype, device=self.v.device)
        gamma = filled["gamma"] if filled["gamma"] is not None else measured["gamma"]
        lam = filled["lam"] if filled["lam"] is not None else measured["lam"]
        shapes = measured["shapes"]
        gamma_h = measured["gamma_h"] if filled["gamma_h"] is None else [filled["gamma_h"]] * len(shapes)
        prices = Prices(
            gamma=new(gamma),
            nu=[torch.full_like(leaf, options.nu or 0.0, requires_grad=False) for leaf in self.v.leaves],
            gamma_h=[new(c) for c in gamma_h],
            mu=[torch.zeros(shape, dtype=self.v.dtype, device=self.v.device) for shape in shapes],
        )
        every = options.advance_every
        if every is None and options.advances:
            every = max(1, self.setting.max_steps // options.advances)
        self.schedule = Schedule(
            prices, new(lam), None if filled["epsilon"] is None else new(filled["epsilon"]),
            factors=(options.gamma_factor or 1.0, options.lam_factor or 1.0, options.epsilon_factor or 1.0),
            every=every, smoothing=options.smoothing, multipliers=bool(options.multipliers),
            averaged=bool(options.average_residual), equalities=len(self.problem.equalities),
        )  # fmt: skip
        moving = max(1, self.setting.max_steps - self.warm_up)
        visits = max(1.0, moving * measured["coverage"])
        adam = torch.optim.Adam
        upper = options.upper_optimizer or partial(adam, lr=2 * REACH / visits)
        lower = options.lower_optimizer or partial(adam, lr=LOWER_RATE)
        self.lower = Descent(self.v, lower, "lower_optimizer")
        self.upper = Descent(self.u, upper, "upper_optimizer")

    def _sample(self) -> list[Pair]:
        upper, lower, _ = self.setting.sources.sample(SCALE_BATCHES)
        count = max(len(upper), len(lower))
        return list(itertools.islice(zip(itertools.cycle(upper), itertools.cycle(lower), strict=False), count))

    def _scales(self, batches: Sequence[Pair]) -> dict[str, Any]:
        """gamma, lam and gamma_h from the sizes of the terms they weigh, over the first batches."""
        d = self.derivatives
        f_v = f_z = slope = bent = 0.0
        shapes: list[torch.Size] = []
        size_h: list[float] = []
        coverage = 1.0
        prepared = d.prepare(batches, graph=False)
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, prepared[0][0])
        for pair in prepared:
            _, s = d.slope([pair])
            product = d.hessian_product([pair], s, with_u=False)
            slope += norm(s).item()
            bent += norm(product).item()
            with d.holding_u(True) as inputs:
                d.lower(pair[1])
                f, values = d.upper(pair[0]), d.constraints(pair[0])
                wrt = [*self.v.leaves, *inputs()]
                first = gradient(f, wrt, retain=True)
                f_v += norm(first[: len(self.v.leaves)]).item()
                f_z += norm(first).item()
                if self.u.rows:
                    tapes = zip(d.tapes, self.u.rows, strict=True)
                    rows = [sum(i.numel() for i, _ in tape) / len(r) for tape, r in tapes]
                    coverage = min(1.0, max(rows) * self.setting.accumulate) or 1.0
                if not shapes:
                    shapes = [h.shape for h in values]
                    size_h = [0.0] * len(values)
                for i, h in enumerate(values):
                    size_h[i] += norm(gradient(h, wrt, cotangent=[torch.ones_like(h)], retain=True)).item() / math.sqrt(
                        max(1, h.numel())
                    )
        count = len(prepared)
        length = 1.0 + norm(self.v.leaves).item()
        if not bent > 1e-12 * max(slope, 1e-300):
            direction = [torch.randn_like(leaf) for leaf in self.v.leaves]
            unit = norm(direction)
            product = d.hessian_product(prepared[:1], [x / unit for x in direction], with_u=False)
            bent = count * max(norm(product).item() ** 2 * length, 1e-12)
        gamma = GAMMA_SHARE * f_v / bent if f_v > 0 else 1.0
        lam = f_v / slope if slope > 0 and f_v > 0 else 1.0
        gamma_h = [(f_v / count) / max((s / count) ** 2 * 0.1 * length, 1e-12) or 1.0 for s in size_h]
        sizes = [s / count * length for s in size_h]
        self._scale_values = (f_z / count or 1.0, slope / count or 1.0, min(sizes, default=1.0) or 1.0)
        return {"gamma": gamma, "lam": lam, "gamma_h": gamma_h, "shapes": shapes, "coverage": coverage}

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, k: int) -> Tensor:
        moving, factor = k >= self.warm_up, self._factor(k)
        count = self.options.lower_steps or 1
        if self.shared:
            batches = self.derivatives.prepare(self._draw(), graph=moving)
            still = detached(batches)
            self._start_episode(still)
            for _ in range(count):
                self._lower_step(still, factor)
            return self._upper_step(batches, factor, moving)
        # One of the T + 1 draws is for the upper step, each time another one: of batches in a fixed order it would else
        # see only some.
        for i in range(count + 1):
            draw = self._draw()
            if i == k % (count + 1):
                batches = draw
            else:
                self._lower_step(draw, factor)
        return self._upper_step(batches, factor, moving)

    def _start_episode(self, batches: list[Pair]) -> None:
        """Put v at its start, and with it all that belongs to the lower problem of one episode."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, batches[0][0])
            self.lower.restart()
            self.schedule.restart_multipliers()

    def _lower_step(self, batches: list[Pair], factor: Tensor) -> None:
        gradients = self._penalised(batches, with_u=False)
        self.lower.step(self._with_lam(gradients), (), factor)

    def _upper_step(self, batches: list[Pair], factor: Tensor, moving: bool) -> Tensor:
        """Move u, then the schedule; returns the record of the step."""
        schedule = self.schedule
        gradients = self._penalised(batches, with_u=moving)
        lowered = self._with_lam(gradients)
        if moving:
            self.upper.step(gradients.u, gradients.rows, factor)
        moved = [*gradients.u, *(g for parts in gradients.rows for _, g in parts)]
        size_u = norm(moved) if moved else torch.zeros_like(gradients.f)
        size_v = norm(lowered)
        record = [
            gradients.f, gradients.g, size_u, size_v, norm(gradients.residual), self._violation(gradients.constraints),
            schedule.prices.gamma, schedule.lam, schedule.epsilon,
            factor * self.upper.rate * moving, factor * self.lower.rate,
        ]  # fmt: skip
        row = torch.stack([x.detach().to(torch.float64) for x in record])
        reason = schedule.observe(size_u**2 + size_v**2, gradients, [*gradients.u, *lowered])
        return torch.cat([row, reason.to(torch.float64).reshape(1)])

    def _draw(self) -> list[Pair]:
        self.last = self.setting.sources.draw(self.setting.accumulate)
        return self.last

    def _factor(self, k: int) -> Tensor:
        """What the learning rates are multiplied by at step k."""
        growth: Tensor = self.schedule.gamma_growth()
        factor = growth ** -(self.options.rate_power or 0.0)
        if self.options.decay == "linear":
            factor = factor * (1.0 - k / self.setting.max_steps)
        return factor

    def _with_lam(self, gradients: Gradients) -> list[Tensor]:
        """grad_v (F + lam g)"""
        return [x + self.schedule.lam * s for x, s in zip(gradients.v, gradients.slope, strict=True)]

    def _penalised(self, batches: list[Pair], *, with_u: bool) -> Gradients:
        d, slope = self.derivatives, None
        if self.options.cotangent == "other":
            _, slope = d.slope(self.setting.sources.draw_lower(self.setting.accumulate))
        elif self.options.cotangent == "running":
            weight = torch.where(self.running_weight > 0, self.running_weight, torch.ones_like(self.running_weight))
            slope = [m / weight for m in self.running]
        gradients = d.penalised(batches, self.schedule.prices, with_u=with_u, slope=slope)
        if self.options.cotangent == "running":
            torch._foreach_lerp_(self.running, gradients.slope, 0.1)
            self.running_weight.lerp_(torch.ones_like(self.running_weight), 0.1)
        return gradients

    def _violation(self, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        count = len(self.problem.equalities)
        sizes = [h.abs().max() if i < count else h.max().clamp(min=0) for i, h in enumerate(values)]
        return torch.stack(sizes).max()

    # -- what solve asks -----------------------------------------------------------------------------------------

    def ended(self) -> Status | None:
        return None

    def finish(self) -> bool | None:
        return None

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
            "scales": list(self._scale_values),
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
        self.derivatives.lower_evaluations, self.derivatives.upper_evaluations = state["evaluations"]
