"""Minimises g(u, .) under the lower constraints for a fixed u, without data: the augmented Lagrangian, by L-BFGS.

    rounds: L-BFGS over v on g + <beta, d> + rho_d/2 |d|^2 + rho_c/2 |max(0, c + alpha/rho_c)|^2 - |alpha|^2/(2 rho_c)
            alpha = max(0, alpha + rho_c c);  beta += rho_d d;  rho *= 10 where the violation fell by less than 4 times

First order only, and apart from the run that it starts and checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .autodiff import Derivatives
from .kkt import KKT
from .lbfgs import LBFGS
from .lower_level import flatten, write
from .vectors import gradient

ROUNDS = 20
ITERATIONS = 50
EVALUATIONS = 600
"""Most evaluations of one minimisation: where g is flat the line searches are long."""
LARGEST = 1e-4
"""The most that g may be less by, relative to its size, and still be explained by the accuracy."""
MOST = 1e8
"""The largest price of a lower constraint, in the unit of g's curvature."""
VAIN = 4
"""Rounds in a row that bring v no nearer to the constraints before a minimisation is over."""
REACHES = (0.1, 0.5, 1.0, 3.0)
"""How far, relative to 1 + |v|, v is moved away before the lower problem is solved again; each way."""
NONE = 1e-3
"""The violation, relative to 1 + |v|, from which the lower problem counts as one without a point at this u."""


@dataclass
class LowerPoint:
    """An end of a lower minimisation."""

    value: float
    """g"""
    v: Tensor
    alpha: list[Tensor]
    beta: list[Tensor]
    violation: float
    """The largest violation of a lower constraint, in the unit of v."""
    slope: float
    """|grad_v L|"""


def violation_of(kkt: KKT, c: list[Tensor], d: list[Tensor]) -> float:
    """The largest violation of a lower constraint, in the unit of v."""
    sizes = [(x.detach() / size).amax().clamp(min=0) for x, size in zip(c, kkt.sizes_c, strict=True)]
    sizes += [(x.detach() / size).abs().amax() for x, size in zip(d, kkt.sizes_d, strict=True)]
    return torch.stack(sizes).amax().item()


def minimise_constrained(d: Derivatives, kkt: KKT, tolerance: float) -> LowerPoint:
    """Minimise g under the lower constraints from the present v, where it leaves v. Multipliers start at zero."""
    size = 1 + flatten(d.v.leaves).norm().item()
    alpha, beta = [torch.zeros_like(x) for x in kkt.sizes_c], [torch.zeros_like(x) for x in kkt.sizes_d]
    rho = 10.0

    def prices(sizes: list[Tensor]) -> list[Tensor]:
        return [rho * kkt.bend / x**2 for x in sizes]

    def value(v: Tensor) -> tuple[float, Tensor, None]:
        write(v, d.v.leaves)
        with d.holding_u(False):
            d.lower_evaluations += 1
            g, c, e = kkt.parts(d.prepare([(None, None)], graph=False)[0][1])
            for m, r, x in zip(alpha, prices(kkt.sizes_c), c, strict=True):
                g = g + (torch.sum((m + r * x).clamp(min=0) ** 2 / r) - torch.sum(m * m / r)) / 2
            for m, r, x in zip(beta, prices(kkt.sizes_d), e, strict=True):
                g = g + torch.sum(m * x) + torch.sum(r * x * x) / 2
            return g.item(), flatten(gradient(g, d.v.leaves)), None

    goal = max(0.1 * tolerance, 1e-10)
    most = d.lower_evaluations + EVALUATIONS
    best, epsilon = math.inf, 0.1
    x, far = flatten(d.v.leaves), 1e6 * size
    slope = outside = math.inf
    vain = 0
    for _ in range(ROUNDS):
        origin = x
        search = LBFGS.start(value, x, metric=torch.full_like(x, 1 / (kkt.bend * (1 + rho))))
        for _ in range(ITERATIONS):
            slope = search.gradient.norm().item()
            if slope <= max(epsilon, goal) * kkt.bend * size or not search.iterate(value):
                break
            if d.lower_evaluations >= most or not search.x.norm().item() <= far:  # far: no minimum this way
                break
        x = search.x
        if not x.norm().item() <= far and rho < MOST:  # g falls faster than the price rises
            x, rho = origin, 100 * rho
            write(x, d.v.leaves)
            continue
        size = 1 + x.norm().item()
        write(x, d.v.leaves)
        slope = search.gradient.norm().item()
        with torch.no_grad():
            _, c, e = kkt.parts(d.prepare([(None, None)], graph=False)[0][1])
            moved = [
                (torch.maximum(v, -m / r) / s).abs().amax()
                for v, m, r, s in zip(c, alpha, prices(kkt.sizes_c), kkt.sizes_c, strict=True)
            ]
            outside = max(violation_of(kkt, c, e), *(m.item() for m in moved), 0.0)
            alpha = [(m + r * v).clamp(min=0) for m, r, v in zip(alpha, prices(kkt.sizes_c), c, strict=True)]
            beta = [m + r * v for m, r, v in zip(beta, prices(kkt.sizes_d), e, strict=True)]
        if (outside <= goal * size and slope <= goal * kkt.bend * size) or not x.norm().item() <= far:
            break
        if outside > max(best / 4, goal * size):
            rho = min(10 * rho, MOST)
        vain = 0 if outside <= best / 2 else vain + 1
        # No point meets the constraints, or none nearer by in this precision.
        if vain >= VAIN or d.lower_evaluations >= most:
            break
        best, epsilon = min(best, outside), epsilon / 10
    with torch.no_grad():
        g, c, e = kkt.parts(d.prepare([(None, None)], graph=False)[0][1])
    return LowerPoint(g.item(), x, alpha, beta, violation_of(kkt, c, e), slope)


