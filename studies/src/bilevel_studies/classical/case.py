"""A classical case: a small problem with constraints, its best known value, and the judgement of an answer.

An answer is solved where it is feasible at both levels, where v solves the lower problem (by solving it again, apart
from the run, with SLSQP of SciPy from several points), and where f is no worse than the best known value by 1%.
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

FEASIBLE = 1e-5
"""The largest violation of a constraint, relative to 1 + the size of u and v."""
OPTIMAL = 1e-4
"""How far g may lie above the re-solved lower value, relative to 1 + |g|."""
WITHIN = 0.01
"""How far f may lie above the best known value, relative to its size; absolute below 1."""
RESOLVES = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem of the literature. The functions take u and v as vectors; constraints are lists of numbers <= 0."""

    name: str
    paper: str
    """A key of `papers.PAPERS`."""
    kind: str
    """`linear`, `quadratic`, `convex` (the lower level), `non-convex` or `smd`."""
    f: Function
    g: Function
    c: Many | None = None
    """Lower inequalities."""
    d: Many | None = None
    """Lower equalities."""
    h: Many | None = None
    """Upper inequalities, coupling ones included."""
    low: Sequence[float] | float | None = None
    high: Sequence[float] | float | None = None
    """Bounds of u."""
    u: Sequence[float]
    v: Sequence[float]
    """The starting point."""
    best: float
    """The best known value of f."""
    at: tuple[Sequence[float], Sequence[float]] | None = None
    """A point (u, v) where it is reached, to the digits of the literature."""
    note: str = ""

    def problem(self) -> Problem:
        """The case as a `Problem` without data."""
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
    """All classical cases."""
    from bilevel_studies.classical import linear, nonconvex, quadratic, quadratic_more, smd

    return [*linear.CASES, *quadratic.CASES, *quadratic_more.CASES, *nonconvex.CASES, *smd.CASES]


def named(name: str) -> Case:
    found = [case for case in cases() if case.name == name]
    if not found:
        raise OptionError(f"name must be that of a classical case; got {name!r}.")
    return found[0]


@dataclass(frozen=True)
class Verdict:
    """How an answer to a case is judged."""

    f: float
    violation: float
    """The largest violation at either level, relative."""
    gap: float
    """g less the re-solved lower value, relative; 0 where it is below."""
    excess: float
    """f less the best known value, relative; negative where f is better."""

    @property
    def feasible(self) -> bool:
        return self.violation <= FEASIBLE

    @property
    def optimal(self) -> bool:
        """Whether v solves the lower problem."""
        return self.gap <= OPTIMAL

    @property
    def solved(self) -> bool:
        return self.feasible and self.optimal and self.excess <= WITHIN


def judge(case: Case, u: Tensor, v: Tensor) -> Verdict:
    """Judge an answer by the case alone: nothing of the run is used."""
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
    lowest = lower_value(case, u, v)
    f = case.f(u, v).item()
    return Verdict(
        f, max(outside) / size, max(0.0, g - lowest) / (1 + abs(g)), (f - case.best) / max(1.0, abs(case.best))
    )


def lower_value(case: Case, u: Tensor, v: Tensor, seed: int = 0) -> float:
    """The least g at this u that SLSQP finds under the lower constraints, from v and from points around it."""
    return resolved(case, u, v, seed)[0]


def resolved(case: Case, u: Tensor, v: Tensor, seed: int = 0) -> tuple[float, np.ndarray[Any, Any]]:
    """The least g at this u that was found, and where; v itself where nothing was."""
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
        outside = max(
            [
                0.0,
                *(
                    float(np.max(-item["fun"](end.x) if item["type"] == "ineq" else np.abs(item["fun"](end.x))))
                    for item in constraints
                ),
            ]
        )
        # A point outside by a hair is lower by the hair's worth.
        if np.isfinite(end.fun) and outside <= 1e-8 * size and end.fun < best:
            best, where = float(end.fun), end.x
    return best, where


def run(case: Case, method: Method, *, starts: int = 8, max_steps: int = 2000, seed: int = 0) -> tuple[Solution, float]:
    """(solution, seconds of processor time) of a case from its starting point."""
    u, v = case.start()
    began = time.process_time()
    solution = solve(case.problem(), method, u, v, max_steps=max_steps, starts=starts, seed=seed)
    return solution, time.process_time() - began
