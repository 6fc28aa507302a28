"""Several starting points: how long a run each gets, and which of their ends is the best.

The first is the point that was passed. The others are drawn (see `starting_points`).

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

from bilevel.derivatives.penalised_objective import Derivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable
from bilevel.results import Candidate, Solution, Status
from bilevel.running.starting_points import copied, drawn, place

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
    ranks = ProcessGroup.from_environment(order.lower.device)
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
        interrupted = solution.interrupted if ranks is None else any(ranks.all_gather_object(solution.interrupted))
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


def drawn_seed(ranks: ProcessGroup | None) -> int:
    """A seed from torch's global generator, that of the first rank on all of them."""
    seed = int(torch.randint(2**62, ()).item())
    return seed if ranks is None else int(ranks.broadcast_object(seed))


def agreed(candidates: Sequence[Candidate]) -> bool:
    """Whether enough of these are solutions with one f, the least of all solutions."""
    values = [c.upper for c in candidates if c.status is Status.CONVERGED]
    least = min(values, default=0.0)
    return sum(value <= least + ALIKE * (1 + abs(least)) for value in values) >= AGREE


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
        c
        for c in order
        if key(c)[:3] == key(first)[:3] and abs(c.upper - first.upper) <= ALIKE * (1 + abs(first.upper))
    ]
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
