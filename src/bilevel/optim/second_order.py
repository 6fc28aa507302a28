"""Tests the end of an L-BFGS search by the second derivative A, in directions that its model may not know.

The directions p are conjugate, <p_i, A p_j> = 0. They span a Krylov space of H A that H e and H r begin, for the slope e
and a random r; H is the inverse curvature of L-BFGS. A p is a difference of slopes. On a face of the set, only moves
along it count.
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
# A direction is new if more than this share of it is left after the others were removed.
NEW = 1e-6


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
        count: The most evaluations. No more than the dimension of the face and one are made.
    """
    face, found = search.face, Exploration()
    r = face.along(random)
    count = min(count, 1 + int((face.along(torch.ones_like(random)) != 0).sum()))
    # r itself shows how the function varies; the other directions are conjugate.
    waiting = [r, face.direction, face.inverse(r)]
    known: list[tuple[Tensor, Tensor, float]] = []
    for k in range(count):
        if not waiting:
            break
        p = waiting.pop(0)
        size = p.norm().item()
        for other, bend, curvature in known:
            p = p - torch.dot(p, bend) / curvature * other
        if not p.norm().item() > NEW * size:
            continue
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
        if not abs(curvature) > CERTAIN * (p * error).norm().item() / abs(step):
            continue
        if curvature < 0:
            found.down = p if torch.dot(p, search.gradient).item() <= 0 else -p
            break
        found.pairs.append((step * p, step * bend))
        found.variation = max(found.variation, curvature * length**2 / 2)
        if k > 0:
            known.append((p, bend, curvature))
            waiting.append(face.inverse(bend))
            found.decrease += torch.dot(face.slope, p).item() ** 2 / curvature
    return found
