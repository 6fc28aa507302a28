"""Runs of the four synthetic problems step by step, and how the demo describes each problem."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from bilevel import Callback, Run, Solution, solve
from bilevel.applications.comparison.synthetic_problems import Example
from bilevel.methods.base import Method


@dataclass(frozen=True)
class Description:
    """A problem in symbols: its objectives, its solutions and the paper's error measure."""

    title: str
    f: str
    g: str
    solutions: str
    measure: str
    note: str = ""


DESCRIPTIONS = {
    "sum": Description("Sum", "|u|² + |v|²", "|1 - u - v|²", "u = v = 1/2", "|(u - 1/2, v - 1/2)|"),
    "difference": Description("Difference", "|v|² - |u - v|²", "|u - v|²", "u = v = 0", "|(u, v)|"),
    "sum-singular": Description(
        "Sum, singular",
        "|u|² + |v|²",
        "|A(1 - u - v)|²",
        "u = v = P(1/2)",
        "|(P(u - 1/2), P(v - 1/2))|",
        "The paper counts 1/2 + p as a solution for every p with Ap = 0; only P(1/2) minimises f among these. The "
        "error is the paper's; a start counts as solved by its distance to P(1/2).",
    ),
    "difference-singular": Description(
        "Difference, singular", "|v|² - |A(u - v)|²", "|A(u - v)|²", "v = 0, Au = 0", "|(Pu, v)|"
    ),
}


@dataclass(frozen=True)
class Attempt:
    """One run from one start, with its error at the start and after each step."""

    solution: Solution
    # The paper's measure at the start, then after each step.
    errors: list[float]
    # From the end to the nearest solution.
    distance: float
    seconds: float

    @property
    def error(self) -> float:
        return self.errors[-1]


def attempt(
    example: Example, method: Method, seed: int, *, max_steps: int = 3000, tolerance: float | None = None
) -> Attempt:
    """Solve an example from the start of this seed; the other options are passed to `solve`."""
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


class _Trace(Callback):
    """Measures the error at the start and after each step."""

    def __init__(self, example: Example, u: Tensor, v: Tensor) -> None:
        self.example, self.u, self.v = example, u, v
        self.errors = [example.error(u, v)]

    def log(self, run: Run) -> None:
        self.errors.append(self.example.error(self.u, self.v))
