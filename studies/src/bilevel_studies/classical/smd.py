"""SMD1 to SMD6, the scalable problems of Sinha, Malo and Deb, with u = (x1, x2) and v = (y1, y2).

x1, x2 and y2 have one number each and y1 has two; SMD6 has two more in y1, whose sum of squares is in f but not in g.
The bounds of v are lower inequalities. At the solution f = g = 0, except for the kink of SMD4 in |x2|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel_studies.classical.case import Case, Function


def _smd(
    number: int,
    f: Function,
    g: Function,
    low: Sequence[float],
    high: Sequence[float],
    top: float,
    v: Sequence[float],
    at: Sequence[float],
    bottom: float = -5.0,
) -> Case:
    """Return a case. `top` and `bottom` are the bounds of x2; `low` and `high` are the bounds of v."""
    return Case(
        name=f"smd{number}",
        paper="sinha14",
        kind="smd",
        f=f,
        g=g,
        c=lambda u, v: [*(torch.as_tensor(low) - v), *(v - torch.as_tensor(high))],
        low=[-5.0, bottom],
        high=[10.0, top],
        u=[1.0, 0.5],
        v=v,
        best=0.0,
        at=([0.0, 0.0], at),
    )


def _y1(v: Tensor) -> Tensor:
    return torch.sum(v[:2] ** 2)


def _waves(v: Tensor) -> Tensor:
    """Rastrigin's function of y1."""
    return 2 + torch.sum(v[:2] ** 2 - torch.cos(2 * math.pi * v[:2]))


def _valley(v: Tensor) -> Tensor:
    """Rosenbrock's function of y1, without its factor of 100."""
    return (v[1] - v[0] ** 2) ** 2 + (v[0] - 1) ** 2


# A little less than pi/2, the pole of tan.
_TURN = 1.5
_WIDE = ([-5.0, -5.0], [10.0, 10.0])

CASES = [
    _smd(
        1,
        lambda u, v: u[0] ** 2 + _y1(v) + u[1] ** 2 + (u[1] - torch.tan(v[2])) ** 2,
        lambda u, v: u[0] ** 2 + _y1(v) + (u[1] - torch.tan(v[2])) ** 2,
        [*_WIDE[0], -_TURN],
        [*_WIDE[1], _TURN],
        10.0,
        [1.0, 1.0, 0.5],
        [0.0, 0.0, 0.0],
    ),
    _smd(
        2,
        lambda u, v: u[0] ** 2 - _y1(v) + u[1] ** 2 - (u[1] - torch.log(v[2])) ** 2,
        lambda u, v: u[0] ** 2 + _y1(v) + (u[1] - torch.log(v[2])) ** 2,
        [*_WIDE[0], 1e-3],
        [*_WIDE[1], math.e],
        1.0,
        [1.0, 1.0, 0.5],
        [0.0, 0.0, 1.0],
    ),
    _smd(
        3,
        lambda u, v: u[0] ** 2 + _y1(v) + u[1] ** 2 + (u[1] ** 2 - torch.tan(v[2])) ** 2,
        lambda u, v: u[0] ** 2 + _waves(v) + (u[1] ** 2 - torch.tan(v[2])) ** 2,
        [*_WIDE[0], -_TURN],
        [*_WIDE[1], _TURN],
        10.0,
        [1.0, 1.0, 0.5],
        [0.0, 0.0, 0.0],
    ),
    _smd(
        4,
        lambda u, v: u[0] ** 2 - _y1(v) + u[1] ** 2 - (u[1].abs() - torch.log(1 + v[2])) ** 2,
        lambda u, v: u[0] ** 2 + _waves(v) + (u[1].abs() - torch.log(1 + v[2])) ** 2,
        [*_WIDE[0], 0.0],
        [*_WIDE[1], math.e],
        1.0,
        [1.0, 1.0, 0.5],
        [0.0, 0.0, 0.0],
        -1.0,
    ),
    _smd(
        5,
        lambda u, v: u[0] ** 2 - _valley(v) + u[1] ** 2 - (u[1].abs() - v[2] ** 2) ** 2,
        lambda u, v: u[0] ** 2 + _valley(v) + (u[1].abs() - v[2] ** 2) ** 2,
        [*_WIDE[0], -5.0],
        [*_WIDE[1], 10.0],
        10.0,
        [0.5, 0.5, 0.5],
        [1.0, 1.0, 0.0],
    ),
    _smd(
        6,
        lambda u, v: u[0] ** 2 - _y1(v) + torch.sum(v[2:4] ** 2) + u[1] ** 2 - (u[1] - v[4]) ** 2,
        lambda u, v: u[0] ** 2 + _y1(v) + (v[3] - v[2]) ** 2 + (u[1] - v[4]) ** 2,
        [-5.0] * 5,
        [10.0] * 5,
        10.0,
        [1.0, 1.0, 1.0, 0.5, 0.5],
        [0.0] * 5,
    ),
]
