"""A labelled data set as the setting of a poisoning attack, one attack on it, and the least poison that is enough.

The attack sees the training and the validation rows. The test rows are for the evaluation only, except for the one
input that a clean-label attack targets.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import Callback, DataError, OptionError
from bilevel._util.checks import ShortRepr, in_range, require
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.poisoning.attack import Evaluation, Poison, attack, evaluate, unmoved
from bilevel.applications.poisoning.goals import Bound, Goal, clean_label, targeted, untargeted
from bilevel.applications.poisoning.victims import Features, Recipe, mapped, trained
from bilevel.data import Labelled, Pair, split_test, split_trusted
from bilevel.methods.base import Method
from bilevel.running.run_many import ONCE, Found, ResultFolder, RunItem, Settings, run_items

Kind = Literal["untargeted", "targeted", "clean-label"]
# The share of the rows that replaces a missing test set, the share of validation rows, and the most of them.
HELD_OUT, VALIDATION, MOST = 0.2, 0.3, 1000
DEEP_DECAY = 5e-4
LAST_LAYER = Recipe(optimizer="lbfgs", steps=500, decay=0.005)
# Passes of Adam over the training rows for networks, and the least number of steps.
PASSES, LEAST_STEPS = 20, 500
# The shares of poison that an audit searches.
FRACTIONS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
# An audit of a bound searches the multiples of epsilon / 16.
PARTS_OF_EPSILON = 16
# The share of a class that a targeted attack must turn into the other class.
SUCCESS = 0.5
WANTED = {
    "untargeted": "costs {cost:g} points of accuracy",
    "targeted": f"turns {SUCCESS:.0%} of the class into the other",
    "clean-label": "flips the target",
}


@dataclass(frozen=True, repr=False)
class AttackSetting(ShortRepr):
    """The parts of a data set, the victim with its first weights, and the recipe of its training.

    `box` is the least and the largest input. `before` is the setting with the whole network, if the victim is its last
    layer on `features`.
    """

    data: Labelled
    train: Pair
    validation: Pair
    test: Pair
    model: nn.Module
    recipe: Recipe
    features: Features | None = None
    box: tuple[Any, Any] = (0.0, 1.0)
    notes: tuple[str, ...] = ()
    before: AttackSetting | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def constant(self) -> float:
        """The accuracy of predicting the most frequent class of the test rows."""
        y = self.test[1]
        return float(torch.bincount(y).max() / len(y))

    def evaluate(self, poison: Poison | None) -> Evaluation:
        """Train the victim from scratch on clean data and poison, and measure it on the test rows."""
        return evaluate(poison, self.train, self.test, self.model, recipe=self.recipe, features=self.features)


@dataclass(frozen=True)
class AttackGoal:
    """What an attack should achieve. `source` and `wanted` are class indices; `target` is a row of the test set."""

    kind: Kind
    points: int
    source: int | None = None
    wanted: int | None = None
    target: int | None = None

    @property
    def pair(self) -> tuple[int, int]:
        """Both classes of a targeted attack."""
        if self.source is None or self.wanted is None:
            raise OptionError(f"a targeted attack needs source and wanted; got {self.source} and {self.wanted}.")
        return self.source, self.wanted


def prepare(data: Labelled, model: nn.Module, *, rows: int | None = None, seed: int = 0) -> AttackSetting:
    """Split a data set into training rows, validation rows that the attack also sees, and test rows that it never sees.

    `rows` training rows are drawn, by default all. The validation rows are the trusted rows of the data, or drawn.
    Without a test part, a fifth of the rows is held out. `model` is the victim; if it is linear, its weights become 0.
    """
    in_range("rows", rows, least=2, whole=True)
    notes = list(data.notes)
    if data.test is None:
        data = split_test(data, share=HELD_OUT, seed=seed)
        notes.append(f"A fifth of the rows, {len(data.part('test')[1])}, is held out as the test set.")
    if data.trusted is None:
        data = split_trusted(data, max(len(data.classes), min(MOST, round(VALIDATION * data.count))), seed)
    if rows is not None and rows > data.count:
        raise OptionError(f"rows must be at most the {data.count} that are left for training; got {rows}.")
    if rows is not None and rows < data.count:
        data = data.select(np.sort(np.random.default_rng(seed).permutation(data.count)[:rows]))
    if len(torch.unique(data.y)) < 2:
        raise DataError(f"an attack needs at least two classes; the {data.count} training rows have one.")
    recipe = LAST_LAYER
    weighted = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    if len(weighted) == 1 and weighted[0] is list(model.modules())[-1] and isinstance(weighted[0], nn.Linear):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # the minimum is unique, and zero prefers no class
    else:
        steps = max(LEAST_STEPS, PASSES * data.count // 100)
        recipe = Recipe(optimizer="adam", steps=steps, decay=DEEP_DECAY, seed=seed)
    trusted = data.part("trusted")
    box: tuple[float | Tensor, float | Tensor] = (0.0, 1.0)
    if data.kind != "images":
        seen = torch.cat([data.x, trusted[0]])
        box = seen.amin(0), seen.amax(0)
    return AttackSetting(data, (data.x, data.y), trusted, data.part("test"), model, recipe, box=box, notes=tuple(notes))


def on_features(setting: AttackSetting) -> AttackSetting:
    """Return the setting whose victim is the network's last layer, on features of the network trained on clean data."""
    layers = list(setting.model) if isinstance(setting.model, nn.Sequential) else []
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise OptionError("a clean-label attack needs a model that is an nn.Sequential and ends in an nn.Linear.")
    if not any(list(layer.parameters()) for layer in layers[:-1]):
        return setting
    whole = trained(setting.model, *setting.train, setting.recipe)
    body = nn.Sequential(*list(whole.children())[:-1]).eval().requires_grad_(False)
    last = nn.Linear(layers[-1].in_features, layers[-1].out_features).to(setting.device)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    note = "The victim is the network's last layer, retrained on the features of the network trained on clean data."
    notes = (*setting.notes, note)
    return replace(setting, model=last, recipe=LAST_LAYER, features=body, notes=notes, before=setting)


