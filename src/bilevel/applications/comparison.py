"""Methods side by side on one problem: the same starts, the same budget of evaluations of g.

A subject is a problem with its starts. Where its trials can run at once, in a leading dimension of u and v, they do; a
method in deterministic mode takes them one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..callbacks import Callback, Run
from ..cost import probe
from ..method import Method
from ..methods.alternating import Alternating
from ..methods.approx_grad import ApproxGrad
from ..methods.forward_mode import ForwardMode
from ..methods.penalty import Penalty
from ..methods.reverse_mode import ReverseMode
from ..methods.value_function import ValueFunction
from ..methods.value_gap import ValueGap
from ..problem import Problem
from ..solution import Solution, Status
from ..solve import solve
from .synthetic import examples, nth

METHODS: dict[str, Callable[..., Method]] = {
    "penalty": Penalty, "algorithm-1": Penalty.algorithm_1, "algorithm-2": Penalty.algorithm_2,
    "alternating": Alternating, "reverse-mode": ReverseMode, "forward-mode": ForwardMode, "approx-grad": ApproxGrad,
    "value-function": ValueFunction, "value-gap": ValueGap,
}  # fmt: skip
"""Every method by its name on the command line; the algorithms are presets of `Penalty`."""
POINTS = 200
"""How often a run is looked at."""


@dataclass(frozen=True)
class Start:
    """Where a run begins. `error` measures (u, v), one number a trial, where the solution is known."""

    problem: Problem
    u: Any
    v: Any
    data: object = None
    error: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Subject:
    """A problem to compare methods on."""

    name: str
    singles: Sequence[Start]
    """A start for each trial."""
    together: Start | None = None
    """All trials in one, where that can be."""

    def starts(self, method: Method) -> Sequence[Start]:
        """What the method runs from."""
        return self.singles if self.together is None or _deterministic(method, self.together) else [self.together]


@dataclass(frozen=True)
class Outcome:
    """A method's runs, as means over the trials."""

    error: float | None
    """The error, where the solution is known."""
    upper: float
    residual: float
    """|grad_v g|"""
    evaluations: float
    """Of g, in one trial."""
    steps: float
    seconds: float
    """Of all trials."""
    memory: int
    """The most bytes that the tensors of one upper step took at one time, in one trial."""
    status: str
    curve: list[tuple[float, float]]
    """(evaluations, error or else f)"""


def synthetic(name: str, trials: int, seed: int) -> Subject:
    """One of the paper's four problems, from the starts of `bilevel demo`."""
    singles = []
    for k in range(trials):
        example = next(e for e in examples(seed=nth(seed, k)) if e.name == name)
        singles.append(Start(example.problem, *example.start(nth(seed, k)), error=example.errors))
    whole = next(e for e in examples(seed=seed, trials=trials) if e.name == name)
    together = Start(whole.problem, *whole.starts(trials, seed), error=whole.errors)
    return Subject(name, singles, together)


