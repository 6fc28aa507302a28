"""A classical case: a small problem with constraints, its best known value, and the judgement of an answer.

An answer solves a case if it is feasible at both levels, v solves the lower problem, and f exceeds the best known value
by at most 1%. For the second condition, SLSQP of SciPy solves the lower problem again from several points.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bilevel import Box, OptionError, Problem, Solution, solve
from bilevel.methods.base import Method

Function = Callable[[Tensor, Tensor], Tensor]
Many = Callable[[Tensor, Tensor], Sequence[Tensor]]

# The largest violation of a constraint, relative to 1 + the size of u and v.
FEASIBLE = 1e-5
# The largest excess of g over the re-solved lower value, relative to 1 + |g|.
OPTIMAL = 1e-4
# The largest excess of f over the best known value, relative to its size; absolute below 1.
WITHIN = 0.01
RESOLVES = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem of the literature. The functions take u and v as vectors; constraints are lists of numbers <= 0."""

    name: str
    # A key of `papers.PAPERS`.
    paper: str
    # `linear`, `quadratic`, `convex` (the lower level), `non-convex` or `smd`.
    kind: str
    f: Function
    g: Function
    # Lower inequalities.
    c: Many | None = None
    # Lower equalities.
    d: Many | None = None
    # Upper inequalities, coupling ones included.
    h: Many | None = None
    # Bounds of u.
    low: Sequence[float] | float | None = None
    high: Sequence[float] | float | None = None
    # The starting point.
    u: Sequence[float]
    v: Sequence[float]
    # The best known value of f.
    best: float
    # A point (u, v) with this value, to the digits of the literature.
    at: tuple[Sequence[float], Sequence[float]] | None = None
    note: str = ""

    def problem(self) -> Problem:
        """Return the case as a `Problem` without data."""
        box = None
        if self.low is not None or self.high is not None:
            box = Box(*(None if x is None else torch.as_tensor(x, dtype=torch.float64) for x in (self.low, self.high)))
        return Problem(
            upper=lambda u, v, _: self.f(u, v),
            lower=lambda u, v, _: self.g(u, v),
            inequalities=_stacked(self.h),
            lower_inequalities=_stacked(self.c),
            lower_equalities=_stacked(self.d),
            project_upper=box,
        )

    def start(self) -> tuple[Tensor, Tensor]:
        return _leaf(self.u), _leaf(self.v)


def _leaf(x: Sequence[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def _stacked(many: Many | None) -> list[Callable[[Any, Any, Any], Tensor]]:
    return [] if many is None else [lambda u, v, _: torch.stack([x.reshape(()) for x in many(u, v)])]


def cases() -> list[Case]:
    """Return all classical cases."""
    from bilevel_studies.classical import linear, nonconvex, quadratic, quadratic_more, smd

    return [*linear.CASES, *quadratic.CASES, *quadratic_more.CASES, *nonconvex.CASES, *smd.CASES]


def named(name: str) -> Case:
    """Return the case with this name."""
    found = {case.name: case for case in cases()}
    if name not in found:
        raise OptionError(f"name must name a classical case; got {name!r}.")
    return found[name]


@dataclass(frozen=True)
class Verdict:
    """The judgement of an answer to a case."""

    f: float
    # The largest violation at either level, relative.
    violation: float
    # g minus the re-solved lower value, relative; at least 0.
    gap: float
    # f minus the best known value, relative; negative if f is better.
    excess: float

    @property
    def feasible(self) -> bool:
        return self.violation <= FEASIBLE

    @property
    def optimal(self) -> bool:
        """True if v solves the lower problem."""
        return self.gap <= OPTIMAL

    @property
    def solved(self) -> bool:
        return self.feasible and self.optimal and self.excess <= WITHIN


def judge(case: Case, u: Tensor, v: Tensor) -> Verdict:
    """Judge an answer from the case only: nothing of the run is used."""
    u, v = u.detach(), v.detach()
    outside = [0.0]
    for many, equal in ((case.h, False), (case.c, False), (case.d, True)):
        if many is not None:
            values = [x.item() for x in many(u, v)]
            outside += [abs(x) if equal else max(0.0, x) for x in values]
    for bound, sign in ((case.low, -1.0), (case.high, 1.0)):
        if bound is not None:
            outside.append((sign * (u - torch.as_tensor(bound, dtype=u.dtype))).max().item())
    size = 1 + torch.cat([u, v]).norm().item()
    g = case.g(u, v).item()
    lowest, _ = resolved(case, u, v)
    f = case.f(u, v).item()
    return Verdict(
        f, max(outside) / size, max(0.0, g - lowest) / (1 + abs(g)), (f - case.best) / max(1.0, abs(case.best))
    )


def resolved(case: Case, u: Tensor, v: Tensor, seed: int = 0) -> tuple[float, np.ndarray[Any, Any]]:
    """Return the least g at this u that SLSQP finds from v and from points around it, and its point; at worst v."""
    draws = np.random.default_rng(seed)

    def value(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], Any]:
        def evaluate(x: Any) -> Any:
            at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
            out = function(u, at)
            (slope,) = torch.autograd.grad(out, at, allow_unused=True)
            return out.item(), np.zeros_like(x) if slope is None else slope.numpy()

        return evaluate

    def many(function: Many, sign: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        def values(x: Any) -> Any:
            at = torch.tensor(x, dtype=torch.float64)
            return sign * np.array([y.item() for y in function(u, at)])

        def slopes(x: Any) -> Any:
            at = torch.tensor(x, dtype=torch.float64)
            return sign * torch.func.jacrev(lambda w: torch.stack([y.reshape(()) for y in function(u, w)]))(at).numpy()

        return values, slopes

    constraints: list[dict[str, Any]] = []
    for function, kind, sign in ((case.c, "ineq", -1.0), (case.d, "eq", 1.0)):
        if function is not None:
            values, slopes = many(function, sign)
            constraints.append({"type": kind, "fun": values, "jac": slopes})
    start = v.numpy()
    size = 1 + float(np.abs(start).max())
    best, where = case.g(u, v).item(), start
    for k in range(RESOLVES):
        x0 = start if k == 0 else start + size * draws.choice([0.1, 1.0, 3.0]) * draws.standard_normal(start.shape)
        try:
            end = minimize(value(case.g), x0, jac=True, constraints=constraints, method="SLSQP", tol=1e-12)
        except (ValueError, FloatingPointError):
            continue
        apart = [np.abs(one["fun"](end.x)) if one["type"] == "eq" else -one["fun"](end.x) for one in constraints]
        outside = max((float(np.max(one)) for one in apart), default=0.0)
        # A tiny violation makes g a little lower, so the tolerance is small.
        if np.isfinite(end.fun) and outside <= 1e-8 * size and end.fun < best:
            best, where = float(end.fun), end.x
    return best, where


def run(case: Case, method: Method, *, starts: int = 8, max_steps: int = 2000, seed: int = 0) -> tuple[Solution, float]:
    """Solve a case from its starting point; return the solution and the seconds of processor time."""
    u, v = case.start()
    began = time.process_time()
    solution = solve(case.problem(), method, u, v, max_steps=max_steps, starts=starts, seed=seed)
    return solution, time.process_time() - began
