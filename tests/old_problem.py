"""The problems of tests/data/checkpoints. Do not change this file: checkpoints are compared with what is here.

A checkpoint is refused if a function of the problem has another name or other code, if u, v or the options have another
shape or value, or if the data have another length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    Alternating,
    ApproxGrad,
    Box,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    ValueFunction,
    ValueGap,
)

STEPS, STOP, SEED = 20, 10, 3


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def upper(u: Tensor, v: Tensor, batch: Any) -> Tensor:
    target = v.new_tensor([1.0, -1.0]) if batch is None else v.new_tensor([1.0, -1.0]) + batch[0].mean(0)
    return ((v - target) ** 2).sum() / 2 + ((u - 0.2) ** 2).sum() / 2


def lower(u: Tensor, v: Tensor, batch: Any) -> Tensor:
    pull = torch.stack([u[0] - 0.5 * u[1], 0.2 * u[0] + 0.8 * u[1]])
    if batch is not None:
        pull = pull + batch[0].mean(0)
    return (v**2).sum() - v @ pull + 0.2 * torch.cosh(v - 0.1).sum()


def at_most(u: Tensor, v: Tensor, batch: Any) -> Tensor:
    return u.sum() - 0.3


def lower_at_most(u: Tensor, v: Tensor, batch: Any) -> Tensor:
    return torch.stack([v[0] - 0.3 - 0.1 * u[0], -0.5 - v[1]])


def lower_equal(u: Tensor, v: Tensor, batch: Any) -> Tensor:
    return v[0] + 2 * v[1] - u[1] + 0.2


def prepare(u: Tensor, batches: Any) -> Tensor:
    return torch.tanh(u) + batches[0][0].mean(0)


def upper_of_prepared(u: Tensor, v: Tensor, made: Tensor) -> Tensor:
    return ((v - 1) ** 2).sum() / 2 + 0.1 * made.sum() + 0.1 * (u**2).sum()


def lower_of_prepared(u: Tensor, v: Tensor, made: Tensor) -> Tensor:
    return ((v - made) ** 2).sum()


def squares(v: nn.Module, batch: Any) -> Tensor:
    return ((v(batch[0]).squeeze(1) - batch[0].sum(1)) ** 2).mean()


def upper_of_network(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return squares(v, batch)


def lower_of_network(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return squares(v, batch) + 0.1 * torch.exp(u[0]) * sum(p.square().sum() for p in v.parameters())


def upper_of_rows(u: Rows, v: Tensor, batch: Any) -> Tensor:
    return ((v - 1 - batch[0]) ** 2).sum(1).mean()


def lower_of_rows(u: Rows, v: Tensor, batch: Any) -> Tensor:
    x, row = batch
    return (torch.sigmoid(u[row]) * ((v - x) ** 2).sum(1)).mean()


def data() -> Any:
    return (
        DataLoader(TensorDataset(0.1 * normal(0, 6, 2)), 2, shuffle=True),
        DataLoader(TensorDataset(0.1 * normal(1, 8, 2)), 3, shuffle=True),
    )


def data_with_rows() -> Any:
    return (
        DataLoader(TensorDataset(0.1 * normal(0, 6, 2)), 2, shuffle=True),
        DataLoader(TensorDataset(normal(1, 8, 2), torch.arange(8)), 3, shuffle=True),
    )


def listed() -> Any:
    """Lists of batches."""
    return [[0.1 * normal(k, 2, 2)] for k in range(3)], [[0.1 * normal(k, 3, 2)] for k in range(3, 7)]


def data_of_network() -> Any:
    return (
        DataLoader(TensorDataset(normal(0, 8, 2)), 4, shuffle=True),
        DataLoader(TensorDataset(normal(1, 8, 2)), 4, shuffle=True),
    )


def network() -> nn.Module:
    v = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Dropout(0.2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for k, parameter in enumerate(v.parameters()):
            parameter.copy_(0.5 * normal(k, *parameter.shape))
    return v


def case(name: str) -> tuple[Problem, Any, Any, Any, Any, dict[str, Any]]:
    """The problem, the method, u, v, the data and further arguments of `solve`."""
    plain, u, v = Problem(upper, lower), leaf(0.1, 0.0), leaf(0.2, 0.0)
    rate = partial(torch.optim.Adam, lr=0.05)
    both: dict[str, Any] = {"lower_optimizer": rate, "upper_optimizer": rate}
    preset: dict[str, Any] = {"lower_steps": 2, "upper_rate": 0.05, "lower_rate": 0.05}
    if name == "deterministic":
        return Problem(upper, lower, inequalities=at_most), Penalty(), u, v, None, {}
    if name == "deterministic_lower_constraints":
        problem = Problem(upper, lower, lower_inequalities=lower_at_most, lower_equalities=lower_equal)
        return problem, Penalty(), u, v, None, {}
    if name == "stochastic":
        return Problem(upper, lower, inequalities=at_most), Penalty(), u, v, data(), {"accumulate": 2}
    if name == "stochastic_lower_constraints":
        problem = Problem(upper, lower, lower_inequalities=lower_at_most, lower_equalities=lower_equal)
        return problem, Penalty(), u, v, listed(), {}
    if name == "stochastic_rows":
        problem = Problem(upper_of_rows, lower_of_rows, project_upper=Box(-1.0, 1.0))
        return problem, Penalty(), Rows(8, dtype=torch.float64), v, data_with_rows(), {}
    if name == "stochastic_network":
        method = Penalty(joint=False, lower_steps=2, lower_batches="shared", curvature="exact", **both)
        return Problem(upper_of_network, lower_of_network), method, leaf(0.0), network(), data_of_network(), {}
    if name == "algorithm_1":
        return plain, Penalty.algorithm_1(**preset), u, v, data(), {}
    if name == "algorithm_2":
        return plain, Penalty.algorithm_2(lam=0.5, **preset), u, v, listed(), {}
    if name == "alternating":
        return plain, Alternating(lower_steps=2), u, v, listed(), {}
    if name.startswith("approx_grad_"):
        prepared = Problem(upper_of_prepared, lower_of_prepared, prepare=prepare)
        method = ApproxGrad(lower_steps=2, linear_solver=name.removeprefix("approx_grad_"))  # type: ignore[arg-type]
        return prepared if name == "approx_grad_cg" else plain, method, u, v, listed(), {}
    if name == "reverse_mode":
        return plain, ReverseMode(lower_steps=3, momentum=0.5, truncate=2, upper_optimizer=rate), u, v, listed(), {}
    if name == "forward_mode":
        return plain, ForwardMode(lower_steps=3, momentum=0.5), u, v, listed(), {}
    if name == "value_function":
        return plain, ValueFunction(lower_steps=2, **both), u, v, listed(), {}
    if name == "value_gap":
        return plain, ValueGap(lower_steps=2), u, v, data(), {}
    raise KeyError(name)


NAMES = (
    "deterministic",
    "deterministic_lower_constraints",
    "stochastic",
    "stochastic_lower_constraints",
    "stochastic_rows",
    "stochastic_network",
    "algorithm_1",
    "algorithm_2",
    "alternating",
    "approx_grad_cg",
    "approx_grad_adam",
    "approx_grad_neumann",
    "reverse_mode",
    "forward_mode",
    "value_function",
    "value_gap",
)
