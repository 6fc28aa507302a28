"""Compares decay="root", which needs no number of steps, with decay="linear", which spends a known one, at equal steps.

    python studies/benchmarks/horizon.py

It prints the relative error on the quadratic of the tests, the AUC of importances on digits (40% wrong labels, softmax
regression), and the validation loss of breast cancer at the exact lower solution for the penalties found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from bilevel import ApproxGrad, Box, Penalty, Problem, Rows, ValueGap, solve

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from quadratic import Quadratic
from test_digits import digits, lower, upper

Make = Callable[[str], Any]


def quadratic(make: Make, decay: str, steps: int) -> float:
    problem = Quadratic()
    u, v = problem.start()
    solve(problem.problem, make(decay), u, v, problem.data(), max_steps=steps, seed=3, hypergradient=False)
    return problem.error(u, v)


def importances(make: Make, decay: str, steps: int) -> float:
    trusted, noisy, right = digits(0)
    torch.manual_seed(0)
    u, v = Rows(len(right)), nn.Linear(64, 10)
    solve(Problem(upper, lower), make(decay), u, v, (trusted, noisy), max_steps=steps, seed=0, hypergradient=False)
    return float(roc_auc_score(right, u.values.numpy()))


def penalties(make: Make, decay: str, steps: int) -> float:
    inputs, labels = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    x = torch.tensor((inputs - inputs.mean(0)) / inputs.std(0))[order]
    y = torch.tensor(labels).double()[order]
    train, valid = (x[:280], y[:280]), (x[280:], y[280:])

    def loss(v: Tensor, batch: Any) -> Tensor:
        return binary_cross_entropy_with_logits(batch[0] @ v, batch[1])

    def penalised(u: Tensor, v: Tensor, batch: Any) -> Tensor:
        return loss(v, batch) + (u.exp() * v**2).sum()

    problem = Problem(lambda u, v, batch: loss(v, batch), penalised, project_upper=Box(-8, 4))
    u = torch.full((x.shape[1],), -3.0, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    data = [DataLoader(TensorDataset(*part), 64, shuffle=True) for part in (valid, train)]
    solve(problem, make(decay), u, v, data, max_steps=steps, seed=0, hypergradient=False)
    best = torch.zeros_like(v, requires_grad=True)
    search = torch.optim.LBFGS([best], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def evaluate() -> Tensor:
        search.zero_grad()
        value = penalised(u.detach(), best, train)
        value.backward()
        return value

    search.step(evaluate)
    return loss(best.detach(), valid).item()


def main() -> None:
    lines: list[tuple[str, Callable[..., float], Make, int]] = []
    many: dict[str, Make] = {
        "Penalty, same": lambda decay: Penalty(cotangent="same", decay=decay),
        "ApproxGrad": lambda decay: ApproxGrad(decay=decay),
        "ValueGap": lambda decay: ValueGap(decay=decay),
    }
    one: dict[str, Make] = {
        "Penalty, same": many["Penalty, same"],
        "ApproxGrad": lambda decay: ApproxGrad(decay=decay, lower_steps=1, damping=0.1),
        "ValueGap": lambda decay: ValueGap(decay=decay, lower_steps=1),
    }
    running: Make = lambda decay: Penalty(cotangent="running", decay=decay)  # noqa: E731
    lines += [(f"quadratic, {name}", quadratic, make, n) for name, make in many.items() for n in (200, 1000)]
    lines += [(f"digits, {name}", importances, make, 600) for name, make in one.items()]
    few = {"Penalty, same": many["Penalty, same"], "Penalty, running": running}
    lines += [(f"breast cancer, {name}", penalties, make, n) for name, make in few.items() for n in (300, 1500)]
    print("| | steps | root | linear |\n| --- | --- | --- | --- |")
    for name, measure, make, steps in lines:
        found = [measure(make, decay, steps) for decay in ("root", "linear")]
        print(f"| {name} | {steps:,} | {found[0]:.3g} | {found[1]:.3g} |", flush=True)


if __name__ == "__main__":
    main()