def goal_of(setting: AttackSetting, goal: AttackGoal, seed: int) -> Goal:
    """Return the start of the attack; raise if the data does not allow it."""
    train, validation = setting.train, setting.validation
    if goal.kind == "untargeted":
        return untargeted(train, validation, goal.points, classes=len(setting.data.classes), seed=seed)
    if goal.kind == "targeted":
        source, wanted = goal.pair
        if not bool((setting.test[1] == source).any()):
            name = setting.data.classes[source]
            raise DataError(f"the test set must have rows of class {name!r} to measure the attack on; it has none.")
        return targeted(train, validation, goal.points, source=source, wanted=wanted, seed=seed)
    x, wanted = target_of(setting, goal)[1], wanted_of(setting, goal)
    return clean_label(validation, x, wanted, points=goal.points, features=setting.features, device=setting.device)


def target_of(setting: AttackSetting, goal: AttackGoal) -> tuple[int, Tensor, int]:
    """Return the target's row in the test set, its input and its label."""
    x, y = setting.test
    if goal.target is None or not 0 <= goal.target < len(y):
        raise OptionError(f"--target must be a row of the test set, 0 to {len(y) - 1}; got {goal.target}.")
    return goal.target, x[goal.target], int(y[goal.target])


def wanted_of(setting: AttackSetting, goal: AttackGoal) -> int:
    """Return `goal.wanted`; by default the class of the validation row, of another class, with the nearest features."""
    _, x, label = target_of(setting, goal)
    if goal.wanted is not None:
        if goal.wanted == label:
            raise OptionError(f"--as must be another class than the target's, {setting.data.classes[label]!r}.")
        return goal.wanted
    inputs, labels = setting.validation
    rows, place = (mapped(setting.features, part, setting.device).flatten(1) for part in (inputs, x[None]))
    distance = (rows - place).norm(dim=1).cpu()
    distance[labels == label] = torch.inf
    return int(labels[distance.argmin()])