@dataclass
class Resolved:
    """What solving the lower problem again from several points found."""

    gap: float
    """g(u, v) less the least g that was found; at least 0."""
    better: LowerPoint | None
    """A lower point whose g is less by more than the accuracy explains."""
    starts: int
    met: int = 0
    """How many of these ended at a point that meets the lower constraints."""


def resolve(d: Derivatives, kkt: KKT, generator: torch.Generator, tolerance: float, slope: float) -> Resolved:
    """Solve the lower problem at the present u from several points; leaves v and the multipliers as they are.

    `slope` is |grad_v L| at the present point.
    """
    held = flatten(d.v.leaves)
    size = 1 + held.norm().item()
    batch = d.prepare([(None, None)], graph=False)[0][1]
    with torch.no_grad():
        at, c, e = kkt.parts(batch)
        weights = sum(m.abs().sum().item() for m in (*kkt.alpha, *kkt.beta))
        largest = max(x.max().item() for x in (*kkt.sizes_c, *kkt.sizes_d))
    g = at.item()
    noise = max(1e-9, 100 * torch.finfo(held.dtype).eps, tolerance)
    margin = noise * (abs(g) + kkt.bend * size) + size * slope + 2 * weights * largest * violation_of(kkt, c, e)
    best, lowest, starts, met = None, g, 0, 0
    for reach in (0.0, *REACHES):
        direction = torch.randn(held.shape, generator=generator, dtype=held.dtype).to(held)
        direction *= reach * size / direction.norm()
        for sign in (1, -1) if reach else (1,):
            write(held + sign * direction, d.v.leaves)
            found = minimise_constrained(d, kkt, tolerance)
            starts += 1
            if reach == 0 and found.violation > NONE * size:
                write(held, d.v.leaves)
                return Resolved(0.0, None, starts)
            met += found.violation <= 1e-6 * size
            # A point outside by x is as low as g may fall by x times its multipliers.
            own = sum(m.abs().sum().item() for m in (*found.alpha, *found.beta))
            allowed = min(margin + 2 * own * largest * found.violation, LARGEST * (abs(g) + abs(found.value)) + 1e-7)
            if found.violation <= 1e-6 * size and found.value < lowest - (allowed if best is None else 0.0):
                best, lowest = found, found.value
    write(held, d.v.leaves)
    return Resolved(max(0.0, g - lowest), best, starts, met)
