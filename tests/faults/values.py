"""NaN and infinity in f, g, their gradients, and the data, from a random evaluation on."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import torch
from tally import Tally
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bilevel import (
    Alternating,
    ApproxGrad,
    Callback,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Run,
    Solution,
    Status,
    ValueFunction,
    ValueGap,
    solve,
)

QUANTITIES = ("upper", "lower", "gradient of upper", "gradient of lower", "data")
BAD = (math.nan, math.inf, -math.inf)
LOG_EVERY = 6
METHODS: dict[str, Any] = {
    "penalty, with data": Penalty(lower_steps=2),
    "penalty, without data": Penalty(),
    "penalty, step-wise without data": Penalty(mode="stochastic", lower_steps=2),
    "approx-grad": ApproxGrad(lower_steps=2),
    "reverse-mode": ReverseMode(lower_steps=2),
    "alternating": Alternating(lower_steps=2),
    "forward-mode": ForwardMode(lower_steps=2),
    "value-gap": ValueGap(lower_steps=2),
    "value-function": ValueFunction(lower_steps=2),
}
WITH_DATA = [name for name in METHODS if "without" not in name]


class Bend(torch.autograd.Function):
    """The identity, whose gradient is a bad number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d * 0 + ctx.bad, None


class Examples(Dataset[Tensor]):
    """Rows of small numbers; from a reading on they are bad ones."""

    def __init__(self, fault: Fault | None) -> None:
        self.rows = 0.1 * torch.randn(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.fault = fault

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        bad = self.fault.hit("data") if self.fault else None
        return self.rows[i] if bad is None else torch.full_like(self.rows[i], bad)


class Fault:
    """A bad number in one quantity, from its `after`-th use on."""

    def __init__(self, quantity: str, bad: float, after: int) -> None:
        self.quantity, self.bad, self.after, self.uses = quantity, bad, after, 0

    def hit(self, quantity: str) -> float | None:
        if quantity != self.quantity:
            return None
        self.uses += 1
        return self.bad if self.uses > self.after else None


class Watch(Callback):
    """The steps of the logs, with u and v at each."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.uses: dict[int, int] = {}

    def into(self, u: Tensor, v: Tensor, fault: Fault) -> Watch:
        self.u, self.v, self.fault = u, v, fault
        return self

    def start(self, run: Run) -> None:
        self.log(run)

    def log(self, run: Run) -> None:
        self.seen[run.step] = self.u.detach().clone(), self.v.detach().clone()
        self.uses[run.step] = self.fault.uses


def run(name: str, fault: Fault, steps: int = 40) -> tuple[Solution, Watch]:
    u = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def harmed(value: Tensor, v: Tensor, level: str) -> Tensor:
        bad = fault.hit(level)
        if bad is not None:
            value = value + bad
        bad = fault.hit(f"gradient of {level}")
        return value if bad is None else value + 0 * Bend.apply(v, bad).sum()

    def upper(u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
        shift = 0.0 if batch is None else batch.mean()
        return harmed(torch.sum((v - 1 - shift) ** 2) + torch.sum(u**4), v, "upper")

    def lower(u: Tensor, v: Tensor, batch: Tensor | None) -> Tensor:
        shift = 0.0 if batch is None else batch.mean()
        return harmed(torch.sum((v - torch.sin(u) - shift) ** 2) + 0.1 * torch.sum(v**4), v, "lower")

    watch = Watch().into(u, v, fault)
    data = None
    if name in WITH_DATA:
        data = DataLoader(Examples(None), 4, shuffle=True), DataLoader(Examples(fault), 4, shuffle=True)
    found = solve(
        Problem(upper, lower),
        METHODS[name],
        u,
        v,
        data,
        max_steps=steps,
        seed=0,
        log_every=LOG_EVERY,
        callbacks=[watch],
        hypergradient=False,
        engine="eager",
    )
    return found, watch


def injected(count: int, seed: int) -> Tally:
    """So many faults, each at a random use of a random quantity."""
    tally, draw = Tally(), random.Random(seed)
    lengths: dict[tuple[str, str], tuple[int, int]] = {}
    clean: dict[str, Solution] = {}
    unused = 0
    while tally.tried < count:
        name = draw.choice(list(METHODS))
        quantity = draw.choice(QUANTITIES if name in WITH_DATA else QUANTITIES[:-1])
        if (name, quantity) not in lengths:  # how often a run without faults uses it: before the first step, and in all
            fault = Fault(quantity, 0.0, 10**9)
            clean[name], watch = run(name, fault)
            lengths[name, quantity] = watch.uses[0], watch.uses[max(watch.uses)]
        first, last = lengths[name, quantity]
        bad = draw.choice(BAD)
        fault = Fault(quantity, bad, draw.randrange(first + 1, last))
        with tally.attempt(f"{bad} in {quantity} from use {fault.after} of {first} to {last} on, {name}"):
            found, watch = run(name, fault)
            if found.status is Status.DIVERGED:
                check(found, watch, fault)
                continue
            # What a method does not use, such as the value of g in an end check, changes nothing.
            unused += 1
            assert torch.equal(found.u, clean[name].u), f"{found.status.name}, with another u and no message"
            assert torch.equal(found.v, clean[name].v), f"{found.status.name}, with another v and no message"
            assert found.status is clean[name].status
    tally.facts = {"of them in numbers that the method does not use": unused}
    return tally


def check(found: Solution, watch: Watch, fault: Fault) -> None:
    """The run says within `log_every` steps what went wrong and when, and is back at the last state that was logged."""
    told = re.match(r"At step (\d+), (.+) (is|are) (.+)\.", found.message)
    assert told is not None, found.message
    step = int(told[1])
    good = max(log for log, uses in watch.uses.items() if uses <= fault.after)
    # The fault came in a step after that log, the earliest in the next one; a line search may pass a few trials over.
    assert good < step <= good + 1 + LOG_EVERY, f"{found.message} The last log before the fault was at step {good}"
    assert found.steps == max(watch.seen)
    u, v = watch.seen[found.steps]
    assert torch.isfinite(u).all()
    assert torch.isfinite(v).all()
    assert torch.equal(found.u, u)
    assert torch.equal(found.v, v)
    assert len(found.history) == found.steps
    assert all(math.isfinite(value) for name in ("upper", "lower", "residual") for value in found.history[name])
