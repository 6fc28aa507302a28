"""Several starting points: where they lie, and which of their ends is the best.

The first is the point that was passed. The others are drawn: in a `Box` with finite bounds on both sides, points of a
Sobol sequence, stretched so that every sixth coordinate lies on a bound; elsewhere normal around the first, with a
deviation of 1 + the root mean square of the tensor, and projected. Four times as many as are needed are drawn, and at
each the lower problem is solved, which shows f: of two starts, one is the best of those that are left (the most
feasible, then the least f; those that are better than all of their nearest neighbours come before all others, so that
one valley does not take the starts of another), the other the one whose u is farthest from those of all starts before
it.

A start that is not over after `FIRST` steps is set aside, after `LATER` once another one ended as a solution or `FEW`
have ended without one; where none did, the best of those set aside goes on to its end. Where `AGREE` of them ended at
one f, and none at a smaller one, the rest are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .autodiff import Derivatives
from .distributed import Ranks
from .kkt import KKT
from .lower_constrained import minimise_constrained
from .lower_level import minimise
from .prices import violation
from .problem import Problem, Variable
from .projections import Box
from .scales import lower_curvature
from .solution import Candidate, Solution, Status

POOL = 4
STRETCH = 1.2
"""How much wider than the bounds the draws are before they are put into them."""
TINY = 1e-12
NEIGHBOURS = 4
"""How many of the nearest draws a draw is better than where it is the best of a valley."""
ROUGH = 1e-4
"""The tolerance of the lower solutions at points that are only looked at."""
NEAR = 1e-6
"""The relative measures below which an end counts as feasible and as a lower solution, when ends are compared."""
NEAR_WITH_DATA, SPREAD = 1e-2, 3.0
"""With data, an end counts as feasible below the first, and as a lower solution where its residual is no more than so
many times the least of all: noise leaves none at zero."""
SAME = 1e-4
"""Ends whose u and v differ by less, relative to their size, are one candidate."""
FIRST, LATER, FEW = 500, 300, 4
AGREE = 3
ALIKE = 1e-5
"""How much two values of f may differ, relative to 1 + |f|, to count as one."""


class Scatter:
    """Moves a variable to other starting points, drawn around the present one or from its bounds."""

    def __init__(self, variable: Variable, generator: torch.Generator) -> None:
        self.variable, self.generator = variable, generator
        named = list(zip(variable.names, variable.leaves, strict=True))
        named += [(name, rows.values) for name, rows in zip(variable.row_names, variable.rows, strict=True)]
        self.leaves = [(leaf, _bounds(variable.projection(name), leaf)) for name, leaf in named]
        inside = sum(leaf.numel() for leaf, bounds in self.leaves if bounds)
        seed = int(torch.randint(2**31, (), generator=generator).item())
        self.sobol = None
        if 0 < inside <= SobolEngine.MAXDIM:
            self.sobol = SobolEngine(inside, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
        self.scales = [1 + leaf.detach().square().mean().sqrt() for leaf, _ in self.leaves]

    @torch.no_grad()
    def move(self) -> None:
        """Add a draw to the present point, or put one from the bounds in its place."""
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
        """The present point as one vector, in units of what a draw moves it by."""
        units = [
            scale if bounds is None else (bounds[1] - bounds[0]).clamp(min=TINY) / 2
            for (_, bounds), scale in zip(self.leaves, self.scales, strict=True)
        ]
        parts = [leaf.detach() / unit for (leaf, _), unit in zip(self.leaves, units, strict=True)]
        return torch.cat([part.reshape(-1).double().cpu() for part in parts])


def _bounds(projection: object, leaf: Tensor) -> tuple[Tensor, Tensor] | None:
    """The bounds of a Box that are finite on both sides."""
    if not isinstance(projection, Box) or projection.low is None or projection.high is None:
        return None
    low, high = (torch.as_tensor(x, dtype=leaf.dtype, device=leaf.device) for x in (projection.low, projection.high))
    return (low, high) if bool(torch.isfinite(low).all() and torch.isfinite(high).all()) else None


@dataclass(eq=False)
class Draw:
    """A starting point, the lower problem solved there."""

    u: list[Tensor]
    v: list[Tensor]
    place: Tensor
    """u, in units of what a draw moves it by."""
    upper: float
    violation: float


def drawn(problem: Problem, u: Variable, v: Variable, count: int, generator: torch.Generator) -> list[Draw]:
    """`count` starting points around the present one, which stays."""
    first = copied(u), copied(v)
    around = Scatter(u, generator), Scatter(v, generator)
    places, pool = [around[0].place()], []
    try:
        for _ in range(POOL * count):
            for variable, value in zip((u, v), first, strict=True):
                place(value, variable)
            for scatter in around:
                scatter.move()
            if (draw := _solved(problem, u, v, around[0].place())) is not None:
                pool.append(draw)
    finally:
        for variable, value in zip((u, v), first, strict=True):
            place(value, variable)
    pool = _ordered(pool)
    out: list[Draw] = []
    while pool and len(out) < count:
        out.append(pool[0] if len(out) % 2 == 0 else max(pool, key=lambda d: _apart(d.place, places)))
        pool.remove(out[-1])
        places.append(out[-1].place)
    return out


def _ordered(pool: Sequence[Draw]) -> list[Draw]:
    """The best of each valley first; all by feasibility, then by f."""

    def key(d: Draw) -> tuple[float, float]:
        return round(d.violation, 3), d.upper

    def follows(d: Draw) -> bool:
        others = sorted(
            (other for other in pool if other is not d), key=lambda other: float((other.place - d.place).norm())
        )
        return any(key(other) < key(d) for other in others[:NEIGHBOURS])

    return sorted(pool, key=lambda d: (follows(d), *key(d)))


def _apart(place: Tensor, others: Sequence[Tensor]) -> float:
    """The distance to the nearest of the others."""
    return float(torch.stack([(place - other).norm() for other in others]).amin())


def _solved(problem: Problem, u: Variable, v: Variable, where: Tensor) -> Draw | None:
    """The present point with v at a lower solution; None where the objectives are not finite there."""
    d = Derivatives(problem, u, v)
    if problem.constrained_below:
        batch = d.prepare([(None, None)], graph=False)[0][1]
        kkt = KKT(problem, u, v, batch)
        kkt.measure(batch, lower_curvature(d, torch.Generator().manual_seed(0)))
        minimise_constrained(d, kkt, ROUGH)
    else:
        minimise(d, ROUGH)
    with torch.no_grad():
        batch = d.prepare([(None, None)], graph=False)[0][0]
        f, h = d.upper(batch).item(), d.constraints(batch)
        outside = violation(h, len(problem.equalities)).item() if h else 0.0
    if not (math.isfinite(f) and math.isfinite(outside)):
        return None
    return Draw(copied(u), copied(v), where, f, outside)


@dataclass
class Aside:
    """What a run left that its budget ended, and what a run goes on from where it is given one."""

    state: dict[str, Any] | None = None
    """As a checkpoint has it; None where there is nothing to go on from but the starting point."""


class Runs(Protocol):
    """What `solve` was asked for: its problem and variables, and how to run from where they are."""

    @property
    def problem(self) -> Problem: ...
    @property
    def upper(self) -> Variable: ...
    @property
    def lower(self) -> Variable: ...
    @property
    def max_steps(self) -> int: ...
    def run(self, folder: Path | None, seed: int | None, start: int = 0, aside: Aside | None = None) -> Solution: ...


def several(order: Runs, folder: Path | None, seed: int | None, count: int) -> Solution:
    """One run from each of `count` starting points; u and v are left at the best end."""
    ranks = Ranks.here(order.lower.device)
    seed = drawn_seed(ranks) if seed is None else seed
    both = order.upper, order.lower
    points = [(copied(both[0]), copied(both[1]))]
    points += [(d.u, d.v) for d in drawn(order.problem, *both, count - 1, torch.Generator().manual_seed(seed))]
    found: dict[int, tuple[Solution, Candidate]] = {}
    kept: dict[int, Aside] = {}

    def run(k: int, most: int, name: str) -> bool:
        """Run a start; whether others are still worth one."""
        for variable, value in zip(both, points[k], strict=True):
            place(value, variable)
        limited: Runs = replace(order, max_steps=most)  # type: ignore[type-var]
        aside = kept.pop(k, Aside())
        solution = limited.run(None if folder is None else folder / name, seed + k, k, aside)
        kept[k] = aside
        found[k] = solution, candidate(solution, Derivatives(order.problem, *both), k)
        for other in set(kept) - {best_aside()}:  # a state may be large
            del kept[other]
        # Ctrl-C may reach one rank after the run of all has ended.
        interrupted = solution.interrupted if ranks is None else any(ranks.gather(solution.interrupted))
        return not interrupted and not agreed([c for _, c in found.values()])

    def solved() -> bool:
        return any(c.status is Status.CONVERGED for _, c in found.values())

    def best_aside() -> int | None:
        """Of the starts that were set aside, the one that goes on if no other is solved."""
        aside = [c for s, c in found.values() if s.status is Status.MAX_STEPS and s.steps < order.max_steps]
        return None if solved() or not aside else ranked(aside)[0].start

    def steps(k: int) -> int:
        return min(LATER if k >= FEW or solved() else FIRST, order.max_steps)

    more = all(run(k, steps(k), f"start-{k}") for k in range(len(points)))
    if more and (k := best_aside()) is not None:
        run(k, order.max_steps, f"start-{k}-to-its-end")
    best = chosen([s for s, _ in found.values()], [c for _, c in found.values()])
    for variable, value in zip(both, (best.candidates[0].u, best.candidates[0].v), strict=True):
        place(value, variable)
    return best


def drawn_seed(ranks: Ranks | None) -> int:
    """A seed from torch's global generator, that of the first rank on all of them."""
    seed = int(torch.randint(2**62, ()).item())
    return seed if ranks is None else int(ranks.share(seed))


