"""Draws several starting points.

In a `Box` with finite bounds on both sides they are points of a Sobol sequence, stretched so that every sixth
coordinate lies on a bound. Other tensors are drawn from a normal distribution around the present point, with a
deviation of 1 + the root mean square of the tensor, and projected.

Without data, four times as many points as needed are drawn, and the lower problem is solved at each of them, which
shows f. Every other start is the best point that is left (the most feasible, then the smallest f; points that are
better than all of their nearest neighbours come first, so that one valley does not take the starts of another). The
starts in between are the points whose u is farthest from all starts before.

With data, the points are used as they are drawn, and each tensor of v moves by a normal draw of the tensor's root
mean square. Points at which f or g is not finite are drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bilevel._util.nested import copy_state
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import violation
from bilevel.measures.constrained_lower_minimum import minimise_constrained
from bilevel.measures.lower_minimum import minimise
from bilevel.measures.problem_scales import lower_curvature
from bilevel.problem import Box, Problem, Variable

# Draws for each start.
POOL = 4
# The tensors of u and of v.
Point = tuple[list[Tensor], list[Tensor]]
# The draws span the bounds times this, and are clamped to the bounds.
STRETCH = 1.2
TINY = 1e-12
# The number of nearest draws that a draw must beat to count as the best of its valley.
NEIGHBOURS = 4
# The tolerance of the lower solutions that are only compared.
ROUGH = 1e-4


def copied(variable: Variable) -> list[Tensor]:
    """Return copies of all tensors of a variable."""
    return [x.detach().clone() for x in variable.tensors().values()]


def write_tensors(values: Sequence[Tensor], variable: Variable) -> None:
    """Write the tensors that `copied` returned back into the variable."""
    copy_state(list(variable.tensors().values()), values)


def write_point(point: Point, u: Variable, v: Variable) -> None:
    """Write the tensors of a point into u and v."""
    write_tensors(point[0], u)
    write_tensors(point[1], v)


class StartSampler:
    """Moves a variable to other starting points, drawn around the present one or from its bounds."""

    def __init__(self, variable: Variable, generator: torch.Generator) -> None:
        self.variable, self.generator = variable, generator
        self.leaves = [(leaf, _bounds(variable.projection(name), leaf)) for name, leaf in variable.named()]
        inside = sum(leaf.numel() for leaf, bounds in self.leaves if bounds)
        seed = int(torch.randint(2**31, (), generator=generator).item())
        fits = 0 < inside <= SobolEngine.MAXDIM
        self.sobol = SobolEngine(inside, scramble=True, seed=seed) if fits else None  # type: ignore[no-untyped-call]
        self.scales = [1 + leaf.detach().square().mean().sqrt() for leaf, _ in self.leaves]

    @torch.no_grad()
    def move(self) -> None:
        """Add a draw to the present point, or replace it by a draw from the bounds."""
        inside = None if self.sobol is None else self.sobol.draw(1, dtype=torch.float64).reshape(-1)
        for (leaf, bounds), scale in zip(self.leaves, self.scales, strict=True):
            if bounds is None:
                leaf.add_(scale * torch.randn(leaf.shape, generator=self.generator, dtype=leaf.dtype).to(leaf.device))
                continue
            if inside is None:
                share = torch.rand(leaf.shape, generator=self.generator, dtype=torch.float64)
            else:
                share, inside = inside[: leaf.numel()].reshape(leaf.shape), inside[leaf.numel() :]
            share = ((share - 0.5) * STRETCH + 0.5).clamp(0, 1).to(leaf)
            leaf.copy_(bounds[0] + share * (bounds[1] - bounds[0]))
        self.variable.project(rows=True)

    @torch.no_grad()
    def place(self) -> Tensor:
        """Return the present point as one vector, in units of the step that a draw makes."""
        units = [
            scale if bounds is None else (bounds[1] - bounds[0]).clamp(min=TINY) / 2
            for (_, bounds), scale in zip(self.leaves, self.scales, strict=True)
        ]
        parts = [leaf.detach() / unit for (leaf, _), unit in zip(self.leaves, units, strict=True)]
        return torch.cat([part.reshape(-1).double().cpu() for part in parts])


def _bounds(projection: object, leaf: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the bounds of a Box if they are finite on both sides."""
    if not isinstance(projection, Box) or projection.low is None or projection.high is None:
        return None
    low, high = (torch.as_tensor(x, dtype=leaf.dtype, device=leaf.device) for x in (projection.low, projection.high))
    return (low, high) if bool(torch.isfinite(low).all() and torch.isfinite(high).all()) else None


