"""Functions that several quadratic cases share."""

from __future__ import annotations

import torch
from torch import Tensor

from bilevel_studies.classical.case import Many


def square(x: Tensor) -> Tensor:
    return torch.sum(x * x)


def outrata(u: Tensor, v: Tensor) -> list[Tensor]:
    """The polygon of Outrata's examples."""
    return [-0.333 * v[0] + v[1] - 2, v[0] - 0.333 * v[1] - 2, -v[0], -v[1]]


def target(v: Tensor) -> Tensor:
    return ((v[0] - 3) ** 2 + (v[1] - 4) ** 2) / 2


def form(a: float, b: float, d: float, v: Tensor) -> Tensor:
    """(a v0^2 + 2 b v0 v1 + d v1^2) / 2."""
    return (a * v[0] ** 2 + 2 * b * v[0] * v[1] + d * v[1] ** 2) / 2


def aiyoshi(u: Tensor, v: Tensor) -> list[Tensor]:
    return [2 * v[0] - u[0] + 10, 2 * v[1] - u[1] + 10, -v[0] - 10, -v[1] - 10, v[0] - 20, v[1] - 20]


def bard(u: Tensor, v: Tensor) -> list[Tensor]:
    return [-3 * u[0] + v[0] + 3, u[0] - v[0] / 2 - 4, u[0] + v[0] - 7, -v[0]]


def square_box(low: float, high: float) -> Many:
    return lambda u, v: [low - v[0], low - v[1], v[0] - high, v[1] - high]


def vicente(u: Tensor, v: Tensor) -> list[Tensor]:
    return [
        u[0] - v[0] - 1,
        u[1] - v[1] - 1,
        1 - u[0] - v[0],
        1 - u[1] - v[1],
        u[0] + v[0] - 1.5,
        u[1] + v[1] - 3,
    ]
