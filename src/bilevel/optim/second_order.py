"""Tests the end of an L-BFGS search by the second derivative A, in directions that its model may not know.

The model knows pairs (s, A s). A direction p that is orthogonal to all A s is conjugate to all s, so it shows what the
search has not seen. Such parts of the slope e and of a random r take turns. A p is a difference of slopes; it joins the
pairs. On a face of the set, only moves along it count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel.optim.projected_lbfgs import ProjectedLBFGS

# The length of a difference of slopes, relative to the length over which the function is probably nonlinear.
DIFFERENCE = 1e-2
# A curvature counts if it is above this many times what the error of the slopes explains.
CERTAIN = 10.0
# A direction is new if more than this share of it is orthogonal to what is known.
NEW = 1e-6
TINY = 1e-300


@dataclass
class Exploration:
    """What the directions show.

    Fields:
        decrease: Twice the decrease that a Newton step in these directions promises. Default: 0.
        variation: The largest variation of the function over the length `reach` along a direction. Default: 0.
        down: A direction in which the function curves down. None (default): none was found.
        pairs: A step along each direction and the change of the slope, as L-BFGS learns them.
    """

    decrease: float = 0.0
    variation: float = 0.0
    down: Tensor | None = None
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def explore(
    search: ProjectedLBFGS,
    slope: Callable[[Tensor], Tensor | None],
    reach: Callable[[Tensor], float],
    error: Tensor,
    random: Tensor,
    count: int,
) -> Exploration:
    """Return what at most `count` evaluations of the slope show.

    Args:
        search: The search, at its end.
        slope: The slope at a point; None if there is none.
        reach: The length along a direction over which the function is probably nonlinear.
        error: The error of a slope.
        random: The vector r.
        count: The most evaluations.
    """
    face, found = search.face, Exploration()
    r, known = face.along(random), _span(face.bends)
    # r shows how the function varies, and the step of the model whether the model is right.
    waiting, idle = [r, face.direction], 0
    while count > 0 and idle < 2:
        first = bool(waiting)
        whole = waiting.pop(0) if first else r if idle or len(found.pairs) % 2 else face.slope
        p = whole if first else whole - known.T @ (known @ whole)
        if not p.norm().item() > NEW * whole.norm().item():
            idle += not first
            continue
        count, idle = count - 1, 0
        p = p / p.norm()
        length = reach(p)
        # At a bound, one of the two signs can leave the set.
        moves = (search.trial(sign * DIFFERENCE * length * p) - search.x for sign in (1, -1))
        move = max(moves, key=lambda move: abs(torch.dot(p, move).item()))
        step = torch.dot(p, move).item()
        if step == 0 or (new := slope(search.x + move)) is None:
            continue
        bend = face.along(new - search.gradient) / step
        curvature = torch.dot(p, bend).item()
        unsure, fall = CERTAIN * (p * error).norm().item(), torch.dot(face.slope, p).item()
        if not abs(curvature) > unsure / abs(step):
            if abs(fall) > unsure:
                found.decrease += fall * fall / max(unsure / abs(step), TINY)
            known = _span(torch.cat([known, p[None]]))
            continue
        if curvature < 0:
            found.down = p if torch.dot(p, search.gradient).item() <= 0 else -p
            break
        found.pairs.append((step * p, step * bend))
        found.variation = max(found.variation, curvature * length**2 / 2)
        known = _span(torch.cat([known, bend[None]]))
        if whole is not r or not first:
            found.decrease += fall * fall / curvature
    return found


def _span(rows: Tensor) -> Tensor:
    """Return an orthonormal basis, as rows, of the span of vectors, up to rounding."""
    if not len(rows):
        return rows
    _, sizes, basis = torch.linalg.svd(rows / rows.norm(dim=1, keepdim=True).clamp(min=TINY), full_matrices=False)
    kept: Tensor = basis[sizes > NEW * sizes[0]]
    return kept
