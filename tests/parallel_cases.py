"""Small problems for every method, solved by one process and by ranks with the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    Box,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    Solution,
    ValueFunction,
    ValueGap,
    solve,
    weighted_mean,
)

STEPS = 6
ADAM = partial(torch.optim.Adam, lr=0.02)
BOTH: dict[str, Any] = {"lower_optimizer": ADAM, "upper_optimizer": ADAM}
COLUMNS = ("upper", "lower", "grad_u", "grad_v", "residual", "violation", "gamma", "lam", "epsilon", "advanced")


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return x, torch.sin(x.sum(1)) + 0.1 * torch.randn(count, generator=draw, dtype=torch.float64)


def data(*, rows: bool = False) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of 9 and of 10, which two and four ranks share unevenly, and last ones of fewer examples than ranks."""
    upper, lower = TensorDataset(*examples(29, 1)), examples(33, 2)
    named = TensorDataset(*lower, torch.arange(33)) if rows else TensorDataset(*lower)
    return DataLoader(upper, 9, shuffle=True), DataLoader(named, 10, shuffle=True)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def squares(v: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (v(batch[0]).squeeze(1) - batch[1]) ** 2


def ridge(**more: Any) -> Problem:
    """The decay of each layer's weights."""

    def upper(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        return squares(v, batch).mean() + 1e-3 * (u**2).sum()

    def lower(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        sizes = [p.square().sum() for p in v.parameters()]
        return squares(v, batch).mean() + sum(0.1 * torch.exp(x) * size for x, size in zip(u, sizes, strict=True))

    return Problem(upper, lower, **more)


def importance() -> Problem:
    """The importance of each example."""

    def upper(u: Rows, v: nn.Module, batch: Any) -> Tensor:
        return squares(v, batch).mean()

    def lower(u: Rows, v: nn.Module, batch: Any) -> Tensor:
        return weighted_mean(squares(v, batch), torch.sigmoid(u[batch[2]])) + 0.01 * sum(
            p.square().sum() for p in v.parameters()
        )

    return Problem(upper, lower)


def constrained() -> Problem:
    return ridge(
        equalities=[lambda u, v, batch: v(batch[0]).mean() - 0.2],
        inequalities=[lambda u, v, batch: torch.stack([u.sum() - 0.5, squares(v, batch).mean() - 0.1])],
    )


def bounded_below(problem: Callable[..., Problem]) -> Callable[[], Problem]:
    """Constraints on the weights at the lower level, one of which u moves where it is a tensor."""

    def least(u: Any, v: nn.Module, batch: None) -> Tensor:
        return (u[0] if isinstance(u, Tensor) else 0.0) - 1 - next(v.parameters())

    def made() -> Problem:
        return replace(
            problem(),
            lower_inequalities=[least, lambda u, v, batch: next(v.parameters()).sum() - 0.1],
            lower_equalities=[lambda u, v, batch: list(v.parameters())[-1].sum() - 0.05],
        )

    return made


def prepared() -> Problem:
    """u scales the inputs, once for both levels, and is the decay of the lower."""

    def prepare(u: Tensor, pair: Any) -> Any:
        (x, y), (a, b) = pair
        return {"upper": (x * torch.exp(u[:3]), y), "lower": (a * torch.exp(u[:3]), b)}

    def upper(u: Tensor, v: nn.Module, made: Any) -> Tensor:
        return squares(v, made["upper"]).mean()

    def lower(u: Tensor, v: nn.Module, made: Any) -> Tensor:
        decay = 0.05 * torch.exp(u[3])
        return squares(v, made["lower"]).mean() + decay * sum(p.square().sum() for p in v.parameters())

    return Problem(upper, lower, prepare=prepare)


def decays() -> Tensor:
    return torch.zeros(4, dtype=torch.float64, requires_grad=True)


def weights() -> Rows:
    return Rows(33, dtype=torch.float64)


def vectors() -> Rows:
    return Rows(33, shape=(2,), dtype=torch.float64)


def shifts() -> Problem:
    """A weight and a shift of the target for each example, in a box; f reads rows, too, and each twice."""

    def upper(u: Rows, v: nn.Module, batch: Any) -> Tensor:
        rows = (10 * batch[0][:, 0].abs()).long() % 33
        return squares(v, batch).mean() + 0.1 * (u[rows][:, 1] - 0.5).square().mean() + 0.1 * u[-1 - rows].pow(2).mean()

    def lower(u: Rows, v: nn.Module, batch: Any) -> Tensor:
        x, y, row = batch
        weight, shift = u[row].unbind(1)
        return weighted_mean(squares(v, (x, y + shift)), torch.sigmoid(weight)) + 0.01 * sum(
            p.square().sum() for p in v.parameters()
        )

    return Problem(upper, lower, project_upper=Box(-0.05, 0.03))


Case = tuple[Any, Callable[[], Problem], Callable[[], Any], dict[str, Any]]
STEPWISE = Penalty(cotangent="same", mode="stochastic", lower_steps=2, **BOTH)
CASES: dict[str, Case] = {
    "penalty": (Penalty(), ridge, decays, {}),
    "penalty, steps on v": (STEPWISE, ridge, decays, {}),
    "penalty, tolerance": (
        Penalty.algorithm_2(lower_steps=2, gamma=1.0, lam=1.0, epsilon=0.5, upper_rate=0.02, lower_rate=0.02),
        ridge,
        decays,
        {},
    ),
    "penalty, running": (Penalty(cotangent="running", lower_steps=1, **BOTH), ridge, decays, {}),
    "penalty, difference": (Penalty(curvature="difference", lower_steps=1, **BOTH), ridge, decays, {}),
    "penalty, accumulate": (STEPWISE, ridge, decays, {"accumulate": 2}),
    "penalty, constraints": (STEPWISE, constrained, decays, {}),
    "penalty, lower constraints": (STEPWISE, bounded_below(ridge), decays, {}),
    "penalty, lower constraints, rows": (Penalty(), bounded_below(importance), weights, {"accumulate": 2}),
    "penalty, projection": (STEPWISE, lambda: ridge(project_lower=Box(-0.3, 0.3)), decays, {}),
    "penalty, prepare": (STEPWISE, prepared, decays, {}),
    "penalty, rows": (Penalty(lower_steps=1), importance, weights, {}),
    "alternating": (Alternating(lower_steps=2, **BOTH), ridge, decays, {}),
    "alternating, rows": (Alternating(lower_steps=2), importance, weights, {}),
    "reverse mode": (ReverseMode(lower_steps=2, momentum=0.5), ridge, decays, {}),
    "reverse mode, rows": (ReverseMode(lower_steps=2), importance, weights, {}),
    "reverse mode, prepare": (ReverseMode(lower_steps=2), prepared, decays, {}),
    "forward mode": (ForwardMode(lower_steps=2, momentum=0.5), ridge, decays, {}),
    "approx grad": (ApproxGrad(lower_steps=2, damping=0.1), ridge, decays, {}),
    "approx grad, prepare": (ApproxGrad(lower_steps=2, damping=0.1), prepared, decays, {"accumulate": 2}),
    "approx grad, adam, rows": (ApproxGrad(linear_solver="adam", lower_steps=2), importance, weights, {}),
    "approx grad, neumann": (ApproxGrad(linear_solver="neumann", lower_steps=2), ridge, decays, {"accumulate": 2}),
    "value gap": (ValueGap(lower_steps=2, **BOTH), ridge, decays, {}),
    "value gap, prepare": (ValueGap(lower_steps=2, **BOTH), prepared, decays, {}),
    "value gap, rows": (ValueGap(lower_steps=2, **BOTH), importance, weights, {}),
    "value function": (ValueFunction(lower_steps=2), ridge, decays, {}),
    "value function, rows": (ValueFunction(lower_steps=2), importance, weights, {}),
    "penalty, vectors, box": (Penalty(lower_steps=1, warm_up=0.0), shifts, vectors, {}),
    "penalty, vectors, difference": (
        Penalty(curvature="difference", lower_steps=1, **BOTH),
        shifts,
        vectors,
        {"accumulate": 2},
    ),
    "alternating, vectors": (Alternating(lower_steps=2, warm_up=0.0), shifts, vectors, {}),
    "reverse mode, vectors": (ReverseMode(lower_steps=2), shifts, vectors, {}),
    "approx grad, rows": (ApproxGrad(lower_steps=2, damping=0.1), importance, weights, {}),
    "value gap, vectors": (ValueGap(lower_steps=2, **BOTH), shifts, vectors, {}),
    "soba": (SOBA(), ridge, decays, {"accumulate": 2}),
    "soba, prepare": (SOBA(), prepared, decays, {}),
    "soba, rows": (SOBA(), importance, weights, {}),
    "srba": (SRBA(period=4), ridge, decays, {}),
    "f2sa": (F2SA(lower_steps=2), ridge, decays, {}),
    "f2sa, prepare": (F2SA(lower_steps=2), prepared, decays, {}),
    "f2sa, rows": (F2SA(lower_steps=2), importance, weights, {}),
    "sama": (SAMA(lower_steps=2), ridge, decays, {}),
    "sama, vectors": (SAMA(lower_steps=2), shifts, vectors, {}),
    "approx grad, sgd": (ApproxGrad(linear_solver="sgd", lower_steps=2), ridge, decays, {}),
    "approx grad, sgd, prepare": (ApproxGrad(linear_solver="sgd", lower_steps=2), prepared, decays, {}),
}


def numbers(solution: Solution) -> dict[str, Any]:
    """All that a trajectory is compared by."""
    u, v = solution.u, solution.v
    certificate = solution.certificate
    return {
        "u": (u.values if isinstance(u, Rows) else u).detach().reshape(-1).tolist(),
        "v": [x for p in v.parameters() for x in p.detach().reshape(-1).tolist()],
        **{name: solution.history[name] for name in COLUMNS},
        "certificate": [certificate.stationarity_u, certificate.stationarity_v, certificate.lower_residual],
        "multipliers": [
            x for tensors in solution.multipliers.values() for t in tensors for x in t.reshape(-1).tolist()
        ],
    }


def solved(name: str, **more: Any) -> Solution:
    method, problem, start, options = CASES[name]
    u = start()
    return solve(
        problem(),
        method,
        u,
        network(),
        data(rows=isinstance(u, Rows)),
        max_steps=STEPS,
        seed=7,
        log_every=4,
        hypergradient=False,
        **(options | more),
    )


FEW = [
    "penalty, constraints",
    "penalty, rows",
    "alternating",
    "reverse mode, rows",
    "forward mode",
    "approx grad",
    "value gap, rows",
    "value function",
    "penalty, vectors, box",
    "value gap, vectors",
    "reverse mode, vectors",
    "soba, rows",
    "srba",
    "f2sa",
    "sama",
    "approx grad, sgd",
]
"""One of each method."""


def all_cases(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        solution = solved(name)
        found[name] = numbers(solution) | {"ranks": solution.ranks, "bytes": solution.bytes_per_step}
    return found
