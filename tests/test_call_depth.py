"""How many calls lie between `solve` and the user's g in a step: a reader who debugs an objective sees them all."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from quadratic import Quadratic
from torch import Tensor

from bilevel import Callback, ForwardMode, Penalty, Problem, ReverseMode, Run, solve

NO_DATA, DATA, LOWER_CONSTRAINTS = "without data", "with data", "without data, with lower constraints"
# A method, the problem, and the most calls, `solve` among them and g not. They may only fall.
MOST = {
    "deterministic": (Penalty(), NO_DATA, 10),
    "deterministic, lower constraints": (Penalty(), LOWER_CONSTRAINTS, 11),
    "deterministic, differences": (Penalty(curvature="difference"), NO_DATA, 13),
    "stochastic, no lower steps": (Penalty(lower_steps=0), DATA, 8),
    "stochastic": (Penalty(lower_steps=2), DATA, 8),
    "stochastic, differences": (Penalty(curvature="difference"), DATA, 11),
    "stochastic, lower constraints": (Penalty(mode="stochastic"), LOWER_CONSTRAINTS, 9),
    "reverse mode": (ReverseMode(), DATA, 14),
    "forward mode": (ForwardMode(), DATA, 11),
}


class Depths(Callback):
    """Counts the calls between the caller of `solve` and g, for each call of g within the steps."""

    def __init__(self, outside: int) -> None:
        self.outside = outside
        self.pending: list[int] = []
        self.found: list[int] = []

    def note(self) -> None:
        self.pending.append(len(inspect.stack(0)) - 2 - self.outside)  # 2: this method and g

    def start(self, run: Run) -> None:
        self.pending = []

    def log(self, run: Run) -> None:
        self.found += self.pending
        self.pending = []


def deepest(problem: Problem, method: Any, data: Any = None) -> int:
    u, v = Quadratic().start()
    depths = Depths(len(inspect.stack(0)))

    def lower(u: Tensor, v: Tensor, batch: Any) -> Tensor:
        depths.note()
        return problem.lower(u, v, batch)

    solve(replace(problem, lower=lower), method, u, v, data, max_steps=4, seed=0, log_every=1, callbacks=[depths])
    assert depths.found
    return max(depths.found)


@pytest.mark.parametrize("case", MOST)
def test_steps_call_g_within_so_many_calls(case):
    (method, setting, most), quadratic = MOST[case], Quadratic()
    problem = quadratic.problem
    if setting == LOWER_CONSTRAINTS:
        problem = replace(problem, lower_inequalities=lambda u, v, _: torch.stack([v[0] - 1, -1 - v[1]]))
    depth = deepest(problem, method, quadratic.data() if setting == DATA else None)
    assert depth <= most, f"{depth} calls lie between solve and g; {most} at most."
