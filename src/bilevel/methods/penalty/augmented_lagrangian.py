"""The penalty method without data: an augmented Lagrangian F, minimised over z = (u, v) by L-BFGS.

    v minimises g(u, .) first;  Lg = |g_vv|, Lf = |f_zz| by power iterations
    gamma = 10 max(Lf, 1e-3 |f_z| / (1 + |u| + |v|)) / Lg^2;   nu = 0;   epsilon = 0.1 |grad F|
    rounds: L-BFGS on F until |grad F| <= epsilon, or for at most INNER_STEPS iterations
        unbounded (moved by more than 100 (1 + |z|), or not finite): return to the round's start, gamma *= 10
        nu += gamma r;  if the round met epsilon:  epsilon /= 10, and gamma *= 10 unless |r| fell to a quarter
    at the end: move v away and minimise g again; if g falls, v did not minimise g, and the run continues from there

Each constraint has a gamma_h = 10 Lf / |J_h|^2, and its violation raises it by the same rule. `project_upper` is the
constraint u in U: with y = u + m/c it adds c/2 |y - P(y)|^2, and m = c (y - P(y)) is its multiplier.

A step is one L-BFGS iteration. It reads values on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import each_tensor
from bilevel._util.tensor_lists import dot, norm
from bilevel.derivatives.prices import Gradients, Prices, constraint_pull, violation
from bilevel.measures.lower_minimum import flatten, lower_point, minimise, write
from bilevel.measures.problem_scales import Scales, measure
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.methods.penalty.run_without_data import RunWithoutData
from bilevel.optim.lbfgs import LBFGS
from bilevel.results import Status

# Pairs that L-BFGS keeps.
MEMORY = 100
# L-BFGS iterations in a round. After them the multipliers move even if the round did not meet epsilon.
INNER_STEPS = 50
RESTARTS = 5
# Most L-BFGS iterations on v after the last projection of u.
SETTLING = 20
# The run ends as infeasible after this many raises of the price of a constraint without success.
RAISES = 8
# The run ends after this many rounds in a row without progress; a round that cannot move counts several times.
STALLS = 20


class AugmentedLagrangianRun(RunWithoutData):
    """A run of the deterministic mode for any lower level. Each gradient of F evaluates f and g once."""

    solver = "augmented Lagrangian"
    patience = STALLS
    # A step of at most this length along its direction counts as no step.
    shortest = 0.0

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        super().__init__(options, context)
        # The goal of the rounds is stricter, so that the certificate passes after the last projection.
        self.goal = (0.05 if self.u.projected or self.v.projected else 0.5) * (self.tolerance or 0.0)
        self.stalls = 0
        self.search: LBFGS

    def begin(self) -> None:
        """Start at the present u and v."""
        self.start_lower()
        self._minimise_lower()
        self._measure()
        self._start()

    def _minimise_lower(self) -> None:
        """Move v to a minimum of g near its start."""
        minimise(self.derivatives, self.goal)

    # -- functions of the flat vector z ----------------------------------------------------------------------------

    def _evaluating(self) -> AbstractContextManager[None]:
        """Return a context for one gradient of F."""
        return nullcontext()

    def _penalised(self, z: Tensor) -> tuple[float, Tensor, Gradients]:
        """Return F, grad F and their parts at z; leave u and v there."""
        write(z, self.leaves)
        with self._evaluating():
            at = self.derivatives.penalised(self._batches(graph=True), self.price, with_u=True)
        slope = flatten([*at.u, *at.v])
        value = at.f + dot(self.price.nu, at.residual) + self.price.gamma / 2 * dot(at.residual, at.residual)
        equal = len(self.problem.equalities)
        for i, (m, c, h) in enumerate(zip(self.price.mu, self.price.gamma_h, at.constraints, strict=True)):
            if i < equal:
                value = value + torch.sum(m * h) + c / 2 * torch.sum(h * h)
            else:
                value = value + (torch.sum((m + c * h).clamp(min=0) ** 2) - torch.sum(m * m)) / (2 * c)
        if self.u.projected:
            out = self._outside()
            value = value + (dot(out, out) * self.set_price**2 - dot(self.set_mu, self.set_mu)) / (2 * self.set_price)
            slope[: self.split] += self.set_price * flatten(out)
        return value.item(), slope, at

    @torch.no_grad()
    def _outside(self) -> list[Tensor]:
        """Return y - P(y) at y = u + m/c."""
        points = [u + m / self.set_price for u, m in zip(self.u.leaves, self.set_mu, strict=True)]
        return [y - p for y, p in zip(points, self.u.project_leaves(points), strict=True)]

    def at(self) -> Gradients:
        """Return the parts of F at the present point."""
        if self.search.extra is None:
            self.search.extra = self._penalised(self.search.x)[2]
        parts: Gradients = self.search.extra
        return parts

    def _measure(self) -> None:
        """Measure the problem at the present point, and set the first prices."""
        scales = self._sizes()
        with torch.no_grad():
            shapes = [torch.zeros_like(h) for h in self.derivatives.constraints(self._batches(graph=False)[0][0])]
        new = partial(torch.tensor, dtype=self.v.dtype, device=self.v.device)
        gamma, gamma_h = self.options.gamma, self.options.gamma_h
        self.price = Prices(
            gamma=new(10 * scales.f / scales.g**2 if gamma is None else gamma),
            nu=[torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves],
            gamma_h=[new(10 * scales.f / j**2 if gamma_h is None else gamma_h) for j in scales.jacobians],
            mu=shapes,
        )
        self.set_price = new(10 * scales.f)
        self.set_mu = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.u.leaves]
        self.sizes = scales

    def _sizes(self) -> Scales:
        return measure(self.derivatives, self.context.generator)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start at the present z without multipliers."""
        count = len(self.price.mu) + 1
        self.lowest = math.inf
        self.epsilon, self.best, self.best_h, self.raises = math.inf, math.inf, [math.inf] * count, [0] * count
        self._new_round()
        self.epsilon = 0.1 * self.search.gradient.norm().item()

    def _new_round(self, *, keep: bool = False) -> None:
        """Minimise F again from the present z. `keep` its pairs if only the multipliers are new."""
        gamma = self.price.gamma.item()
        z = flatten(self.leaves)
        metric = torch.empty_like(z)
        metric[: self.split] = 1 / (self.sizes.f + gamma * self.sizes.cross**2)
        metric[self.split :] = 1 / (self.sizes.f + gamma * self.sizes.g**2)
        pairs = (self.search.moves, self.search.bends) if keep else ([], [])
        self.search = LBFGS.start(self._penalised, z, memory=MEMORY, metric=metric)
        self.search.moves, self.search.bends = pairs
        self.search.shortest = self.shortest
        self.origin, self.taken = self.search.x.clone(), 0

    def step(self, k: int) -> Tensor:
        moved = self.search.iterate(self._penalised) and self.search.length > self.shortest
        self.taken += 1
        limit = 100 * (1 + self.origin.norm().item())
        if moved and not (self.search.x - self.origin).norm().item() <= limit:
            write(self.origin, self.leaves)
            for price in (self.price.gamma, *self.price.gamma_h, self.set_price):
                price.mul_(10)
            self._new_round()
            return self._record(0)
        write(self.search.x, self.leaves)  # the line search can have left another trial there
        met = self.search.gradient.norm().item() <= self.epsilon or self._stationarity() <= 0.1 * self.goal
        over = not moved or self.taken >= INNER_STEPS
        record = self._record(1 if met else 3 if over else 0)
        if met or over:
            self._end_round(met, moved)
        return record

    def _end_round(self, met: bool, moved: bool) -> None:
        """End the run, or move the multipliers and start the next round."""
        sizes = self._violations()
        residual = norm(self.at().residual).item()
        measure = self._measure_of(residual, sizes)
        if measure <= self.goal:
            # g_vv and the slopes of the constraints can have fallen since the start.
            now = self._sizes()
            slopes = [*map(min, self.sizes.jacobians, now.jacobians)]
            self.sizes = replace(self.sizes, g=min(self.sizes.g, now.g), jacobians=slopes)
            measure = self._measure_of(residual, sizes)
        if measure < 0.9 * self.lowest:
            self.lowest, self.stalls = measure, 0
        else:
            self.stalls += 1 if moved or self.taken > 1 else self.patience // 3
        vain = self.stalls >= self.patience or max(self.raises[:-1], default=0) >= RAISES
        if measure <= self.goal or vain or self._over():
            self._check_end()
            return
        with torch.no_grad():
            for n, r in zip(self.price.nu, self.at().residual, strict=True):
                n += self.price.gamma * r
            self.price.mu = constraint_pull(self.at().constraints, self.price, len(self.problem.equalities))
            if self.u.projected:
                self.set_mu = [self.set_price * o for o in self._outside()]
        raised = False
        if met:
            self.epsilon /= 10
            if residual > max(self.best / 4, 0.1 * self.goal * self.scales()[2]):
                self.price.gamma *= 10
                raised = True
            for i, size in enumerate(sizes):
                if size > max(self.best_h[i] / 4, self.goal * self._constraint_scales()[i]):
                    self.raises[i] += 1
                    raised = True
                    (self.set_price if i == len(self.price.gamma_h) else self.price.gamma_h[i]).mul_(10)
            self.best, self.best_h = residual, sizes
        self._new_round(keep=not self._tighten(met) and not raised)

    def _over(self) -> bool:
        """Return whether a phase of the run has used all its rounds."""
        return False

    def _tighten(self, met: bool) -> bool:
        """Change F between two rounds; return whether it changed."""
        return False

    def _violations(self) -> list[float]:
        """Return |h| of each constraint, or |max(h, -m/c)| of an inequality; then the violation of u in U."""
        equal = len(self.problem.equalities)
        parts = enumerate(zip(self.price.mu, self.price.gamma_h, self.at().constraints, strict=True))
        sizes = [(h if i < equal else torch.maximum(h, -m / c)).norm().item() for i, (m, c, h) in parts]
        if self.u.projected:
            moved = [o - m / self.set_price for o, m in zip(self._outside(), self.set_mu, strict=True)]
            sizes.append(norm(moved).item())
        return sizes

    def _stationarity(self) -> float:
        """Return |grad F|, with grad_u F and grad_v F relative to their scales."""
        scale_u, scale_v, *_ = self.scales()
        slope = self.search.gradient
        return math.hypot(slope[: self.split].norm().item() / scale_u, slope[self.split :].norm().item() / scale_v)

    def _measure_of(self, residual: float, sizes: Sequence[float]) -> float:
        """Return the largest of the relative measures, for comparison with the tolerance."""
        relative = [size / s for size, s in zip(sizes, self._constraint_scales(), strict=False)]
        return float(max(self._stationarity(), residual / self.scales()[2], *relative))

    def _constraint_scales(self) -> list[float]:
        """Return how much each constraint changes over the size of z; then the size of z, for u in U."""
        reach = self._reach()
        return [j * reach for j in self.sizes.jacobians] + [1 + norm(self.leaves).item()]

    def _reach(self) -> float:
        """Return the size of z, with u in its unit; measures are relative to it."""
        return 1 + math.hypot(norm(self.u.leaves).item() / self.sizes.unit_u, norm(self.v.leaves).item())

    def scales(self) -> tuple[float, float, float, float]:
        reach, sizes = self._reach(), self.sizes
        return sizes.f * reach / sizes.unit_u, sizes.f * reach, sizes.g * reach, min(self._constraint_scales())

    def _check_end(self) -> None:
        """End here; if g has a lower point nearby, continue from there."""
        better = self._lower_point()
        self.minimiser = better is None
        if better is None or not self._may_restart():
            self.status = Status.CONVERGED if self.minimiser else Status.STATIONARY
            if self._measure_of(norm(self.at().residual).item(), sizes := self._violations()) > self.goal:
                constraints = zip(sizes, self._constraint_scales()[:-1], strict=False)  # the set is met by projection
                infeasible = any(size > self.goal * scale for size, scale in constraints)
                self.status = Status.INFEASIBLE if infeasible else Status.STALLED
            return
        self.restarts += 1
        self.minimiser = None
        self._restart(better)

    def _may_restart(self) -> bool:
        return self.restarts < RESTARTS

    def _lower_point(self) -> Tensor | None:
        """Return a v with a smaller g, or None if there is none nearby."""
        return lower_point(self.derivatives, self.context.generator, self.goal, first=self.first_v)

    def _restart(self, better: Tensor) -> None:
        write(better, self.v.leaves)
        self._measure()
        # With a higher first price, f cannot gain enough to pull v away from this minimum.
        self.price.gamma.mul_(10.0**self.restarts)
        self._start()

    def _record(self, reason: int) -> Tensor:
        at, price = self.at(), self.price
        size_u = self.search.gradient[: self.split].norm().item()
        size_v = self.search.gradient[self.split :].norm().item()
        worst = violation(at.constraints, len(self.problem.equalities)).item() if at.constraints else 0.0
        row = [at.f.item(), at.g.item(), size_u, size_v, norm(at.residual).item(), worst, price.gamma.item(), 0.0]
        row += [self.epsilon, self.search.length, self.search.length, float(reason)]
        return torch.tensor(row, dtype=torch.float64)

    # -- what solve asks -----------------------------------------------------------------------------------------------

    def finish(self) -> bool | None:
        """Project u and v, as the multipliers bring them into their sets only to the tolerance."""
        if self.u.projected:
            self.u.project()
            self._settle_lower()
        self.v.project()
        if self.minimiser is None:  # the budget ended before the end was checked
            self.minimiser = self._lower_point() is None
        return self.minimiser

    def _settle_lower(self) -> None:
        """Minimise F over v only: the projection moved u a little, and the price of the slope magnifies this."""

        def restricted(v: Tensor) -> tuple[float, Tensor, None]:
            value, slope, _ = self._penalised(torch.cat([z[: self.split], v]))
            return value, slope[self.split :], None

        z = flatten(self.leaves)
        metric = torch.full_like(z[self.split :], 1 / (self.sizes.f + self.price.gamma.item() * self.sizes.g**2))
        search = LBFGS.start(restricted, z[self.split :], metric=metric)
        for _ in range(SETTLING):
            if search.gradient.norm().item() <= 0.1 * self.goal * self.scales()[1] or not search.iterate(restricted):
                break
        write(torch.cat([z[: self.split], search.x]), self.leaves)

    def prices(self) -> Prices:
        return self.price

    def state_dict(self) -> dict[str, Any]:
        d = self.derivatives
        return {
            "solver": self.solver,
            "gamma": self.price.gamma,
            "nu": self.price.nu,
            "gamma_h": self.price.gamma_h,
            "mu": self.price.mu,
            "set_price": self.set_price,
            "set_mu": self.set_mu,
            "search": self.search.state_dict(),
            "origin": self.origin,
            "curvature": d.curvature,
            "sizes": asdict(self.sizes),
            "numbers": [self.lowest, self.epsilon, self.best, *self.best_h],
            "counters": [self.taken, self.restarts, self.stalls],
            "raises": self.raises,
            "evaluations": [d.lower_evaluations, d.upper_evaluations],
            "minimiser": self.minimiser,
            "status": self.status.name if self.status else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        d = self.derivatives
        state = each_tensor(lambda tensor: tensor.to(self.v.device), state)
        self.price = Prices(
            gamma=state["gamma"].clone(),
            nu=[t.clone() for t in state["nu"]],
            gamma_h=[t.clone() for t in state["gamma_h"]],
            mu=[t.clone() for t in state["mu"]],
        )
        self.set_price, self.set_mu = state["set_price"].clone(), [t.clone() for t in state["set_mu"]]
        self.search = LBFGS(**state["search"])
        self.origin, d.curvature = state["origin"], state["curvature"]
        self.lowest, self.epsilon, self.best, *self.best_h = state["numbers"]
        self.sizes = Scales(**state["sizes"])
        self.taken, self.restarts, self.stalls = state["counters"]
        self.raises = list(state["raises"])
        d.lower_evaluations, d.upper_evaluations = state["evaluations"]
        self.minimiser = state["minimiser"]
        self.status = Status[state["status"]] if state["status"] else None
