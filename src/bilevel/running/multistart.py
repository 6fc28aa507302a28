"""Several starting points: how long each run is, and which of the ends is the best.

The first start is the point that was passed. The others are drawn (see `bilevel.running.starting_points`). The runs
follow one another. If `AGREE` of them end as solutions with the same f, and none has a smaller f, the rest are
skipped.

Without data, a run that has not ended after `FIRST` steps is paused; after `LATER` steps once another one ended as a
solution, or once `FEW` have ended without one. If none ended as a solution, the best of the paused runs is resumed to
its end. With data every run has the whole budget, because its steps depend on it, and the ends are compared on the
same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bilevel._util.random_state import undisturbed
from bilevel.batches.sources import Sources
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.distributed.process_group import ProcessGroup
from bilevel.measures.certificate_batches import BATCHES
from bilevel.results import Candidate, Solution, Status
from bilevel.running.loop import PausedRun
from bilevel.running.run_once import RunRequest, drawn_seed, run_once
from bilevel.running.starting_points import Point, copied, drawn, spread_points, write_point

# The relative measures below which an end counts as feasible and as a lower solution, when ends are compared.
NEAR = 1e-6
# With data, the violation below which an end counts as feasible, and the largest residual of a lower solution as a
# multiple of the smallest one: noise leaves none at zero.
NEAR_WITH_DATA, SPREAD = 1e-2, 3.0
# Ends whose u and v differ by less, relative to their size, are one candidate.
SAME = 1e-4
FIRST, LATER, FEW = 500, 300, 4
AGREE = 3
# The largest difference of two values of f, relative to 1 + |f|, that counts as none.
ALIKE = 1e-5
Runner = Callable[[RunRequest, PausedRun | None], Solution]


def run_starts(request: RunRequest, count: int, run: Runner = run_once) -> Solution:
    """Run from each of `count` starting points; u and v are left at the best end."""
    both = request.u, request.v
    ranks = ProcessGroup.from_environment(request.v.device)
    seed = drawn_seed(ranks) if request.seed is None else request.seed
    sources = Sources(request.data, seed, request.v.device)
    points = _points(request, count, seed, sources, ranks)
    found: dict[int, tuple[Solution, Candidate]] = {}
    kept: dict[int, PausedRun] = {}

    def run_start(k: int, most: int, name: str) -> bool:
        """Run a start; return whether others are still worth a run."""
        write_point(points[k], *both)
        folder = None if request.folder is None else request.folder / name
        paused = kept.pop(k, PausedRun())
        solution = run(replace(request, max_steps=most, folder=folder, seed=seed + k, start=k), paused)
        kept[k] = paused
        found[k] = solution, candidate(solution, PenalisedObjective(request.problem, *both), k, sources)
        for other in set(kept) - {best_paused()}:  # a state can be large
            del kept[other]
        # Ctrl-C can reach one rank after the run of all has ended.
        interrupted = solution.interrupted if ranks is None else any(ranks.all_gather_object(solution.interrupted))
        return not interrupted and not agreed([c for _, c in found.values()])

    def solved() -> bool:
        return any(c.status is Status.CONVERGED for _, c in found.values())

    def best_paused() -> int | None:
        """Return the paused start to resume if none is solved."""
        paused = [c for s, c in found.values() if s.status is Status.MAX_STEPS and s.steps < request.max_steps]
        return None if solved() or not paused else ranked(paused)[0].start

    def steps(k: int) -> int:
        if request.data is not None:
            return request.max_steps
        return min(LATER if k >= FEW or solved() else FIRST, request.max_steps)

    more = all(run_start(k, steps(k), f"start-{k}") for k in range(len(points)))
    if more and (k := best_paused()) is not None:
        run_start(k, request.max_steps, f"start-{k}-to-its-end")
    best = chosen(list(found.values()), ranks)
    write_point((best.candidates[0].u, best.candidates[0].v), *both)
    return best


def _points(request: RunRequest, count: int, seed: int, sources: Sources, ranks: ProcessGroup | None) -> list[Point]:
    """Return the tensors of u and v at each start."""
    u, v = request.u, request.v
    if request.data is None:
        others = drawn(request.problem, u, v, count - 1, torch.Generator().manual_seed(seed))
        return [(copied(u), copied(v)), *((draw.u, draw.v) for draw in others)]

    def fits() -> bool:
        """Return whether f and g are finite at the present point, on the first batches."""
        finite = all(map(math.isfinite, _values(PenalisedObjective(request.problem, u, v), sources, 1)))
        return finite if ranks is None else all(ranks.all_gather_object(finite))

    return spread_points(u, v, count, seed, fits)


def _values(d: PenalisedObjective, sources: Sources, most: int) -> tuple[float, float]:
    """Return f and g at the present point, as means over the first batches, at most `most`."""
    pairs = sources.first_pairs(most)
    with torch.no_grad(), undisturbed(d.v.device, d.v.buffers() + d.u.buffers()):
        made = [d.prepare([pair], graph=False)[0] for pair in pairs]
        f = torch.stack([d.upper(pair[0]) for pair in made]).mean()
        g = torch.stack([d.lower(pair[1]) for pair in made]).mean()
    return f.item(), g.item()


def agreed(candidates: Sequence[Candidate]) -> bool:
    """Return whether enough candidates are solutions with the same f, and no solution has a smaller one."""
    values = [c.upper for c in candidates if c.status is Status.CONVERGED]
    least = min(values, default=0.0)
    return sum(value <= least + ALIKE * (1 + abs(least)) for value in values) >= AGREE


def candidate(solution: Solution, d: PenalisedObjective, start: int, sources: Sources | None = None) -> Candidate:
    """Return the end of a run, at the present u and v."""
    f, g = _values(d, sources or Sources(None, 0, d.v.device), BATCHES)
    return Candidate(copied(d.u), copied(d.v), f, g, solution.status, solution.certificate, solution.multipliers, start)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates: feasible ones first, then lower solutions, then by f (not finite: last); near ties by accuracy.

    The f of an end that is infeasible or does not minimise g is meaningless. Such ends are ranked by how
    far they are from a feasible lower solution.
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
        off = 0.0 if solved else max(residual(c), (c.certificate.lower_gap or 0.0) / (1 + abs(c.lower)))
        off = off if feasible else c.certificate.infeasibility
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


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out candidates that have the same u and v as a better one."""
    kept: list[tuple[Candidate, Tensor]] = []
    for c in candidates:
        z = torch.cat([x.double().reshape(-1) for x in (*c.u, *c.v)])
        if all((z - other).norm() > SAME * (1 + z.norm()) for _, other in kept):
            kept.append((c, z))
    return [c for c, _ in kept]


def chosen(found: Sequence[tuple[Solution, Candidate]], ranks: ProcessGroup | None) -> Solution:
    """Return the solution of the best candidate, with the distinct candidates."""
    candidates = [c for _, c in found]
    if ranks is not None:  # each rank has drawn its own random numbers, or batches; all must keep the same start
        values = ranks.broadcast_object([(c.upper, c.lower) for c in candidates])
        candidates = [replace(c, upper=f, lower=g) for c, (f, g) in zip(candidates, values, strict=True)]
    order = ranked(candidates)
    best = next(s for (s, _), c in zip(found, candidates, strict=True) if c is order[0])
    return replace(best, candidates=distinct(order), interrupted=any(s.interrupted for s, _ in found))
