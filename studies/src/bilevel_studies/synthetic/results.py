"""The results of the synthetic study in the form that its tables and figures need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel_studies.study import Found, Kept, RunItem, Settings
from bilevel_studies.synthetic.study import (
    LOWER_STEPS,
    OTHERS,
    PAIRS,
    RUNS,
    Scale,
    ablation,
    budgeted,
    costs,
    default,
    protocol,
    sensitivity,
    wall_clock,
)

Array = NDArray[np.float64]
# A trial of the protocol has converged if its last error is at most this share of its first.
GOAL = 0.01


class Results:
    """The results of the study at one scale. All cells must be among `kept`."""

    def __init__(self, scale: Scale, kept: Sequence[Kept]) -> None:
        self.scale, self.kept = scale, kept
        self._found = {_key(settings): found for settings, found in kept}

    def _get(self, cell: RunItem) -> Found:
        found = self._found.get(_key(cell.settings))
        if found is None:
            raise KeyError(f"the cell {cell.name} is not finished.")
        return found

    def run(self, problem: str, name: str, T: int, **options: Any) -> Found:
        """Return the result of the run that has this problem."""
        if (name, T) in OTHERS:
            return self._get(budgeted(self.scale, pair_of(problem), name, T))
        return self._get(protocol(self.scale, pair_of(problem), name, T, **options))

    def curves(self, problem: str, name: str, T: int, **options: Any) -> tuple[Array, Array]:
        """Return the steps and the errors, of shape (points, trials)."""
        found = self.run(problem, name, T, **options)
        errors = np.array([point[found["problems"].index(problem)] for point in found["errors"]])
        return np.array(found["steps"], dtype=float), errors

    def ends(self, problem: str, name: str, T: int, **options: Any) -> Array:
        """Return the last error of every trial."""
        return np.asarray(self.curves(problem, name, T, **options)[1][-1])

    def converged(self, problem: str, name: str, T: int, **options: Any) -> int:
        """Return how many trials have converged."""
        _, errors = self.curves(problem, name, T, **options)
        return int((self.ends(problem, name, T, **options) <= GOAL * errors[0]).sum())

    def ablated(self, T: int, multipliers: bool) -> tuple[Array, Array]:
        """Return the steps and the mean errors, of shape (points, values of lam)."""
        found = self._get(ablation(self.scale, T, multipliers))
        return np.array(found["steps"], dtype=float), np.array(found["errors"]).mean(-1)

    def varied(self, option: str) -> dict[str, list[tuple[float, float]]]:
        """Return pairs (value, mean of the last errors) for each problem of the plain pair."""
        out: dict[str, list[tuple[float, float]]] = {name: [] for name in PAIRS["plain"]}
        for cell in sensitivity(self.scale, option):
            found = self._get(cell)
            values = found["values"] if "vary" in cell.settings else [cell.settings["options"][option]]
            last = np.array(found["errors"][-1]).mean(-1).reshape(len(found["problems"]), len(values))
            for name, ends in zip(found["problems"], last, strict=True):
                out[name] += list(zip(values, ends.tolist(), strict=True))
        return out

    def clock(self, problem: str, name: str) -> dict[int, tuple[float, float]]:
        """Return the mean and deviation of the seconds of 10,000 eager steps of one run, by T."""
        blocks = self._get(wall_clock(self.scale, problem, name))["seconds_per_step"]
        pairs = zip(LOWER_STEPS, blocks, strict=True)
        return {T: (1e4 * float(np.mean(block)), 1e4 * float(np.std(block))) for T, block in pairs}

    def default(self, problem: str) -> Found:
        """Return the result of `Penalty()` without options."""
        return self._get(default(self.scale, problem))

    @cached_property
    def gradients(self) -> dict[tuple[str, int], float]:
        """The cost of an upper step in gradients of g, by method and T."""
        return {
            run: gradients
            for runs in (RUNS, list(OTHERS))
            for run, gradients in zip(runs, self._get(costs(runs))["gradients"], strict=True)
        }

    @cached_property
    def budget(self) -> float:
        """The gradients of the cheapest run of the protocol: every run took at least as many."""
        longest = self.run("sum", "RMD", 100)["steps"][-1]
        return min(self.gradients[name, T] * (longest if T == 100 else self.scale.steps) for name, T in RUNS)

    def at_budget(self, problem: str, name: str, T: int) -> Array:
        """Return the error of every trial when the budget was spent."""
        steps, errors = self.curves(problem, name, T)
        at = np.searchsorted(steps * self.gradients[name, T], self.budget * (1 + 1e-9), "right") - 1
        return np.asarray(errors[at])


def pair_of(problem: str) -> str:
    return next(pair for pair, names in PAIRS.items() if problem in names)


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
