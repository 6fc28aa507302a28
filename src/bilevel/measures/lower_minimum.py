"""Minimises g(u, .) for a fixed u, without data, at the start of a run and to test its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bilevel._util.tensor_lists import norm
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.optim.lbfgs import LBFGS

ITERATIONS = 50
# The distances, relative to 1 + |v|, by which v is moved in both directions before g is minimised again.
PROBES = (1e-3, 0.1, 1.0)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all tensors as one vector."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


@torch.no_grad()
def write(vector: Tensor, leaves: Sequence[Tensor]) -> None:
    """Copy the parts of a vector into the leaves."""
    for leaf, part in zip(leaves, torch.split(vector, [leaf.numel() for leaf in leaves]), strict=True):
        leaf.copy_(part.reshape(leaf.shape))


def lower_value(d: PenalisedObjective, v: Tensor) -> tuple[float, Tensor, None]:
    """Write v to the leaves; return g and grad_v g there."""
    write(v, d.v.leaves)
    g, s = d.slope(d.prepare([(None, None)], graph=False))
    return g.sum().item(), flatten(s), None


def minimise(d: PenalisedObjective, tolerance: float) -> float:
    """Minimise g from the present v in a few iterations; leave v at the best point and return g there."""
    start = flatten(d.v.leaves)
    if d.v.projected:
        return _minimise_projected(d, start, tolerance)
    value, slope, _ = lower_value(d, start)
    first = min(1.0, (1 + start.norm().item()) * 0.1 / max(slope.norm().item(), 1e-300))
    search = LBFGS(start, value, slope, metric=torch.full_like(start, first))
    enough = 1e-3 * tolerance * slope.norm().item()
    far = 1e6 * (1 + start.norm().item())
    for _ in range(ITERATIONS):
        if search.gradient.norm().item() <= enough or not search.iterate(lambda v: lower_value(d, v)):
            break
        if not search.x.norm().item() <= far:  # g has no minimum this way
            break
    write(search.x, d.v.leaves)
    return search.value


def lower_point(
    d: PenalisedObjective,
    generator: torch.Generator,
    tolerance: float,
    curvature: float = 0.0,
    descend: Callable[[], float] | None = None,
    first: Tensor | None = None,
    along: Sequence[Tensor] = (),
) -> Tensor | None:
    """Move v away and minimise g again; return a v with a smaller g than at the present point, or None.

    One minimisation starts from `first`, the v that the run began with, if it is given, and two from far along each
    direction of `along`, in which g looks flat: v can lie on a plateau of g. `descend` minimises g from the
    present v and returns its value; default: `minimise`. A decrease counts only if rounding, or an inexact minimum,
    cannot explain it. `curvature` is |g_vv|; with 0, a move of v by a tenth shows how much g varies.
    """
    descend = descend or partial(minimise, d, tolerance)
    held = flatten(d.v.leaves)
    at, slope = d.slope(d.prepare([(None, None)], graph=False))
    g = at.sum().item()
    best, lowest = None, g
    size, eps = 1 + held.norm().item(), torch.finfo(held.dtype).eps
    noise = max(1e-9, 100 * eps, tolerance)
    scale = 1e-6 * curvature * size**2
    if curvature == 0:  # numbers of v can have different units
        signs = torch.randn(held.shape, generator=generator, dtype=held.dtype).sign().to(held)
        scale = abs(lower_value(d, held * (1 + 0.1 * signs))[0] - g)
    margin = noise * (abs(g) + scale) + 1e-2 * size * norm(d.residual(slope)).item()

    def try_from(v: Tensor) -> None:
        nonlocal best, lowest
        write(v, d.v.leaves)
        value = descend()
        if value < lowest - margin:
            best, lowest = flatten(d.v.leaves), value

    if first is not None:
        try_from(first)
    for direction in along:
        for sign in (1, -1):
            try_from(held + sign * size * direction / direction.norm())
    for reach in PROBES:
        direction = torch.randn(held.shape, generator=generator, dtype=held.dtype).to(held)
        direction *= reach * size / direction.norm()
        for sign in (1, -1):
            try_from(held + sign * direction)
        if best is not None:
            break
    write(held, d.v.leaves)
    return best


def _minimise_projected(d: PenalisedObjective, x: Tensor, tolerance: float) -> float:
    """Minimise g over the set of `project_lower`, by projected gradients with Barzilai-Borwein steps."""

    def projected(point: Tensor) -> Tensor:
        write(point, d.v.leaves)
        d.v.project()
        return flatten(d.v.leaves)

    x = projected(x)
    value, slope, _ = lower_value(d, x)
    t = 0.1 * (1 + x.norm().item()) / max(slope.norm().item(), 1e-300)
    for _ in range(4 * ITERATIONS):
        for _ in range(40):
            trial = projected(x - t * slope)
            move = trial - x
            square = torch.dot(move, move).item()
            new_value, new_slope, _ = lower_value(d, trial)
            if new_value <= value - 1e-4 / t * square:
                break
            t /= 2
        else:
            break
        bend = torch.dot(move, new_slope - slope).item()
        x, value, slope = trial, new_value, new_slope
        if square**0.5 <= 1e-2 * tolerance * (1 + x.norm().item()):
            break
        t = square / bend if bend > 0 else 2 * t
    write(x, d.v.leaves)
    return value
