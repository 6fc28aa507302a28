"""The pessimistic choice: if the lower problem has several solutions, f is evaluated at the worst of them.

    min_{u, t} t   subject to   f(u, v_k) <= t,   h(u, v_k) = 0 or <= 0,   v_k a lower solution at u,   k = 1..K

The K lower solutions are copies of v, and each has to meet the lower conditions (as the K-best candidates for min-max
problems of Hamm and Noh, ICML 2018, and the candidates of Appendix C.3 of the paper). This is one optimistic problem
in (u, t) and (v_1, ..., v_K). It is solved in rounds: find lower solutions at u from several points, keep those with
the smallest g, solve, and search again, until the search finds no others.

The end is a stationary point for the kept solutions. Lower solutions that no search found are ignored, and of
infinitely many only the kept ones are used. If a lower solution exists only at a single u, the pessimistic problem can
have no minimum at all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bilevel._util.checks import check_counts, in_range
from bilevel._util.tensor_lists import gradient, norm
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import OptionError
from bilevel.measures.constrained_lower_minimum import minimise_constrained
from bilevel.measures.lower_minimum import flatten, minimise, write
from bilevel.measures.problem_check import variables
from bilevel.measures.problem_scales import measure
from bilevel.methods.penalty import Penalty
from bilevel.problem import Objective, Problem, Projection, Variable
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback
from bilevel.running.loop import PausedRun
from bilevel.running.multistart import candidate, run_starts
from bilevel.running.run_once import RunRequest, drawn_seed, run_once
from bilevel.running.solve import U, V
from bilevel.running.starting_points import copied, lower_conditions, write_point, write_tensors

ROUNDS = 6
SEARCHES = 12
# The default tolerance of a round. t is linear, so measures relative to it fall more slowly.
TOLERANCE = 1e-6
STEADY = 1000.0
# The largest number of lower solutions that are kept.
KEPT = 8
# How far above the smallest g, relative to 1 + |g|, a kept lower solution can be.
TIED = 1e-6
APART = 1e-3


def lower_solutions(
    problem: Problem, u: Variable, v: Variable, generator: torch.Generator, known: Sequence[Tensor]
) -> list[Tensor]:
    """Return distinct v that minimise g at the present u, as flat vectors; searches from v, around it and `known`."""
    held = flatten(v.leaves)
    size = 1 + held.norm().item()
    found: list[tuple[float, Tensor]] = []
    d = PenalisedObjective(problem, u, v)
    kkt = lower_conditions(d)
    starts = [
        held + size * (0.5 if k % 2 else 2.0) * torch.randn(held.shape, generator=generator, dtype=held.dtype).to(held)
        for k in range(SEARCHES)
    ]
    for start in (held, *known, *starts):
        write(start, v.leaves)
        if kkt is None:
            g = minimise(d, 1e-9)
            flat = norm(d.residual(d.slope(d.prepare([(None, None)], graph=False))[1])).item() <= 1e-4 * size
        else:
            point = minimise_constrained(d, kkt, 1e-9)
            g, flat = point.value, point.violation <= 1e-6 * size
        if flat:
            found.append((g, flatten(v.leaves)))
    write(held, v.leaves)
    least = min((g for g, _ in found), default=0.0)
    kept: list[Tensor] = []
    for g, w in sorted(found, key=lambda pair: pair[0]):
        new = all((w - other).norm() > APART * (1 + w.norm()) for other in kept)
        if g <= least + TIED * (1 + abs(least)) and new and len(kept) < KEPT:
            kept.append(w)
    return kept or [held]


def solve_pessimistic(
    problem: Problem,
    method: Penalty,
    u: U,
    v: V,
    *,
    max_steps: int,
    tolerance: float | None = None,
    callbacks: Sequence[Callback] = (),
    starts: int = 1,
    seed: int | None = None,
    hypergradient: bool | None = None,
) -> Solution[U, V]:
    """Solve a bilevel problem without data in which f counts at the worst of several lower solutions.

    It solves in rounds: it searches for lower solutions at u, keeps the best ones, minimises the largest f over them,
    and searches again, until it finds no others. u and v are updated in place; v ends at the worst of the kept lower
    solutions. `Solution.candidates` lists these, the worst first.

    Args:
        problem: The problem, without `trials` and `start_lower`.
        method: `Penalty` in its deterministic mode.
        u: The upper variable, without `Rows`.
        v: The lower variable.
        max_steps: The largest number of steps of each round.
        tolerance: A round ends as converged if the relative measures of the certificate are at most this. None
            (default): 1e-6.
        callbacks: A list such as `[Progress()]`, called in each round. Default: none.
        starts: The number of starting points. Default: 1, the point that was passed. The best end is kept;
            `Solution.candidates` lists the distinct ends.
        seed: The seed of the search and of the starting points. None (default): one from torch's global generator.
        hypergradient: Whether the certificate solves for the exact hypergradient. None (default): if v is small.

    >>> import torch
    >>> from bilevel import Penalty, Problem, solve_pessimistic
    >>> problem = Problem(
    ...     upper=lambda u, v, batch: (u - v).square(),
    ...     lower=lambda u, v, batch: (v.square() - 1).square() + 0 * u,
    ... )
    >>> u, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, 0.8))
    >>> solution = solve_pessimistic(problem, Penalty(), u, v, max_steps=500, seed=0)
    >>> abs(solution.u.item()) < 1e-4  # both v = 1 and v = -1 minimise g, and u = 0 is best for the worse of them
    True
    """
    if not isinstance(method, Penalty) or method.mode == "stochastic":
        raise OptionError(f"method must be Penalty() in its deterministic mode; got {method!r}.")
    check_counts(max_steps=max_steps, starts=starts)
    in_range("tolerance", tolerance, above=0)
    for name in ("start_lower", "trials"):
        if getattr(problem, name, None) is not None:
            raise OptionError(f"solve_pessimistic cannot be used with {name}. Use solve.")
    upper, lower = variables(problem, u, v)
    if upper.rows:
        raise OptionError("solve_pessimistic cannot be used with Rows. Use a tensor for u.")
    request = RunRequest(
        problem=problem,
        method=method,
        u=upper,
        v=lower,
        data=None,
        max_steps=max_steps,
        tolerance=tolerance or TOLERANCE,
        callbacks=callbacks,
        hypergradient=hypergradient,
        seed=seed,
    )
    return worst_case(request) if starts == 1 else run_starts(request, starts, worst_case)


def worst_case(request: RunRequest, paused: PausedRun | None = None) -> Solution:
    """Run in rounds with copies of v, one for each lower solution that was found.

    u and v are left at the end, v at the worst of the kept lower solutions.
    """
    problem, u, v, seed = request.problem, request.u, request.v, request.seed
    seed = drawn_seed(ProcessGroup.from_environment(v.device)) if seed is None else seed
    generator = torch.Generator().manual_seed(seed)
    first = copied(u), copied(v)
    try:
        points = lower_solutions(problem, u, v, generator, ())
        for _ in range(ROUNDS):
            solution, twins = solve_copies(request, points, seed)
            kept = [flatten(twin.leaves) for twin in twins]
            points = lower_solutions(problem, u, v, generator, kept)
            settled = same(points, kept)
            if settled or solution.interrupted:
                break
        if solution.status is Status.CONVERGED and not (settled or solution.interrupted):
            # It is stationary only for the kept lower solutions.
            message = f"After {ROUNDS} rounds the search still finds other lower solutions."
            solution = replace(solution, status=Status.STALLED, message=message)
    except BaseException:
        write_point(first, u, v)
        raise
    ends = []
    for value in [copied(twin) for twin in twins]:  # all are copied before v, the first, changes
        write_tensors(value, v)
        ends.append(candidate(solution, PenalisedObjective(problem, u, v), request.start))
    ends.sort(key=lambda end: end.upper)
    write_tensors(ends[-1].v, v)
    return replace(solution, u=u.value, v=v.value, candidates=ends[::-1])


def solve_copies(request: RunRequest, points: Sequence[Tensor], seed: int) -> tuple[Solution, list[Variable]]:
    """Solve the optimistic problem of K copies of v, which start at `points`; return its end and the copies.

    The first copy is v.
    """
    problem, u, v, method = request.problem, request.u, request.v, cast(Penalty, request.method)
    write(points[0], v.leaves)
    d = PenalisedObjective(problem, u, v)
    scales = measure(d, torch.Generator().manual_seed(0))
    leaves = [*u.leaves, *v.leaves]
    slope = norm(gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves)).item()
    size = max(scales.f, slope / (1 + norm(leaves).item()))
    unit = size * (1 + norm(leaves).item())
    twins = [v, *(Variable(copy.deepcopy(v.value), "v") for _ in points[1:])]
    for twin, w in zip(twins[1:], points[1:], strict=True):
        write(w, twin.leaves)
    values = [twin.value for twin in twins]
    prepare = problem.prepare
    with torch.no_grad():
        batch = None if prepare is None else prepare(u.value, None)
        t = torch.stack([problem.upper(u.value, w, batch).reshape(()) for w in values]).max().clone().requires_grad_()

    def over(functions: Any) -> list[Objective]:
        return [lambda _, __, batch, w=w, f=f: f(u.value, w, batch) for f in functions for w in values]  # type: ignore[misc]

    def sets(variable: Variable, names: Sequence[str]) -> dict[str, Projection] | None:
        return {str(i): p for i, name in enumerate(names) if (p := variable.projection(name)) is not None} or None

    rewritten = Problem(
        upper=lambda x, _, batch: x[-1],
        lower=lambda _, __, batch: torch.stack([problem.lower(u.value, w, batch).reshape(()) for w in values]).sum(),
        equalities=over(problem.equalities),
        inequalities=[
            lambda x, _, batch, w=w: (problem.upper(u.value, w, batch).reshape(()) - x[-1]) / unit for w in values
        ]
        + over(problem.inequalities),
        lower_equalities=over(problem.lower_equalities),
        lower_inequalities=over(problem.lower_inequalities),
        project_upper=sets(u, u.names),
        project_lower=sets(v, v.names * len(values)),
        prepare=None if prepare is None else lambda _, batches: prepare(u.value, batches),
    )
    # Penalty weights that keep each copy at its minimum: t is linear, and shows no scale.
    gamma = STEADY * size / max(scales.g, size if problem.constrained_below else 0.0) ** 2
    method = replace(
        method,
        gamma=gamma if method.gamma is None else method.gamma,
        gamma_h=STEADY * size if method.gamma_h is None else method.gamma_h,
    )
    upper, lower = variables(rewritten, [*u.leaves, t], [leaf for twin in twins for leaf in twin.leaves])
    # A start above 0 stays near where it is.
    inner = replace(request, problem=rewritten, method=method, u=upper, v=lower, seed=seed, start=1)
    return run_once(inner), twins


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists hold the same points, in any order."""
    return len(a) == len(b) and all(min((x - y).norm() for y in b) <= 10 * APART * (1 + x.norm()) for x in a)