def compare(
    subject: Subject, method: Method, *, evaluations: int | None, steps: int | None, seed: int
) -> Outcome | None:
    """Run a method from all starts within a budget of evaluations of g or of upper steps; None after Ctrl-C."""
    begun = subject.starts(method)
    each, memory = cost_of(begun[0], method)
    if begun[0] is subject.together:
        memory //= len(subject.singles)
    runs = []
    for start in begun:
        u, v = copy.deepcopy((start.u, start.v))
        watch = _Watch(start, u, v, evaluations)
        most = steps or max(1, (evaluations or 1) if _deterministic(method, start) else (evaluations or 1) // each)
        solution = solve(
            start.problem, method, u, v, start.data, max_steps=most, callbacks=[watch],
            log_every=1 if _deterministic(method, start) else max(1, most // POINTS), seed=seed, hypergradient=False,
        )  # fmt: skip
        if solution.status is Status.STOPPED and not watch.spent:
            return None
        watch.see(solution.history["evaluations"][-1] if len(solution.history) else 0, _last(solution))
        runs.append((start, u, v, solution, watch))
    ends = [_end(start, u, v, solution) for start, u, v, solution, _ in runs]
    errors = [end[0] for end in ends if end[0] is not None]
    return Outcome(
        error=_mean(errors) if errors else None,
        upper=_mean([end[1] for end in ends]), residual=_mean([end[2] for end in ends]),
        evaluations=_mean([watch.curve[-1][0] for *_, watch in runs]),
        steps=_mean([solution.steps for *_, solution, _ in runs]),
        seconds=sum(watch.seconds for *_, watch in runs), memory=memory,
        status=", ".join(sorted({_ending(solution, watch) for *_, solution, watch in runs})),
        curve=_mean_curve([watch.curve for *_, watch in runs]),
    )  # fmt: skip


def cost_of(start: Start, method: Method) -> tuple[int, int]:
    """(evaluations of g, bytes) of one upper step. Refuses what the method cannot do, before anything is run."""
    u, v = copy.deepcopy((start.u, start.v))
    evaluations, memory = probe(start.problem, method, u, v, start.data)
    return max(1, evaluations), memory


class _Watch(Callback):
    """Notes the error, or f, as a run goes, and ends it when the budget is spent."""

    def __init__(self, start: Start, u: Any, v: Any, budget: int | None) -> None:
        self.start_, self.u, self.v, self.budget = start, u, v, budget
        self.curve: list[tuple[float, float]] = []
        self.spent = False
        self.seconds = 0.0
        if start.error is not None:
            self.curve.append((0.0, float(start.error(u, v).mean())))

    def log(self, run: Run) -> bool | None:
        row = next(run.history.rows(len(run.history) - 1))
        self.seconds = run.seconds
        self.see(row["evaluations"], row["upper"])
        self.spent = self.budget is not None and row["evaluations"] >= self.budget
        return self.spent

    def see(self, evaluations: float, upper: float) -> None:
        error = self.start_.error
        value = upper if error is None else float(error(self.u, self.v).mean())
        if self.curve and self.curve[-1][0] == evaluations:
            self.curve.pop()
        self.curve.append((float(evaluations), value))


def _deterministic(method: Method, start: Start) -> bool:
    return isinstance(method, Penalty) and start.data is None and method.mode in (None, "deterministic")


def _ending(solution: Solution, watch: _Watch) -> str:
    return "budget spent" if watch.spent or solution.status is Status.MAX_STEPS else solution.status.name.lower()


def _last(solution: Solution) -> float:
    return float(solution.history["upper"][-1]) if len(solution.history) else float("nan")


def _end(start: Start, u: Any, v: Any, solution: Solution) -> tuple[float | None, float, float]:
    """(error, f, |grad_v g|) at the end, each the mean over the trials that ran at once."""
    error = None if start.error is None else float(start.error(u, v).mean())
    if start.data is not None or not isinstance(v, Tensor):
        return error, _last(solution), solution.certificate.lower_residual
    slope = torch.autograd.grad(start.problem.lower(u, v, None).sum(), v)[0]
    trials = start.problem.trials or 1
    with torch.no_grad():
        upper = float(start.problem.upper(u, v, None).mean())
    return error, upper, float(slope.reshape(trials, -1).norm(dim=1).mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_curve(curves: Sequence[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of several runs; one that has ended stays where it is."""
    if len(curves) == 1:
        return curves[0]
    grid = sorted({evaluations for curve in curves for evaluations, _ in curve})
    out, at = [], [0] * len(curves)
    for evaluations in grid:
        for i, curve in enumerate(curves):
            while at[i] + 1 < len(curve) and curve[at[i] + 1][0] <= evaluations:
                at[i] += 1
        out.append((evaluations, _mean([curve[k][1] for curve, k in zip(curves, at, strict=True)])))
    return out
