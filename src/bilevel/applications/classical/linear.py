"""Cases whose objectives and constraints are linear at both levels."""

from __future__ import annotations

from .case import Case

CASES = [
    Case(
        name="anandalingam-white-1990", paper="anandalingam90", kind="linear",
        f=lambda u, v: -u[0] - 3 * v[0], g=lambda u, v: -u[0] + 3 * v[0],
        c=lambda u, v: [
            10 - u[0] - 2 * v[0], u[0] - 2 * v[0] - 6, 2 * u[0] - v[0] - 21, u[0] + 2 * v[0] - 38,
            -u[0] + 2 * v[0] - 18, -v[0],
        ],
        low=0.0, high=20.0, u=[1.0], v=[1.0], best=-49.0, at=([16.0], [11.0]),
    ),
    Case(
        name="bard-1984-a", paper="bard84", kind="linear",
        f=lambda u, v: u[0] + v[0], g=lambda u, v: -5 * u[0] - v[0],
        c=lambda u, v: [
            2 - u[0] - v[0] / 2, v[0] - u[0] / 4 - 2, u[0] + v[0] / 2 - 8, u[0] - 2 * v[0] - 4, -v[0],
        ],
        low=0.0, high=10.0, u=[1.0], v=[1.0], best=28 / 9, at=([8 / 9], [20 / 9]),
    ),
    Case(
        name="bard-1984-b", paper="bard84", kind="linear",
        f=lambda u, v: -5 * u[0] - v[0], g=lambda u, v: v[0],
        c=lambda u, v: [
            2 - u[0] - v[0] / 2, v[0] - u[0] / 4 - 2, u[0] + v[0] / 2 - 8, u[0] - 2 * v[0] - 4, -v[0],
        ],
        low=0.0, high=10.0, u=[1.0], v=[1.0], best=-37.6, at=([7.2], [1.6]),
    ),
    Case(
        name="bard-1991-2", paper="bard91", kind="linear",
        f=lambda u, v: -u[0] + 10 * v[0] - v[1], g=lambda u, v: -v[0] - v[1],
        c=lambda u, v: [u[0] + v[0] - 1, u[0] + v[1] - 1, v[0] + v[1] - 1, -v[0], -v[1]],
        low=0.0, high=1.0, u=[0.5], v=[0.0, 0.0], best=-1.0, at=([0.0], [0.0, 1.0]),
        note="The lower solution at u = 0 is a segment.",
    ),
    Case(
        name="bard-falk-1982-2", paper="bardfalk82", kind="linear",
        f=lambda u, v: -2 * u[0] + u[1] + v[0] / 2, g=lambda u, v: u[0] + u[1] - 4 * v[0] + v[1],
        c=lambda u, v: [
            2.5 - 2 * u[0] + v[0] - v[1], u[0] - 3 * u[1] + v[1] - 2, u[0] + u[1] - 2, -v[0], -v[1],
        ],
        low=0.0, high=2.0, u=[1.0, 1.0], v=[1.0, 1.0], best=-3.25, at=([2.0, 0.0], [1.5, 0.0]),
    ),
    Case(
        name="ben-ayed-blair-1990-a", paper="benayed90", kind="linear",
        f=lambda u, v: -1.5 * u[0] - 6 * v[0] - v[1], g=lambda u, v: -v[0] - 5 * v[1],
        c=lambda u, v: [u[0] + 3 * v[0] + v[1] - 5, 2 * u[0] + v[0] + 3 * v[1] - 5, -v[0], -v[1]],
        low=0.0, high=1.0, u=[0.5], v=[1.0, 1.0], best=-2.5, at=([1.0], [0.0, 1.0]),
    ),
    Case(
        name="ben-ayed-blair-1990-b", paper="benayed90", kind="linear",
        f=lambda u, v: -u[0] - v[0], g=lambda u, v: v[0],
        c=lambda u, v: [19 - 4 * u[0] - 3 * v[0], u[0] + 2 * v[0] - 11, 3 * u[0] + v[0] - 13, -v[0]],
        low=0.0, high=10.0, u=[3.0], v=[4.0], best=-6.0, at=([1.0], [5.0]),
    ),
    Case(
        name="bialas-karwan-1984-a", paper="bialas84", kind="linear",
        f=lambda u, v: -u[0] - v[1], g=lambda u, v: -v[1],
        c=lambda u, v: [
            u[0] + v[0] + v[1] - 3, 1 - u[0] - v[0] + v[1], -u[0] + v[0] + v[1] - 1, u[0] - v[0] + v[1] - 1,
            v[1] - 0.5, -v[0], -v[1],
        ],
        low=0.0, high=3.0, u=[1.0], v=[1.0, 1.0], best=-2.0, at=([1.5], [1.0, 0.5]),
    ),
    Case(
        name="bialas-karwan-1984-b", paper="bialas84", kind="linear",
        f=lambda u, v: -v[0], g=lambda u, v: v[0],
        c=lambda u, v: [
            10 - u[0] - 2 * v[0], u[0] + 2 * v[0] - 38, -u[0] + 2 * v[0] - 18, u[0] - 2 * v[0] - 6,
            2 * u[0] - v[0] - 21, -v[0],
        ],
        low=0.0, high=20.0, u=[10.0], v=[14.0], best=-11.0, at=([16.0], [11.0]),
    ),
    Case(
        name="candler-townsley-1982", paper="candler82", kind="linear",
        f=lambda u, v: -8 * u[0] - 4 * u[1] + 4 * v[0] - 40 * v[1] - 4 * v[2],
        g=lambda u, v: u[0] + 2 * u[1] + v[0] + v[1] + 2 * v[2],
        c=lambda u, v: [
            -v[0] + v[1] + v[2] - 1, 2 * u[0] - v[0] + 2 * v[1] - v[2] / 2 - 1,
            2 * u[1] + 2 * v[0] - v[1] - v[2] / 2 - 1, -v[0], -v[1], -v[2],
        ],
        low=0.0, high=2.0, u=[1.0, 1.0], v=[1.0, 1.0, 1.0], best=-29.2, at=([0.0, 0.9], [0.0, 0.6, 0.4]),
    ),
    Case(
        name="clark-westerberg-1988", paper="clark88", kind="linear",
        f=lambda u, v: u[0] - 4 * v[0], g=lambda u, v: v[0],
        c=lambda u, v: [v[0] - 2 * u[0], 2 * u[0] + 5 * v[0] - 108, 2 * u[0] - 3 * v[0] + 4],
        low=0.0, high=50.0, u=[20.0], v=[0.0], best=-37.0, at=([19.0], [14.0]),
    ),
    Case(
        name="clark-westerberg-1990-b", paper="clark90", kind="linear",
        f=lambda u, v: -u[0] - 3 * v[0] + 2 * v[1], g=lambda u, v: -v[0],
        c=lambda u, v: [
            -v[0], v[0] - 4, -2 * u[0] + v[0] + 4 * v[1] - 16, 8 * u[0] + 3 * v[0] - 2 * v[1] - 48,
            -2 * u[0] + v[0] - 3 * v[1] + 12,
        ],
        low=0.0, high=8.0, u=[1.0], v=[1.0, 1.0], best=-13.0, at=([5.0], [4.0, 2.0]),
        note="The lower solution is a segment: g does not see v[1].",
    ),
    Case(
        name="haurie-savard-white-1990", paper="haurie90", kind="linear",
        f=lambda u, v: u[0] + 5 * v[0], g=lambda u, v: -v[0],
        c=lambda u, v: [
            -3 * u[0] + 2 * v[0] - 6, 3 * u[0] + 4 * v[0] - 48, 2 * u[0] - 5 * v[0] - 9, 8 - u[0] - v[0],
        ],
        low=0.0, high=20.0, u=[1.0], v=[1.0], best=27.0, at=([12.0], [3.0]),
    ),
    Case(
        name="liu-hart-1994", paper="liuhart94", kind="linear",
        f=lambda u, v: -u[0] - 3 * v[0], g=lambda u, v: v[0],
        c=lambda u, v: [-u[0] + v[0] - 3, u[0] + 2 * v[0] - 12, 4 * u[0] - v[0] - 12, -v[0]],
        low=0.0, high=10.0, u=[1.0], v=[1.0], best=-16.0, at=([4.0], [4.0]),
    ),
]  # fmt: skip