@dataclass(frozen=True, repr=False)
class AttackResult(ShortRepr):
    """An attack, and victims trained from scratch: without poison (`clean`), with it, and with its unmoved points."""

    poison: Poison
    goal: Goal
    clean: Evaluation
    poisoned: Evaluation
    flipped: Evaluation

    def success(self, setting: AttackSetting, goal: AttackGoal, which: Evaluation) -> float | bool | None:
        """Return the share of the source's test rows that get the wanted class, or None for an untargeted attack.

        For a clean-label attack, return whether the target gets it.
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

    1 means that every point is below every clean row; 1/2 is chance. `denoise` trains `model` in place, in `steps`. The
    trusted set is the validation rows without the rows `without`: the points of a clean-label attack start there, and a
    defender has no clean copy of a point.
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


@dataclass(frozen=True, repr=False)
class Audit(ShortRepr):
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
    attack as requested; every run takes as many `steps`. Finished runs are kept in the folder `checkpoint`, and a
    stopped run is resumed. `callbacks(label)` returns the callbacks of a run.
    """
    what: Literal["fraction", "epsilon"] = "epsilon" if goal.kind == "clean-label" and bound else "fraction"
    count, y = setting.data.count, setting.train[1]
    # Each share is at least one point, and needs no more rows than the data has.
    most = 2 * min(int((y == c).sum()) for c in goal.pair) if goal.kind == "targeted" else count - 1
    shares = {round(f * count): f for f in reversed(FRACTIONS) if 1 <= round(f * count) <= most}
    values = tuple(sorted(shares.values())) or (1 / count,)
    if what == "epsilon" and bound:
        values = tuple(bound.epsilon * k / PARTS_OF_EPSILON for k in range(1, PARTS_OF_EPSILON + 1))
    if goal.kind == "clean-label" and found.success(setting, goal, found.clean):
        values = ()
    store, runs = ResultFolder(checkpoint / "audit"), list[dict[str, Any]]()

    def enough(value: float) -> bool:
        cell = RunItem({"what": what, "value": value}, 0)
        limit = replace(bound, epsilon=value) if what == "epsilon" and bound else bound
        mine = goal if what == "epsilon" else replace(goal, points=max(1, round(value * count)))

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
            success, accuracy = result.success(setting, mine, result.poisoned), result.poisoned.accuracy
            reached = 100 * (result.clean.accuracy - accuracy) >= cost if success is None else success >= SUCCESS
            done = {"accuracy": accuracy, "success": success, "enough": bool(reached)}
            return {"value": value, "points": mine.points} | done

        if not run_items([cell], store, attacked, where=ONCE):
            raise KeyboardInterrupt
        runs.append(store.get(cell) or {})
        return bool(runs[-1]["enough"])

    least = smallest(values, enough)
    bases = found.poison.rows if goal.kind == "clean-label" else None
    network = copy.deepcopy((setting.before or setting).model)
    auc = detection_auc(setting, found.poison, network, without=bases, seed=seed)
    return Audit(what, WANTED[goal.kind].format(cost=cost), values, least, runs, auc)


def smallest(values: Sequence[float], flips: Callable[[float], bool]) -> float | None:
    """Return the smallest of rising values for which `flips` is true, by bisection; None if it fails for the largest.

    `flips` must be true above each value for which it is true. It is called with the largest value first, and then
    about log2(len(values)) times.

    >>> smallest([1, 2, 3, 4], lambda value: value >= 3)
    3
    """
    if not values or not flips(values[-1]):
        return None
    return values[bisect_left(values, True, hi=len(values) - 1, key=flips)]


def shown(what: str, value: float) -> str:
    """Return a value as text: a fraction in percent, an epsilon as a number."""
    return f"{100 * value:.3g}%" if what == "fraction" else f"{value:.4g}"
