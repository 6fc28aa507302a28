"""Feature collision: move the points to the target's features, without regard to the victim's training.

    u <- u - rate grad |r(u) - r(t)|^2,        u <- (u + rate beta b) / (1 + rate beta)

Shafahi et al., *Poison frogs! Targeted clean-label poisoning attacks on neural networks*, NeurIPS 2018, Algorithm 1;
with a bound, the points are projected into it after each step, as the paper does in its comparison (Appendix E.4:
beta 0.1, rate 0.01, 2,000 steps).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from bilevel import OptionError
from bilevel.applications.poisoning.attack import Poison, made
from bilevel.applications.poisoning.bounds import Bound, Within
from bilevel.applications.poisoning.goals import Goal
from bilevel.applications.poisoning.victims import Features, mapped


def collide(
    goal: Goal,
    *,
    features: Features | None = None,
    box: tuple[float | Tensor | None, float | Tensor | None] = (0.0, 1.0),
    bound: Bound | None = None,
    steps: int = 2000,
    rate: float = 0.01,
    beta: float = 0.1,
    device: torch.device | str = "cpu",
) -> Poison:
    """Forward-backward splitting on the distance of features, from the bases of a clean-label goal."""
    if goal.collide is None:
        raise OptionError(f"feature collision needs a goal with a target, as clean_label makes; got {goal.name!r}.")
    began = time.perf_counter()
    where = torch.device(device)
    base = goal.base.to(where)
    low, high = (edge.to(base) if isinstance(edge, Tensor) else edge for edge in box)
    within = Within(base, low, high, bound)
    project = within.projection(multipliers=False) or (lambda u: u)
    wanted = mapped(features, goal.collide.to(base), where)
    u = base.clone()
    for _ in range(steps):
        u.requires_grad_()
        apart = ((u if features is None else features(u)) - wanted) ** 2
        (slope,) = torch.autograd.grad(apart.sum(), u)
        with torch.no_grad():
            u = project((u - rate * slope + rate * beta * base) / (1 + rate * beta))
    settings: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "beta": beta,
        "epsilon": bound and bound.epsilon,
        "norm": bound and bound.norm,
        "method": "feature collision",
    }
    return made(goal, within.settled(u).cpu(), None, time.perf_counter() - began, settings)
