"""Cases whose lower level is convex: quadratic, or smooth with a convex set."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Case, Many


def _square(x: Tensor) -> Tensor:
    return torch.sum(x * x)


def _outrata(u: Tensor, v: Tensor) -> list[Tensor]:
    """The polygon of Outrata's examples."""
    return [-0.333 * v[0] + v[1] - 2, v[0] - 0.333 * v[1] - 2, -v[0], -v[1]]


def _target(v: Tensor) -> Tensor:
    return ((v[0] - 3) ** 2 + (v[1] - 4) ** 2) / 2


def _form(a: float, b: float, d: float, v: Tensor) -> Tensor:
    """(a v0^2 + 2 b v0 v1 + d v1^2) / 2."""
    return (a * v[0] ** 2 + 2 * b * v[0] * v[1] + d * v[1] ** 2) / 2


def _aiyoshi(u: Tensor, v: Tensor) -> list[Tensor]:
    return [2 * v[0] - u[0] + 10, 2 * v[1] - u[1] + 10, -v[0] - 10, -v[1] - 10, v[0] - 20, v[1] - 20]


def _bard(u: Tensor, v: Tensor) -> list[Tensor]:
    return [-3 * u[0] + v[0] + 3, u[0] - v[0] / 2 - 4, u[0] + v[0] - 7, -v[0]]


def _square_box(low: float, high: float) -> Many:
    return lambda u, v: [low - v[0], low - v[1], v[0] - high, v[1] - high]


def _vicente(u: Tensor, v: Tensor) -> list[Tensor]:
    return [
        u[0] - v[0] - 1, u[1] - v[1] - 1, 1 - u[0] - v[0], 1 - u[1] - v[1], u[0] + v[0] - 1.5, u[1] + v[1] - 3,
    ]  # fmt: skip


