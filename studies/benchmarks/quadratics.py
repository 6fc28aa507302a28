"""Count how many random quadratics the defaults solve.

    .venv/bin/python studies/benchmarks/quadratics.py --seeds 11 12 13 14 15

Print the table of docs/results/quadratics.md. A problem is strongly convex and has a solution in closed form:

    g = v'Hv/2 - v'(Cu + c)        f = |v - a|^2/2 + alpha |u - b|^2/2

Dimensions 2 to 50; condition number of H up to 100; scales of H, C, u and v from 0.1 to 10; alpha from 0.01 to 1. With
v*(u) = Mu + m, M = H^-1 C and m = H^-1 c, the solution is u = (M'M + alpha I)^-1 (alpha b + M'(a - m)).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from bilevel import Penalty, Problem, solve
from bilevel.running.run_many import Where, parallel_map

STEPS = 3000


@dataclass(frozen=True)
class Quadratic:
    """A problem, a random start and the solution."""

    problem: Problem
    u: Tensor
    v: Tensor
    best: Tensor
    """The solution (u, v), in one vector."""

    def error(self) -> float:
        """Return the relative distance of the present (u, v) from the solution."""
        z = torch.cat([self.u, self.v]).detach()
        return float((z - self.best).norm() / self.best.norm())


def quadratic(seed: int, number: int) -> Quadratic:
    """Return problem `number` of the family that `seed` draws."""
    draw = np.random.default_rng([seed, number])

    def scale(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(draw.standard_normal(shape))

    p, q = (int(n) for n in draw.integers(2, 51, 2))
    size_h, size_c, size_u, size_v = (scale(0.1, 10) for _ in range(4))
    condition, alpha = scale(1, 100), scale(0.01, 1)
    basis, _ = torch.linalg.qr(normal(q, q))
    H = size_h * basis @ torch.diag(torch.logspace(0, -np.log10(condition), q, dtype=torch.float64)) @ basis.T
    H = (H + H.T) / 2
    C = size_c * normal(q, p) / np.sqrt(p)
    c, a, b = size_h * size_v * normal(q), size_v * normal(q), size_u * normal(p)
    M, m = torch.linalg.solve(H, C), torch.linalg.solve(H, c)
    best_u = torch.linalg.solve(M.T @ M + alpha * torch.eye(p, dtype=torch.float64), alpha * b + M.T @ (a - m))

    def upper(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return torch.sum((v - a) ** 2) / 2 + alpha * torch.sum((u - b) ** 2) / 2

    def lower(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return torch.as_tensor(v @ H @ v / 2 - v @ (C @ u + c))

    u, v = (size_u * normal(p)).requires_grad_(), (size_v * normal(q)).requires_grad_()
    return Quadratic(Problem(upper, lower), u, v, torch.cat([best_u, M @ best_u + m]))


def run(case: tuple[int, int]) -> tuple[float, int, int, str]:
    """Solve one problem; return its relative error, steps, lower evaluations and status."""
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
    options = parser.parse_args()
    print("| seed | error < 1e-3 | error < 1e-6 | worst error | median steps | most steps | evaluations | endings |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for seed in options.seeds:
        began = time.perf_counter()
        cases = [(seed, i) for i in range(options.count)]
        found = [end for _, end in sorted(parallel_map(run, cases, Where(options.processes)), key=lambda one: one[0])]
        errors, steps, evaluations, endings = zip(*found, strict=True)
        ends = ", ".join(f"{name.lower()} {n}" for name, n in Counter(endings).most_common())
        print(
            f"| {seed} | {sum(e < 1e-3 for e in errors)} of {options.count} "
            f"| {sum(e < 1e-6 for e in errors)} of {options.count} | {max(errors):.1e} | {median(steps):g} "
            f"| {max(steps)} | {median(evaluations):g} | {ends} |",
            flush=True,
        )
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
