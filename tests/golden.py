"""The runs that tests/data/golden_runs.json records, and the numbers that each of them is compared by.

A case is a method and a setting: "value gap, rows". Settings are small problems in float64 with everything that a
run can have: data, Rows, prepare, constraints, projections, trials, several starts, two ranks. Only the public package
is imported, so that the file stays as it is when modules move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    Alternating,
    ApproxGrad,
    Ball,
    Box,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    Simplex,
    Solution,
    ValueFunction,
    ValueGap,
    solve,
    weighted_mean,
)

STEPS = 20
COLUMNS = (
    "upper",
    "lower",
    "grad_u",
    "grad_v",
    "residual",
    "violation",
    "gamma",
    "lam",
    "epsilon",
    "upper_rate",
    "lower_rate",
    "evaluations",
    "advanced",
)
CERTIFICATE = ("stationarity_u", "stationarity_v", "lower_residual", "violation", "hypergradient_error")


def _tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- settings: (problem, u, v, data, further arguments of solve) -------------------------------------------------------

Setting = tuple[Problem, Any, Any, Any, dict[str, Any]]
C = _tensor([1.0, -0.5, 0.3], [0.2, 0.8, -0.4])
H = _tensor([1.5, 0.3], [0.3, 1.0])
A, B = _tensor(1.0, -1.0), _tensor(0.5, -0.5, 0.2)


def upper(u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
    target = A if batch is None else A + batch
    apart = ((v - target) ** 2).sum(-1)
    return (apart if batch is None else apart.mean()) / 2 + ((u - B) ** 2).sum(-1) / 2 + 0.1 * torch.sin(u).sum(-1)


def lower(u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
    pull = u @ C.T if batch is None else u @ C.T + batch.mean(0)
    return ((v @ H) * v).sum(-1) / 2 - (v * pull).sum(-1) + 0.2 * torch.cosh(v - 0.1).sum(-1)


def start(trials: int | None = None) -> tuple[Tensor, Tensor]:
    u, v = _tensor(0.1, 0.0, -0.1), _tensor(0.2, 0.0)
    if trials is not None:
        u, v = (torch.stack([t * (k + 1) for k in range(trials)]) for t in (u, v))
    return u.requires_grad_(), v.requires_grad_()


def loaders(size: float = 0.05) -> tuple[Any, Any]:
    """Batches of two and of three, whose last one is smaller."""
    return (
        DataLoader(list(size * _normal(0, 6, 2)), 2, shuffle=True),
        DataLoader(TensorDataset(size * _normal(1, 8, 2)), 3, shuffle=True),
    )


def _first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda u, v, batch: function(u, v, batch[0])


def no_data() -> Setting:
    return Problem(upper, lower), *start(), None, {}


def batches() -> Setting:
    return Problem(upper, _first(lower)), *start(), loaders(), {}


class Stream:
    """An iterable of batches without a length, which reads torch's generator."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            yield 0.05 * torch.randn(2, 2, dtype=torch.float64)


def stream() -> Setting:
    return Problem(upper, lower), *start(), (Stream(), [0.1 * _normal(2, 3, 2), 0.1 * _normal(3, 3, 2)]), {}


def accumulate() -> Setting:
    return Problem(upper, _first(lower)), *start(), loaders(), {"accumulate": 2}


def trials() -> Setting:
    return Problem(upper, lower, trials=2), *start(2), None, {}


def starts() -> Setting:
    """v = 1 and v = -1 minimise g for every u."""
    problem = Problem(
        lambda u, v, _: torch.sum((u - v) ** 2 + 0.2 * u),
        lambda u, v, _: torch.sum((v * v - 1) ** 2) / 4 + 0 * u.sum(),
    )
    return problem, _tensor(0.7).requires_grad_(), _tensor(0.8).requires_grad_(), None, {"starts": 3}


def starts_in_a_box() -> Setting:
    """From points of a box, with a lower problem that is convex everywhere."""
    return Problem(upper, lower, project_upper=Box(-1.0, 1.0)), *start(), None, {"starts": 3, "max_steps": 10}


EQUAL = [lambda u, v, _: v[0] + v[1] - 0.1]
LESS = [lambda u, v, _: torch.stack([u.sum() - 0.3, v[0] ** 2 - 0.5])]
LOWER_LESS = [lambda u, v, _: torch.stack([v[0] - 0.5 - 0.1 * u[0], -1.0 - v[1]])]
LOWER_EQUAL = [lambda u, v, _: v[0] + 2 * v[1] - u[1] + 0.2]


