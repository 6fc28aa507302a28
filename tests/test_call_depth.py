"""How many calls lie between `solve` and the user's g in a step: a reader who debugs an objective sees them all."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from quadratic import Quadratic
from torch import Tensor

from bilevel import Callback, Penalty, Problem, Run, solve

STOCHASTIC, DETERMINISTIC, LOWER_CONSTRAINTS = 8, 10, 11
"""The most calls, that of `solve` among them and that of g not. They may only fall: to 8, 10 and 11."""


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


@pytest.mark.parametrize("lower_steps", [0, 2])
def test_stochastic_steps_call_g_within_so_many_calls(lower_steps):
    problem = Quadratic()
    depth = deepest(problem.problem, Penalty(lower_steps=lower_steps), problem.data())
    assert depth <= STOCHASTIC, f"{depth} calls lie between solve and g; {STOCHASTIC} at most."


def test_deterministic_steps_call_g_within_so_many_calls():
    depth = deepest(Quadratic().problem, Penalty())
    assert depth <= DETERMINISTIC, f"{depth} calls lie between solve and g; {DETERMINISTIC} at most."


def test_deterministic_steps_with_lower_constraints_call_g_within_so_many_calls():
    problem = replace(Quadratic().problem, lower_inequalities=lambda u, v, _: torch.stack([v[0] - 1, -1 - v[1]]))
    depth = deepest(problem, Penalty())
    assert depth <= LOWER_CONSTRAINTS, f"{depth} calls lie between solve and g; {LOWER_CONSTRAINTS} at most."
