"""The paper's four synthetic problems (Appendix E.1), with their solutions in closed form.

    sum                   f = |u|^2 + |v|^2           g = |1 - u - v|^2
    difference            f = |v|^2 - |u - v|^2       g = |u - v|^2
    sum-singular          f = |u|^2 + |v|^2           g = |A(1 - u - v)|^2
    difference-singular   f = |v|^2 - |A(u - v)|^2    g = |A(u - v)|^2

A has half as many rows as columns, so the lower solution of the last two is a plane, not a point. With
P = A'(AA')^-1 A, the projection on the row space of A, the paper measures |(P(u - 1/2), P(v - 1/2))| and |(Pu, v)|.

For `sum-singular` the paper names u = v = 1/2 + p as solutions, for any p with Ap = 0. They all solve the lower
problem, but f depends on p, and only u = v = P(1/2) minimises it. `error` is the paper's measure; `distance`, which is
never smaller, is the distance to the nearest solution.

`examples(trials=n)` returns the same problems with n trials, each with its own matrix: u and v have a leading dimension
n, and the objectives return n numbers. Trial k is the single problem with the seed `nth(seed, k)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bilevel import OptionError, Problem
from bilevel._util.checks import ShortRepr

# Starting points are uniform in [-BOUND, BOUND].
BOUND = 5.0
Term = Callable[[Tensor, Tensor], Tensor]
Points = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, repr=False)
class Example(ShortRepr):
    """A problem whose solutions are known. `examples` returns four.

    Args:
        name: The name of the problem.
        problem: The `Problem`.
        nearest: A function (u, v) that returns the nearest solution.
        residuals: A function (u, v) that returns the two vectors whose joint norm is the paper's error.
        dimension: The size of u and of v.

    >>> example = examples(dimension=4)[0]
    >>> u, v = example.start(seed=0)
    >>> example.error(u, v) > 0, example.error(*example.nearest(u, v))
    (True, 0.0)
    """

    name: str
    problem: Problem
    nearest: Points
    residuals: Points
    dimension: int

    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return a random (u, v), uniform in the paper's domain."""
        generator = _generator(seed, self.name)
        u, v = BOUND * (2 * torch.rand(2, self.dimension, generator=generator, dtype=torch.float64) - 1)
        return u.clone().requires_grad_(), v.clone().requires_grad_()

    def starts(self, trials: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the starts of several trials, as u and v with a leading dimension."""
        points = [self.start(nth(seed, k)) for k in range(trials)]
        u, v = (torch.stack(part).detach() for part in zip(*points, strict=True))
        return u.requires_grad_(), v.requires_grad_()

    @torch.no_grad()
    def errors(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the paper's measure of convergence, one number for each trial; 0 at a solution."""
        return square(torch.cat(self.residuals(u, v), -1)).sqrt()

    @torch.no_grad()
    def distances(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the Euclidean distance from (u, v) to the nearest solution, one number for each trial."""
        best_u, best_v = self.nearest(u, v)
        return square(torch.cat([u - best_u, v - best_v], -1)).sqrt()

    def error(self, u: Tensor, v: Tensor) -> float:
        """Return `errors` of a single trial."""
        return float(self.errors(u, v))

    def distance(self, u: Tensor, v: Tensor) -> float:
        """Return `distances` of a single trial."""
        return float(self.distances(u, v))


def examples(dimension: int = 10, seed: int = 0, trials: int | None = None) -> list[Example]:
    """Return the paper's four problems.

    Args:
        dimension: The size of u and of v, at least 2. Default: 10.
        seed: The seed of the entries of A, drawn from N(0, 1). Default: 0.
        trials: The number of trials in one problem, each with its own A: u and v then have a leading dimension. None
            (default): one problem without it.

    >>> [example.name for example in examples()]
    ['sum', 'difference', 'sum-singular', 'difference-singular']
    """
    if dimension < 2:
        raise OptionError(f"dimension must be at least 2, because A has half as many rows; got {dimension}.")
    A = _matrix(dimension, seed) if trials is None else matrices(dimension, seed, trials)
    P = A.mT @ torch.linalg.solve(A @ A.mT, A)
    half = torch.full((dimension,), 0.5, dtype=torch.float64)
    zero = torch.zeros(dimension, dtype=torch.float64)

    def example(name: str, f: Term, g: Term, nearest: Points, residuals: Points) -> Example:
        problem = Problem(lambda u, v, batch: f(u, v), lambda u, v, batch: g(u, v), trials=trials)
        return Example(name, problem, nearest, residuals, dimension)

    return [
        example(
            "sum",
            lambda u, v: square(u) + square(v),
            lambda u, v: square(1 - u - v),
            lambda u, v: (half, half),
            lambda u, v: (u - half, v - half),
        ),
        example(
            "difference",
            lambda u, v: square(v) - square(u - v),
            lambda u, v: square(u - v),
            lambda u, v: (zero, zero),
            lambda u, v: (u, v),
        ),
        example(
            "sum-singular",
            lambda u, v: square(u) + square(v),
            lambda u, v: square(times(A, 1 - u - v)),
            lambda u, v: (P @ half, P @ half),
            lambda u, v: (times(P, u - half), times(P, v - half)),
        ),
        example(
            "difference-singular",
            lambda u, v: square(v) - square(times(A, u - v)),
            lambda u, v: square(times(A, u - v)),
            lambda u, v: (u - times(P, u), zero),
            lambda u, v: (times(P, u), v),
        ),
    ]


def square(x: Tensor) -> Tensor:
    """Return |x|^2 over the last dimension."""
    return (x * x).sum(-1)


def times(A: Tensor, x: Tensor) -> Tensor:
    """Return A x, for each entry of the leading dimension if there is one."""
    return (A @ x[..., None])[..., 0]


def nth(seed: int, *k: int) -> int:
    """Return the seed of trial k, or of the purpose with these numbers; no two seeds share a trial or a purpose."""
    return int(np.random.SeedSequence([seed, *k]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def matrices(dimension: int, seed: int, trials: int) -> Tensor:
    """Return the matrix A of each trial."""
    return torch.stack([_matrix(dimension, nth(seed, k)) for k in range(trials)])


def _matrix(dimension: int, seed: int) -> Tensor:
    return torch.randn(dimension // 2, dimension, generator=_generator(seed, "matrix"), dtype=torch.float64)


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one purpose, independent of other seeds and purposes."""
    return torch.Generator().manual_seed(nth(seed, *name.encode()))