@dataclass(eq=False)
class Draw:
    """A starting point, with the lower problem solved."""

    u: list[Tensor]
    v: list[Tensor]
    # u, in units of the step that a draw makes.
    place: Tensor
    upper: float
    violation: float


def _moved(
    u: Variable, v: Variable, count: int, generator: torch.Generator, near: bool
) -> Generator[Tensor, None, None]:
    """Move u and v to draw after draw, and restore them at the end. Yield the place of u at the start and at each draw.

    With `near`, each tensor of v moves by its size.
    """
    first = copied(u), copied(v)
    around = StartSampler(u, generator), StartSampler(v, generator)
    if near:
        around[1].scales = _own_sizes([leaf.detach() for leaf, _ in around[1].leaves])
    try:
        yield around[0].place()
        for _ in range(POOL * count):
            for sampler in around:
                sampler.move()
            yield around[0].place()
            write_point(first, u, v)
    finally:
        write_point(first, u, v)


def drawn(problem: Problem, u: Variable, v: Variable, count: int, generator: torch.Generator) -> list[Draw]:
    """Return `count` starting points around the present one, which stays."""
    moves = _moved(u, v, count, generator, near=False)
    places = [next(moves)]
    pool = _ordered([draw for place in moves if (draw := _solved(problem, u, v, place)) is not None])
    out: list[Draw] = []
    while pool and len(out) < count:
        out.append(
            pool[0]
            if len(out) % 2 == 0
            else max(pool, key=lambda d: min(float((d.place - other).norm()) for other in places))
        )
        pool.remove(out[-1])
        places.append(out[-1].place)
    return out


def _ordered(pool: Sequence[Draw]) -> list[Draw]:
    """Sort: the best of each valley first; then by feasibility, then by f."""

    def key(d: Draw) -> tuple[float, float]:
        return round(d.violation, 3), d.upper

    def follows(d: Draw) -> bool:
        others = sorted(
            (other for other in pool if other is not d), key=lambda other: float((other.place - d.place).norm())
        )
        return any(key(other) < key(d) for other in others[:NEIGHBOURS])

    return sorted(pool, key=lambda d: (follows(d), *key(d)))


def lower_conditions(d: PenalisedObjective) -> KKT | None:
    """Return the conditions of a constrained lower problem, measured at the present point; None without constraints."""
    if not d.problem.constrained_below:
        return None
    batch = d.prepare([(None, None)], graph=False)[0][1]
    kkt = KKT(d.problem, d.u, d.v, batch)
    kkt.measure(batch, lower_curvature(d, torch.Generator().manual_seed(0)))
    return kkt


def _solved(problem: Problem, u: Variable, v: Variable, where: Tensor) -> Draw | None:
    """Solve the lower problem at the present point; return None if the objectives are not finite there."""
    d = PenalisedObjective(problem, u, v)
    if (kkt := lower_conditions(d)) is None:
        minimise(d, ROUGH)
    else:
        minimise_constrained(d, kkt, ROUGH)
    with torch.no_grad():
        batch = d.prepare([(None, None)], graph=False)[0][0]
        f, h = d.upper(batch).item(), d.constraints(batch)
        outside = violation(h, len(problem.equalities)).item() if h else 0.0
    return Draw(copied(u), copied(v), where, f, outside) if math.isfinite(f) and math.isfinite(outside) else None


def spread_points(
    u: Variable, v: Variable, count: int, seed: int, fits: Callable[[], bool] = lambda: True
) -> list[Point]:
    """Return the present point and others around it that fit: `count` in all, or fewer if too few fit."""
    with closing(_moved(u, v, count - 1, torch.Generator().manual_seed(seed), near=True)) as moves:
        next(moves)
        points = [(copied(u), copied(v))]
        points += islice(((copied(u), copied(v)) for _ in moves if fits()), count - 1)
    return points


def _own_sizes(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor; if it is zero, the root mean square of all tensors, or one."""
    sizes = [leaf.square().mean().sqrt() for leaf in leaves]
    every = torch.cat([leaf.reshape(-1) for leaf in leaves]).square().mean().sqrt()
    every = torch.where(every > 0, every, torch.ones_like(every))
    return [torch.where(size > 0, size, every.to(size)) for size in sizes]
