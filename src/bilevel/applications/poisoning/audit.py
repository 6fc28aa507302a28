"""One attack on a labelled data set, and the least poison that is enough."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bilevel._util.optional import require
from bilevel._util.parallel_map import ONCE
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.poisoning.attack import Evaluation, Poison, attack, unmoved
from bilevel.applications.poisoning.bounds import Bound
from bilevel.applications.poisoning.goals import Goal
from bilevel.applications.poisoning.setting import AttackGoal, AttackSetting, goal_of, target_of, wanted_of
from bilevel.errors import DataError, OptionError
from bilevel.methods.base import Method
from bilevel.running.callbacks import Callback
from bilevel.running.run_many import Found, ResultFolder, RunItem, Settings, run_items

FRACTIONS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
"""The shares of poison that an audit searches."""
PARTS_OF_EPSILON = 16
"""An audit of a bound searches the multiples of epsilon / 16."""
SUCCESS = 0.5
"""The share of a class that a targeted attack must turn into the other class."""


@dataclass(frozen=True)
class AttackResult:
    """An attack, and victims trained from scratch: without poison (`clean`), with it, and with its unmoved points."""

    poison: Poison
    goal: Goal
    clean: Evaluation
    poisoned: Evaluation
    flipped: Evaluation

    def success(self, setting: AttackSetting, goal: AttackGoal, which: Evaluation) -> float | bool | None:
        """Return whether, or how far, the goal is achieved.

        This is the share of the source's test rows that get the wanted class (targeted), whether the target gets it
        (clean label), or None (untargeted).
        """
        if goal.kind == "targeted":
            return which.share(setting.test, *goal.pair)
        if goal.kind == "clean-label":
            return int(which.predicted[target_of(setting, goal)[0]]) == wanted_of(setting, goal)
        return None


def carry_out(
    setting: AttackSetting,
    goal: AttackGoal,
    *,
    bound: Bound | None = None,
    steps: int,
    method: Method | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    clean: Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
) -> AttackResult:
    """Run an attack, and evaluate it by training victims from scratch.

    `clean` is the evaluation without poison if it is known: it is the same for every attack in a setting. For the other
    options see `attack`.
    """
    start = goal_of(setting, goal, seed)
    poison = attack(
        start,
        setting.train,
        setting.model,
        recipe=setting.recipe,
        features=setting.features,
        method=method,
        box=setting.box,
        bound=bound,
        steps=steps,
        seed=seed,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=callbacks,
    )
    body = setting.before and setting.before.recipe.describe()
    poison = replace(poison, settings=poison.settings | {"body_recipe": body})
    clean = clean or setting.evaluate(None)
    return AttackResult(poison, start, clean, setting.evaluate(poison), setting.evaluate(unmoved(start)))


def detection_auc(
    setting: AttackSetting,
    poison: Poison,
    model: nn.Module,
    *,
    without: Tensor | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> float:
    """Return how well `denoise` detects the poison: the AUC of its importance as a sign of a clean row.

    1 means that every point is below every clean row; 1/2 is chance. The trusted set is the validation rows without the
    rows `without`: the points of a clean-label attack start there, and a defender has no clean copy of a point.
    """
    x, y = setting.train
    inputs, labels = torch.cat([x, poison.x.to(x)]), torch.cat([y, poison.labels])
    left = torch.ones(len(setting.validation[1]), dtype=torch.bool)
    if without is not None:
        left[without] = False
    trusted = (setting.validation[0][left], setting.validation[1][left])
    known = torch.isin(labels, trusted[1])
    if not bool(known[len(y) :].any()):
        raise DataError(
            "the trusted rows must have examples of a class of the points; without the rows that the points start "
            "from, none is left."
        )
    found = denoise((inputs[known], labels[known]), trusted, model, steps=steps, seed=seed)
    clean = (torch.arange(len(labels)) < len(y))[known]
    return float(require("sklearn.metrics", "apps").roc_auc_score(clean.numpy(), found.importance.numpy()))


@dataclass(frozen=True)
class Audit:
    """The search for the least poison that is enough: the `values` searched, the `least` that is, and the `runs` made.

    `values` is empty if the target gets the wanted class without poison; then nothing is searched. `wanted` says in
    words when poison is enough. `auc` is how well the denoiser detects the poison of the attack as requested; see
    `detection_auc`.
    """

    what: Literal["fraction", "epsilon"]
    wanted: str
    values: tuple[float, ...]
    least: float | None
    runs: list[dict[str, Any]]
    auc: float

    @property
    def sentence(self) -> str:
        if not self.values:
            return ""
        if self.least is None:
            return f"No {self.what} up to {shown(self.what, self.values[-1])} {self.wanted}; try more --steps."
        return f"The smallest {self.what} tried that {self.wanted}: {shown(self.what, self.least)}."


def audit(
    setting: AttackSetting,
    goal: AttackGoal,
    bound: Bound | None,
    found: AttackResult,
    *,
    steps: int,
    cost: float,
    checkpoint: Path,
    seed: int = 0,
    callbacks: Callable[[str], Sequence[Callback]] = lambda label: (),
) -> Audit:
    """Search for the least poison that is enough, by bisection, and measure whether the denoiser detects it.

    A clean-label attack with a `bound` searches its epsilon, every other attack the share of poison. Enough is a loss
    of `cost` points of accuracy (untargeted), half of the class (targeted), or the target (clean label). `found` is the
    attack as requested. Finished runs are kept in the folder `checkpoint`, and a stopped run is resumed.
    `callbacks(label)` returns the callbacks of a run.
    """
    what: Literal["fraction", "epsilon"] = "epsilon" if goal.kind == "clean-label" and bound else "fraction"
    values = _fractions(setting, goal)
    if what == "epsilon" and bound:
        values = tuple(bound.epsilon * k / PARTS_OF_EPSILON for k in range(1, PARTS_OF_EPSILON + 1))
    if goal.kind == "clean-label" and found.success(setting, goal, found.clean):
        values = ()
    store, runs = ResultFolder(checkpoint / "audit"), list[dict[str, Any]]()

    def enough(value: float) -> bool:
        cell, mine, limit = RunItem({"what": what, "value": value}, 0), goal, bound
        if what == "epsilon" and bound:
            limit = replace(bound, epsilon=value)
        else:
            mine = replace(goal, points=max(1, round(value * setting.data.count)))

        def attacked(settings: Settings) -> Found:
            result = carry_out(
                setting,
                mine,
                bound=limit,
                steps=steps,
                seed=seed,
                checkpoint=checkpoint / cell.name,
                resume=True,
                clean=found.clean,
                callbacks=callbacks(f"audit at {value:.3g}"),
            )
            success = result.success(setting, mine, result.poisoned)
            accuracy = result.poisoned.accuracy
            reached = 100 * (result.clean.accuracy - accuracy) >= cost if success is None else success >= SUCCESS
            done = {"accuracy": accuracy, "success": success, "enough": bool(reached)}
            return {"value": value, "points": mine.points} | done

        if not run_items([cell], store, attacked, where=ONCE):
            raise KeyboardInterrupt
        runs.append(store.get(cell) or {})
        return bool(runs[-1]["enough"])

    least = smallest(values, enough) if values else None
    bases = found.poison.rows if goal.kind == "clean-label" else None
    network = copy.deepcopy((setting.before or setting).model)
    auc = detection_auc(setting, found.poison, network, without=bases, seed=seed)
    wanted = {
        "untargeted": f"costs {cost:g} points of accuracy",
        "targeted": f"turns {SUCCESS:.0%} of the class into the other",
        "clean-label": "flips the target",
    }
    return Audit(what, wanted[goal.kind], values, least, runs, auc)


def _fractions(setting: AttackSetting, goal: AttackGoal) -> tuple[float, ...]:
    """Return the shares that are at least one point each, and that the data has enough rows for."""
    count, y = setting.data.count, setting.train[1]
    most = 2 * min(int((y == c).sum()) for c in goal.pair) if goal.kind == "targeted" else count - 1
    different = {round(f * count): f for f in reversed(FRACTIONS) if 1 <= round(f * count) <= most}
    return tuple(sorted(different.values())) or (1 / count,)


def smallest(values: Sequence[float], flips: Callable[[float], bool]) -> float | None:
    """Return the smallest of rising values for which `flips` is true, by bisection; None if it fails for the largest.

    `flips` must be true above each value for which it is true. It is called with the largest value first, and then
    about log2(len(values)) times.

    >>> smallest([1, 2, 3, 4], lambda value: value >= 3)
    3
    """
    ordered = list(values)
    if not ordered or any(b <= a for a, b in pairwise(ordered)):
        raise OptionError(f"values must rise, and have at least one entry; got {ordered}.")
    if not flips(ordered[-1]):
        return None
    return ordered[bisect_left(ordered, True, hi=len(ordered) - 1, key=flips)]


def shown(what: str, value: float) -> str:
    """Return a value as text: a fraction in percent, an epsilon as a number."""
    return f"{100 * value:.3g}%" if what == "fraction" else f"{value:.4g}"
