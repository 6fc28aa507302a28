"""The schedule: when gamma, lam, epsilon, nu and mu change, and how.

With G = (grad_u F, grad_v (F + lam g)) after an upper step, the schedule advances as soon as one condition holds:

    tolerance   |G| <= epsilon
    steps       `every` upper steps have passed since the last advance

and an advance does

    nu += gamma r;   mu += gamma_h h (equalities);   mu = max(0, mu + gamma_h h) (inequalities)
    gamma *= c_gamma;   gamma_h *= c_gamma;   lam *= c_lam;   epsilon *= c_epsilon;   t *= c_t (`shrinking`)

Everything is a tensor on the device of v, and the host reads no decision. Without an epsilon the host counts the steps
itself, and changes the multipliers only at an advance. With trials each penalty weight is a vector, and each trial
advances separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.tensor_lists import broadcast_trials
from bilevel.derivatives.prices import Gradients, Prices, constraint_pull
from bilevel.methods.base import copy_state


class Schedule:
    """The penalty weights and multipliers of a run, and the rule that moves them.

    Arguments:
        prices: The first penalty weights and multipliers. The schedule changes them in place.
        lam: The first weight of g.
        epsilon: The first tolerance; None for no tolerance.
        factors: The factors on gamma, lam and epsilon at an advance.
        every: Upper steps between two advances; None for no limit.
        multipliers: Whether nu moves.
        averaged: Whether nu moves by the mean of r since the last advance, and not by the last r.
        equalities: How many of the constraints are equalities; they come first.
        shrinking: Other tensors to multiply at an advance, each with its factor. Default: none.
        longer: The factor on `every` at an advance. Default: 1.
    """

    def __init__(
        self,
        prices: Prices,
        lam: Tensor,
        epsilon: Tensor | None,
        *,
        factors: tuple[float, float, float],
        every: float | None,
        multipliers: bool,
        averaged: bool,
        equalities: int,
        shrinking: Sequence[tuple[Tensor, float]] = (),
        longer: float = 1.0,
    ) -> None:
        self.prices, self.lam = prices, lam
        self.tolerant = epsilon is not None
        self.epsilon = torch.zeros_like(lam) if epsilon is None else epsilon
        self.gamma_factor, self.lam_factor, self.epsilon_factor = factors
        self.every, self.multipliers, self.equalities = every, multipliers, equalities
        self.longer = longer
        self.interval = torch.full_like(lam, every or 0.0, dtype=torch.float64)
        self.shrinking = [*shrinking, (self.interval, longer)]
        self.gamma_start = prices.gamma.clone()
        self.nu_start = [n.clone() for n in prices.nu]
        self.since = torch.zeros_like(lam, dtype=torch.int64)
        # Steps since the last advance, if the host counts them.
        self.counted = 0
        # The running mean of r since the last advance, because r of one minibatch is mostly noise; or the last r.
        self.averaged = averaged
        held = multipliers and (averaged or not self.tolerant)
        self.mean = [torch.zeros_like(n) for n in prices.nu] if held else []
        self.last = [torch.zeros_like(m) for m in prices.mu]

    @torch.no_grad()
    def observe(self, square: Tensor, gradients: Gradients) -> Tensor:
        """Note an upper step with |G|^2 = `square`; advance if it meets the tolerance, or after `every` steps.

        Return the position of the reason in `REASONS`, as a tensor.
        """
        self.since += 1
        if self.mean:
            share = 1.0 / self.since.to(self.lam.dtype) if self.averaged else torch.ones_like(self.lam)
            for mean, r in zip(self.mean, gradients.residual, strict=True):
                mean.lerp_(r, broadcast_trials(share, r).to(mean.dtype))
        for last, h in zip(self.last, gradients.constraints, strict=True):
            last.copy_(h)
        if not self.tolerant:
            return torch.zeros_like(self.since)
        tolerance = square <= self.epsilon**2
        steps = torch.zeros_like(tolerance) if self.every is None else self.since >= self.interval
        self._advance(tolerance | steps, self.mean or gradients.residual)
        return torch.where(tolerance, 1, torch.where(steps, 3, 0))

    @torch.no_grad()
    def count(self) -> bool:
        """Count one upper step on the host if there is no epsilon; return whether the schedule advanced."""
        if self.tolerant or self.every is None:
            return False
        self.counted += 1
        if self.counted < self.every:
            return False
        self._advance(torch.ones_like(self.since, dtype=torch.bool), self.mean)
        self.counted, self.every = 0, self.every * self.longer
        return True

    def _advance(self, fire: Tensor, residual: Sequence[Tensor]) -> None:
        prices, on = self.prices, fire.to(self.lam.dtype)
        if self.multipliers:
            for n, r in zip(prices.nu, residual, strict=True):
                n.add_(r * broadcast_trials(on * prices.gamma, r))
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
        """Reset nu to its first value, as a new episode has another lower problem."""
        copy_state(self.prices.nu, self.nu_start)

    def gamma_growth(self) -> Tensor:
        """Return gamma / its first value."""
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
            "every": self.every,
            "interval": self.interval,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted, apart = state["counted"], {"counted", "every"}
        if self.longer != 1:
            self.every = state.get("every", self.every)
        else:  # the interval spans the present number of steps
            apart.add("interval")
        held = {name: mine for name, mine in self.state_dict().items() if name in state}
        copy_state({name: mine for name, mine in held.items() if name not in apart}, state)
