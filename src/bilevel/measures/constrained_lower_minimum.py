"""Minimises g(u, .) under the lower constraints for a fixed u, without data, by an augmented Lagrangian and L-BFGS.

    rounds: L-BFGS over v on g + <beta, d> + rho_d/2 |d|^2 + rho_c/2 |max(0, c + alpha/rho_c)|^2 - |alpha|^2/(2 rho_c)
            alpha = max(0, alpha + rho_c c);  beta += rho_d d;  rho *= 10 unless the violation fell to a quarter

It uses only first derivatives. A run starts from the result, and tests its end with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel._util.tensor_lists import gradient
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.measures.lower_minimum import flatten, write
from bilevel.optim.lbfgs import LBFGS

ROUNDS = 20
ITERATIONS = 50
# The most evaluations of one minimisation; if g is flat, line searches are long.
EVALUATIONS = 600
# A decrease of g up to this share of its size counts as rounding.
LARGEST = 1e-4
# The largest price of a lower constraint, relative to the curvature of g.
MOST = 1e8
# A minimisation ends after this many rounds in a row that bring v no closer to the constraints.
VAIN = 4
# The distances, relative to 1 + |v|, by which v is moved in both directions before g is minimised again.
REACHES = (0.1, 1.0)
# The number of points that are evaluated to find `PROMISING` starts; a tenth if v has more than `LARGE` numbers.
LOOKS = 128
PROMISING, LARGE = 4, 1000
# The least distance of promising points from v and from each other, relative to 1 + |v|.
APART = 0.3
# The tolerance of a minimisation whose end has a larger g, or is already known.
COARSE = 1e-5
# Ends closer than this, relative to 1 + |v|, count as one.
SAME = 1e-3
# From this violation, relative to 1 + |v|, the lower problem at this u counts as infeasible.
NONE = 1e-3


@dataclass
class LowerPoint:
    """The end of a lower minimisation.

    `value` is g, `violation` the largest violation of a lower constraint in the unit of v, `slope` is |grad_v L|.
    """

    value: float
    v: Tensor
    alpha: list[Tensor]
    beta: list[Tensor]
    violation: float
    slope: float


def violation_of(kkt: KKT, c: list[Tensor], d: list[Tensor]) -> float:
    """Return the largest violation of a lower constraint, in the unit of v."""
    sizes = [(x.detach() / size).amax().clamp(min=0) for x, size in zip(c, kkt.sizes_c, strict=True)]
    sizes += [(x.detach() / size).abs().amax() for x, size in zip(d, kkt.sizes_d, strict=True)]
    return torch.stack(sizes).amax().item()


class _Lagrangian:
    """The augmented Lagrangian of the lower level as a function of v, with its multipliers and prices."""

    def __init__(self, d: PenalisedObjective, kkt: KKT, start: LowerPoint | None) -> None:
        self.d, self.kkt, self.rho = d, kkt, 10.0
        self.alpha = [torch.zeros_like(x) for x in kkt.sizes_c] if start is None else start.alpha
        self.beta = [torch.zeros_like(x) for x in kkt.sizes_d] if start is None else start.beta

    def start_round(self) -> None:
        """Set the prices by rho, and what stays constant until the multipliers move."""
        kkt = self.kkt
        self.rho_c, self.rho_d = ([self.rho * kkt.bend / x**2 for x in sizes] for sizes in (kkt.sizes_c, kkt.sizes_d))
        self.constant = [torch.sum(m * m / r) for m, r in zip(self.alpha, self.rho_c, strict=True)]

    def parts(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return g, the inequalities and the equalities at the live v."""
        return self.kkt.parts(self.d.prepare([(None, None)], graph=False)[0][1])

    def __call__(self, v: Tensor) -> tuple[float, Tensor, None]:
        """Write v to the leaves; return the value and the gradient there."""
        leaves = self.d.v.leaves
        write(v, leaves)
        with self.d.differentiating_u(False):
            self.d.lower_evaluations += 1
            g, c, e = self.parts()
            for m, r, x, constant in zip(self.alpha, self.rho_c, c, self.constant, strict=True):
                g = g + (torch.sum((m + r * x).clamp(min=0) ** 2 / r) - constant) / 2
            for m, r, x in zip(self.beta, self.rho_d, e, strict=True):
                g = g + torch.sum(m * x) + torch.sum(r * x * x) / 2
            return g.item(), flatten(gradient(g, leaves)), None

    @torch.no_grad()
    def move_multipliers(self) -> float:
        """Move alpha and beta at the live v; return the largest violation there, including complementarity."""
        _, c, e = self.parts()
        inequalities = zip(c, self.alpha, self.rho_c, self.kkt.sizes_c, strict=True)
        violations = [(torch.maximum(x, -m / r) / size).abs().amax().item() for x, m, r, size in inequalities]
        self.alpha = [(m + r * x).clamp(min=0) for m, r, x in zip(self.alpha, self.rho_c, c, strict=True)]
        self.beta = [m + r * x for m, r, x in zip(self.beta, self.rho_d, e, strict=True)]
        return max(violation_of(self.kkt, c, e), 0.0, *violations)


