"""Methods side by side on one problem: the same starts, the same budget.

A subject is a problem with its starts. Where its trials can run at once, in a leading dimension of u and v, they do; a
method in deterministic mode takes them one after another. A step-wise run has as many upper steps as the budget pays
for, and takes them all: its warm-up and the decay of its rates are complete. What it measures before the first one is
not paid for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from bilevel_studies.cost import StepCost, probe
from torch import Tensor

from bilevel.applications.comparison.synthetic_problems import BOUND, examples, nth
from bilevel.methods.alternating import Alternating
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.base import Method
from bilevel.methods.forward_mode import ForwardMode
from bilevel.methods.penalty import Penalty
from bilevel.methods.reverse_mode import ReverseMode
from bilevel.methods.value_function import ValueFunction
from bilevel.methods.value_gap import ValueGap
from bilevel.problem.problem import Problem
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback, Run
from bilevel.running.solve import solve

METHODS: dict[str, Callable[..., Method]] = {
    "penalty": Penalty,
    "algorithm-1": Penalty.algorithm_1,
    "algorithm-2": Penalty.algorithm_2,
    "alternating": Alternating,
    "reverse-mode": ReverseMode,
    "forward-mode": ForwardMode,
    "approx-grad": ApproxGrad,
    "value-function": ValueFunction,
    "value-gap": ValueGap,
}
"""Every method by its name on the command line; the algorithms are presets of `Penalty`."""
PRESETS = ("algorithm-1", "algorithm-2")
UNROLLED = ("reverse-mode", "forward-mode")
"""Those whose `lower_rate` is that of gradient descent."""
WIDTH = 2 * BOUND
"""Of the domain of the paper's problems."""
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
class Budget:
    """What each method may take in one trial: gradients (evaluations of g, and products with its second derivatives),
    evaluations of g alone, or upper steps."""

    unit: Literal["gradients", "evaluations", "steps"]
    most: int

    def steps(self, cost: StepCost) -> int:
        """The upper steps that it pays for, at least one."""
        if self.unit == "steps":
            return self.most
        warm, moving = (
            (cost.warm_gradients, cost.gradients)
            if self.unit == "gradients"
            else (cost.warm_evaluations, cost.evaluations)
        )

        def price(steps: int) -> int:
            first = round(cost.warm_up * steps)
            return warm * first + moving * (steps - first)

        steps = max(1, int(self.most / (cost.warm_up * warm + (1 - cost.warm_up) * moving)))
        while steps > 1 and price(steps) > self.most:
            steps -= 1
        while price(steps + 1) <= self.most:
            steps += 1
        return steps


@dataclass(frozen=True)
class Subject:
    """A problem to compare methods on."""

    name: str
    singles: Sequence[Start]
    """A start for each trial."""
    together: Start | None = None
    """All trials in one, where that can be."""
    width: float | None = None
    """How far a coordinate of u may have to travel. A step-wise method without an upper rate gets one that lets it."""

    def starts(self, method: Method) -> Sequence[Start]:
        """What the method runs from."""
        return self.singles if self.together is None or deterministic(method, self.together) else [self.together]


@dataclass(frozen=True)
class Outcome:
    """A method's runs, as means over the trials."""

    error: float | None
    """The error, where the solution is known."""
    upper: float
    residual: float
    """|grad_v g|"""
    evaluations: float
    """Of g, in one trial, with those before the first step."""
    gradients: float
    """Evaluations of g and products with its second derivatives, in the steps of one trial."""
    steps: float
    seconds: float
    """Of all trials."""
    memory: int
    """The most bytes that the tensors of one upper step took at one time, in one trial."""
    status: str
    curve: list[tuple[float, float]]
    """(gradients, error or else f)"""
    upper_rate: float | None = None
    """The learning rate of u at its start, where it was chosen here."""