def constraints() -> Setting:
    return Problem(upper, lower, equalities=EQUAL, inequalities=LESS), *start(), None, {}


def constraints_and_batches() -> Setting:
    return Problem(upper, _first(lower), equalities=EQUAL, inequalities=LESS), *start(), loaders(), {}


def lower_inequalities() -> Setting:
    return Problem(upper, lower, lower_inequalities=LOWER_LESS), *start(), None, {}


def lower_constraints() -> Setting:
    problem = Problem(upper, lower, lower_inequalities=LOWER_LESS, lower_equalities=LOWER_EQUAL, inequalities=LESS)
    return problem, *start(), None, {}


def lower_constraints_and_starts() -> Setting:
    return Problem(upper, lower, lower_inequalities=LOWER_LESS), *start(), None, {"starts": 3}


def lower_constraints_and_batches() -> Setting:
    problem = Problem(upper, _first(lower), lower_inequalities=LOWER_LESS, lower_equalities=LOWER_EQUAL)
    return problem, *start(), loaders(), {}


def upper_projection() -> Setting:
    return Problem(upper, _first(lower), project_upper=Simplex()), *start(), loaders(), {}


def projections() -> Setting:
    return Problem(upper, lower, project_upper=Box(-0.2, 0.3), project_lower=Ball(0.4)), *start(), None, {}


def projections_and_batches() -> Setting:
    problem = Problem(upper, _first(lower), project_upper=Box(-0.2, 0.3), project_lower=Ball(0.4))
    return problem, *start(), loaders(), {}


def _prepared(u: Tensor, pair: Any) -> dict[str, Tensor]:
    held_out, train = pair
    return {"pull": torch.tanh(u @ C.T) + train[0].mean(0), "held_out": held_out}


def _prepared_upper(u: Tensor, v: Tensor, made: dict[str, Tensor]) -> Tensor:
    return ((v - A - made["held_out"]) ** 2).sum(-1).mean() / 2 + 0.1 * made["pull"].sum() + 0.1 * (u**2).sum()


def _prepared_lower(u: Tensor, v: Tensor, made: dict[str, Tensor]) -> Tensor:
    return v @ H @ v / 2 - v @ made["pull"]


def prepare() -> Setting:
    return Problem(_prepared_upper, _prepared_lower, prepare=_prepared), *start(), loaders(), {}


def _restart(v: Tensor, made: dict[str, Tensor]) -> None:
    v.copy_(made["held_out"].mean(0))


def episodes() -> Setting:
    problem = Problem(_prepared_upper, _prepared_lower, prepare=_prepared, start_lower=_restart)
    return problem, *start(), loaders(), {}


X, Y = _normal(4, 17, 3), torch.sin(_normal(5, 17))


def _squares(v: Any, x: Tensor, y: Tensor) -> Tensor:
    prediction = x @ v if isinstance(v, Tensor) else v(x).squeeze(1)
    return (prediction - y) ** 2


def _data_with_rows(upper: int = 3, lower: int = 4) -> tuple[Any, Any]:
    return (
        DataLoader(TensorDataset(X[:6], Y[:6]), upper, shuffle=True),
        DataLoader(TensorDataset(X[6:], Y[6:], torch.arange(11)), lower, shuffle=True),
    )


def _held_out(u: Any, v: Any, batch: Any) -> Tensor:
    return _squares(v, *batch).mean()


def _weighted(u: Rows, v: Tensor, batch: Any) -> Tensor:
    x, y, row = batch
    return weighted_mean(_squares(v, x, y), torch.sigmoid(u[row])) + 0.05 * (v**2).sum()


def rows() -> Setting:
    u, v = Rows(11, init=0.1 * _normal(6, 11)), _tensor(0.0, 0.1, 0.0).requires_grad_()
    return Problem(_held_out, _weighted), u, v, _data_with_rows(), {}


def all_rows() -> Setting:
    """Without data, where f and g read every row."""
    u, v = Rows(11, init=0.1 * _normal(6, 11)), _tensor(0.0, 0.1, 0.0).requires_grad_()
    problem = Problem(
        lambda u, v, _: _squares(v, X[:6], Y[:6]).mean() + 0.01 * (u[:] ** 2).sum(),
        lambda u, v, _: _weighted(u, v, (X[6:], Y[6:], torch.arange(11))),
    )
    return problem, u, v, None, {}


