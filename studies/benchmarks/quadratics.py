"""How many random quadratics the defaults solve: writes docs/results/quadratics.md.

.venv/bin/python studies/benchmarks/quadratics.py --seeds 11 12 13 14 15
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch
from bilevel_studies.quadratics import quadratic

from bilevel import Penalty, solve
from bilevel._util.parallel_map import Where, parallel_map

STEPS = 3000


def run(case: tuple[int, int]) -> tuple[float, int, int, str]:
    """(relative error, steps, lower evaluations, status) of one problem."""
    torch.set_num_threads(1)
    problem = quadratic(*case)
    solution = solve(
        problem.problem, Penalty(), problem.u, problem.v, max_steps=STEPS, seed=case[1], hypergradient=False
    )
    return problem.error(), solution.steps, solution.history["evaluations"][-1], solution.status.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "docs/results/quadratics.md")
    options = parser.parse_args()
    command = f"python studies/benchmarks/quadratics.py --seeds {' '.join(map(str, options.seeds))}"
    lines = [
        "# Random quadratics with the defaults",
        "",
        f"Written by `{command}`.",
        "`src/bilevel/applications/quadratics.py` states the family of problems and their solution.",
        f"`Penalty()`, no option, at most {STEPS:,} steps, float64. The seeds were not used for choosing constants.",
        "Evaluations are of the lower objective, those of the start and of the end check among them.",
        "",
        "| seed | error < 1e-3 | error < 1e-6 | worst error | median steps | most steps | evaluations | endings |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for seed in options.seeds:
        began = time.perf_counter()
        cases = [(seed, i) for i in range(options.count)]
        found = [end for _, end in sorted(parallel_map(run, cases, Where(options.processes)), key=lambda one: one[0])]
        errors, steps, evaluations, endings = zip(*found, strict=True)
        ends = ", ".join(f"{name.lower()} {n}" for name, n in Counter(endings).most_common())
        lines.append(
            f"| {seed} | {sum(e < 1e-3 for e in errors)} of {options.count} "
            f"| {sum(e < 1e-6 for e in errors)} of {options.count} | {max(errors):.1e} | {median(steps):g} "
            f"| {max(steps)} | {median(evaluations):g} | {ends} |"
        )
        print(lines[-1], f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
