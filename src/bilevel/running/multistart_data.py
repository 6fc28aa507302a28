"""Several starting points for a problem with data: at once over a trial dimension, or one after another.

The first start is the point that was passed; in the others u is drawn as without data (see `starting_points`), and each
tensor of v moves by a normal draw of its own root mean square. All run for the whole budget.

At once means one run of a problem with k trials, `torch.func.vmap` of the user's functions over copies of u and v. It
is done where that is exact: constraints, projections, episodes, Rows, ranks, dropout and what else cannot be mapped
are not, and neither are functions whose values or slopes on the first batches differ, for any start, from those of the
function itself. Everything else runs one after another.

The ends are ranked by their certificates, on the same batches (see `starts.ranked`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bilevel._util.nested import Pair
from bilevel._util.random_state import undisturbed
from bilevel._util.tensor_lists import gradient
from bilevel.batches.sources import Sources
from bilevel.derivatives.penalised_objective import Derivatives
from bilevel.derivatives.prices import Prices
from bilevel.distributed.process_group import ProcessGroup
from bilevel.errors import BilevelError
from bilevel.measures.certificate import BATCHES, certify
from bilevel.problem.problem import Objective, Problem
from bilevel.problem.variables import Variable
from bilevel.results import Candidate, Certificate, Solution, Status
from bilevel.running.multistart import chosen, drawn_seed
from bilevel.running.starting_points import POOL, Scatter, copied, place

AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far a mapped function may be from the function itself, relative to its size; elsewhere it is not tried."""
Points = list[tuple[list[Tensor], list[Tensor]]]


def several_with_data(order: Any, folder: Path | None, seed: int | None, count: int) -> Solution:
    """The best of `count` starts; u and v are left at its end."""
    ranks = ProcessGroup.from_environment(order.lower.device)
    seed = drawn_seed(ranks) if seed is None else seed

    def fits() -> bool:
        finite = _finite(order, seed)
        return finite if ranks is None else all(ranks.all_gather_object(finite))

    points = spread_points(order.upper, order.lower, count, seed, fits)
    found = _at_once(order, folder, seed, points) if ranks is None else None
    if found is None:
        found = _in_turn(order, folder, seed, points, ranks)
    if ranks is not None:
        # Each rank has drawn its own random numbers, or batches; they are to keep the same start.
        values = ranks.broadcast_object([(c.upper, c.lower) for _, c in found])
        found = [(s, replace(c, upper=f, lower=g)) for (s, c), (f, g) in zip(found, values, strict=True)]
    best = chosen([s for s, _ in found], [c for _, c in found])
    for variable, value in zip((order.upper, order.lower), (best.candidates[0].u, best.candidates[0].v), strict=True):
        place(value, variable)
    return best


def spread_points(u: Variable, v: Variable, count: int, seed: int, fits: Callable[[], bool] = lambda: True) -> Points:
    """The present point, and others around it that fit; fewer than `count` where too few do."""
    generator = torch.Generator().manual_seed(seed)
    first = copied(u), copied(v)
    around = Scatter(u, generator), Scatter(v, generator)
    around[1].scales = _own_sizes([leaf.detach() for leaf, _ in around[1].leaves])
    points = [first]
    for _ in range(POOL * (count - 1)):
        if len(points) == count:
            break
        for scatter in around:
            scatter.move()
        if fits():
            points.append((copied(u), copied(v)))
        for variable, value in zip((u, v), first, strict=True):
            place(value, variable)
    return points


