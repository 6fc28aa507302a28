"""The paper's four synthetic problems (Appendix E.1), with their solutions in closed form.

    sum                   f = |u|^2 + |v|^2           g = |1 - u - v|^2
    difference            f = |v|^2 - |u - v|^2       g = |u - v|^2
    sum-singular          f = |u|^2 + |v|^2           g = |A(1 - u - v)|^2
    difference-singular   f = |v|^2 - |A(u - v)|^2    g = |A(u - v)|^2

A has half as many rows as columns, so the lower solution of the last two is a plane, not a point. With
P = A'(AA')^-1 A, the projection on the row space of A, the paper measures |(P(u - 1/2), P(v - 1/2))| and |(Pu, v)|.

For `sum-singular` the paper names u = v = 1/2 + p as solutions, for any p with Ap = 0. All of these solve the lower
problem, but f depends on p, and only u = v = P(1/2) minimises it. `error` is the paper's measure; `distance`, which is
never smaller, is that to the nearest solution.

`examples(trials=n)` are the same problems n times over, each trial with a matrix of its own: u and v have a leading
dimension n, and the objectives return n numbers. Trial k is the single problem of the seed `nth(seed, k)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import OptionError
from bilevel.methods.base import Method
from bilevel.problem.problem import Problem
from bilevel.results import Solution
from bilevel.running.callbacks import Callback, Run
from bilevel.running.solve import solve

BOUND = 5.0
"""Starting points are uniform in [-BOUND, BOUND]."""


@dataclass(frozen=True)
class Example:
    """A problem whose solutions are known. The texts say in symbols what the functions compute."""

    name: str
    title: str
    f: str
    g: str
    solutions: str
    measure: str
    problem: Problem
    nearest: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """The solution that is nearest to (u, v)."""
    residuals: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """What the paper takes the norm of."""
    dimension: int
    note: str = ""

    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        """A random (u, v), uniform in the paper's domain."""
        generator = _generator(seed, self.name)
        u, v = BOUND * (2 * torch.rand(2, self.dimension, generator=generator, dtype=torch.float64) - 1)
        return u.clone().requires_grad_(), v.clone().requires_grad_()

    def starts(self, trials: int, seed: int) -> tuple[Tensor, Tensor]:
        """The starts of that many trials, as u and v with a leading dimension."""
        points = [self.start(nth(seed, k)) for k in range(trials)]
        u, v = (torch.stack(part).detach() for part in zip(*points, strict=True))
        return u.requires_grad_(), v.requires_grad_()

    @torch.no_grad()
    def errors(self, u: Tensor, v: Tensor) -> Tensor:
        """The paper's measure of convergence, one number a trial; 0 at a solution."""
        return square(torch.cat(self.residuals(u, v), -1)).sqrt()

    @torch.no_grad()
    def distances(self, u: Tensor, v: Tensor) -> Tensor:
        """The Euclidean distance from (u, v) to the nearest solution, one number a trial."""
        best_u, best_v = self.nearest(u, v)
        return square(torch.cat([u - best_u, v - best_v], -1)).sqrt()

    def error(self, u: Tensor, v: Tensor) -> float:
        """`errors` of a single trial."""
        return float(self.errors(u, v))

    def distance(self, u: Tensor, v: Tensor) -> float:
        """`distances` of a single trial."""
        return float(self.distances(u, v))