def synthetic(name: str, trials: int, seed: int) -> Subject:
    """One of the paper's four problems, from the starts of `bilevel demo`."""
    singles = []
    for k in range(trials):
        example = next(e for e in examples(seed=nth(seed, k)) if e.name == name)
        singles.append(Start(example.problem, *example.start(nth(seed, k)), error=example.errors))
    whole = next(e for e in examples(seed=seed, trials=trials) if e.name == name)
    together = Start(whole.problem, *whole.starts(trials, seed), error=whole.errors)
    return Subject(name, singles, together, WIDTH)


def compare(subject: Subject, method: Method, budget: Budget, *, seed: int) -> Outcome | None:
    """Run a method from all starts within the budget; None after Ctrl-C."""
    begun = subject.starts(method)
    each = cost_of(begun[0], method)
    memory = each.bytes // (len(subject.singles) if begun[0] is subject.together else 1)
    searching = deterministic(method, begun[0])
    # A step of the deterministic mode is a line search of one evaluation or more: the budget ends the run.
    most = budget.most if searching else budget.steps(each)
    rate = None
    if subject.width is not None and not searching:
        method, rate = paced(method, subject.width, most, round(each.warm_up * most))
    runs = []
    for start in begun:
        u, v = copy.deepcopy((start.u, start.v))
        watch = _Watch(start, u, v, each, most, budget if searching else None)
        solution = solve(
            start.problem,
            method,
            u,
            v,
            start.data,
            max_steps=most,
            callbacks=[watch],
            log_every=1 if searching else max(1, most // POINTS),
            seed=seed,
            hypergradient=False,
        )
        if solution.interrupted:
            return None
        if len(solution.history):
            watch.see(next(solution.history.rows(len(solution.history) - 1)))
        runs.append((start, u, v, solution, watch))
    ends = [_end(start, u, v, solution) for start, u, v, solution, _ in runs]
    errors = [end[0] for end in ends if end[0] is not None]
    return Outcome(
        error=_mean(errors) if errors else None,
        upper=_mean([end[1] for end in ends]),
        residual=_mean([end[2] for end in ends]),
        evaluations=_mean([watch.evaluations for *_, watch in runs]),
        gradients=_mean([watch.gradients for *_, watch in runs]),
        steps=_mean([solution.steps for *_, solution, _ in runs]),
        seconds=sum(watch.seconds for *_, watch in runs),
        memory=memory,
        status=", ".join(sorted({_ending(solution, watch) for *_, solution, watch in runs})),
        curve=_mean_curve([watch.curve for *_, watch in runs]),
        upper_rate=rate,
    )


def cost_of(start: Start, method: Method) -> StepCost:
    """What an upper step takes. Refuses what the method cannot do, before anything is run."""
    u, v = copy.deepcopy((start.u, start.v))
    return probe(start.problem, method, u, v, start.data)


def deterministic(method: Method, start: Start) -> bool:
    """Whether the method is to run in deterministic mode, which has no learning rates."""
    return isinstance(method, Penalty) and start.data is None and method.mode in (None, "deterministic")


def rated(method: Any, upper: float | None, lower: float | None) -> Method:
    """The method with these learning rates of Adam where it has none of its own."""
    given: dict[str, Any] = {}
    if upper is not None and method.upper_optimizer is None:
        given["upper_optimizer"] = partial(torch.optim.Adam, lr=upper)
    if lower is not None and isinstance(method, (ReverseMode, ForwardMode)):
        if method.lower_rate is None:
            given["lower_rate"] = lower
    elif lower is not None and method.lower_optimizer is None:
        given["lower_optimizer"] = partial(torch.optim.Adam, lr=lower)
    found: Method = replace(method, **given)
    return found


def paced(method: Any, width: float, steps: int, warm_up: int) -> tuple[Method, float | None]:
    """The method with an upper rate, where it has none, that lets a coordinate travel by `width`; and that rate.

    Adam moves a coordinate by its rate, or less. v has a default rate that follows u, but for the penalty method's: its
    T steps get to share that of u.
    """
    falling = method.decay in (None, "linear")
    travelled = sum(1 - k / steps if falling else 1.0 for k in range(warm_up, steps))
    rate = width / max(travelled, 1e-12) if method.upper_optimizer is None else None
    upper = method.upper_optimizer.keywords.get("lr") if isinstance(method.upper_optimizer, partial) else rate
    lower = upper / max(1, method.lower_steps or 0) if isinstance(method, Penalty) and upper is not None else None
    return rated(method, rate, lower), rate


class _Watch(Callback):
    """Notes the error, or f, as a run goes; ends the run when a budget is spent."""

    def __init__(self, start: Start, u: Any, v: Any, cost: StepCost, most: int, budget: Budget | None) -> None:
        self.begun, self.u, self.v, self.cost, self.budget = start, u, v, cost, budget
        self.warm_up = round(cost.warm_up * most)
        self.curve: list[tuple[float, float]] = []
        self.spent = False
        self.seconds = self.evaluations = self.gradients = 0.0
        if start.error is not None:
            self.curve.append((0.0, float(start.error(u, v).mean())))

    def log(self, run: Run) -> bool | None:
        self.seconds = run.seconds
        self.see(next(run.history.rows(len(run.history) - 1)))
        if self.budget is not None and self.budget.unit != "steps":
            taken = self.gradients if self.budget.unit == "gradients" else self.evaluations
            self.spent = taken >= self.budget.most
        return self.spent

    def see(self, row: Mapping[str, float]) -> None:
        error = self.begun.error
        value = float(row["upper"]) if error is None else float(error(self.u, self.v).mean())
        self.evaluations, self.gradients = float(row["evaluations"]), self._taken(row)
        if self.curve and self.curve[-1][0] == self.gradients:
            self.curve.pop()
        self.curve.append((self.gradients, value))

    def _taken(self, row: Mapping[str, float]) -> float:
        """Gradients so far. In deterministic mode every evaluation has as many products, and all are counted."""
        cost = self.cost
        if self.budget is not None:
            return float(row["evaluations"] * cost.gradients / max(1, cost.evaluations))
        first = min(int(row["step"]), self.warm_up)
        return float(cost.warm_gradients * first + cost.gradients * (int(row["step"]) - first))


def _ending(solution: Solution, watch: _Watch) -> str:
    return "budget spent" if watch.spent or solution.status is Status.MAX_STEPS else solution.status.name.lower()


def _last(solution: Solution) -> float:
    return float(solution.history["upper"][-1]) if len(solution.history) else float("nan")


def _end(start: Start, u: Any, v: Any, solution: Solution) -> tuple[float | None, float, float]:
    """(error, f, |grad_v g|) at the end, each the mean over the trials that ran at once."""
    error = None if start.error is None else float(start.error(u, v).mean())
    if start.data is not None or not isinstance(v, Tensor):
        return error, _last(solution), solution.certificate.lower_residual
    problem, trials = start.problem, start.problem.trials or 1
    with torch.no_grad():
        made = None if problem.prepare is None else problem.prepare(u, None)
        upper = float(problem.upper(u, v, made).mean())
    slope = torch.autograd.grad(problem.lower(u, v, made).sum(), v)[0]
    return error, upper, float(slope.reshape(trials, -1).norm(dim=1).mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_curve(curves: Sequence[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of several runs; one that has ended stays where it is."""
    if len(curves) == 1:
        return curves[0]
    grid = sorted({gradients for curve in curves for gradients, _ in curve})
    out, at = [], [0] * len(curves)
    for gradients in grid:
        for i, curve in enumerate(curves):
            while at[i] + 1 < len(curve) and curve[at[i] + 1][0] <= gradients:
                at[i] += 1
        out.append((gradients, _mean([curve[k][1] for curve, k in zip(curves, at, strict=True)])))
    return out