CASES = [
    Case(
        name="clark-westerberg-1990-a", paper="clark90", kind="quadratic",
        f=lambda u, v: (u[0] - 3) ** 2 + (v[0] - 2) ** 2, g=lambda u, v: (v[0] - 5) ** 2,
        c=lambda u, v: [-2 * u[0] + v[0] - 1, u[0] - 2 * v[0] + 2, u[0] + 2 * v[0] - 14],
        low=0.0, high=8.0, u=[1.0], v=[1.0], best=5.0, at=([1.0], [3.0]),
        note="A second local solution has f = 9.",
    ),
    Case(
        name="gumus-floudas-2001-4", paper="gumus01", kind="quadratic",
        f=lambda u, v: (u[0] - 3) ** 2 + (v[0] - 2) ** 2, g=lambda u, v: (v[0] - 5) ** 2,
        c=lambda u, v: [-v[0], v[0] - 10],
        h=lambda u, v: [-2 * u[0] + v[0] - 1, u[0] - 2 * v[0] + 2, u[0] + 2 * v[0] - 14],
        low=0.0, high=8.0, u=[1.0], v=[1.0], best=9.0, at=([3.0], [5.0]),
        note="The same with the constraints at the upper level.",
    ),
    Case(
        name="bard-1988-1", paper="bard88", kind="quadratic",
        f=lambda u, v: (u[0] - 5) ** 2 + (2 * v[0] + 1) ** 2, g=lambda u, v: (v[0] - 1) ** 2 - 1.5 * u[0] * v[0],
        c=_bard, low=0.0, high=10.0, u=[4.0], v=[0.0], best=17.0, at=([1.0], [0.0]),
    ),
    Case(
        name="bard-1998", paper="bard98", kind="linear",
        f=lambda u, v: _square(v - u + 20), g=lambda u, v: 2 * u.sum() - 3 * v.sum() - 60,
        c=lambda u, v: [u[0] + u[1] + v[0] - 2 * v[1] - 40, *_aiyoshi(u, v)],
        low=0.0, high=50.0, u=[1.0, 1.0], v=[1.0, 1.0], best=0.0, at=([25.0, 30.0], [5.0, 10.0]),
        note="The lower level is linear, f quadratic.",
    ),
    Case(
        name="aiyoshi-shimizu-1984-2", paper="aiyoshi84", kind="quadratic",
        f=lambda u, v: 2 * u.sum() - 3 * v.sum() - 60, g=lambda u, v: _square(v - u + 20),
        c=_aiyoshi, h=lambda u, v: [u[0] + u[1] + v[0] - 2 * v[1] - 40],
        low=0.0, high=50.0, u=[10.0, 10.0], v=[20.0, 20.0], best=0.0, at=([0.0, 30.0], [-10.0, 10.0]),
        note="The paper's value is 5; (0, 30) with v = (-10, 10) has 0.",
    ),
    Case(
        name="floudas-1999-9.3.7", paper="floudas99", kind="quadratic",
        f=lambda u, v: 2 * u.sum() - 3 * v.sum() - 60, g=lambda u, v: _square(v - u + 20),
        c=lambda u, v: [u[0] + u[1] + v[0] - 2 * v[1] - 40, *_aiyoshi(u, v)],
        low=0.0, high=50.0, u=[10.0, 10.0], v=[20.0, 20.0], best=0.0, at=([0.0, 0.0], [-10.0, -10.0]),
    ),
    Case(
        name="shimizu-aiyoshi-1981-1", paper="shimizu81", kind="quadratic",
        f=lambda u, v: u[0] ** 2 + (v[0] - 10) ** 2, g=lambda u, v: (u[0] + 2 * v[0] - 30) ** 2,
        c=lambda u, v: [u[0] + v[0] - 20, v[0] - 20, -v[0]], h=lambda u, v: [v[0] - u[0]],
        low=0.0, high=15.0, u=[1.0], v=[1.0], best=100.0, at=([10.0], [10.0]),
    ),
    Case(
        name="shimizu-aiyoshi-1981-2", paper="shimizu81", kind="quadratic",
        f=lambda u, v: (u[0] - 30) ** 2 + (u[1] - 20) ** 2 - 20 * v[0] + 20 * v[1], g=lambda u, v: _square(u - v),
        c=_square_box(0.0, 10.0), h=lambda u, v: [30 - u[0] - 2 * u[1], u[0] + u[1] - 25, u[1] - 15],
        low=0.0, high=50.0, u=[1.0, 1.0], v=[1.0, 1.0], best=225.0, at=([20.0, 5.0], [10.0, 5.0]),
    ),
    Case(
        name="calamai-vicente-1994-b", paper="calamai94", kind="quadratic",
        f=lambda u, v: _square(u - 1) / 2 + _square(v) / 2,
        g=lambda u, v: _square(v) / 2 - u[0] * v[0] - u[1] * v[1], c=_vicente,
        low=0.0, high=3.0, u=[1.0, 1.0, 1.0, 1.0], v=[1.0, 1.0], best=0.3125,
        at=([1.25, 0.5, 1.0, 1.0], [0.25, 0.5]),
    ),
    Case(
        name="de-silva-1978", paper="desilva78", kind="quadratic",
        f=lambda u, v: _square(u - 1) + _square(v) - 2, g=lambda u, v: _square(v - u), c=_square_box(0.5, 1.5),
        u=[0.0, 0.0], v=[1.0, 1.0], best=-1.0, at=([0.5, 0.5], [0.5, 0.5]),
        note="Both constraints change there: no strict complementarity.",
    ),
    Case(
        name="falk-liu-1995", paper="falk95", kind="quadratic",
        f=lambda u, v: u[0] ** 2 - 3 * u[0] + u[1] ** 2 - 3 * u[1] + _square(v), g=lambda u, v: _square(v - u),
        c=_square_box(0.5, 1.5), u=[0.0, 0.0], v=[1.0, 1.0], best=-2.25, at=([0.75, 0.75], [0.75, 0.75]),
        note="f = 2 u^2 - 3 u in each coordinate where v = u: -9/8 at 3/4.",
    ),
    Case(
        name="allende-still-2013", paper="allende13", kind="quadratic",
        f=lambda u, v: _square(u) - 2 * u.sum() + _square(v), g=lambda u, v: _square(v) - 2 * torch.dot(u, v),
        c=lambda u, v: [(v[0] - 1) ** 2 - 0.25, (v[1] - 1) ** 2 - 0.25], h=lambda u, v: [-v[0], -v[1]],
        low=0.0, high=2.0, u=[0.0, 0.0], v=[0.0, 0.0], best=-1.0, at=([0.5, 0.5], [0.5, 0.5]),
    ),
    Case(
        name="outrata-1990-1a", paper="outrata90", kind="quadratic",
        f=lambda u, v: 0.1 * _square(u) + _target(v) - 12.5, g=lambda u, v: _form(1, -2, 5, v) - torch.dot(u, v),
        c=_outrata, u=[0.0, 0.0], v=[3.0, 3.0], best=-8.92, at=([0.97, 3.14], [2.6, 1.8]),
    ),
    Case(
        name="outrata-1990-1b", paper="outrata90", kind="quadratic",
        f=lambda u, v: _square(u) + _target(v) - 12.5, g=lambda u, v: _form(1, -2, 5, v) - torch.dot(u, v),
        c=_outrata, u=[0.0, 0.0], v=[3.0, 3.0], best=-7.56, at=([0.28, 0.48], [2.34, 1.03]),
    ),
    Case(
        name="outrata-1990-1c", paper="outrata90", kind="quadratic",
        f=lambda u, v: _target(v) - 12.5, g=lambda u, v: _form(1, 3, 10, v) - torch.dot(u, v),
        c=_outrata, u=[0.0, 0.0], v=[3.0, 3.0], best=-12.0, at=([20.26, 42.81], [3.0, 3.0]),
    ),
    Case(
        name="outrata-1990-1d", paper="outrata90", kind="quadratic",
        f=lambda u, v: 0.1 * _square(u) + _target(v) - 12.5, g=lambda u, v: _form(1, 3, 10, v) - torch.dot(u, v),
        c=_outrata, u=[6.0, -3.0], v=[3.0, 3.0], best=-3.60, at=([2.0, 0.06], [2.0, 0.0]),
    ),
    Case(
        name="outrata-1990-2a", paper="outrata90", kind="quadratic",
        f=lambda u, v: _target(v), g=lambda u, v: _square(v) / 2 - (3 + 1.333 * u[0]) * v[0] - u[0] * v[1],
        c=_outrata, low=0.0, u=[1.0], v=[1.0, 1.0], best=0.5, at=([2.07], [3.0, 3.0]),
    ),
    Case(
        name="outrata-1990-2c", paper="outrata90", kind="quadratic",
        f=lambda u, v: _target(v),
        g=lambda u, v: ((1 + u[0]) * v[0] ** 2 + (1 + 0.1 * u[0]) * v[1] ** 2) / 2
        - (3 + 1.333 * u[0]) * v[0] - u[0] * v[1],
        c=_outrata, low=0.0, u=[0.0], v=[0.0, 0.0], best=1.860, at=([3.456], [1.707, 2.569]),
    ),
    Case(
        name="outrata-zowe-1993-2", paper="outrata93", kind="convex",
        f=lambda u, v: _target(v),
        g=lambda u, v: ((1 + 0.2 * u[0]) * v[0] ** 2 + (1 + 0.1 * u[0]) * v[1] ** 2) / 2
        - (3 + 1.333 * u[0]) * v[0] - u[0] * v[1],
        c=lambda u, v: [-0.333 * v[0] + v[1] + 0.1 * u[0] - 1, _square(v) - 0.1 * u[0] - 9, -v[0], -v[1]],
        low=0.0, u=[0.0], v=[0.0, 0.0], best=3.208, at=([4.06095], [2.68227, 1.48710]),
    ),
    Case(
        name="tuy-2007", paper="tuy07", kind="quadratic",
        f=lambda u, v: u[0] ** 2 + v[0] ** 2, g=lambda u, v: -v[0],
        c=lambda u, v: [3 * u[0] + v[0] - 15, u[0] + v[0] - 7, u[0] + 3 * v[0] - 15],
        h=lambda u, v: [-v[0]], low=0.0, high=5.0, u=[5.0], v=[0.0], best=22.5, at=([4.5], [1.5]),
    ),
    Case(
        name="henderson-quandt-1958", paper="henderson58", kind="quadratic",
        f=lambda u, v: ((u[0] + v[0]) / 2 - 95) * u[0], g=lambda u, v: (v[0] + u[0] / 2 - 100) * v[0],
        c=lambda u, v: [-v[0]], low=0.0, high=200.0, u=[0.0], v=[0.0], best=-9800 / 3, at=([280 / 3], [80 / 3]),
    ),
    Case(
        name="lampariello-2017-3.1", paper="lampariello17", kind="linear",
        f=lambda u, v: u[0] ** 2 + v[0] ** 2, g=lambda u, v: v[0], c=lambda u, v: [1 - u[0] - v[0]],
        low=1.0, u=[2.0], v=[1.0], best=1.0, at=([1.0], [0.0]),
    ),
    Case(
        name="lampariello-2017-3.3", paper="lampariello17", kind="linear",
        f=lambda u, v: u[0] ** 2 + (v[0] + v[1]) ** 2, g=lambda u, v: v[0],
        c=lambda u, v: [1 - u[0] - v[0] - v[1], -v[0], -v[1]],
        low=0.5, u=[1.0], v=[1.0, 1.0], best=0.5, at=([0.5], [0.0, 0.5]),
        note="The lower solution is a half-line.",
    ),
    Case(
        name="lampariello-2017-3.5", paper="lampariello17", kind="linear",
        f=lambda u, v: u[0] ** 2 + v[0] ** 2, g=lambda u, v: -v[0],
        c=lambda u, v: [2 * u[0] + v[0] - 2, -v[0], v[0] - 1],
        low=-1.0, high=1.0, u=[1.0], v=[1.0], best=0.8, at=([0.8], [0.4]),
    ),
    Case(
        name="muu-quy-2003-1", paper="muu03", kind="quadratic",
        f=lambda u, v: u[0] ** 2 - 4 * u[0] + _square(v),
        g=lambda u, v: v[0] ** 2 + v[1] ** 2 / 2 + v[0] * v[1] + (1 - 3 * u[0]) * v[0] + (1 + u[0]) * v[1],
        c=lambda u, v: [2 * v[0] + v[1] - 2 * u[0] - 1, -v[0], -v[1]],
        low=0.0, high=2.0, u=[2.0], v=[0.0, 0.0], best=-2.0769, at=([0.8462], [0.7692, 0.0]),
    ),
    Case(
        name="muu-quy-2003-2", paper="muu03", kind="quadratic",
        f=lambda u, v: -7 * u[0] + 4 * u[1] + v[0] ** 2 + v[2] ** 2 - v[0] * v[2] - 4 * v[1],
        g=lambda u, v: v[0] ** 2 + v[1] ** 2 / 2 + v[2] ** 2 / 2 + v[0] * v[1] + (1 - 3 * u[0]) * v[0]
        + (1 + u[1]) * v[1],
        c=lambda u, v: [2 * v[0] + v[1] - v[2] + u[0] - 2 * u[1] + 2, -v[0], -v[1], -v[2]],
        h=lambda u, v: [u[0] + u[1] - 1], low=0.0, high=1.0, u=[0.0, 1.0], v=[1.0, 1.0, 1.0], best=0.6426,
        at=([0.609, 0.391], [0.0, 0.0, 1.828]),
    ),
    Case(
        name="yezza-1996-3.1", paper="yezza96", kind="linear",
        f=lambda u, v: -(4 * u[0] - 3) * v[0] + 2 * u[0] + 1, g=lambda u, v: -(1 - 4 * u[0]) * v[0] - 2 * u[0] - 2,
        c=lambda u, v: [-v[0], v[0] - 1], low=0.0, high=1.0, u=[1.0], v=[1.0], best=1.5, at=([0.25], [0.0]),
        note="The lower solution jumps at u = 1/4, where it is an interval.",
    ),
    Case(
        name="yezza-1996-4.1", paper="yezza96", kind="quadratic",
        f=lambda u, v: (v[0] - 2) ** 2 / 2 + (u[0] - v[0] - 2) ** 2 / 2, g=lambda u, v: v[0] ** 2 / 2 + u[0] - v[0],
        c=lambda u, v: [-v[0], v[0] - u[0]], low=0.0, u=[1.0], v=[0.5], best=0.5, at=([3.0], [1.0]),
    ),
    Case(
        name="dempe-1992-b", paper="dempe92", kind="convex",
        f=lambda u, v: (u[0] - 3.5) ** 2 + (v[0] + 4) ** 2, g=lambda u, v: (v[0] - 3) ** 2,
        c=lambda u, v: [v[0] ** 2 - u[0]], u=[2.0], v=[0.5], best=28.25, at=([0.0], [0.0]),
        note="The lower set shrinks to a point at u = 0, where no multiplier exists; (1, 1) has 31.25.",
    ),
    Case(
        name="dempe-franke-2011-4.1", paper="dempe11", kind="linear",
        f=lambda u, v: u[0] + _square(v), g=lambda u, v: torch.dot(u, v),
        c=lambda u, v: [-2 * v[0] + v[1], v[0] - 2, v[1] - 2, -v[1]], h=lambda u, v: [u[1] + 1, -u[1] - 1],
        low=-1.0, high=1.0, u=[0.0, 0.0], v=[1.0, 1.0], best=5.0, at=([0.0, -1.0], [1.0, 2.0]),
        note="The upper set has no interior: u[1] = -1.",
    ),
    Case(
        name="shimizu-1997-b", paper="shimizu97", kind="convex",
        f=lambda u, v: 16 * u[0] ** 2 + 9 * v[0] ** 2, g=lambda u, v: (u[0] + v[0] - 20) ** 4,
        c=lambda u, v: [-v[0], 4 * u[0] + v[0] - 50], h=lambda u, v: [-4 * u[0] + v[0]],
        low=0.0, high=12.5, u=[1.0], v=[1.0], best=2250.0, at=([11.25], [5.0]),
        note="g is flat at its minimum; (7.2, 12.8) is a local solution.",
    ),
    Case(
        name="colson-2002-1", paper="colson02", kind="convex",
        f=lambda u, v: (10 - u[0]) ** 3 + (10 - v[0]) ** 3, g=lambda u, v: (u[0] + 2 * v[0] - 15) ** 4,
        c=lambda u, v: [u[0] + v[0] - 20, v[0] - 20, -v[0]], h=lambda u, v: [v[0] - u[0]],
        low=0.0, high=5.0, u=[5.0], v=[5.0], best=250.0, at=([5.0], [5.0]),
    ),
    Case(
        name="colson-2002-2", paper="colson02", kind="quadratic",
        f=lambda u, v: (u[0] - 5) ** 2 + (2 * v[0] + 1) ** 2,
        g=lambda u, v: (v[0] - 1) ** 2 - 1.5 * u[0] * v[0] + u[0] ** 3, c=_bard,
        low=0.0, high=10.0, u=[4.0], v=[0.0], best=17.0, at=([1.0], [0.0]),
    ),
    Case(
        name="colson-2002-3", paper="colson02", kind="convex",
        f=lambda u, v: (u[0] - 5) ** 4 + (2 * v[0] + 1) ** 4,
        g=lambda u, v: torch.exp(v[0] - u[0]) + u[0] ** 2 + 2 * u[0] * v[0] + v[0] ** 2 + 2 * u[0] + 6 * v[0],
        c=lambda u, v: [-u[0] + v[0] - 2, -v[0]], h=lambda u, v: [u[0] + v[0] - 4],
        low=0.0, high=4.0, u=[4.0], v=[0.0], best=2.0, at=([4.0], [0.0]),
    ),
    Case(
        name="colson-2002-4", paper="colson02", kind="convex",
        f=lambda u, v: u[0] ** 2 + (v[0] - 10) ** 2,
        g=lambda u, v: u[0] ** 3 + 2 * v[0] ** 3 + u[0] - 2 * v[0] - u[0] ** 2,
        c=lambda u, v: [-u[0] + 2 * v[0] - 3, -v[0]], h=lambda u, v: [u[0] + 2 * v[0] - 6],
        low=0.0, high=6.0, u=[1.5], v=[2.25], best=88.79, at=([0.0], [0.57735]),
    ),
    Case(
        name="colson-2002-5", paper="colson02", kind="convex",
        f=lambda u, v: (u[0] - v[1]) ** 4 + (v[0] - 1) ** 2 + (v[0] - v[1]) ** 2,
        g=lambda u, v: 2 * u[0] + torch.exp(v[0]) + v[0] ** 2 + 4 * v[0] + 2 * v[1] ** 2 - 6 * v[1],
        c=lambda u, v: [
            6 * u[0] + v[0] ** 2 + torch.exp(v[1]) - 15, 5 * u[0] + v[0] ** 4 - v[1] - 25, v[0] - 4, v[1] - 2,
            -v[0], -v[1],
        ],
        low=0.0, high=3.0, u=[1.0], v=[1.0, 1.0], best=2.75, at=([1.94], [0.0, 1.21]),
    ),
    Case(
        name="sinha-2014-tp6", paper="sinha14", kind="quadratic",
        f=lambda u, v: (u[0] - 1) ** 2 + 2 * v[0] - 2 * u[0],
        g=lambda u, v: (2 * v[0] - 4) ** 2 + (2 * v[1] - 1) ** 2 + u[0] * v[0],
        c=lambda u, v: [
            -v[0], -v[1], 4 * u[0] + 5 * v[0] + 4 * v[1] - 12, 4 * v[1] - 4 * u[0] - 5 * v[0] + 4,
            4 * u[0] - 4 * v[0] + 5 * v[1] - 4, 4 * v[0] - 4 * u[0] + 5 * v[1] - 4,
        ],
        low=0.0, high=3.0, u=[1.0], v=[1.0, 1.0], best=-1.2099, at=([1.889], [0.889, 0.0]),
    ),
    Case(
        name="toll-setting-5", paper="zhou18", kind="linear",
        f=lambda u, v: -(v[1] + v[2]) * u[0],
        g=lambda u, v: 8 * v[0] + (3 + 2 * u[0]) * v[1] + (4 + 2 * u[0]) * v[2] + 6 * v[3],
        c=lambda u, v: [-v[0], -v[1], -v[2], -v[3]], d=lambda u, v: [v[0] + v[1] - 1, v[2] + v[3] - 1],
        low=0.0, high=10.0, u=[1.0], v=[1.0, 1.0, 1.0, 1.0], best=-2.5, at=([2.5], [0.0, 1.0, 0.0, 1.0]),
        note="The lower set has no interior: flows sum to one.",
    ),
]  # fmt: skip
