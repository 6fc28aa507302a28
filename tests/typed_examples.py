"""The examples of the guide as users write them. tests/test_typing.py checks this file with `mypy --strict`."""

from __future__ import annotations

from functools import partial
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    Box,
    Callback,
    EarlyStopping,
    Penalty,
    Problem,
    Progress,
    ReverseMode,
    Rows,
    Run,
    Simplex,
    Solution,
    run_many,
    solve,
    solve_pessimistic,
)


def tensors() -> None:
    problem = Problem(
        upper=lambda u, v, batch: (v - 1).square().sum() + u.square().sum(),
        lower=lambda u, v, batch: (v - 2 * u).square().sum(),
        inequalities=lambda u, v, batch: u - 1,
        project_upper=Box(0.0, 1.0),
    )
    u, v = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    solution = solve(problem, Penalty(), u, v, max_steps=100, seed=0, starts=2)
    assert_type(solution, Solution[Tensor, Tensor])
    assert_type(solution.u, Tensor)
    print(solution.status, solution.u.norm().item(), solution.history["f"][-1], solution.certificate.worst)


def importances() -> None:
    x, y = torch.randn(20, 5), torch.randint(2, (20,))
    importance, model = Rows(len(x)), nn.Linear(5, 2)

    def lower(w: Rows, net: nn.Linear, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        index, inputs, labels = batch
        loss: Tensor = nn.functional.cross_entropy(net(inputs), labels, reduction="none")
        weight = w[index].sigmoid()
        return (weight * loss).sum() / weight.sum()

    def upper(w: Rows, net: nn.Linear, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    trusted = DataLoader(TensorDataset(x[:5], y[:5]), batch_size=5)
    noisy = DataLoader(TensorDataset(torch.arange(20), x, y), batch_size=8, shuffle=True)
    solution = solve(Problem(upper, lower), Penalty(), importance, model, (trusted, noisy), max_steps=10)
    assert_type(solution.u, Rows)
    assert_type(solution.v, nn.Linear)
    print(solution.u.values.shape, solution.v.weight.shape)


def dicts() -> None:
    class Stop(Callback):
        def log(self, run: Run) -> bool:
            return run.step > 3

    adam = partial(torch.optim.Adam, lr=1e-2)
    u = {"decay": torch.zeros(1, requires_grad=True)}
    v = [torch.zeros(2, requires_grad=True)]
    problem = Problem(
        lambda u, v, batch: (v[0] - 1).square().sum(),
        lambda u, v, batch: (v[0] - 2).square().sum() + u["decay"].exp() * v[0].square().sum(),
        equalities=[lambda u, v, batch: u["decay"] - 1],
        project_lower={"0": Simplex()},
    )
    method = ReverseMode(lower_steps=2, upper_optimizer=adam)
    callbacks = [Progress(), Stop(), EarlyStopping("residual", patience=10)]
    solution = solve(problem, method, u, v, max_steps=5, callbacks=callbacks)
    assert_type(solution.u, dict[str, Tensor])
    assert_type(solution.v, list[Tensor])
    print(solution.u["decay"], solution.v[0])


def last_values(solution: Solution[Tensor, Tensor]) -> tuple[float, str]:
    return solution.history["f"][-1], solution.history["solver"][-1]


def worst_case(problem: Problem, u: Tensor, v: Tensor) -> Solution[Tensor, Tensor]:
    return solve_pessimistic(problem, Penalty(), u, v, max_steps=100, seed=0)


def square(item: Any) -> dict[str, Any]:
    return {"value": item["x"] ** 2}


def many() -> list[dict[str, Any]]:
    return run_many(square, [{"x": 1}, {"x": 2}], "runs", workers=2)
