"""What the tests of both unrolled methods share: autograd through T steps, and what a run found in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel import Problem, Rows
from bilevel._util.nested import Pair
from bilevel.batches.sources import Sources
from bilevel.measures.problem_check import variables
from bilevel.methods.base import RunContext

SGD = partial(torch.optim.SGD, lr=1.0)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Network:
    """A small tanh network v; u weighs the examples of the lower batches, and the decay of the weights."""

    def __init__(self, *, count: int = 12) -> None:
        self.count = count
        x, y = normal(count, 3, seed=1), normal(count, 2, seed=2)
        index = torch.arange(count)
        self.lower_data = [(x[i : i + 4], y[i : i + 4], index[i : i + 4]) for i in range(0, count, 4)]
        self.upper_data = [(normal(4, 3, seed=s), normal(4, 2, seed=s + 9), index[s : s + 3]) for s in (3, 4)]
        self.problem = Problem(self.upper, self.lower)

    def start(self, *, rows: bool = False) -> tuple[Any, dict[str, Tensor]]:
        values = normal(self.count, seed=5)
        u = Rows(self.count, init=values) if rows else values.requires_grad_()
        return u, {"a": normal(3, 5, seed=6).requires_grad_(), "b": normal(5, 2, seed=7).requires_grad_()}

    def output(self, v: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ v["a"]) @ v["b"]

    def lower(self, u: Any, v: dict[str, Tensor], batch: Any) -> Tensor:
        x, y, index = batch
        fit = (torch.sigmoid(u[index]) * (self.output(v, x) - y).square().sum(1)).mean()
        return fit + 0.1 * torch.exp(u[index[:1]]).sum() * v["a"].square().sum()

    def upper(self, u: Any, v: dict[str, Tensor], batch: Any) -> Tensor:
        x, y, index = batch
        return (self.output(v, x) - y).square().mean() + 0.1 * u[index].square().sum()

    @property
    def data(self) -> tuple[list[Any], list[Any]]:
        return self.upper_data, self.lower_data


@dataclass
class Seen:
    """One upper step: where it set out from, what it drew, and the gradient that u was moved along."""

    u: Tensor
    v: Any
    moments: list[Tensor]
    left: float
    lower: list[list[Pair]] = field(default_factory=list)
    upper: list[Pair] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.zeros(()))


def start(problem: Problem, method: Any, u: Any, v: Any, data: Any = None, **options: Any) -> Any:
    """The state of a run of the method before its first step."""
    upper, lower = variables(problem, u, v)
    settings = {"max_steps": 10, "tolerance": None, "accumulate": 1, "engine": "eager"} | options
    generator = torch.Generator().manual_seed(0)
    sources = Sources(data, 0, lower.device)
    return method.init(RunContext(problem=problem, u=upper, v=lower, sources=sources, generator=generator, **settings))


def dense(values: Tensor) -> Tensor:
    return values.detach().clone()


def watch(state: Any, steps: int = 1) -> list[Seen]:
    """Take the steps; u is one tensor or one Rows."""
    found: list[Seen] = []
    plain, move = state._unrolled, state.upper.step

    def unrolled(run: Any, lower: Any, upper: Any, left: Tensor) -> Tensor:
        u = dense(state.u.value.values if state.u.rows else state.u.value)
        v = {key: dense(x) for key, x in zip(state.v.names, state.v.leaves, strict=True)}
        seen = Seen(u, v, [dense(m) for m in state.lower.moments], float(left))
        seen.lower, seen.upper = list(lower), upper
        found.append(seen)
        return plain(run, lower, upper, left)

    def step(gradients: Sequence[Tensor], rows: Any, factor: Tensor) -> None:
        total = torch.zeros_like(found[-1].u)
        if gradients:
            total += gradients[0]
        for index, part in (pair for parts in rows for pair in parts):
            total.index_add_(0, index, part)
        found[-1].gradient = total
        move(gradients, rows, factor)

    state._unrolled, state.upper.step = unrolled, step
    for k in range(steps):
        state.step(k)
    return found


def reference(
    problem: Problem, seen: Seen, rho: float, *, momentum: float = 0.0, kept: int | None = None, prepared: Any = None
) -> Tensor:
    """df(u, v_T(u))/du by autograd through the steps; of the last `kept` alone where that is given."""
    u = seen.u.clone().requires_grad_()
    made = None if prepared is None else prepared(u)
    v = {key: x.clone().requires_grad_() for key, x in seen.v.items()}
    m = seen.moments or [torch.zeros_like(x) for x in v.values()]

    def mean(function: Any, batches: list[Any]) -> Tensor:
        value = v if list(v) != [""] else v[""]
        return torch.stack([function(u, value, b if made is None else made) for b in batches]).mean()

    for t, batches in enumerate(seen.lower):
        if kept is not None and t == len(seen.lower) - kept:
            v = {key: x.detach().requires_grad_() for key, x in v.items()}
            m = [x.detach() for x in m]
        slope = torch.autograd.grad(mean(problem.lower, [b for _, b in batches]), list(v.values()), create_graph=True)
        m = [momentum * x + s for x, s in zip(m, slope, strict=True)]
        v = {key: x - rho * y for (key, x), y in zip(v.items(), m, strict=True)}
    return torch.autograd.grad(mean(problem.upper, [b for b, _ in seen.upper]), u)[0]
