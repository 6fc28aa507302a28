"""The error of the stochastic mode on a quadratic with a known answer, against the growth of gamma.

.venv/bin/python studies/benchmarks/factors.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from bilevel import Penalty, solve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import Quadratic


def main() -> None:
    adam = partial(torch.optim.Adam, lr=0.05)
    problem = Quadratic()
    print("| gamma_factor | 200 steps, seeds 3 and 4 | 800 steps |\n| --- | --- | --- |")
    for factor in (1.1, 1.2, 1.3):
        cells = []
        for steps in (200, 800):
            errors = []
            for seed in (3, 4):
                u, v = problem.start()
                method = Penalty(
                    lower_steps=3, lower_optimizer=adam, upper_optimizer=adam, gamma_factor=factor, decay="linear"
                )
                solve(problem.problem, method, u, v, problem.data(), max_steps=steps, seed=seed)
                errors.append(f"{problem.error(u, v):.4f}")
            cells.append(", ".join(errors))
        print(f"| {factor} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
