"""Cases whose lower level is not convex."""

from __future__ import annotations

import torch
from torch import Tensor

from bilevel_studies.classical.case import Case, Many


def _between(low: float, high: float) -> Many:
    return lambda u, v: [low - v[0], v[0] - high]


_UNIT = _between(-1.0, 1.0)


def _quartic(v: Tensor) -> Tensor:
    x = v[0]
    return 16 * x**4 + 2 * x**3 - 8 * x**2 - 1.5 * x + 0.5


def _mitsos(name: str, **options: object) -> Case:
    """One of the small cases of Mitsos and Barton: u and v between -1 and 1."""
    filled = {
        "paper": "mitsos06",
        "kind": "non-convex",
        "c": _UNIT,
        "low": -1.0,
        "high": 1.0,
        "u": [0.0],
        "v": [0.0],
    } | options
    return Case(name=f"mitsos-barton-{name}", **filled)  # type: ignore[arg-type]


CASES = [
    _mitsos(
        "3.8",
        f=lambda u, v: v[0] ** 2,
        g=lambda u, v: u[0] * v[0] + torch.exp(u[0]) * v[0],
        h=lambda u, v: [-v[0] - 0.1, v[0] - 0.1],
        best=0.0,
        at=([-0.567143], [0.0]),
    ),
    _mitsos(
        "3.9",
        f=lambda u, v: u[0],
        g=lambda u, v: v[0] ** 3,
        h=lambda u, v: [v[0] - u[0]],
        low=-10.0,
        high=10.0,
        best=-1.0,
        at=([-1.0], [-1.0]),
    ),
    _mitsos("3.10", f=lambda u, v: v[0], g=lambda u, v: u[0] * _quartic(v), low=0.1, best=0.5, at=([0.5], [0.5])),
    _mitsos(
        "3.11",
        f=lambda u, v: v[0],
        g=lambda u, v: u[0] * _quartic(v),
        c=_between(-0.8, 1.0),
        best=-0.8,
        at=([0.0], [-0.8]),
        note="At u = 0 every v solves the lower problem.",
    ),
    _mitsos(
        "3.12",
        f=lambda u, v: -u[0] + u[0] * v[0] + 10 * v[0] ** 2,
        g=lambda u, v: -u[0] * v[0] ** 2 + v[0] ** 4 / 2,
        best=0.0,
        at=([0.0], [0.0]),
    ),
    _mitsos(
        "3.13",
        f=lambda u, v: u[0] - v[0],
        g=lambda u, v: u[0] * v[0] ** 2 / 2 - u[0] ** 3 * v[0],
        best=-1.0,
        at=([0.0], [1.0]),
        note="At u = 0 every v solves the lower problem.",
    ),
    _mitsos(
        "3.14",
        f=lambda u, v: (u[0] - 0.25) ** 2 + v[0] ** 2,
        g=lambda u, v: v[0] ** 3 / 3 - u[0] * v[0],
        best=0.25,
        at=([0.25], [0.5]),
        note="Two lower minimisers tie there: v = 1/2 and v = -1.",
    ),
    _mitsos(
        "3.15",
        f=lambda u, v: u[0] + v[0],
        g=lambda u, v: u[0] * v[0] ** 2 / 2 - v[0] ** 3 / 3,
        best=0.0,
        at=([-1.0], [1.0]),
    ),
    _mitsos(
        "3.16",
        f=lambda u, v: 2 * u[0] + v[0],
        g=lambda u, v: -u[0] * v[0] ** 2 / 2 - v[0] ** 4 / 4,
        best=-2.0,
        at=([-1.0], [0.0]),
    ),
    _mitsos(
        "3.17",
        f=lambda u, v: (u[0] + 0.5) ** 2 + v[0] ** 2 / 2,
        g=lambda u, v: u[0] * v[0] ** 2 / 2 + v[0] ** 4 / 4,
        best=0.1875,
        at=([-0.25], [0.5]),
    ),
    _mitsos(
        "3.18",
        f=lambda u, v: -(u[0] ** 2) + v[0] ** 2,
        g=lambda u, v: u[0] * v[0] ** 2 - v[0] ** 4 / 2,
        best=-1.0,
        at=([1.0], [0.0]),
    ),
    _mitsos(
        "3.19",
        f=lambda u, v: u[0] * v[0] - v[0] + v[0] ** 2 / 2,
        g=lambda u, v: -u[0] * v[0] ** 2 + v[0] ** 4 / 2,
        best=-0.258,
        at=([0.1886], [0.4343]),
    ),
    _mitsos(
        "3.20",
        f=lambda u, v: (u[0] - 0.25) ** 2 + v[0] ** 2,
        g=lambda u, v: v[0] ** 3 / 3 - u[0] ** 2 * v[0],
        best=0.3125,
        at=([0.5], [0.5]),
        note="Two lower minimisers tie there: v = 1/2 and v = -1.",
    ),
    _mitsos(
        "3.21",
        f=lambda u, v: (u[0] + 0.6) ** 2 + v[0] ** 2,
        g=lambda u, v: (
            v[0] ** 4
            + 4 / 30 * (1 - u[0]) * v[0] ** 3
            + (-0.02 * u[0] ** 2 + 0.16 * u[0] - 0.4) * v[0] ** 2
            + (0.004 * u[0] ** 3 - 0.036 * u[0] ** 2 + 0.08 * u[0]) * v[0]
        ),
        best=0.2095,
        at=([-0.5545], [0.4554]),
    ),
    _mitsos(
        "3.24",
        f=lambda u, v: u[0] ** 2 - v[0],
        g=lambda u, v: ((v[0] - 1 - 0.1 * u[0]) ** 2 - 0.5 - 0.5 * u[0]) ** 2,
        c=_between(0.0, 3.0),
        low=0.0,
        u=[0.5],
        v=[1.0],
        best=-1.755,
        at=([0.2106], [1.799]),
    ),
    Case(
        name="kleniati-adjiman-2014-3",
        paper="kleniati14",
        kind="non-convex",
        f=lambda u, v: u[0] - v[0],
        g=lambda u, v: u[0] * v[0] ** 2 / 2 - u[0] * v[0] ** 3,
        c=_UNIT,
        low=-1.0,
        high=1.0,
        u=[0.5],
        v=[0.5],
        best=-1.0,
        at=([0.0], [1.0]),
        note="At u = 0 every v solves the lower problem.",
    ),
    Case(
        name="basblib-18v",
        paper="paulavicius17",
        kind="non-convex",
        f=lambda u, v: u[0] ** 2 + v[0] ** 2,
        g=lambda u, v: u[0] * v[0] ** 2 - v[0] ** 4 / 2,
        c=_UNIT,
        low=-1.0,
        high=1.0,
        u=[1.0],
        v=[0.5],
        best=0.25,
        at=([0.5], [0.0]),
        note="v = 0 and v = 1 tie there.",
    ),
    Case(
        name="basblib-13v",
        paper="paulavicius17",
        kind="non-convex",
        f=lambda u, v: u[0] + v[0],
        g=lambda u, v: u[0] * v[0] ** 2 / 2 - u[0] ** 3 * v[0],
        c=_UNIT,
        low=-1.0,
        high=1.0,
        u=[0.0],
        v=[0.0],
        best=-2.0,
        at=([-1.0], [-1.0]),
    ),
    Case(
        name="mirrlees-1999",
        paper="mirrlees99",
        kind="non-convex",
        f=lambda u, v: (u[0] - 2) ** 2 + (v[0] - 1) ** 2,
        g=lambda u, v: -u[0] * torch.exp(-((v[0] + 1) ** 2)) - torch.exp(-((v[0] - 1) ** 2)),
        c=_between(-2.0, 2.0),
        low=-4.0,
        high=4.0,
        u=[1.5],
        v=[0.5],
        best=1.0018,
        at=([1.0], [0.95753]),
        note="Two lower minimisers tie at u = 1. The first-order conditions give f = 0.002, which is not a solution.",
    ),
    Case(
        name="ye-zhu-2010-4.2",
        paper="ye10",
        kind="non-convex",
        f=lambda u, v: (u[0] - 1) ** 2 + v[0] ** 2,
        g=lambda u, v: v[0] ** 3 - 3 * v[0],
        c=lambda u, v: [u[0] - v[0]],
        low=-3.0,
        high=2.0,
        u=[-1.0],
        v=[-1.0],
        best=1.0,
        at=([1.0], [1.0]),
    ),
    Case(
        name="ye-zhu-2010-4.3",
        paper="ye10",
        kind="non-convex",
        f=lambda u, v: (u[0] - 0.5) ** 2 + (v[0] - 2) ** 2,
        g=lambda u, v: v[0] ** 3 - 3 * v[0],
        c=lambda u, v: [u[0] - v[0]],
        low=-3.0,
        high=2.0,
        u=[-1.0],
        v=[-1.0],
        best=1.0,
        at=([0.5], [1.0]),
    ),
    Case(
        name="lucchetti-1987",
        paper="lucchetti87",
        kind="non-convex",
        f=lambda u, v: (1 - u[0]) / 2 + u[0] * v[0],
        g=lambda u, v: (u[0] - 1) * v[0],
        c=_between(0.0, 1.0),
        low=0.0,
        high=1.0,
        u=[0.5],
        v=[0.5],
        best=0.0,
        at=([1.0], [0.0]),
        note="At u = 1 every v solves the lower problem.",
    ),
    Case(
        name="floudas-zlobec-1998",
        paper="floudas98",
        kind="non-convex",
        f=lambda u, v: u[0] ** 3 * v[0] + v[1],
        g=lambda u, v: -v[1],
        c=lambda u, v: [
            -v[0] - 1,
            -v[1],
            v[0] - 1,
            v[1] - 100,
            u[0] * v[0] - 10,
            v[0] ** 2 + u[0] * v[1] - 1,
        ],
        low=0.0,
        high=1.0,
        u=[1.0],
        v=[1.0, 1.0],
        best=1.0,
        at=([1.0], [0.0, 1.0]),
    ),
    Case(
        name="dempe-dutta-2012-2.4",
        paper="dempe12",
        kind="non-convex",
        f=lambda u, v: (u[0] - 1) ** 2 + v[0] ** 2,
        g=lambda u, v: u[0] ** 2 * v[0],
        c=lambda u, v: [v[0] ** 2],
        low=-2.0,
        high=2.0,
        u=[1.0],
        v=[1.0],
        best=0.0,
        at=([1.0], [0.0]),
        note="The lower set is the point 0, which has no multiplier unless u = 0.",
    ),
]