def examples(dimension: int = 10, seed: int = 0, trials: int | None = None) -> list[Example]:
    """The four problems for u and v of this dimension; the seed draws the entries of A from a normal distribution."""
    if dimension < 2:
        raise OptionError(f"dimension must be at least 2, for A has half as many rows; got {dimension}.")
    A = _matrix(dimension, seed) if trials is None else matrices(dimension, seed, trials)
    P = A.mT @ torch.linalg.solve(A @ A.mT, A)
    half = torch.full((dimension,), 0.5, dtype=torch.float64)
    zero = torch.zeros(dimension, dtype=torch.float64)

    def squares(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(u) + square(v)

    def less(gap: Callable[[Tensor, Tensor, None], Tensor]) -> Callable[[Tensor, Tensor, None], Tensor]:
        return lambda u, v, batch: square(v) - gap(u, v, batch)

    def sum_to_one(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(1 - u - v)

    def difference(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(u - v)

    def singular_sum(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(times(A, 1 - u - v))

    def singular_difference(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(times(A, u - v))

    return [
        Example(
            name="sum",
            title="Sum",
            f="|u|² + |v|²",
            g="|1 - u - v|²",
            solutions="u = v = 1/2",
            measure="|(u - 1/2, v - 1/2)|",
            problem=Problem(squares, sum_to_one, trials=trials),
            nearest=lambda u, v: (half, half),
            residuals=lambda u, v: (u - half, v - half),
            dimension=dimension,
        ),
        Example(
            name="difference",
            title="Difference",
            f="|v|² - |u - v|²",
            g="|u - v|²",
            solutions="u = v = 0",
            measure="|(u, v)|",
            problem=Problem(less(difference), difference, trials=trials),
            nearest=lambda u, v: (zero, zero),
            residuals=lambda u, v: (u, v),
            dimension=dimension,
        ),
        Example(
            name="sum-singular",
            title="Sum, singular",
            f="|u|² + |v|²",
            g="|A(1 - u - v)|²",
            solutions="u = v = P(1/2)",
            measure="|(P(u - 1/2), P(v - 1/2))|",
            problem=Problem(squares, singular_sum, trials=trials),
            nearest=lambda u, v: (P @ half, P @ half),
            residuals=lambda u, v: (times(P, u - half), times(P, v - half)),
            dimension=dimension,
            note="The paper counts 1/2 + p as a solution for every p with Ap = 0; of these, f is least at P(1/2) "
            "alone. The error is the paper's; a start counts as solved by its distance to P(1/2).",
        ),
        Example(
            name="difference-singular",
            title="Difference, singular",
            f="|v|² - |A(u - v)|²",
            g="|A(u - v)|²",
            solutions="v = 0, Au = 0",
            measure="|(Pu, v)|",
            problem=Problem(less(singular_difference), singular_difference, trials=trials),
            nearest=lambda u, v: (u - times(P, u), zero),
            residuals=lambda u, v: (times(P, u), v),
            dimension=dimension,
        ),
    ]


def square(x: Tensor) -> Tensor:
    """|x|^2 over the last dimension."""
    return (x * x).sum(-1)


def times(A: Tensor, x: Tensor) -> Tensor:
    """A x, over the leading dimension where there is one."""
    return (A @ x[..., None])[..., 0]


def nth(seed: int, k: int) -> int:
    """The seed of trial k; other seeds share none of them."""
    return int(np.random.SeedSequence([seed, k]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def matrices(dimension: int, seed: int, trials: int) -> Tensor:
    """The matrix A of each trial."""
    return torch.stack([_matrix(dimension, nth(seed, k)) for k in range(trials)])


def _matrix(dimension: int, seed: int) -> Tensor:
    return torch.randn(dimension // 2, dimension, generator=_generator(seed, "matrix"), dtype=torch.float64)


@dataclass(frozen=True)
class Attempt:
    """One run from one start, and how it came nearer to the solution."""

    solution: Solution
    errors: list[float]
    """The paper's measure at the start, then after each step."""
    distance: float
    """From the end to the nearest solution."""
    seconds: float

    @property
    def error(self) -> float:
        return self.errors[-1]


def attempt(
    example: Example, method: Method, seed: int, *, max_steps: int = 3000, tolerance: float | None = None
) -> Attempt:
    """Solve an example from the start of this seed; the options are those of `solve`."""
    u, v = example.start(seed)
    trace = _Trace(example, u, v)
    began = time.perf_counter()
    solution = solve(
        example.problem,
        method,
        u,
        v,
        max_steps=max_steps,
        tolerance=tolerance,
        callbacks=[trace],
        log_every=1,
        seed=seed,
        hypergradient=False,
    )
    seconds = time.perf_counter() - began
    return Attempt(solution, [*trace.errors[:-1], example.error(u, v)], example.distance(u, v), seconds)


@dataclass
class _Trace(Callback):
    """Measures the error at the start and after each step."""

    example: Example
    u: Tensor
    v: Tensor
    errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.errors.append(self.example.error(self.u, self.v))

    def log(self, run: Run) -> bool | None:
        self.errors.append(self.example.error(self.u, self.v))
        return None


def _generator(seed: int, name: str) -> torch.Generator:
    """A generator for this purpose; neighbouring seeds and other purposes are unrelated."""
    mixed = np.random.SeedSequence([seed, *name.encode()]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))