def _own_sizes(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The root mean square of each tensor; where it is zero that of all, or one."""
    sizes = [leaf.square().mean().sqrt() for leaf in leaves]
    every = torch.cat([leaf.reshape(-1) for leaf in leaves]).square().mean().sqrt()
    every = torch.where(every > 0, every, torch.ones_like(every))
    return [torch.where(size > 0, size, every.to(size)) for size in sizes]


def _finite(order: Any, seed: int) -> bool:
    """Whether f and g are finite at the present point, on the first batches."""
    d = Derivatives(order.problem, order.upper, order.lower)
    upper, lower, _ = Sources(order.data, seed, d.v.device).sample(1)
    with torch.no_grad(), undisturbed(d.v.device, d.v.buffers() + d.u.buffers()):
        pair = d.prepare([(upper[0], lower[0])], graph=False)[0]
        finite = torch.isfinite(d.upper(pair[0])) & torch.isfinite(d.lower(pair[1]))
    return bool(finite)


# -- one after another --------------------------------------------------------------------------------------------


def _in_turn(
    order: Any, folder: Path | None, seed: int, points: Points, ranks: ProcessGroup | None
) -> list[tuple[Solution, Candidate]]:
    found = []
    sources = Sources(order.data, seed, order.lower.device)
    for k, point in enumerate(points):
        for variable, value in zip((order.upper, order.lower), point, strict=True):
            place(value, variable)
        solution = order.run(None if folder is None else folder / f"start-{k}", seed + k, k)
        found.append((solution, _candidate(order, sources, solution, k)))
        # Ctrl-C may reach one rank after the run of all has ended.
        if solution.interrupted if ranks is None else any(ranks.all_gather_object(solution.interrupted)):
            break
    return found


def _candidate(order: Any, sources: Sources, solution: Solution, start: int) -> Candidate:
    """The end of a run, at the present u and v, with f and g as means over the batches of a certificate."""
    d = Derivatives(order.problem, order.upper, order.lower)
    upper, lower, _ = sources.sample(BATCHES)
    with torch.no_grad(), undisturbed(d.v.device, d.v.buffers() + d.u.buffers()):
        pairs: list[Pair] = [(x, y) for x, y in zip(_cycled(upper, lower), _cycled(lower, upper), strict=True)]
        made = [d.prepare([pair], graph=False)[0] for pair in pairs]
        f, g = (
            torch.stack([function(pair[i]) for pair in made]).mean().item()
            for i, function in enumerate((d.upper, d.lower))
        )
    return Candidate(copied(d.u), copied(d.v), f, g, solution.status, solution.certificate, solution.multipliers, start)


def _cycled(items: list[Any], others: list[Any]) -> list[Any]:
    """As many as the longer of the two lists has."""
    return [items[i % len(items)] for i in range(max(len(items), len(others)))]


# -- at once ------------------------------------------------------------------------------------------------------


class _Both(nn.Module):
    """u and v as the modules of one, so that their parameters can be replaced in a call."""

    def __init__(self, u: Any, v: Any) -> None:
        super().__init__()
        self.u, self.v = u, v

    def forward(self, function: Callable[[Any, Any], Tensor], u: Any, v: Any) -> Tensor:
        return function(self.u if u is None else u, self.v if v is None else v)


@dataclass
class Mapped:
    """A problem over k copies of u and v, each a list of tensors with a leading dimension."""

    problem: Problem
    u: list[Tensor]
    v: list[Tensor]


def mapped(problem: Problem, u: Variable, v: Variable, points: Points) -> Mapped:
    """The problem with one trial for each point."""
    both = _Both(*(x.value if x.modules else None for x in (u, v)))

    def each(function: Objective) -> Objective:
        def objective(us: list[Tensor], vs: list[Tensor], batch: Any) -> Tensor:
            def one(u_leaves: list[Tensor], v_leaves: list[Tensor]) -> Tensor:
                replaced = {f"u.{name}": x for name, x in zip(u.names, u_leaves, strict=True) if u.modules}
                replaced |= {f"v.{name}": x for name, x in zip(v.names, v_leaves, strict=True) if v.modules}
                given = _like(u, u_leaves), _like(v, v_leaves)
                arguments = (lambda a, b: function(a, b, batch).reshape(()), *given)
                found: Tensor = functional_call(both, replaced, arguments)
                return found

            return vmap(one, randomness="error")(us, vs)

        return objective

    stacked = []
    for i, variable in enumerate((u, v)):
        named = list(variable.tensors())
        where = [named.index(name) for name in variable.names]
        stacked.append([torch.stack([point[i][k] for point in points]).requires_grad_() for k in where])
    return Mapped(Problem(each(problem.upper), each(problem.lower), trials=len(points)), *stacked)


def _like(variable: Variable, leaves: list[Tensor]) -> Any:
    """What the user's function receives; None for a module, whose parameters are replaced."""
    match variable.value:
        case nn.Module():
            return None
        case Tensor():
            return leaves[0]
        case dict():
            return dict(zip(variable.value, leaves, strict=True))
        case _:
            return type(variable.value)(leaves)


def exact(order: Any, made: Mapped, points: Points, pair: Pair) -> bool:
    """Whether the mapped objectives have the values and slopes of the user's own at every point."""
    u, v = order.upper, order.lower
    tolerance = AGREEMENT[v.dtype]
    for i, name in enumerate(("upper", "lower")):
        together = getattr(made.problem, name)(made.u, made.v, pair[i])
        slopes = gradient(together, [*made.u, *made.v], cotangent=[torch.ones_like(together)])
        for k, point in enumerate(points):
            for variable, value in zip((u, v), point, strict=True):
                place(value, variable)
            alone = getattr(order.problem, name)(u.value, v.value, pair[i]).reshape(())
            own = gradient(alone, [*u.leaves, *v.leaves])
            for a, b in zip([together[k], *(s[k] for s in slopes)], [alone, *own], strict=True):
                if not (a - b).detach().abs().amax() <= tolerance * (1 + b.detach().abs().amax()):
                    return False
    return True


def _at_once(order: Any, folder: Path | None, seed: int, points: Points) -> list[tuple[Solution, Candidate]] | None:
    """One run with a trial for each point; None where it would not be exact, or diverged."""
    u, v, problem = order.upper, order.lower, order.problem
    fixed = (
        "equalities",
        "inequalities",
        "lower_equalities",
        "lower_inequalities",
        "project_upper",
        "project_lower",
        "prepare",
        "start_lower",
    )
    if any(getattr(problem, name) for name in fixed) or u.rows or u.shards or v.shards:
        return None
    if v.dtype not in AGREEMENT:
        return None
    sources = Sources(order.data, seed, v.device)
    first = copied(u), copied(v)
    try:
        with undisturbed(v.device, v.buffers() + u.buffers()):
            upper, lower, _ = sources.sample(1)
            made = mapped(problem, u, v, points)
            if not exact(order, made, points, (upper[0], lower[0])):
                return None
    except BilevelError:
        raise
    except Exception:  # what vmap cannot map fails in many ways; one after another, it does not
        return None
    finally:
        for variable, value in zip((u, v), first, strict=True):
            place(value, variable)
    trial = replace(order, problem=made.problem, upper=Variable(made.u, "u"), lower=Variable(made.v, "v"))
    solution = trial.run(None if folder is None else folder / "together", seed, 0)
    if solution.status is Status.DIVERGED:
        return None
    return [_trial(order, sources, solution, made, k) for k in range(len(points))]


@dataclass
class _End:
    """The end of one trial, as a certificate asks for it."""

    derivatives: Derivatives
    nu: list[Tensor]
    sizes: tuple[float, float, float, float]

    def prices(self) -> Prices:
        """nu + gamma s is all that was paid, whatever its parts."""
        return Prices(torch.zeros((), dtype=self.nu[0].dtype, device=self.nu[0].device), self.nu)

    def lam(self) -> Tensor:
        return torch.zeros_like(self.prices().gamma)

    def scales(self) -> tuple[float, float, float, float]:
        return self.sizes

    def episode(self) -> None:
        return None


def _trial(order: Any, sources: Sources, solution: Solution, made: Mapped, k: int) -> tuple[Solution, Candidate]:
    """What one trial ended as: u and v are left there."""
    for variable, stacked in zip((order.upper, order.lower), (made.u, made.v), strict=True):
        with torch.no_grad():
            for leaf, values in zip(variable.leaves, stacked, strict=True):
                leaf.copy_(values[k])
    joint, count = solution.certificate, math.sqrt(len(made.u[0]))
    d = Derivatives(order.problem, order.upper, order.lower)
    scale = joint.scale / count
    sizes = (scale, scale, joint.lower_scale / count, 1.0)  # those of all trials together
    end = _End(d, [n[k] for n in solution.multipliers["nu"]], sizes)
    certificate, multipliers = certify(end, sources, minimiser=None, hypergradient=order.hypergradient)
    certificate = replace(certificate, damping=joint.damping)
    status = _judged(solution.status, certificate, order.tolerance)
    own = replace(
        solution,
        u=order.upper.value,
        v=order.lower.value,
        status=status,
        certificate=certificate,
        multipliers=multipliers,
        adjoint=[-n for n in multipliers["nu"]],
    )
    return own, _candidate(order, sources, own, k)


def _judged(status: Status, certificate: Certificate, tolerance: float | None) -> Status:
    if tolerance is not None and certificate.passes(tolerance):
        return Status.CONVERGED
    return Status.MAX_STEPS if status is Status.CONVERGED else status