def minimise_constrained(
    d: PenalisedObjective, kkt: KKT, tolerance: float, start: LowerPoint | None = None
) -> LowerPoint:
    """Minimise g under the lower constraints, starting and ending at the live v.

    Multipliers start at zero, or at their values in `start`, the end of an earlier minimisation.
    """
    lagrangian = _Lagrangian(d, kkt, start)
    goal = max(0.1 * tolerance, 1e-10)
    most = d.lower_evaluations + EVALUATIONS
    best, epsilon, slope, vain = math.inf, 0.1, math.inf, 0
    x = flatten(d.v.leaves)
    size = 1 + x.norm().item()
    far = 1e6 * size
    for _ in range(ROUNDS):
        lagrangian.start_round()
        search = LBFGS.start(lagrangian, x, metric=torch.full_like(x, 1 / (kkt.bend * (1 + lagrangian.rho))))
        for _ in range(ITERATIONS):
            slope = search.gradient.norm().item()
            if slope <= max(epsilon, goal) * kkt.bend * size or not search.iterate(lagrangian):
                break
            if d.lower_evaluations >= most or not search.x.norm().item() <= far:  # no minimum in this direction
                break
        if not search.x.norm().item() <= far and lagrangian.rho < MOST:  # g falls faster than the price rises
            lagrangian.rho *= 100
            write(x, d.v.leaves)
            continue
        x = search.x
        size = 1 + x.norm().item()
        write(x, d.v.leaves)
        slope = search.gradient.norm().item()
        violation = lagrangian.move_multipliers()
        if (violation <= goal * size and slope <= goal * kkt.bend * size) or not x.norm().item() <= far:
            break
        if violation > max(best / 4, goal * size):
            lagrangian.rho = min(10 * lagrangian.rho, MOST)
        vain = 0 if violation <= best / 2 else vain + 1
        # The constraints cannot be met, or not more closely in this precision.
        if vain >= VAIN or d.lower_evaluations >= most:
            break
        best, epsilon = min(best, violation), epsilon / 10
    with torch.no_grad():
        g, c, e = lagrangian.parts()
    return LowerPoint(g.item(), x, lagrangian.alpha, lagrangian.beta, violation_of(kkt, c, e), slope)


@dataclass
class Resolved:
    """The result of solving the lower problem again from several points.

    Fields:
        gap: g(u, v) minus the smallest g found; at least 0.
        better: A lower point with a smaller g, by more than the accuracy explains.
        starts: The number of starting points.
        met: How many of them ended at a point that meets the lower constraints. Default: 0.
        tied: Other lower points with the same g, within the accuracy. Default: none.
    """

    gap: float
    better: LowerPoint | None
    starts: int
    met: int = 0
    tied: list[LowerPoint] = field(default_factory=list)


