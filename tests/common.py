"""What several test files of the loop share."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bilevel import Callback, Penalty, Problem, Run

SGD = partial(torch.optim.SGD, lr=0.01)


def needs(name: str) -> pytest.MarkDecorator:
    """For tests that read a real data set."""
    folder = os.environ.get("BILEVEL_DATA")
    here = folder is not None and (Path(folder) / name).is_dir()
    return pytest.mark.skipif(not here, reason=f"{name} is neither in $BILEVEL_DATA nor in ../shared/data")


def chromium() -> str | None:
    """The path of a Chromium, where there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("BILEVEL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def two_minimisers() -> Problem:
    """v = 1 and v = -1 minimise g for every u. f is least at u = -1.1, v = -1; its maximum over v at u = 0."""
    return Problem(
        lambda u, v, _: torch.sum((u - v) ** 2 + 0.2 * u),
        lambda u, v, _: torch.sum((v * v - 1) ** 2) / 4 + 0 * u.sum(),
    )


def plain(**options: Any) -> Penalty:
    """The step-wise mode with nothing that moves by itself: fixed prices, fixed rates, no warm-up, u and v in turn."""
    fixed: dict[str, Any] = {
        "mode": "stochastic",
        "lower_steps": 2,
        "joint": False,
        "gamma": 1.0,
        "lam": 0.5,
        "advances": 0,
        "warm_up": 0.0,
        "decay": "constant",
        "lower_optimizer": SGD,
        "upper_optimizer": SGD,
    }
    return Penalty(**(fixed | options))


class Each(Callback):
    """Calls a function before the first step and after each log."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def start(self, run: Run) -> None:
        self.function(run)

    def log(self, run: Run) -> bool | None:
        return self.function(run)


def global_state() -> list[Any]:
    numbers = [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
    return [torch.get_rng_state().tolist(), numbers, random.getstate()]


class Once(torch.autograd.Function):
    """The square, differentiable once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return 2 * d * ctx.saved_tensors[0]
