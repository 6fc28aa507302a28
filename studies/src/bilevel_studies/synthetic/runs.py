"""Run a cell of the synthetic study. All trials of two problems run in one tensor:

    f = a|u|^2 + |v|^2 - b|A(u - v)|^2      g = |A(c + s u - v)|^2      (A = I in the plain pair)

with a, b, c, s = 1, 0, 1, -1 for a `sum` and 0, 1, 0, 1 for a `difference`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch._inductor.config as inductor
from torch import Tensor

from bilevel import Callback, Penalty, Problem, Run, solve
from bilevel.applications.comparison.synthetic_problems import Example, examples, matrices, nth, square, times
from bilevel_studies.cost import cost
from bilevel_studies.study import Found, Settings
from bilevel_studies.synthetic.attempts import attempt
from bilevel_studies.synthetic.study import DIMENSION, PAIRS, method


def run(settings: Settings) -> Found | None:
    """Return the result of a cell; None after Ctrl-C."""
    parts = {"default": _run_default, "clock": _run_clock, "costs": _run_costs}
    return parts.get(settings["part"], _run_trials)(settings)


def general(problems: Sequence[str], trials: int, seed: int) -> Problem:
    """Return one problem for all trials of problems that are all plain or all singular (see the module's docstring)."""
    kinds = torch.tensor([name.startswith("difference") for name in problems]).repeat_interleave(trials)
    b = kinds.to(torch.float64)
    a, c, s = 1 - b, (1 - b)[:, None], (2 * b - 1)[:, None]
    if problems[0].endswith("singular"):
        A = matrices(DIMENSION, seed, trials).repeat(len(problems), 1, 1)
        return _quadratic(a, b, c, s, partial(times, A))
    return _quadratic(a, b, c, s, lambda x: x)


def _quadratic(a: Tensor, b: Tensor, c: Tensor, s: Tensor, product: Callable[[Tensor], Tensor]) -> Problem:
    def upper(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return a * square(u) + square(v) - b * square(product(u - v))

    def lower(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return square(product(c + s * u - v))

    return Problem(upper, lower, trials=len(a))


def _run_trials(settings: Settings) -> Found | None:
    """Return the errors of every trial for each problem and varied value, measured at intervals of a run."""
    trials, seed, steps = settings["trials"], settings["seed"], settings["steps"]
    names = list(settings.get("problems") or PAIRS[settings["pair"]])
    known = {example.name: example for example in examples(DIMENSION, seed, trials)}
    options, values = dict(settings["options"]), [0.0]
    for option, values in settings.get("vary", {}).items():
        options[option] = [value for _ in names for value in values for _ in range(trials)]
    chosen = method(settings["method"], settings["lower_steps"], options)
    # Trials are ordered by problem, value and number; all values of a problem start at the same points.
    spread = [name for name in names for _ in values]
    groups = [known[name] for name in spread]
    u, v = (
        torch.cat(parts).detach().requires_grad_()
        for parts in zip(*(example.starts(trials, seed) for example in groups), strict=True)
    )
    trace = _Trace(groups, trials, u, v)
    with inductor.patch(compile_threads=1):  # other processes run at the same time
        solution = solve(
            general(spread, trials, seed),
            chosen,
            u,
            v,
            max_steps=steps,
            log_every=max(1, steps // settings["points"]),
            callbacks=[trace],
            seed=seed,
            hypergradient=False,
            engine="compile" if settings["compiled"] else "eager",
        )
    if solution.interrupted:
        return None
    distances = [
        example.distances(part_u, part_v).tolist()
        for example, part_u, part_v in zip(groups, torch.split(u, trials), torch.split(v, trials), strict=True)
    ]
    return {
        "status": solution.status.name,
        "engine": solution.engine,
        "problems": names,
        "values": values,
        "steps": trace.steps,
        "errors": [_rounded(rows) for rows in trace.errors],
        "distances": _rounded(distances),
        "seconds_per_step": trace.seconds_per_step(),
        "evaluations": solution.history["evaluations"][-1] if len(solution.history) else 0,
        "gamma": solution.history["gamma"][-1] if len(solution.history) else 0.0,
    }


class _Trace(Callback):
    """Records the errors of all trials at the start and at each log: [group][trial] at each of `steps`."""

    def __init__(self, groups: Sequence[Example], trials: int, u: Tensor, v: Tensor) -> None:
        self.groups, self.trials, self.u, self.v = groups, trials, u, v
        self.steps: list[int] = []
        self.times: list[tuple[int, float]] = []
        self.errors: list[list[list[float]]] = []
        self._see(0, 0.0)

    def log(self, run: Run) -> bool | None:
        self._see(run.step, run.seconds)
        return None

    def seconds_per_step(self) -> float:
        """Return the median over the intervals except the first, which compiles. Other programs run in bursts."""
        pairs = itertools.pairwise(self.times[1:])
        rates = [(late[1] - early[1]) / (late[0] - early[0]) for early, late in pairs if late[0] > early[0]]
        return median(rates) if rates else 0.0

    def _see(self, step: int, seconds: float) -> None:
        parts = zip(self.groups, *(torch.split(x, self.trials) for x in (self.u, self.v)), strict=True)
        self.errors.append([example.errors(u, v).tolist() for example, u, v in parts])
        self.steps.append(step)
        self.times.append((step, seconds))


def _run_clock(settings: Settings) -> Found | None:
    """Return the seconds of an eager step of single runs, in four blocks of steps for each T.

    They are seconds of the process, so that other programs on the machine do not count.
    """
    example = next(e for e in examples(DIMENSION, nth(settings["seed"], 0)) if e.name == settings["problem"])
    blocks: list[list[float]] = []
    for T in settings["lower_steps"]:
        u, v = example.start(nth(settings["seed"], 0))
        watch, steps = _Watch(), settings["steps"]
        solution = solve(
            example.problem,
            method(settings["method"], T, {}),
            u,
            v,
            max_steps=steps,
            log_every=max(1, steps // 5),
            callbacks=[watch],
            seed=0,
            engine="eager",
            hypergradient=False,
        )
        if solution.interrupted:
            return None
        pairs = itertools.pairwise(watch.marks)  # the first block makes the optimizers' state
        blocks.append([(late[1] - early[1]) / (late[0] - early[0]) for early, late in pairs])
    return {"seconds_per_step": blocks}


class _Watch(Callback):
    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []

    def log(self, run: Run) -> bool | None:
        self.marks.append((run.step, time.process_time()))
        return None


def _run_costs(settings: Settings) -> Found:
    """Count the cost of an upper step on the third problem: all its work is in g."""
    example = examples(DIMENSION)[2]
    found = [cost(example.problem, method(name, T, {}), *example.start(0), repeats=0) for name, T in settings["runs"]]
    return {"gradients": [one.gradients for one in found]}


def _run_default(settings: Settings) -> Found | None:
    found: Found = {"errors": [], "distances": [], "steps": [], "evaluations": [], "seconds": []}
    for k in range(settings["trials"]):
        seed = nth(settings["seed"], k)
        example = next(e for e in examples(DIMENSION, seed) if e.name == settings["problem"])
        one = attempt(example, Penalty(), seed, max_steps=settings["steps"])
        if one.solution.interrupted:
            return None
        found["errors"].append([float(f"{x:.6g}") for x in one.errors])
        found["distances"].append(one.distance)
        found["steps"].append(one.solution.steps)
        found["evaluations"].append([0, *one.solution.history["evaluations"]])
        found["seconds"].append(one.seconds)
    return found


def _rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Round to six digits: enough for a figure, and a third of the file size."""
    return [[float(f"{x:.6g}") for x in row] for row in rows]
