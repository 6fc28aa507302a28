"""The synthetic study (Section 3.1, Appendices D.4 and E.1): its protocol and its cells.

Adam with learning rates of 1e-3 above and 1e-4 below (plain gradient descent below in RMD), gamma 1, lam 10, epsilon 1,
40,000 upper steps, 20 trials from starts uniform in [-5, 5]^10. `runs.py` runs a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bilevel import Alternating, ApproxGrad, ForwardMode, Penalty, ReverseMode, ValueFunction, ValueGap
from bilevel.methods.base import Method
from bilevel_studies.study import RunItem

DIMENSION = 10
UPPER_RATE, LOWER_RATE = 1e-3, 1e-4
# The paper regularises the linear system of ApproxGrad but does not say by how much.
DAMPING = 1e-3
PAIRS = {"plain": ("sum", "difference"), "singular": ("sum-singular", "difference-singular")}
PROBLEMS = [name for pair in PAIRS.values() for name in pair]
# The paper's Examples 1 to 4.
NUMBERS = {name: i + 1 for i, name in enumerate(PROBLEMS)}
METHODS = ("GD", "RMD", "ApproxGrad", "Penalty")
LOWER_STEPS = (1, 5, 10)
# The methods of the protocol with their T.
RUNS = [*((name, T) for name in METHODS for T in LOWER_STEPS), ("RMD", 100)]
# The library's other methods with their T, and the gradients of g in one upper step. They stop at the budget that is
# common to all runs.
OTHERS: dict[tuple[str, int], int] = {
    ("FMD", 10): (DIMENSION + 1) * 10 + 1,
    ("ValueGap", 10): 2 * (10 + 1),
    ("ValueFunction", 10): 2 * (10 + 1),
}
# The first lam in Figure 7.
LAMS = (0.0, 1e-4, 1e-2, 1.0)
# What Appendix D.4 varies; it names neither the values nor the ranges.
SENSITIVITY: dict[str, tuple[float, ...]] = {
    "gamma": (0.01, 0.1, 1.0, 10.0, 100.0),
    "epsilon": (0.1, 0.3, 1.0, 3.0, 10.0),
    "gamma_factor": (1.01, 1.05, 1.1, 1.2, 1.5),
    "epsilon_factor": (0.5, 0.8, 0.9, 0.95, 0.99),
}
# T of the sensitivity study.
VARIED_STEPS = 5


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    steps: int = 40_000
    trials: int = 20
    # As the caption of Figure 7 says.
    ablation_trials: int = 5
    # Upper steps of RMD with T = 100. A step has 201 evaluations, too many for one compiled graph.
    long_steps: Mapping[str, int] = field(default_factory=lambda: {"plain": 10_000, "singular": 10_000})
    # Upper steps of Penalty with T = 1: the protocol's steps are too few for v to converge.
    more_steps: int = 100_000
    clock_steps: int = 500
    default_steps: int = 500
    # How often the error is measured in a run.
    points: int = 200
    compiled: bool = True
    seed: int = 0


FULL = Scale()
QUICK = Scale(
    steps=100,
    trials=5,
    ablation_trials=2,
    long_steps={"plain": 10, "singular": 10},
    more_steps=200,
    clock_steps=25,
    points=20,
    compiled=False,
)


def method(name: str, lower_steps: int, options: Mapping[str, Any]) -> Method:
    """Return a method by its name in the paper or the library, with the learning rates of the study."""
    lower = partial(torch.optim.Adam, lr=LOWER_RATE)
    shared: dict[str, Any] = {
        "lower_steps": lower_steps,
        "warm_up": 0.0,
        "decay": "constant",
        "lower_batches": "shared",
        "upper_optimizer": partial(torch.optim.Adam, lr=UPPER_RATE),
        **options,
    }
    match name:
        case "GD":
            return Alternating(**shared, lower_optimizer=lower)
        case "RMD":
            return ReverseMode(**shared, lower_rate=LOWER_RATE)
        case "ApproxGrad":
            linear: dict[str, Any] = {"linear_solver": "adam", "linear_rate": LOWER_RATE, "damping": DAMPING}
            return ApproxGrad(**(linear | shared), lower_optimizer=lower)
        case "FMD":
            return ForwardMode(**shared, lower_rate=LOWER_RATE)
        case "ValueGap":
            return ValueGap(**shared, lower_optimizer=lower)
        case "ValueFunction":
            return ValueFunction(**shared, lower_optimizer=lower)
        case _:
            return Penalty.algorithm_2(lower_steps=lower_steps, upper_rate=UPPER_RATE, lower_rate=LOWER_RATE, **options)


# -- the cells -------------------------------------------------------------------------------------------------------


def protocol(
    scale: Scale, pair: str, name: str, lower_steps: int, *, steps: int | None = None, **options: Any
) -> RunItem:
    """Return the cell of one method with one T on a pair of problems."""
    steps = steps or (scale.long_steps[pair] if lower_steps == 100 else scale.steps)
    settings = {
        "part": "protocol",
        "pair": pair,
        "method": name,
        "lower_steps": lower_steps,
        "steps": steps,
        "trials": scale.trials,
        "points": scale.points,
        "compiled": scale.compiled,
        "seed": scale.seed,
        "options": options,
    }
    cost = {"GD": 1, "RMD": 2, "ApproxGrad": 2, "Penalty": 1.5}[name]
    return RunItem(settings, weight=lower_steps * cost * (3 if pair == "singular" else 1))


def budgeted(scale: Scale, pair: str, name: str, lower_steps: int) -> RunItem:
    """Return the cell of one of the other methods, for as many gradients as GD with T = 1 takes: two per step.

    FMD has so few steps that compiling them would take longer.
    """
    settings = {
        "part": "budget",
        "pair": pair,
        "method": name,
        "lower_steps": lower_steps,
        "steps": max(1, 2 * scale.steps // OTHERS[name, lower_steps]),
        "trials": scale.trials,
        "points": scale.points,
        "compiled": scale.compiled and name != "FMD",
        "seed": scale.seed,
        "options": {},
    }
    return RunItem(settings, weight=10)


def ablation(scale: Scale, lower_steps: int, multipliers: bool) -> RunItem:
    """Return the cell of Figure 7: all four lam at the same time on the first problem, with or without nu."""
    settings = {
        "part": "ablation",
        "pair": "plain",
        "problems": ["sum"],
        "method": "Penalty",
        "lower_steps": lower_steps,
        "steps": scale.steps,
        "trials": scale.ablation_trials,
        "points": scale.points,
        "compiled": scale.compiled,
        "seed": scale.seed,
        "options": {"multipliers": multipliers},
        "vary": {"lam": list(LAMS)},
    }
    return RunItem(settings, weight=lower_steps)


def sensitivity(scale: Scale, option: str, pair: str = "plain") -> list[RunItem]:
    """Return the cells of Appendix D.4 for one option: gamma and epsilon vary within a run, factors between runs."""
    values = SENSITIVITY[option]
    base = {
        "part": "sensitivity",
        "pair": pair,
        "method": "Penalty",
        "lower_steps": VARIED_STEPS,
        "steps": scale.steps,
        "trials": scale.ablation_trials,
        "points": scale.points,
        "compiled": scale.compiled,
        "seed": scale.seed,
    }
    if option in ("gamma", "epsilon"):
        return [RunItem(base | {"options": {}, "vary": {option: list(values)}}, weight=VARIED_STEPS)]
    return [RunItem(base | {"options": {option: value}}, weight=VARIED_STEPS) for value in values]


def wall_clock(scale: Scale, problem: str, name: str) -> RunItem:
    """Return the cell of Table 4: one run for each T."""
    settings = {
        "part": "clock",
        "problem": problem,
        "method": name,
        "lower_steps": list(LOWER_STEPS),
        "steps": scale.clock_steps,
        "seed": scale.seed,
        "clock": "process",
    }
    return RunItem(settings, weight=1)


def default(scale: Scale, problem: str) -> RunItem:
    """Return the cell of `Penalty()` without options, one start after another."""
    settings = {
        "part": "default",
        "problem": problem,
        "trials": scale.trials,
        "steps": scale.default_steps,
        "seed": scale.seed,
    }
    return RunItem(settings, weight=2)


def costs(runs: Iterable[tuple[str, int]] = tuple(RUNS)) -> RunItem:
    """Return the cell that counts the cost of an upper step of each run in gradients of g."""
    return RunItem({"part": "costs", "runs": [list(run) for run in runs]}, weight=5)


def cells(scale: Scale) -> list[RunItem]:
    """Return all cells of the study."""
    out = [protocol(scale, pair, name, T) for pair in PAIRS for name in METHODS for T in LOWER_STEPS]
    out += [protocol(scale, pair, "RMD", 100) for pair in PAIRS]
    out += [protocol(scale, pair, "Penalty", 1, steps=scale.more_steps) for pair in PAIRS]
    out += [protocol(scale, pair, "ApproxGrad", 10, linear_solver="cg", linear_rate=None) for pair in PAIRS]
    out += [ablation(scale, T, multipliers) for T in LOWER_STEPS for multipliers in (True, False)]
    out += [cell for option in SENSITIVITY for cell in sensitivity(scale, option)]
    out += [wall_clock(scale, problem, name) for problem in PROBLEMS for name in METHODS]
    out += [default(scale, problem) for problem in PROBLEMS]
    out += [budgeted(scale, pair, name, T) for pair in PAIRS for name, T in OTHERS]
    return [*out, costs(), costs(OTHERS)]
