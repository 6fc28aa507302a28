"""Several methods on one problem, from the same starting points and with the same budget.

A step-wise method decays its learning rates over all of its steps, so the number of steps is set before the run: a
trial run of a few steps measures what one step takes, and the budget is divided by that. Scales that a method measures
before its first step are counted in `evaluations`, but the budget does not pay for them. `Penalty` in deterministic
mode has no such schedule and stops when the budget is spent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    Callback,
    ForwardMode,
    History,
    Penalty,
    Problem,
    ReverseMode,
    Run,
    Solution,
    Status,
    ValueFunction,
    ValueGap,
    solve,
)
from bilevel._util.checks import ShortRepr, in_range
from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel.methods.base import Method

# Every method by its name on the command line; the algorithms are presets of `Penalty`. A budget is a known number of
# steps, which decay="linear" spends.
METHODS: dict[str, Callable[..., Method]] = {
    "penalty": Penalty,
    "algorithm-1": Penalty.algorithm_1,
    "algorithm-2": Penalty.algorithm_2,
    "alternating": partial(Alternating, decay="linear"),
    "reverse-mode": partial(ReverseMode, decay="linear"),
    "forward-mode": partial(ForwardMode, decay="linear"),
    "approx-grad": partial(ApproxGrad, decay="linear"),
    "value-function": partial(ValueFunction, decay="linear"),
    "value-gap": partial(ValueGap, decay="linear"),
    "soba": SOBA,
    "srba": SRBA,
    "f2sa": F2SA,
    "sama": partial(SAMA, decay="linear"),
    "stocbio": partial(ApproxGrad, decay="linear", linear_solver="sgd", lower_steps=10, warm_start=False),
    "amigo": partial(ApproxGrad, decay="linear", linear_solver="sgd", lower_steps=10),
}
PRESETS = ("algorithm-1", "algorithm-2")
# The number of points on the curve of a run.
POINTS = 200
TRIAL_STEPS = 4


@dataclass(frozen=True, repr=False)
class Start(ShortRepr):
    """A problem and a starting point, for `compare`.

    Args:
        problem: The `Problem`.
        u: The upper variable at the start, as for `solve`. It is copied.
        v: The lower variable at the start.
        data: The data, as for `solve`. None (default): the problem has none.
        error: A function (u, v) that returns the distance to the solution, one number for each trial. None (default):
            the solution is not known.

    >>> problem = Problem(lambda u, v, _: (v - 1).square().sum(), lambda u, v, _: (v - u).square().sum())
    >>> u, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> start = Start(problem, u, v, error=lambda u, v: (u - 1).abs())
    """

    problem: Problem
    u: Any
    v: Any
    data: object = None
    error: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Budget:
    """What each method can use in one run.

    Args:
        unit: "evaluations" (of g), "steps" (of u) or "seconds".
        most: The number of them.

    >>> Budget("evaluations", 10_000).most
    10000
    """

    unit: Literal["evaluations", "steps", "seconds"]
    most: float

    def __post_init__(self) -> None:
        in_range(self.unit, self.most, above=0)


@dataclass(frozen=True, repr=False)
class Subject(ShortRepr):
    """A problem to compare methods on.

    Args:
        name: The name of the problem, for tables.
        singles: A `Start` for each trial.
        together: All trials as one `Start`, if they can run at once. None (default): they run one after another.

    >>> problem = Problem(lambda u, v, _: (v - 1).square().sum(), lambda u, v, _: (v - u).square().sum())
    >>> u, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> subject = Subject("line", [Start(problem, u, v)])
    >>> compare(subject, Penalty(), Budget("steps", 20), seed=0).status
    'converged'
    """

    name: str
    singles: Sequence[Start]
    together: Start | None = None

    def starts(self, method: Method) -> Sequence[Start]:
        """Return the starts that the method runs from; the deterministic mode takes trials one after another."""
        return self.singles if self.together is None or deterministic(method, self.together) else [self.together]


@dataclass(frozen=True, repr=False)
class ComparisonResult(ShortRepr):
    """The runs of one method, as means over the trials. `compare` returns it.

    Fields:
        error: The distance to the solution at the end. None if the solution is not known.
        upper: f at the end.
        residual: |grad_v g| at the end.
        evaluations: The evaluations of g in one run, with those before the first step.
        steps: The number of upper steps.
        seconds: The time of all runs together.
        status: How the runs ended, such as "converged" or "budget spent".
        curve: Pairs (evaluations, error), or (evaluations, f) if the solution is not known.

    >>> found = compare(synthetic("sum", trials=1, seed=0), Penalty(), Budget("steps", 50), seed=0)
    >>> found.status
    'converged'
    """

    error: float | None
    upper: float
    residual: float
    evaluations: float
    steps: float
    seconds: float
    status: str
    curve: list[tuple[float, float]]


def synthetic(name: str, trials: int, seed: int) -> Subject:
    """Return one of the paper's four problems, with the starts of `bilevel demo`.

    Args:
        name: "sum", "difference", "sum-singular" or "difference-singular".
        trials: The number of starting points, each with its own matrix A.
        seed: The seed of all draws.

    >>> len(synthetic("sum", trials=3, seed=0).singles)
    3
    """
    singles = []
    for k in range(trials):
        example = next(e for e in examples(seed=nth(seed, k)) if e.name == name)
        singles.append(Start(example.problem, *example.start(nth(seed, k)), error=example.errors))
    whole = next(e for e in examples(seed=seed, trials=trials) if e.name == name)
    return Subject(name, singles, Start(whole.problem, *whole.starts(trials, seed), error=whole.errors))


def compare(subject: Subject, method: Method, budget: Budget, *, seed: int) -> ComparisonResult | None:
    """Run a method from every start within the budget; return None after Ctrl-C.

    Args:
        subject: The problem and its starts. Their variables are copied and do not change.
        method: The method, such as `Penalty()`; `METHODS` has the names of all.
        budget: What each run can use.
        seed: The seed of every run.

    >>> found = compare(synthetic("sum", trials=1, seed=0), Penalty(), Budget("steps", 50), seed=0)
    >>> found.error < 1e-3
    True
    """
    runs = []
    for start in subject.starts(method):
        try:
            steps = steps_of(start, method, budget)
        except KeyboardInterrupt:
            return None
        watch = _Watch(start, budget)
        every = 1 if deterministic(method, start) else max(1, steps // POINTS)
        solution = _solve(start, method, watch.u, watch.v, steps, seed, every, [watch])
        if solution.interrupted:
            return None
        runs.append((solution, watch))
    errors = [watch.curve[-1][1] for _, watch in runs if watch.error is not None]
    return ComparisonResult(
        error=_mean(errors) if errors else None,
        upper=_mean([watch.upper for _, watch in runs]),
        residual=_mean([solution.certificate.lower_residual for solution, _ in runs]),
        evaluations=_mean([watch.curve[-1][0] for _, watch in runs]),
        steps=_mean([solution.steps for solution, _ in runs]),
        seconds=sum(watch.seconds for _, watch in runs),
        status=", ".join(sorted({watch.ending(solution) for solution, watch in runs})),
        curve=_mean_curve([watch.curve for _, watch in runs]),
    )


def steps_of(start: Start, method: Method, budget: Budget) -> int:
    """Return the most upper steps that the budget pays for, at least one.

    Runs a few steps on copies of the variables, and so raises what the method raises on this problem. Ctrl-C meanwhile
    raises KeyboardInterrupt.
    """
    steps = int(budget.most) if budget.unit == "steps" else TRIAL_STEPS
    found = _solve(start, method, *copy.deepcopy((start.u, start.v)), min(steps, TRIAL_STEPS), 0, 1, [])
    if found.interrupted:
        raise KeyboardInterrupt
    if budget.unit == "steps":
        return max(1, steps)
    if deterministic(method, start):
        # A step takes one evaluation or more; the seconds of a step are not known, so `_Watch` ends the run.
        return max(1, int(budget.most)) if budget.unit == "evaluations" else 10**9
    used = found.history[budget.unit]
    price = (used[-1] - used[0]) / (len(used) - 1) if len(used) > 1 else 0.0
    return max(1, int(budget.most / price)) if price > 0 else 1


def deterministic(method: Method, start: Start) -> bool:
    """Return whether the method would run in deterministic mode, which has no learning rates."""
    return isinstance(method, Penalty) and start.data is None and method.mode in (None, "deterministic")


def _solve(
    start: Start, method: Method, u: Any, v: Any, steps: int, seed: int, log_every: int, callbacks: Sequence[Callback]
) -> Solution:
    return solve(
        start.problem,
        method,
        u,
        v,
        start.data,
        max_steps=steps,
        callbacks=callbacks,
        log_every=log_every,
        seed=seed,
        hypergradient=False,
    )


class _Watch(Callback):
    """Records the error, or f, during a run, and ends the run when its budget is spent."""

    def __init__(self, start: Start, budget: Budget) -> None:
        self.error, self.budget = start.error, budget
        self.u, self.v = copy.deepcopy((start.u, start.v))
        self.curve = [] if self.error is None else [(0.0, self._error())]
        self.spent = False
        self.seconds, self.upper = 0.0, float("nan")

    def _error(self) -> float:
        return self.upper if self.error is None else float(self.error(self.u, self.v).mean())

    def log(self, run: Run) -> bool:
        self.seconds = run.seconds
        self._note(run.history)
        used = {"evaluations": self.curve[-1][0], "steps": 0.0, "seconds": self.seconds}
        self.spent = used[self.budget.unit] >= self.budget.most
        return self.spent

    def end(self, solution: Solution) -> None:
        """Record the end of the run, which is after the last step that was logged."""
        self._note(solution.history)

    def _note(self, history: History) -> None:
        last = history.rows(max(0, len(history) - 1))
        row = next(last, {"upper": self.upper, "evaluations": 0.0})  # without a step, the start is the only point
        self.upper, evaluations = float(row["upper"]), float(row["evaluations"])
        if self.curve and self.curve[-1][0] == evaluations:
            self.curve.pop()
        self.curve.append((evaluations, self._error()))

    def ending(self, solution: Solution) -> str:
        return "budget spent" if self.spent or solution.status is Status.MAX_STEPS else solution.status.name.lower()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_curve(curves: Sequence[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean of several curves; a curve that has ended keeps its last value."""
    grid = sorted({evaluations for curve in curves for evaluations, _ in curve})
    held = []
    for curve in curves:
        at = torch.searchsorted(torch.tensor([x for x, _ in curve]), torch.tensor(grid), right=True) - 1
        held.append([curve[k][1] for k in at.clamp(min=0).tolist()])
    return [(x, _mean(values)) for x, values in zip(grid, zip(*held, strict=True), strict=True)]
