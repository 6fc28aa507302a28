"""With no option given, random strongly convex quadratics and the paper's four problems are solved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bilevel import Penalty, solve
from bilevel.applications.comparison.synthetic_problems import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from quadratics import quadratic

SEEDS = range(11, 16)
"""Not used for choosing constants."""
COUNT, PART = 100, 20
STEPS = 3000


def errors(seed: int, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        case = quadratic(seed, number)
        solve(case.problem, Penalty(), case.u, case.v, max_steps=STEPS, seed=number, hypergradient=False)
        found.append(case.error())
    return found


def check(found: list[float]) -> None:
    assert max(found) < 1e-3
    # 95 of 100 to 1e-6, and so 19 of every 20.
    assert sum(error < 1e-6 for error in found) >= 0.95 * len(found)


@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_defaults_solve_random_quadratics(first):
    check(errors(SEEDS[0], range(first, first + PART)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_defaults_solve_a_hundred_of_a_hundred_random_quadratics(seed):
    check(errors(seed, range(COUNT)))


@pytest.mark.parametrize("index", range(4), ids=[example.name for example in examples()])
def test_defaults_solve_the_papers_problems_from_twenty_starts(index):
    example = examples()[index]
    for start in range(20):
        u, v = example.start(start)
        solve(example.problem, Penalty(), u, v, max_steps=STEPS, seed=start, hypergradient=False)
        # The run ends at a relative 1e-9; A's smallest singular value magnifies it.
        assert example.distance(u, v) < 1e-6, f"start {start}"
