"""One cell of the poisoning study: the split of a seed, the points of a column, and a victim retrained on both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import ApproxGrad, Penalty, ReverseMode
from bilevel.applications.denoising.clean_dataset import as_bytes
from bilevel.applications.poisoning.attack import Poison, attack, evaluate, unmoved
from bilevel.applications.poisoning.goals import SHARPER, Goal, failure, raised_loss, shortfall, targeted, untargeted
from bilevel.applications.poisoning.victims import Recipe
from bilevel.data import Pair, load
from bilevel.methods.base import Method
from bilevel_studies.poisoning.study import CHOICE, CHOICE_SEED, SOURCE, SPLITS, TABLE, TARGETED, UNTARGETED, WANTED
from bilevel_studies.study import Found, Settings

loaded = cache(load)
# The most iterations of L-BFGS on a victim.
ITERATIONS = 500


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

    def goal(self, settings: Settings) -> Goal:
        """Return our objective if the cell has a factor and shifts; otherwise the paper's."""
        ours = "factor" in settings
        objective: Callable[[Tensor, Tensor], Tensor]
        if self.attack == TARGETED:
            objective = partial(_scaled, shortfall, settings["factor"]) if ours else torch.nn.functional.cross_entropy
            goal = targeted(
                self.train,
                self.validation,
                self.points,
                source=SOURCE,
                wanted=WANTED,
                objective=objective,
                seed=self.seed,
            )
        else:
            objective = partial(_scaled, failure, settings["factor"] / SHARPER) if ours else raised_loss
            goal = untargeted(self.train, self.validation, self.points, objective=objective, seed=self.seed)
        return shifted(goal) if ours and settings["shifts"] else goal

    def flipped(self) -> Pair | Poison:
        """Return points of the validation set with other labels; if targeted, only eights with the label three.

        With half eights and half threes, another reading of the paper, the success is a third of the published one.
        """
        if self.attack == UNTARGETED:
            return unmoved(untargeted(self.validation, self.validation, self.points, seed=self.seed))
        x, y = self.validation
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.seed))
        rows = order[y[order] == SOURCE][: self.points]
        return x[rows], torch.full((len(rows),), WANTED)

    def score(self, poison: Pair | Poison | None, test: Pair) -> Found:
        found = evaluate(poison, self.train, test, self.model, recipe=self.recipe)
        success = found.share(test, SOURCE, WANTED) if self.attack == TARGETED else None
        return {"accuracy": found.accuracy, "success": success}


def _scaled(objective: Callable[[Tensor, Tensor], Tensor], factor: float, scores: Tensor, labels: Tensor) -> Tensor:
    return objective(factor * scores, labels)


def shifted(goal: Goal) -> Goal:
    """Return the goal with its images as they are, and moved by one pixel up, down, left and right.

    The points then fit the few validation images less closely. The border of an MNIST image is empty.
    """
    x = [goal.x.roll(way, (-2, -1)) for way in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))]
    return replace(goal, x=torch.cat(x), y=goal.y.repeat(len(x)))


@cache
def for_the_choice(kind: str) -> Pair:
    """Return the images for comparing candidates, from the part of MNIST without test images of the table."""
    data = loaded("mnist")
    x, y = data.part("test") if kind == UNTARGETED else (data.x, data.y)
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    if kind == TARGETED:
        seen = torch.cat(rows_of(TARGETED, CHOICE_SEED)[:2])
        rows = rows[(y[rows] == SOURCE) & ~torch.isin(rows, seen)]
    return x[rows[:5000]], y[rows[:5000]]


@cache
def split(kind: str, seed: int) -> tuple[Pair, Pair, Pair]:
    """Return the examples of a seed for training, validation and test.

    Untargeted: all from MNIST's training part. Targeted: the same number of each class, and the test examples from
    MNIST's test part.
    """
    data, (first, second, third) = loaded("mnist"), rows_of(kind, seed)
    x, y = data.part("test") if kind == TARGETED else (data.x, data.y)
    return (data.x[first], data.y[first]), (data.x[second], data.y[second]), (x[third], y[third])


def rows_of(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the three parts; if targeted, the last are rows of MNIST's test part."""
    data, counts, generator = loaded("mnist"), SPLITS[kind], torch.Generator().manual_seed(seed)
    order = torch.randperm(data.count, generator=generator)
    if kind == UNTARGETED:
        first, second, third = torch.split(order[: sum(counts)], list(counts))
        return first, second, third
    y_test = data.part("test")[1]
    drawn = _alike(data.y, order, counts[0] + counts[1])
    first = torch.cat([rows[: counts[0] // 10] for rows in drawn])
    second = torch.cat([rows[counts[0] // 10 :] for rows in drawn])
    return first, second, torch.cat(_alike(y_test, torch.randperm(len(y_test), generator=generator), counts[2]))


def _alike(y: Tensor, order: Tensor, count: int) -> list[Tensor]:
    """Return rows in this order by class, the same number of each."""
    return [order[y[order] == c][: count // 10] for c in range(10)]


def run(settings: Settings) -> Found | None:
    """Run a cell; return None after Ctrl-C."""
    task = Task(settings)
    began = time.perf_counter()
    column = settings["column"]
    test = for_the_choice(task.attack) if settings["part"] == CHOICE else task.test
    if column == "clean":
        found = task.score(None, test)
    elif column == "flipping":
        found = task.score(task.flipped(), test)
    else:
        try:
            poison = attack(
                task.goal(settings),
                task.train,
                task.model,
                recipe=task.recipe,
                steps=int(settings["steps"]),
                method=method(settings),
                whiten=column != "algorithm-2",
                seed=task.seed,
            )
        except KeyboardInterrupt:
            return None
        found = task.score(poison, test) | {"l2": float(poison.l2.mean())}
        if poison.solution is not None:
            history = poison.solution.history
            found["ms_per_step"] = round(1000 * history["seconds"][-1] / settings["steps"], 2)
            found["residual"] = history["residual"][-1]
        if settings["part"] == TABLE and column == "penalty" and settings["percent"] == 6 and task.seed == 0:
            found["pictures"] = pictures(task.attack, poison)
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def pictures(kind: str, poison: Poison) -> dict[str, Any]:
    """Return bases and points as bytes, one for each label (untargeted) or five for each of both (targeted)."""
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
    """Return the method of a column; None for the default of `attack`."""
    adam = partial(torch.optim.Adam, lr=settings.get("rate", 0.1))
    T = settings.get("T")
    match settings["column"]:
        case "approx-grad":
            few = T or 5
            return ApproxGrad(lower_steps=few, linear_steps=few, warm_up=0.0, decay="linear", upper_optimizer=adam)
        case "rmd":
            return ReverseMode(lower_steps=10, warm_up=0.0, decay="linear", upper_optimizer=adam)
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
        mode="stochastic",
        warm_up=0.0,
        cotangent="same",
        decay="linear",
        upper_optimizer=partial(torch.optim.Adam, lr=settings.get("rate", 0.03)),
        lower_optimizer=partial(torch.optim.Adam, lr=0.01),
        **options,
    )
