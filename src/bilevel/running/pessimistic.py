"""The pessimistic choice: if the lower problem has several solutions, f counts at the worst of them.

    min_{u, t} t   subject to   f(u, v_k) <= t,   h(u, v_k) = 0 or <= 0,   v_k a lower solution at u,   k = 1..K

The K lower solutions are kept as copies of v, each with the conditions of its own (as the K-best candidates for min-max
problems of Hamm and Noh, ICML 2018, and the candidates of Appendix C.3 of the paper); that is one problem of the
optimistic kind in (u, t) and (v_1, ..., v_K). It is solved in rounds: find lower solutions at u from several points,
keep those whose g is the least, solve, and look again, until no other ones are found.

What this guarantees is a stationary point for the kept solutions. Lower solutions that no search found, and sets with
infinitely many, count only by their kept points; and where a lower solution is one at a single u alone, the pessimistic
problem may have no minimum at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from bilevel._util.checks import in_range
from bilevel._util.tensor_lists import gradient, norm
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.penalised_objective import Derivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import OptionError
from bilevel.measures.constrained_lower_minimum import minimise_constrained
from bilevel.measures.lower_minimum import flatten, minimise, write
from bilevel.measures.problem_check import variables
from bilevel.measures.problem_scales import lower_curvature, measure
from bilevel.methods.penalty import Penalty
from bilevel.problem.problem import Objective, Problem, Projection
from bilevel.problem.variables import Variable
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback
from bilevel.running.multistart import candidate, drawn_seed, run_starts
from bilevel.running.run_once import PausedRun, RunRequest, run_once
from bilevel.running.starting_points import copied, write_tensors

ROUNDS = 6
SEARCHES = 12
TOLERANCE = 1e-6
"""That of a round, where none was given: t is linear, and the measures relative to it are harder to meet."""
STEADY = 1000.0
KEPT = 8
"""Most lower solutions that are kept."""
TIED = 1e-6
"""How much larger than the least its g may be, relative to 1 + |g|, for a lower solution to be kept."""
APART = 1e-3


@dataclass
class Copies:
    """K lower solutions beside one u, as a problem of the optimistic kind."""

    problem: Problem
    u: list[Tensor]
    """The leaves of the user's u, then t."""
    v: list[Tensor]
    variables: list[Variable]
    """One for each of them; the first is the user's own v."""
    uppers: Callable[[], list[Tensor]]
    """f at each of them."""

    gamma: float
    gamma_h: float
    """First prices, high enough for each copy to stay at the minimum where it is: t is linear, and says nothing of
    sizes."""

    def points(self) -> list[Tensor]:
        """Where they are now."""
        return [flatten(variable.leaves) for variable in self.variables]


def refuse(problem: Problem, u: Variable) -> None:
    """Refuse what the pessimistic choice does not support."""
    for name in ("start_lower", "trials"):
        if getattr(problem, name) is not None:
            raise OptionError(f"solve_pessimistic cannot be used with {name}. Use solve.")
    if u.rows:
        raise OptionError("solve_pessimistic cannot be used with Rows. Use a tensor for u.")