def agreed(candidates: Sequence[Candidate]) -> bool:
    """Whether enough of these are solutions with one f, the least of all solutions."""
    values = [c.upper for c in candidates if c.status is Status.CONVERGED]
    least = min(values, default=0.0)
    return sum(value <= least + ALIKE * (1 + abs(least)) for value in values) >= AGREE


def copied(variable: Variable) -> list[Tensor]:
    """All tensors of a variable, copied."""
    return [x.detach().clone() for x in variable.tensors().values()]


@torch.no_grad()
def place(values: Sequence[Tensor], variable: Variable) -> None:
    """Write what `copied` returned back into the variable."""
    for tensor, value in zip(variable.tensors().values(), values, strict=True):
        tensor.copy_(value)


def candidate(solution: Solution, d: Derivatives, start: int) -> Candidate:
    """The end of a run, at the present u and v."""
    with torch.no_grad():
        upper, lower = d.prepare([(None, None)], graph=False)[0]
        f, g = d.upper(upper).item(), d.lower(lower).item()
    return Candidate(copied(d.u), copied(d.v), f, g, solution.status, solution.certificate, solution.multipliers, start)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Feasible ones first, then lower solutions, then by f (not finite: last); near ties by accuracy.

    The f of an end that is not feasible, or no lower solution, says nothing: these are ranked by how far they are off.
    """

    def residual(c: Candidate) -> float:
        return c.certificate.lower_residual / c.certificate.lower_scale

    with_data = any(c.certificate.batches for c in candidates)
    near = NEAR_WITH_DATA if with_data else NEAR
    met = [residual(c) for c in candidates if c.certificate.infeasibility <= near and math.isfinite(residual(c))]
    low = max(NEAR, SPREAD * min(met, default=0.0)) if with_data else NEAR

    def key(c: Candidate) -> tuple[bool, bool, float, float]:
        feasible = c.certificate.infeasibility <= near
        solved = residual(c) <= low and c.certificate.lower_minimiser is not False
        off = 0.0 if feasible and solved else _off(c, residual(c)) if feasible else c.certificate.infeasibility
        off, f = (x if math.isfinite(x) else math.inf for x in (off, c.upper))
        return not feasible, not solved, off, f

    order = sorted(candidates, key=key)
    first = order[0]
    tied = [
        c for c in order
        if key(c)[:3] == key(first)[:3] and abs(c.upper - first.upper) <= ALIKE * (1 + abs(first.upper))
    ]  # fmt: skip
    best = min(tied, key=lambda c: c.certificate.worst)
    return [best, *(c for c in order if c is not best)]


def _off(c: Candidate, residual: float) -> float:
    """How far a feasible end is from a lower solution."""
    return max(residual, (c.certificate.lower_gap or 0.0) / (1 + abs(c.lower)))


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without those that are where a better one is."""
    kept: list[Candidate] = []
    for c in candidates:
        z = _flat(c)
        if all((z - _flat(other)).norm() > SAME * (1 + z.norm()) for other in kept):
            kept.append(c)
    return kept


def _flat(c: Candidate) -> Tensor:
    return torch.cat([x.double().reshape(-1) for x in (*c.u, *c.v)])


def chosen(solutions: Sequence[Solution], candidates: Sequence[Candidate]) -> Solution:
    """The solution of the best candidate, with the distinct candidates."""
    order = ranked(candidates)
    best = next(s for s, c in zip(solutions, candidates, strict=True) if c is order[0])
    return replace(best, candidates=distinct(order), interrupted=any(s.interrupted for s in solutions))
