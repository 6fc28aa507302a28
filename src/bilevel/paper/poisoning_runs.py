"""One cell of the poisoning study: the split of a seed, the points of a column, and a victim trained anew on both."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..applications.cleaning import as_bytes
from ..applications.poisoning import Poison, attack, evaluate, unmoved
from ..applications.poisoning_goals import Goal, raised_loss, targeted, untargeted
from ..applications.victims import Recipe
from ..cells import Found, Settings
from ..data import Pair, load
from ..method import Method
from ..methods.approx_grad import ApproxGrad
from ..methods.penalty import Penalty
from ..methods.reverse_mode import ReverseMode
from .poisoning import SOURCE, SPLITS, TABLE, TARGETED, UNTARGETED, WANTED

loaded = cache(load)
ITERATIONS = 500
"""Of L-BFGS, at most, on a victim."""


class Task:
    """The data of a cell and its victim."""

    def __init__(self, settings: Settings) -> None:
        self.attack, self.seed = settings["attack"], int(settings["seed"])
        self.train, self.validation, self.test = split(self.attack, self.seed)
        self.points = round(settings["percent"] / 100 * len(self.train[1]))
        linear = nn.Linear(784, 10, bias=False)
        nn.init.zeros_(linear.weight)
        self.model = nn.Sequential(nn.Flatten(), linear)
        self.recipe = Recipe(optimizer="lbfgs", steps=ITERATIONS, decay=float(settings["weight"]))

    def goal(self, *, of_the_paper: bool = False) -> Goal:
        if self.attack == TARGETED:
            return targeted(
                self.train, self.validation, self.points, source=SOURCE, wanted=WANTED, seed=self.seed,
                **({"objective": torch.nn.functional.cross_entropy} if of_the_paper else {}),
            )  # fmt: skip
        objective: dict[str, Any] = {"objective": raised_loss} if of_the_paper else {}
        return untargeted(self.train, self.validation, self.points, seed=self.seed, **objective)

    def flipped(self) -> Poison:
        """Points of the validation set with other labels: the paper's baseline."""
        if self.attack == TARGETED:
            return unmoved(
                targeted(self.validation, self.validation, self.points, source=SOURCE, wanted=WANTED, seed=self.seed)
            )
        return unmoved(untargeted(self.validation, self.validation, self.points, seed=self.seed))

    def score(self, poison: Poison | None) -> Found:
        found = evaluate(poison, self.train, self.test, self.model, recipe=self.recipe)
        success = found.share(self.test, SOURCE, WANTED) if self.attack == TARGETED else None
        return {"accuracy": found.accuracy, "success": success}


@cache
def split(kind: str, seed: int) -> tuple[Pair, Pair, Pair]:
    """The examples of a seed. Untargeted: drawn from MNIST's training part. Targeted: every class alike, those for the
    test from MNIST's test part."""
    data = loaded("mnist")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(data.count, generator=generator)
    counts = SPLITS[kind]
    if kind == UNTARGETED:
        first, second, third = torch.split(order[: sum(counts)], list(counts))
        parts = [(data.x, data.y, first), (data.x, data.y, second), (data.x, data.y, third)]
    else:
        x_test, y_test = data.part("test")
        drawn = _alike(data.y, order, counts[0] + counts[1])
        first = torch.cat([rows[: counts[0] // 10] for rows in drawn])
        second = torch.cat([rows[counts[0] // 10 :] for rows in drawn])
        of_test = torch.cat(_alike(y_test, torch.randperm(len(y_test), generator=generator), counts[2]))
        parts = [(data.x, data.y, first), (data.x, data.y, second), (x_test, y_test, of_test)]
    train, validation, test = ((x[rows], y[rows]) for x, y, rows in parts)
    return train, validation, test


def _alike(y: Tensor, order: Tensor, count: int) -> list[Tensor]:
    """Rows in this order, by class, the same number of each."""
    return [order[y[order] == c][: count // 10] for c in range(10)]


def run(settings: Settings) -> Found | None:
    """Run a cell; None where Ctrl-C came."""
    task = Task(settings)
    began = time.perf_counter()
    column = settings["column"]
    if column == "clean":
        found = task.score(None)
    elif column == "flipping":
        found = task.score(task.flipped())
    else:
        goal = task.goal(of_the_paper=column != "penalty")
        try:
            poison = attack(
                goal, task.train, task.model, recipe=task.recipe, steps=int(settings["steps"]), seed=task.seed,
                method=method(settings),
            )  # fmt: skip
        except KeyboardInterrupt:
            return None
        found = task.score(poison)
        assert poison.solution is not None
        history = poison.solution.history
        found |= {
            "l2": float(poison.l2.mean()), "ms_per_step": round(1000 * history["seconds"][-1] / settings["steps"], 2),
            "residual": history["residual"][-1],
        }  # fmt: skip
        if settings["part"] == TABLE and column == "penalty" and settings["percent"] == 6 and task.seed == 0:
            found["pictures"] = pictures(task.attack, poison)
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def pictures(kind: str, poison: Poison) -> dict[str, Any]:
    """Bases and points as bytes, one for each label (untargeted) or five for each of both (targeted)."""
    if kind == TARGETED:
        rows = [int(i) for c in (WANTED, SOURCE) for i in torch.nonzero(poison.labels == c)[:5, 0]]
    else:
        rows = [int(torch.nonzero(poison.labels == c)[0, 0]) for c in range(10) if bool((poison.labels == c).any())]
    return {
        "labels": poison.labels[rows].tolist(),
        "base": as_bytes(poison.base[rows]).reshape(len(rows), -1).tolist(),
        "poison": as_bytes(poison.x[rows]).reshape(len(rows), -1).tolist(),
    }


def method(settings: Settings) -> Method | None:
    """What a column runs; None: the default of `attack`."""
    adam = partial(torch.optim.Adam, lr=0.1)
    T = settings.get("T")
    match settings["column"]:
        case "approx-grad":
            few = T or 5
            return ApproxGrad(lower_steps=few, linear_steps=few, warm_up=0.0, upper_optimizer=adam)
        case "rmd":
            return ReverseMode(lower_steps=10, warm_up=0.0, upper_optimizer=adam)
        case "algorithm-2":
            lam = 1.0 if settings["attack"] == TARGETED else 100.0
            return Penalty.algorithm_2(
                lower_steps=20, gamma=10.0, epsilon=1.0, lam=lam, nu=0.0, upper_rate=0.1, lower_rate=1e-3
            )
    if T is None and "options" not in settings:
        return None
    options: dict[str, Any] = dict(settings.get("options", {}))
    if T is not None:
        options["lower_steps"] = T
    return Penalty(
        mode="stochastic", warm_up=0.0, upper_optimizer=partial(torch.optim.Adam, lr=0.03),
        lower_optimizer=partial(torch.optim.Adam, lr=0.01), **options,
    )  # fmt: skip
