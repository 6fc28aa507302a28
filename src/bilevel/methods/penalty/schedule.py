"""The schedule: gamma, lam, epsilon, nu, mu; when they move and how.

With G = (grad_u F, grad_v (F + lam g)) after an upper step, the schedule advances when the first of these holds:

    tolerance   |G| <= epsilon
    steps       `every` upper steps have passed since the last advance

and an advance does

    nu += gamma r;   mu += gamma_h h (equalities);   mu = max(0, mu + gamma_h h) (inequalities)
    gamma *= c_gamma;   gamma_h *= c_gamma;   lam *= c_lam;   epsilon *= c_epsilon;   t *= c_t (`shrinking`)

Everything is a tensor on the device of v, and no decision is read on the host. Without an epsilon the host knows when
it is time, and the multipliers are touched only then. Over trials, each price is a vector, and each trial advances by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import spread
from bilevel.derivatives.prices import Gradients, Prices, constraint_pull


class Schedule:
    def __init__(
        self,
        prices: Prices,
        lam: Tensor,
        epsilon: Tensor | None,
        *,
        factors: tuple[float, float, float],
        every: int | None,
        multipliers: bool,
        averaged: bool,
        equalities: int,
        shrinking: Sequence[tuple[Tensor, float]] = (),
    ) -> None:
        self.prices, self.lam = prices, lam
        self.tolerant = epsilon is not None
        self.epsilon = torch.zeros_like(lam) if epsilon is None else epsilon
        self.gamma_factor, self.lam_factor, self.epsilon_factor = factors
        self.every, self.multipliers, self.equalities = every, multipliers, equalities
        self.shrinking = list(shrinking)
        """What else an advance multiplies, and by what; the owner keeps it."""
        self.gamma_start = prices.gamma.clone()
        self.nu_start = [n.clone() for n in prices.nu]
        self.since = torch.zeros_like(lam, dtype=torch.int64)
        self.counted = 0
        """Steps since the last advance, where the host knows them."""
        # The running mean of r since the last advance: one minibatch's r is mostly noise. Not averaged, the last r.
        self.averaged = averaged
        held = multipliers and (averaged or not self.tolerant)
        self.mean = [torch.zeros_like(n) for n in prices.nu] if held else []
        self.last = [torch.zeros_like(m) for m in prices.mu]

    @torch.no_grad()
    def observe(self, square: Tensor, gradients: Gradients) -> Tensor:
        """Take in one upper step with |G|^2 = `square`; advance if the tolerance or the number of steps says so.

        Returns the position in `REASONS`, as a tensor.
        """
        self.since += 1
        if self.mean:
            share = 1.0 / self.since.to(self.lam.dtype) if self.averaged else torch.ones_like(self.lam)
            for mean, r in zip(self.mean, gradients.residual, strict=True):
                mean.lerp_(r, spread(share, r).to(mean.dtype))
        for last, h in zip(self.last, gradients.constraints, strict=True):
            last.copy_(h)
        if not self.tolerant:
            return torch.zeros_like(self.since)
        tolerance = square <= self.epsilon**2
        steps = torch.zeros_like(tolerance) if self.every is None else self.since >= self.every
        self._advance(tolerance | steps, self.mean or gradients.residual)
        return torch.where(tolerance, 1, torch.where(steps, 3, 0))

    @torch.no_grad()
    def count(self) -> bool:
        """Count one upper step on the host; advance, and say so, if that alone tells that it is time."""
        if self.tolerant or self.every is None:
            return False
        self.counted += 1
        if self.counted < self.every:
            return False
        self._advance(torch.ones_like(self.since, dtype=torch.bool), self.mean)
        self.counted = 0
        return True

    def _advance(self, fire: Tensor, residual: Sequence[Tensor]) -> None:
        prices, on = self.prices, fire.to(self.lam.dtype)
        if self.multipliers:
            for n, r in zip(prices.nu, residual, strict=True):
                n.add_(r * spread(on * prices.gamma, r))
        for m, moved in zip(prices.mu, constraint_pull(self.last, prices, self.equalities), strict=True):
            m.copy_(torch.where(fire, moved, m))
        for value, factor in (
            (prices.gamma, self.gamma_factor),
            *((c, self.gamma_factor) for c in prices.gamma_h),
            (self.lam, self.lam_factor),
            (self.epsilon, self.epsilon_factor),
            *self.shrinking,
        ):
            value.mul_(torch.where(fire, torch.full_like(value, factor), torch.ones_like(value)))
        self.since.mul_(~fire)

    @torch.no_grad()
    def restart_multipliers(self) -> None:
        """Put nu back at nu_0: a new episode has a lower problem of its own."""
        for n, start in zip(self.prices.nu, self.nu_start, strict=True):
            n.copy_(start)

    def gamma_growth(self) -> Tensor:
        """gamma over its first value."""
        start = self.gamma_start
        return torch.where(start > 0, self.prices.gamma / start, torch.ones_like(start))

    def state_dict(self) -> dict[str, Any]:
        prices = self.prices
        return {
            "gamma": prices.gamma,
            "nu": prices.nu,
            "gamma_h": prices.gamma_h,
            "mu": prices.mu,
            "lam": self.lam,
            "epsilon": self.epsilon,
            "gamma_start": self.gamma_start,
            "nu_start": self.nu_start,
            "since": self.since,
            "mean": self.mean,
            "last": self.last,
            "counted": self.counted,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = state["counted"]
        for name, mine in self.state_dict().items():
            if name != "counted":
                for a, b in zip(*([x] if isinstance(x, Tensor) else x for x in (mine, state[name])), strict=True):
                    a.copy_(b)
