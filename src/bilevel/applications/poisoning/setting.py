"""A labelled data set as the setting of a poisoning attack, and what an attack in it should achieve.

The attack sees the training and the validation rows. The test rows are for the evaluation only, except for the one
input that a clean-label attack targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import DataError, OptionError
from bilevel._util.checks import ShortRepr, in_range
from bilevel.applications.poisoning.attack import Evaluation, Poison, evaluate
from bilevel.applications.poisoning.goals import Goal, clean_label, targeted, untargeted
from bilevel.applications.poisoning.victims import Features, Recipe, mapped, trained
from bilevel.data import Labelled, Pair, split_test, split_trusted

Kind = Literal["untargeted", "targeted", "clean-label"]
# The share of the rows that replaces a missing test set, the share of validation rows, and the most of them.
HELD_OUT, VALIDATION, MOST = 0.2, 0.3, 1000
DEEP_DECAY = 5e-4
LAST_LAYER = Recipe(optimizer="lbfgs", steps=500, decay=0.005)
# Passes of Adam over the training rows for networks, and the least number of steps.
PASSES, LEAST_STEPS = 20, 500


@dataclass(frozen=True, repr=False)
class AttackSetting(ShortRepr):
    """The parts of a data set, the victim with its first weights, and the recipe of its training. `prepare` makes it.

    Args:
        data: The data set; its rows are `train`.
        train: Inputs and labels that the victim is trained on, with the poison.
        validation: Inputs and labels that the attack also sees.
        test: Inputs and labels that the attack never sees; they measure it.
        model: The victim with its first weights.
        recipe: How the victim is trained, a `Recipe`.
        features: A map of the inputs that is not trained; the victim acts on its output. None (default): the inputs.
        box: The least and the largest input, numbers or tensors. Default: (0, 1).
        notes: Sentences for the user about the parts. Default: none.
        before: The setting with the whole network, if the victim is its last layer on `features`. None (default): the
            victim is the whole network.

    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=100)
    >>> len(setting.train[1]), len(setting.validation[1]), len(setting.test[1])
    (100, 419, 400)
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
    """What an attack should achieve.

    Args:
        kind: "untargeted": be wrong on everything. "targeted": take one class for another. "clean-label": take one
            input for a class, by points with right labels.
        points: The number of points that are added to the training rows.
        source: The index of the class that should be mistaken, for a targeted attack. None (default): not used.
        wanted: The index of the class that it should be mistaken for. None (default): not used; a clean-label attack
            takes the class of the nearest validation row.
        target: The row of the test set that a clean-label attack aims at. None (default): not used.

    >>> AttackGoal("targeted", points=10, source=3, wanted=8).pair
    (3, 8)
    """

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

    The validation rows are the trusted rows of the data, or drawn. Without a test part, a fifth of the rows is held
    out.

    Args:
        data: The data set, as `load` reads it.
        model: The victim; if it is linear, its weights become 0.
        rows: The number of training rows to draw. None (default): all.
        seed: The seed of all draws. Default: 0.

    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=100)
    >>> setting.recipe.optimizer  # a linear victim
    'lbfgs'
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
    return replace(setting, model=last, recipe=LAST_LAYER, features=body, notes=(*setting.notes, note), before=setting)


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
