"""One run of a method for some CPU seconds, and the best value of a problem."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bilevel import F2SA, SOBA, SRBA, ApproxGrad, BilevelWarning, Callback, Penalty, Run, Solution, solve
from bilevel.methods.base import Method
from bilevel_studies.field.problems import FieldProblem, Quadratics, problem
from bilevel_studies.field.study import BEST, CHOICE
from bilevel_studies.study import Found, Settings

# F is measured first after so many CPU seconds, and then each time that they have grown by this factor.
FIRST, FACTOR = 0.2, 1.25
# The steps from one look at the clock to the next, and a number of steps that no run reaches.
EVERY, NEVER = 20, 10**7
LOWER_STEPS = 10


def method(settings: Settings) -> Method:
    """Return the method of a cell, with its step sizes."""
    name, rates = settings["method"], {key: settings[key] for key in ("lower_rate", "upper_rate") if key in settings}
    match name:
        case "penalty":
            return Penalty()
        case "soba":
            return SOBA(**rates)
        case "srba":
            return SRBA(**rates, period=settings["period"])
        case "f2sa":
            return F2SA(**rates)
    lower, upper = (partial(torch.optim.SGD, lr=rates[key]) for key in ("lower_rate", "upper_rate"))
    return ApproxGrad(
        lower_steps=LOWER_STEPS,
        linear_solver="sgd",
        linear_rate=rates["lower_rate"],
        warm_start=name == "amigo",
        warm_up=0.0,
        decay="constant",
        lower_optimizer=lower,
        upper_optimizer=upper,
    )


class Clock(Callback):
    """Measures F at growing CPU times from `first`, without the time of the measurements, and stops after `seconds`."""

    def __init__(self, field: FieldProblem, u: Tensor, v: Tensor, seconds: float, first: float) -> None:
        self.field, self.u, self.seconds, self.next = field, u, seconds, first
        self.start_value, self.v = field.value(u.detach(), v.detach())
        self.found: dict[str, list[float]] = {"seconds": [], "values": [], "steps": []}
        self.began = time.process_time()

    def log(self, run: Run) -> bool:
        now = time.process_time()
        used = now - self.began
        if used < min(self.next, self.seconds):
            return False
        value, self.v = self.field.value(self.u.detach(), self.v)
        for key, one in (("seconds", round(used, 3)), ("values", value), ("steps", run.step)):
            self.found[key].append(one)
        self.next = max(self.next, used) * FACTOR
        self.began += time.process_time() - now
        return used >= self.seconds or not math.isfinite(value)


def run(settings: Settings) -> Found | None:
    """Run a cell; return None after Ctrl-C."""
    torch.set_num_threads(1)
    field = problem(settings["problem"])
    if settings["part"] == BEST:
        return best(field)
    stated, data = field.on_batches()

    def solved(max_steps: int, u: Tensor, v: Tensor, callbacks: Sequence[Callback] = ()) -> Solution[Tensor, Tensor]:
        return solve(
            stated,
            method(settings),
            u,
            v,
            data,
            max_steps=max_steps,
            seed=settings["seed"],
            callbacks=callbacks,
            log_every=EVERY,
            engine="eager",
            hypergradient=False,
        )

    solved(2, *start(field, settings["seed"]))  # what a process loads in its first run
    u, v = start(field, settings["seed"])
    seconds = settings["seconds"]
    clock = Clock(field, u, v, seconds, first=seconds if settings["part"] == CHOICE else FIRST)
    solution = solved(NEVER, u, v, [clock])
    if solution.interrupted:
        return None
    return {"start": clock.start_value, "status": solution.status.name.lower()} | clock.found


def start(field: FieldProblem, seed: int) -> tuple[Tensor, Tensor]:
    u, v = field.start(seed)
    return u.requires_grad_(), v.requires_grad_()


def best(field: FieldProblem) -> Found | None:
    """Return a low value of F from `Penalty` on all data at once; of the quadratics the least value."""
    if isinstance(field, Quadratics):
        return {"value": field.least(), "status": "exact"}
    u, v = (x.double().requires_grad_() for x in field.start(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BilevelWarning)
        solution = solve(field.on_all_data(), Penalty(), u, v, max_steps=3000, seed=0)
    if solution.interrupted:
        return None
    value, _ = field.value(u.detach().float(), v.detach().float())
    return {"value": value, "status": solution.status.name.lower(), "seconds": solution.history["seconds"][-1]}