def rows_in_a_box() -> Setting:
    u, v = Rows(11, init=0.1 * _normal(6, 11)), _tensor(0.0, 0.1, 0.0).requires_grad_()
    problem = Problem(_held_out, _weighted, project_upper=Box(-0.1, 0.15))
    return problem, u, v, _data_with_rows(), {"accumulate": 2}


def rows_and_lower_constraints() -> Setting:
    u, v = Rows(11, init=0.1 * _normal(6, 11)), _tensor(0.0, 0.1, 0.0).requires_grad_()
    problem = Problem(_held_out, _weighted, lower_inequalities=lambda u, v, _: -0.05 - v)
    return problem, u, v, _data_with_rows(), {}


def _module(*layers: nn.Module) -> nn.Module:
    """Weights from `_normal`, not from torch's global generator."""
    v = nn.Sequential(*layers, nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for k, parameter in enumerate(v.parameters()):
            parameter.copy_(0.5 * _normal(10 + k, *parameter.shape))
    return v


def _decayed(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
    decay = [torch.exp(x) * p.square().sum() for x, p in zip(u, v.parameters(), strict=False)]
    return _squares(v, batch[0], batch[1]).mean() + 0.05 * sum(decay)


def network() -> Setting:
    """v is a module, u the decay of its weights."""
    u = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    return Problem(_held_out, _decayed), u, _module(nn.Linear(3, 3)), _data_with_rows(), {}


def full_batch_network() -> Setting:
    """Without data: the objectives close over all of it."""
    problem = Problem(
        lambda u, v, _: _held_out(u, v, (X[:6], Y[:6])) + 0.01 * (u**2).sum(),
        lambda u, v, _: _decayed(u, v, (X[6:], Y[6:])),
    )
    return problem, torch.zeros(3, dtype=torch.float64, requires_grad=True), _module(nn.Linear(3, 3)), None, {}


def prepare_without_data() -> Setting:
    problem = Problem(
        lambda u, v, made: upper(u, v, None) + 0.1 * made.sum(),
        lambda u, v, made: v @ H @ v / 2 - v @ made,
        prepare=lambda u, _: torch.tanh(u @ C.T),
    )
    return problem, *start(), None, {}


def noisy_network() -> Setting:
    """With dropout, which reads torch's generator, and BatchNorm, whose buffers belong to v."""
    # No bias before BatchNorm: its derivative is zero but for rounding, which Adam would make a step of.
    v = _module(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Dropout(0.2))
    data = _data_with_rows(6, 6)  # BatchNorm needs two examples on each rank
    return Problem(_held_out, _decayed), torch.zeros(3, dtype=torch.float64, requires_grad=True), v, data, {}


# -- methods -----------------------------------------------------------------------------------------------------------

RATE = partial(torch.optim.Adam, lr=0.05)
BOTH: dict[str, Any] = {"lower_optimizer": RATE, "upper_optimizer": RATE}
PRESET: dict[str, Any] = {"lower_steps": 2, "gamma": 1.0, "epsilon": 0.5, "upper_rate": 0.05, "lower_rate": 0.05}
METHODS: dict[str, Any] = {
    "deterministic": Penalty(),
    "stochastic": Penalty(mode="stochastic", cotangent="same", decay="linear"),
    "tracked": Penalty(mode="stochastic", warm_up=0.1),
    "stochastic in turn": Penalty(
        mode="stochastic",
        joint=False,
        lower_steps=2,
        lower_batches="shared",
        cotangent="running",
        decay="linear",
        **BOTH,
    ),
    "stochastic with differences": Penalty(
        mode="stochastic", lower_steps=1, curvature="difference", decay="constant", cotangent="same"
    ),
    "algorithm 1": Penalty.algorithm_1(curvature="exact", **PRESET),
    "algorithm 2": Penalty.algorithm_2(lam=0.5, curvature="exact", **PRESET),
    "alternating": Alternating(decay="linear", lower_steps=2),
    "approx grad cg": ApproxGrad(decay="linear", lower_steps=2, linear_solver="cg"),
    "approx grad adam": ApproxGrad(decay="linear", lower_steps=2, linear_solver="adam"),
    "approx grad neumann": ApproxGrad(
        decay="linear", lower_steps=2, linear_solver="neumann", linear_steps=3, damping=0.1
    ),
    "reverse mode": ReverseMode(decay="linear", lower_steps=3),
    "reverse mode truncated": ReverseMode(
        decay="linear", lower_steps=3, truncate=2, momentum=0.5, upper_optimizer=RATE
    ),
    "forward mode": ForwardMode(decay="linear", lower_steps=3),
    "forward mode with momentum": ForwardMode(decay="linear", lower_steps=3, momentum=0.5, lower_rate=0.2),
    "value function": ValueFunction(decay="linear", lower_steps=2),
    "value gap": ValueGap(decay="linear", lower_steps=2),
}
EVERY = (no_data, batches, accumulate, trials, upper_projection, prepare, episodes, network)
"""What every step-wise method supports."""
SETTINGS: dict[str, Sequence[Callable[[], Setting]]] = {
    "deterministic": (
        no_data,
        constraints,
        lower_inequalities,
        lower_constraints,
        lower_constraints_and_starts,
        projections,
        starts,
        starts_in_a_box,
        all_rows,
        full_batch_network,
        prepare_without_data,
    ),
    "stochastic": (
        *EVERY,
        stream,
        constraints,
        constraints_and_batches,
        lower_constraints,
        lower_constraints_and_batches,
        projections,
        projections_and_batches,
        rows,
        rows_in_a_box,
        rows_and_lower_constraints,
        noisy_network,
        starts,
    ),
    "tracked": (
        no_data,
        batches,
        accumulate,
        upper_projection,
        prepare,
        network,
        stream,
        rows,
        rows_in_a_box,
        noisy_network,
        starts,
    ),
    "stochastic in turn": (batches, constraints_and_batches, lower_constraints_and_batches, rows, noisy_network),
    "stochastic with differences": (batches, prepare, rows_in_a_box),
    "algorithm 1": (*EVERY, constraints_and_batches, projections_and_batches, rows, starts_in_a_box),
    "algorithm 2": (*EVERY, constraints_and_batches, projections_and_batches, rows),
    "alternating": (*EVERY, projections_and_batches, rows, starts_in_a_box),
    "approx grad cg": (*EVERY, rows, rows_in_a_box, noisy_network, starts_in_a_box),
    "approx grad adam": (*EVERY, rows),
    "approx grad neumann": (*EVERY, rows),
    "reverse mode": (*EVERY, rows, noisy_network, starts_in_a_box),
    "reverse mode truncated": (batches, rows_in_a_box),
    "forward mode": (*EVERY, noisy_network, starts_in_a_box),
    "forward mode with momentum": (batches,),
    "value function": (*EVERY, projections_and_batches, rows, starts_in_a_box),
    "value gap": (*EVERY, projections_and_batches, rows, noisy_network, starts_in_a_box),
}
ON_RANKS: dict[str, Sequence[Callable[[], Setting]]] = {
    "stochastic": (batches, rows, constraints_and_batches, lower_constraints_and_batches, noisy_network),
    "tracked": (batches, rows, noisy_network),
    **dict.fromkeys([name for name in METHODS if name not in ("deterministic", "stochastic", "tracked")], (batches,)),
}


def _named(cases: Mapping[str, Sequence[Callable[[], Setting]]], more: str = "") -> dict[str, Callable[[], Setting]]:
    return {
        f"{method}, {setting.__name__.replace('_', ' ')}{more}": setting
        for method, settings in cases.items()
        for setting in settings
    }


RUNS = _named(SETTINGS)
RANK_RUNS = _named(ON_RANKS, ", 2 ranks")
RANKS = 2
PATH = ("steps", "history.", "certificate.")
UNSTABLE = {
    "reverse mode, network": ("certificate.hypergradient_error",),
    **{name: PATH for name in RUNS if name.startswith("deterministic,")},
}
"""Columns, or beginnings of their names, that multiply rounding errors by more than a tolerance allows. The error of
the hypergradient divides by a g_vv that is nearly singular there, as the run ends far from the minimum of g. A run
without data decides by comparisons how accurately to solve: on another machine it can reach the same end in other
steps."""


# -- what is recorded --------------------------------------------------------------------------------------------------


def run(name: str, change: Callable[[Tensor], None] | None = None) -> dict[str, Any]:
    """The record of a run; `change` is applied to the start of v."""
    problem, u, v, data, options = (RUNS | RANK_RUNS)[name]()
    torch.manual_seed(1)
    if change is not None:
        change(v if isinstance(v, Tensor) else next(v.parameters()))
    method = METHODS[name.split(", ")[0]]
    return record(solve(problem, method, u, v, data, **({"max_steps": STEPS, "seed": 5} | options)))


def on_rank(names: Sequence[str]) -> dict[str, Any]:
    return {name: run(name) for name in names}


def rank_runs(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the records of each rank."""
    return on_ranks(RANKS, on_rank, list(names)) if names else [{}]


def every_run(names: Sequence[str]) -> dict[str, Any]:
    """Return the records of all runs with one of these in their name, or of all if there are none."""
    chosen = [name for name in [*RUNS, *RANK_RUNS] if not names or any(part in name for part in names)]
    found = {name: run(name) for name in chosen if name in RUNS}
    return found | rank_runs([name for name in chosen if name in RANK_RUNS])[0]


def nudge(v: Tensor) -> None:
    """Change the last bit of a number."""
    v.data[0] = torch.nextafter(v.data[0], torch.tensor(1.0, dtype=v.dtype))


def shift(v: Tensor) -> None:
    v.data.add_(1e-5)


def record(solution: Solution) -> dict[str, Any]:
    certificate = {name: getattr(solution.certificate, name) for name in CERTIFICATE}
    return {
        "status": solution.status.name,
        "steps": solution.steps,
        "u": packed(solution.u),
        "v": packed(solution.v),
        "history": {name: _pack(_some(solution.history[name])) for name in COLUMNS},
        "certificate": {name: _pack([value]) for name, value in certificate.items() if value is not None},
        "multipliers": {
            name: _pack([x for tensor in tensors for x in _numbers(tensor)])
            for name, tensors in solution.multipliers.items()
            if tensors
        },
    }


def packed(value: Any) -> str:
    """A tensor, Rows or a module with its buffers, as hex."""
    return _pack(_numbers(value))


def _some(column: Sequence[Any]) -> list[Any]:
    """The values of the first steps, of one in five after these, and of the last."""
    return [value for k, value in enumerate(column, 1) if k <= 3 or k % 5 == 0 or k == len(column)]


def _numbers(value: Any) -> list[float]:
    if isinstance(value, nn.Module):
        return [x for tensor in value.state_dict().values() for x in _numbers(tensor)]
    tensor = value.values if isinstance(value, Rows) else value
    return tensor.detach().double().reshape(-1).tolist()


def _pack(values: Sequence[Any]) -> str:
    """Numbers as hex, words as they are; `x*3` stands for x x x."""
    words = [value or "-" if isinstance(value, str) else float(value).hex() for value in values]
    counted = [(word, len(list(same))) for word, same in groupby(words)]
    return " ".join(word if count == 1 else f"{word}*{count}" for word, count in counted)


def unpacked(text: str) -> list[str]:
    parts = [word.partition("*") for word in text.split()]
    return [word for word, _, count in parts for _ in range(int(count or 1))]


def columns(recorded: Mapping[str, Any]) -> dict[str, list[str]]:
    """The record as flat columns of words."""
    flat: dict[str, list[str]] = {}
    for name, value in recorded.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": unpacked(text) for key, text in value.items()}
        else:
            flat[name] = unpacked(str(value))
    return flat


def differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any], tolerance: float = 0.0, unstable: Sequence[str] = ()
) -> list[str]:
    """A line for each column that differs, with the place where it does so first.

    A tolerance is relative to the largest number of the column, or to 1 if that is larger. With one, columns whose
    names that begin with one of `unstable` are not compared.
    """
    old, new = columns(recorded), columns(found)
    if tolerance > 0:
        skipped = tuple(unstable)
        old, new = ({name: x for name, x in each.items() if not name.startswith(skipped)} for each in (old, new))
    lines = [f"{name} is only in the {'record' if name in old else 'new run'}" for name in sorted(old.keys() ^ new)]
    for name in (name for name in old if name in new):
        if len(old[name]) != len(new[name]):
            lines.append(f"{name} has {len(new[name])} values; recorded {len(old[name])}")
            continue
        size = max((abs(x) for x in map(_number, old[name]) if x is not None and math.isfinite(x)), default=1.0)
        for i, (a, b) in enumerate(zip(old[name], new[name], strict=True)):
            if a != b and not _near(a, b, tolerance * max(1.0, size)):
                lines.append(f"{name}[{i}] is {_readable(b)}; recorded {_readable(a)}")
                break
    return lines


def _number(word: str) -> float | None:
    return float.fromhex(word) if "0x" in word or word in ("nan", "inf", "-inf") else None


def _near(a: str, b: str, within: float) -> bool:
    x, y = _number(a), _number(b)
    return x is not None and y is not None and abs(x - y) <= within


def _readable(word: str) -> str:
    number = _number(word)
    return word if number is None else f"{number!r} ({word})"