def lower_solutions(
    problem: Problem, u: Variable, v: Variable, generator: torch.Generator, known: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Distinct v that minimise g at the present u, as flat vectors, searched from v, around it and from `known`."""
    held = flatten(v.leaves)
    size = 1 + held.norm().item()
    found: list[tuple[float, Tensor]] = []
    d = Derivatives(problem, u, v)
    batch = d.prepare([(None, None)], graph=False)[0][1]
    kkt = None
    if problem.constrained_below:
        kkt = KKT(problem, u, v, batch)
        kkt.measure(batch, lower_curvature(d, torch.Generator().manual_seed(0)))
    around = [torch.randn(held.shape, generator=generator, dtype=held.dtype).to(held) for _ in range(SEARCHES)]
    starts = [held + size * (0.5 if k % 2 else 2.0) * far for k, far in enumerate(around)]
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
    if not found:
        return [held]
    least = min(g for g, _ in found)
    kept: list[Tensor] = []
    for g, w in sorted(found, key=lambda pair: pair[0]):
        new = all((w - other).norm() > APART * (1 + w.norm()) for other in kept)
        if g <= least + TIED * (1 + abs(least)) and new and len(kept) < KEPT:
            kept.append(w)
    return kept


def copies(problem: Problem, u: Variable, v: Variable, points: list[Tensor]) -> Copies:
    """The problem of the kept lower solutions; v is put at the first."""
    write(points[0], v.leaves)
    d = Derivatives(problem, u, v)
    scales = measure(d, torch.Generator().manual_seed(0))
    leaves = [*u.leaves, *v.leaves]
    slope = norm(gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves)).item()
    size = max(scales.f, slope / (1 + norm(leaves).item()))
    unit = size * (1 + norm(leaves).item())
    values, variables = [v.value], [v]
    for w in points[1:]:
        twin = copy.deepcopy(v.value)
        values.append(twin)
        variables.append(Variable(twin, "v"))
        write(w, variables[-1].leaves)

    def each(function: Objective) -> list[Objective]:
        return [lambda _, __, batch, w=w: function(u.value, w, batch) for w in values]  # type: ignore[misc]

    def over(functions: Any) -> list[Objective]:
        return [one for function in functions for one in each(function)]

    with torch.no_grad():
        batch = None if problem.prepare is None else problem.prepare(u.value, None)
        first = torch.stack([problem.upper(u.value, w, batch).reshape(()) for w in values])
    t = first.max().clone().requires_grad_()
    sets: dict[str, Projection] = {}
    for i, name in enumerate(u.names):
        if (projection := u.projection(name)) is not None:
            sets[str(i)] = projection
    below: dict[str, Projection] = {}
    for i, name in enumerate(v.names * len(values)):
        if (projection := v.projection(name)) is not None:
            below[str(i)] = projection
    prepare = problem.prepare
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
        project_upper=sets or None,
        project_lower=below or None,
        prepare=None if prepare is None else lambda _, batches: prepare(u.value, batches),
    )

    def uppers() -> list[Tensor]:
        batch = None if problem.prepare is None else problem.prepare(u.value, None)
        return [problem.upper(u.value, w, batch).reshape(()) for w in values]

    gamma = STEADY * size / max(scales.g, size if problem.constrained_below else 0.0) ** 2
    moved = [leaf for variable in variables for leaf in variable.leaves]
    return Copies(rewritten, [*u.leaves, t], moved, variables, uppers, gamma, STEADY * size)


def solve_pessimistic(
    problem: Problem,
    method: Penalty,
    u: Any,
    v: Any,
    *,
    max_steps: int,
    tolerance: float | None = None,
    callbacks: Sequence[Callback] = (),
    starts: int = 1,
    seed: int | None = None,
    hypergradient: bool | None = None,
) -> Solution:
    """Solve a bilevel problem without data, where f counts at the worst of several lower solutions.

    It solves in rounds: it searches for lower solutions at u, keeps the best ones, minimises the largest f over them,
    and searches again, until it finds no others. u and v are updated in place; v ends at the worst of the kept lower
    solutions. `Solution.candidates` lists these, the worst first.

    Args:
        problem: The problem, without `trials` and `start_lower`.
        method: `Penalty` in its deterministic mode.
        u: The upper variable, without `Rows`.
        v: The lower variable.
        max_steps: Most steps of each round.
        tolerance: As in `solve`. Default: 1e-6.
        callbacks: Called in each round.
        starts: The number of starting points. The best end is kept; `Solution.candidates` lists the distinct ends.
        seed: The seed of the search and of the starting points. None (default): one from torch's global generator.
        hypergradient: As in `solve`.

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
    in_range("max_steps", max_steps, least=1, whole=True)
    in_range("starts", starts, least=1, whole=True)
    in_range("tolerance", tolerance, above=0)
    upper, lower = variables(problem, u, v)
    refuse(problem, upper)
    request = RunRequest(
        problem=problem,
        method=method,
        upper=upper,
        lower=lower,
        data=None,
        max_steps=max_steps,
        tolerance=tolerance or TOLERANCE,
        callbacks=callbacks,
        folder=None,
        every=None,
        resume=False,
        log_every=None,
        engine="auto",
        precision=None,
        accumulate=1,
        hypergradient=hypergradient,
        seed=seed,
    )
    return worst_case(request) if starts == 1 else run_starts(request, starts, worst_case)


def worst_case(request: RunRequest, paused: PausedRun | None = None) -> Solution:
    """Run in rounds with copies of v, one for each lower solution that was found.

    u and v are left at the end, v at the worst of the kept lower solutions.
    """
    problem, u, v, seed = request.problem, request.upper, request.lower, request.seed
    seed = drawn_seed(ProcessGroup.from_environment(v.device)) if seed is None else seed
    generator = torch.Generator().manual_seed(seed)
    first = copied(u), copied(v)
    solution: Solution | None = None
    kept: list[Tensor] = []
    try:
        for _ in range(ROUNDS):
            points = lower_solutions(problem, u, v, generator, kept)
            if solution is not None and (solution.interrupted or same(points, kept)):
                break
            made = copies(problem, u, v, points)
            both = variables(made.problem, made.u, made.v)
            method = inner(cast(Penalty, request.method), made)
            round_ = replace(
                request,
                problem=made.problem,
                method=method,
                upper=both[0],
                lower=both[1],
                seed=seed,
                start=1,  # a start that stays near where it is
            )
            solution = run_once(round_)
            kept = made.points()
        else:
            if solution is not None and not same(lower_solutions(problem, u, v, generator, kept), kept):
                solution = unsettled(solution)
    except BaseException:
        write_tensors(first[0], u)
        write_tensors(first[1], v)
        raise
    if solution is None:
        raise OptionError("solve_pessimistic needs a lower problem with a solution; none was found.")
    ends = []
    values = [copied(variable) for variable in made.variables]  # the first is v, which the others are put into
    for k in sorted(range(len(kept)), key=lambda k: made.uppers()[k].item()):  # the worst last: v stays there
        write_tensors(values[k], v)
        ends.append(candidate(solution, Derivatives(problem, u, v), request.start))
    return replace(solution, u=u.value, v=v.value, candidates=ends[::-1])


def unsettled(solution: Solution) -> Solution:
    """Return a last round that others would follow as stalled: it is stationary only for the kept lower solutions."""
    if solution.status is not Status.CONVERGED:
        return solution
    message = f"After {ROUNDS} rounds the search still finds other lower solutions."
    return replace(solution, status=Status.STALLED, message=message)


def inner(method: Penalty, made: Copies) -> Penalty:
    """Return the method for one round, with first prices for the copies unless some were given."""
    gamma = made.gamma if method.gamma is None else method.gamma
    gamma_h = made.gamma_h if method.gamma_h is None else method.gamma_h
    return replace(method, gamma=gamma, gamma_h=gamma_h)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of points are one, in any order."""
    return len(a) == len(b) and all(min((x - y).norm() for y in b) <= 10 * APART * (1 + x.norm()) for x in a)
