"""The schedule: gamma, lam, epsilon, nu, mu; when they move and how.

With n2 = |grad_u F|^2 + |grad_v (F + lam g)|^2 after an upper step, the schedule advances when one of these holds:

    tolerance   n2 <= epsilon^2
    smoothed    the running mean of n2 <= epsilon^2
    steps       `every` upper steps have passed since the last advance

and an advance does

    nu += gamma r;   mu += gamma_h h (equalities);   mu = max(0, mu + gamma_h h) (inequalities)
    gamma *= c_gamma;   gamma_h *= c_gamma;   lam *= c_lam;   epsilon *= c_epsilon

Everything is a tensor on the device of v, and no decision is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autodiff import Gradients, Prices


class Schedule:
    def __init__(
        self,
        prices: Prices,
        lam: Tensor,
        epsilon: Tensor,
        *,
        factors: tuple[float, float, float],
        every: int | None,
        smoothing: float | None,
        multipliers: bool,
        averaged: bool,
        equalities: int,
    ) -> None:
        self.prices, self.lam, self.epsilon = prices, lam, epsilon
        self.gamma_factor, self.lam_factor, self.epsilon_factor = factors
        self.every, self.smoothing, self.multipliers, self.equalities = every, smoothing, multipliers, equalities
        self.gamma_start = prices.gamma.clone()
        self.nu_start = [n.clone() for n in prices.nu]
        self.since = torch.zeros((), dtype=torch.int64, device=lam.device)
        self.smooth = torch.zeros_like(epsilon)
        self.weight = torch.zeros_like(epsilon)
        # The running mean of r since the last advance: one minibatch's r is mostly noise.
        self.mean = [torch.zeros_like(n) for n in prices.nu] if averaged else []

    @torch.no_grad()
    def observe(self, square: Tensor, gradients: Gradients) -> Tensor:
        """Take in one upper step; advance if it is time. Returns the position in `REASONS`, as a tensor."""
        self.since += 1
        limit = self.epsilon**2
        tolerance = square <= limit
        smoothed = torch.zeros_like(tolerance)
        if self.smoothing is not None:
            self.smooth.lerp_(square.to(self.smooth.dtype), 1 - self.smoothing)
            self.weight.lerp_(torch.ones_like(self.weight), 1 - self.smoothing)
            # A mean over fewer steps than it is meant to span is no mean yet.
            smoothed = (self.smooth / self.weight <= limit) & (self.since * (1 - self.smoothing) >= 1)
        steps = torch.zeros_like(tolerance) if self.every is None else self.since >= self.every
        fire = tolerance | smoothed | steps
        if self.mean:
            share = 1.0 / self.since.to(self.lam.dtype)
            for mean, r in zip(self.mean, gradients.residual, strict=True):
                mean.lerp_(r, share.to(mean.dtype))
        self._advance(fire, self.mean or gradients.residual, gradients.constraints)
        return torch.where(tolerance, 1, torch.where(smoothed, 2, torch.where(steps, 3, 0)))

    def _advance(self, fire: Tensor, residual: Sequence[Tensor], constraints: Sequence[Tensor]) -> None:
        prices, on = self.prices, fire.to(self.lam.dtype)
        if self.multipliers:
            for n, r in zip(prices.nu, residual, strict=True):
                n.add_(r * (on * prices.gamma))
        for i, (m, c, h) in enumerate(zip(prices.mu, prices.gamma_h, constraints, strict=True)):
            moved = m + c * h
            m.copy_(torch.where(fire, moved if i < self.equalities else moved.clamp(min=0), m))
        for value, factor in (
            (prices.gamma, self.gamma_factor),
            *((c, self.gamma_factor) for c in prices.gamma_h),
            (self.lam, self.lam_factor),
            (self.epsilon, self.epsilon_factor),
        ):
            value.mul_(torch.where(fire, factor, 1.0).to(value.dtype))
        self.since.mul_(~fire)
        for mean in self.mean:
            mean.mul_(1 - on)

    @torch.no_grad()
    def restart_multipliers(self) -> None:
        """Put nu back at nu_0: a new episode has a lower problem of its own."""
        for n, start in zip(self.prices.nu, self.nu_start, strict=True):
            n.copy_(start)

    def gamma_growth(self) -> Tensor:
        """gamma over its first value."""
        return self.prices.gamma / self.gamma_start

    def state_dict(self) -> dict[str, Any]:
        prices = self.prices
        return {
            "gamma": prices.gamma, "nu": prices.nu, "gamma_h": prices.gamma_h, "mu": prices.mu,
            "lam": self.lam, "epsilon": self.epsilon, "gamma_start": self.gamma_start, "nu_start": self.nu_start,
            "since": self.since, "smooth": self.smooth, "weight": self.weight, "mean": self.mean,
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, mine in self.state_dict().items():
            for a, b in zip(*([x] if isinstance(x, Tensor) else x for x in (mine, state[name])), strict=True):
                a.copy_(b)
