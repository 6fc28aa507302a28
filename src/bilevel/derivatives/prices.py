"""`Prices`, the penalty weights and multipliers of F, and `Gradients`, its values and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel._util.tensor_lists import summed


@dataclass
class Prices:
    """Penalty weights and multipliers: gamma and nu for the lower stationarity, gamma_h and mu for each constraint."""

    gamma: Tensor
    nu: list[Tensor]
    gamma_h: list[Tensor] = field(default_factory=list)
    mu: list[Tensor] = field(default_factory=list)
    # Whether nu can differ from zero.
    multipliers: bool = True


@dataclass
class Gradients:
    """Values at a point, and the derivative of F there. All detached, all means over the batches."""

    f: Tensor
    g: Tensor
    # s = grad_v g; empty if lam was given and s was not needed.
    slope: list[Tensor]
    # r: the slope, or v - P(v - s) if the lower variable is projected.
    residual: list[Tensor]
    # h, the equalities first
    constraints: list[Tensor]
    # grad_v F, or grad_v (F + lam g) if lam was given.
    v: list[Tensor]
    u: list[Tensor] = field(default_factory=list)
    # For each Rows of u, the (index, gradient) pairs of the rows that were read
    rows: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)


def constraint_pull(values: Sequence[Tensor], prices: Prices, equalities: int) -> list[Tensor]:
    """Return mu + gamma_h h, or max(0, mu + gamma_h h) for inequalities: the cotangent and the next mu of each."""
    pulls = [m + c * h for m, c, h in zip(prices.mu, prices.gamma_h, values, strict=True)]
    return pulls[:equalities] + [pull.clamp(min=0) for pull in pulls[equalities:]]


def violation(values: Sequence[Tensor], equalities: int) -> Tensor:
    """Return the largest violation of a constraint, as a tensor; there is at least one."""
    sizes = [h.abs().amax() if i < equalities else h.amax().clamp(min=0) for i, h in enumerate(values)]
    return torch.stack(sizes).amax()


def added(a: Gradients, b: Gradients) -> Gradients:
    """Return the sum of two derivatives, each from a part of the batches."""
    return Gradients(
        f=a.f + b.f,
        g=a.g + b.g,
        slope=a.slope,
        residual=a.residual,
        constraints=a.constraints,
        v=summed([a.v, b.v]),
        u=summed([a.u, b.u]),
        rows=[x + y for x, y in zip(a.rows, b.rows, strict=True)],
    )