def resolve(d: PenalisedObjective, kkt: KKT, generator: torch.Generator, tolerance: float, slope: float) -> Resolved:
    """Solve the lower problem at the present u from several points; leave v and the multipliers unchanged.

    `slope` is |grad_v L| at the present point.
    """
    held = flatten(d.v.leaves)
    size = 1 + held.norm().item()
    with torch.no_grad():
        at, c, e = kkt.parts(d.prepare([(None, None)], graph=False)[0][1])
        weights = sum(m.abs().sum().item() for m in (*kkt.alpha, *kkt.beta))
        largest = max(x.max().item() for x in (*kkt.sizes_c, *kkt.sizes_d))
    g = at.item()
    noise = max(1e-9, 100 * torch.finfo(held.dtype).eps, tolerance)
    margin = noise * (abs(g) + kkt.bend * size) + size * slope + 2 * weights * largest * violation_of(kkt, c, e)

    def allowed(point: LowerPoint) -> float:
        """Return how much smaller g can be at a point as good as this one: violations lower g by their multipliers."""
        own = sum(m.abs().sum().item() for m in (*point.alpha, *point.beta))
        explained = margin + 2 * own * largest * point.violation
        return float(min(explained, LARGEST * (abs(g) + abs(point.value)) + 1e-7))

    points = [held]
    for reach in REACHES:
        direction = torch.randn(held.shape, generator=generator, dtype=held.dtype).to(held)
        direction *= reach * size / direction.norm()
        points += [held + direction, held - direction]
    points += promising(d, kkt, held, 2 * weights * largest + kkt.bend * size, generator)
    best, lowest, met = None, g, 0
    ends: list[LowerPoint] = []
    for k, point in enumerate(points):
        write(point, d.v.leaves)
        found = minimise_constrained(d, kkt, tolerance if k == 0 else max(tolerance, COARSE))
        if k == 0 and found.violation > NONE * size:
            write(held, d.v.leaves)
            return Resolved(0.0, None, 1)
        known = any((found.v - end.v).norm() <= SAME * size for end in ends)
        if k and not known and found.value <= lowest + max(margin, COARSE * (abs(g) + kkt.bend * size**2)):
            found = minimise_constrained(d, kkt, tolerance, found)
            known = any((found.v - end.v).norm() <= SAME * size for end in ends)
        if found.violation > 1e-6 * size:
            continue
        met += 1
        if not known:
            ends.append(found)
        if found.value < lowest - (allowed(found) if best is None else 0.0):
            best, lowest = found, found.value
    write(held, d.v.leaves)
    tied = [end for end in ends if abs(end.value - g) <= allowed(end) and (end.v - held).norm() > SAME * size]
    return Resolved(max(0.0, g - lowest), best, len(points), met, [] if best else tied)


@torch.no_grad()
def promising(d: PenalisedObjective, kkt: KKT, held: Tensor, price: float, generator: torch.Generator) -> list[Tensor]:
    """Return points away from `held` with a small g + price * violation; half the candidates change only one number."""
    size = 1 + held.norm().item()
    batch = d.prepare([(None, None)], graph=False)[0][1]
    looked: list[tuple[float, Tensor]] = []
    for k in range(LOOKS if held.numel() <= LARGE else LOOKS // 10):
        direction = torch.randn(held.shape, generator=generator, dtype=held.dtype)
        if k % 2:
            only = int(torch.randint(held.numel(), (), generator=generator))
            direction *= torch.arange(held.numel()) == only
        reach = APART + 3 * torch.rand((), generator=generator).item() ** 2
        point = held + (reach * size / max(direction.norm().item(), 1e-300) * direction).to(held)
        write(point, d.v.leaves)
        g, c, e = kkt.parts(batch)
        value = g.item() + price * violation_of(kkt, c, e)
        if math.isfinite(value):
            looked.append((value, point))
    kept: list[Tensor] = []
    for _, point in sorted(looked, key=lambda pair: pair[0]):
        if len(kept) < PROMISING and all((point - other).norm() > APART * size for other in kept):
            kept.append(point)
    return kept
