"""A labelled data set as the ground of a poisoning attack: its parts, its victim, one attack, and how little it takes.

The attack sees training and validation rows; the test rows are for `evaluate` alone, but for the one input that a
clean-label attack is aimed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel._util.checks import in_range
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.poisoning.attack import Evaluation, Poison, attack, evaluate, smallest, unmoved
from bilevel.applications.poisoning.bounds import Bound
from bilevel.applications.poisoning.goals import Goal, clean_label, targeted, untargeted
from bilevel.applications.poisoning.victims import Features, Recipe, mapped, trained
from bilevel.data import Labelled, Pair, split_test, split_trusted
from bilevel.errors import DataError, OptionError
from bilevel.methods.base import Method
from bilevel.running.callbacks import Callback

Kind = Literal["untargeted", "targeted", "clean-label"]
HELD_OUT, VALIDATION, MOST = 0.2, 0.3, 1000
"""The share of the rows that stands in for a test set, that of validation rows, and how many of these at most."""
DECAY, DEEP_DECAY = 0.005, 5e-4
PASSES, LEAST_STEPS = 20, 500
"""Of Adam over the training rows, for victims that are networks."""
FRACTIONS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
"""What an audit looks among for the smallest share of poison."""
PARTS_OF_EPSILON = 16
"""An audit of a bound looks among the sixteenths of --epsilon."""


@dataclass(frozen=True)
class Ground:
    """The parts of a data set, the victim at its first weights, and how it is trained."""

    data: Labelled
    train: Pair
    validation: Pair
    test: Pair
    model: nn.Module
    recipe: Recipe
    features: Features | None = None
    box: tuple[Any, Any] = (0.0, 1.0)
    notes: tuple[str, ...] = ()
    before: Ground | None = None
    """That of the whole network, where the victim is its last layer."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def constant(self) -> float:
        """The accuracy of their most frequent class for all test rows."""
        y = self.test[1]
        return max(float((y == c).double().mean()) for c in torch.unique(y))

    def evaluate(self, poison: Poison | None) -> Evaluation:
        """Train the victim anew on clean data and poison, and measure it on the test rows."""
        return evaluate(poison, self.train, self.test, self.model, recipe=self.recipe, features=self.features)


def prepare(data: Labelled, model: nn.Module, *, rows: int | None = None, seed: int = 0) -> Ground:
    """Split a data set into what is trained on, what the attack may look at besides, and what it never sees.

    `rows` are drawn for training, all by default. Validation rows are the trusted ones of the data, or drawn. Without a
    test part a fifth of the rows is held out as such.
    """
    in_range("rows", rows, least=2, whole=True)
    notes = list(data.notes)
    if data.test is None:
        data = split_test(data, share=HELD_OUT, seed=seed)
        notes.append(f"A fifth of the rows, {len(data.part('test')[1])}, is held out as the test set.")
    if data.trusted is None:
        data = split_trusted(data, max(len(data.classes), min(MOST, round(VALIDATION * data.count))), seed)
    if rows is not None and rows < data.count:
        drawn = np.random.default_rng(seed).permutation(data.count)[:rows]
        data = data.select(np.sort(drawn))
    elif rows is not None and rows > data.count:
        raise OptionError(f"rows must be at most the {data.count} that are left for training; got {rows}.")
    if len(torch.unique(data.y)) < 2:
        raise DataError(f"an attack needs at least two classes; the {data.count} training rows have one.")
    linear = _plain(model)
    steps = max(LEAST_STEPS, PASSES * data.count // 100)
    recipe = (
        Recipe(optimizer="lbfgs", steps=500, decay=DECAY)
        if linear
        else Recipe(optimizer="adam", steps=steps, decay=DEEP_DECAY, seed=seed)
    )
    if linear:  # the minimum is one: start where nothing is preferred
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    box: tuple[Any, Any] = (0.0, 1.0)
    if data.kind != "images":
        seen = torch.cat([data.x, data.part("trusted")[0]])
        box = seen.amin(0), seen.amax(0)
    return Ground(
        data, (data.x, data.y), data.part("trusted"), data.part("test"), model, recipe, None, box, tuple(notes)
    )


def _plain(model: nn.Module) -> bool:
    """Whether all that is trained is one Linear, after layers without parameters."""
    layers = list(model.modules())
    weighted = [layer for layer in layers if any(True for _ in layer.parameters(recurse=False))]
    return len(weighted) == 1 and weighted[0] is layers[-1] and isinstance(weighted[0], nn.Linear)


def on_features(ground: Ground) -> Ground:
    """The last layer of the network as the victim, on the features of the network as trained on clean data."""
    layers = list(ground.model) if isinstance(ground.model, nn.Sequential) else []
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise OptionError("a clean-label attack needs a model that is an nn.Sequential which ends in an nn.Linear.")
    if not any(True for layer in layers[:-1] for _ in layer.parameters()):
        return ground
    whole = trained(ground.model, *ground.train, ground.recipe)
    body = nn.Sequential(*list(whole.children())[:-1]).eval().requires_grad_(False)
    last = nn.Linear(layers[-1].in_features, layers[-1].out_features).to(ground.device)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    note = (
        "The victim is the last layer of the network, retrained on the features of the network trained on clean data."
    )
    return replace(
        ground,
        model=last,
        recipe=Recipe(optimizer="lbfgs", steps=500, decay=DECAY),
        features=body,
        notes=(*ground.notes, note),
        before=ground,
    )


@dataclass(frozen=True)
class Aim:
    """What is asked of an attack. Classes are indices; `target` is a row of the test set."""

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


def goal_of(ground: Ground, aim: Aim, seed: int) -> Goal:
    """The start of the attack."""
    classes = len(ground.data.classes)
    if aim.kind == "untargeted":
        return untargeted(ground.train, ground.validation, aim.points, classes=classes, seed=seed)
    if aim.kind == "targeted":
        source, wanted = aim.pair
        if not bool((ground.test[1] == source).any()):
            name = ground.data.classes[source]
            raise DataError(f"the test set must have rows of class {name!r} to measure the attack on; it has none.")
        return targeted(ground.train, ground.validation, aim.points, source=source, wanted=wanted, seed=seed)
    _, x, _ = target_of(ground, aim)
    wanted = wanted_of(ground, aim)
    return clean_label(ground.validation, x, wanted, points=aim.points, features=ground.features, device=ground.device)


def target_of(ground: Ground, aim: Aim) -> tuple[int, Tensor, int]:
    """The target's row in the test set, its input and its label."""
    x, y = ground.test
    if aim.target is None or not 0 <= aim.target < len(y):
        raise OptionError(f"--target must be a row of the test set, 0 to {len(y) - 1}; got {aim.target}.")
    return aim.target, x[aim.target], int(y[aim.target])


def wanted_of(ground: Ground, aim: Aim) -> int:
    """The class that a clean-label attack wants: the one asked for, else that of the nearest validation row of
    another class, in the features."""
    _, x, label = target_of(ground, aim)
    if aim.wanted is not None:
        if aim.wanted == label:
            raise OptionError(f"--as must be another class than the target's, {ground.data.classes[label]!r}.")
        return aim.wanted
    inputs, labels = ground.validation
    place = mapped(ground.features, x[None], ground.device).flatten(1)
    apart = (mapped(ground.features, inputs, ground.device).flatten(1) - place).norm(dim=1).cpu()
    apart[labels == label] = torch.inf
    return int(labels[apart.argmin()])


@dataclass(frozen=True)
class Outcome:
    """An attack and what it did to a victim that was trained anew; `flipped` is for the same points unmoved."""

    poison: Poison
    goal: Goal
    clean: Evaluation
    poisoned: Evaluation
    flipped: Evaluation

    def success(self, ground: Ground, aim: Aim, which: Evaluation) -> float | bool | None:
        """Targeted: the share of the source's test rows that are given the wanted class. Clean label: whether the
        target is. Untargeted: None."""
        if aim.kind == "targeted":
            return which.share(ground.test, *aim.pair)
        if aim.kind == "clean-label":
            return int(which.predicted[target_of(ground, aim)[0]]) == wanted_of(ground, aim)
        return None


def carry_out(
    ground: Ground,
    aim: Aim,
    *,
    bound: Bound | None = None,
    steps: int,
    method: Method | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    clean: Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run an attack and evaluate it by training anew: without poison, with its points as they began, and with them.

    `clean` is the evaluation without poison where it is known: the same for every attack on a ground.
    """
    goal = goal_of(ground, aim, seed)
    poison = attack(
        goal,
        ground.train,
        ground.model,
        recipe=ground.recipe,
        features=ground.features,
        method=method,
        box=ground.box,
        bound=bound,
        steps=steps,
        seed=seed,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=callbacks,
    )
    body = ground.before and ground.before.recipe.describe()
    poison = replace(poison, settings=poison.settings | {"body_recipe": body})
    clean = clean or ground.evaluate(None)
    return Outcome(poison, goal, clean, ground.evaluate(poison), ground.evaluate(unmoved(goal)))


def least(values: Sequence[float], run: Callable[[float], dict[str, Any]]) -> tuple[float | None, list[dict[str, Any]]]:
    """The smallest value whose run succeeds (`"enough"`), by bisection, and the runs that were made, in their order."""
    made: list[dict[str, Any]] = []

    def enough(value: float) -> bool:
        found = run(value)
        made.append(found)
        return bool(found["enough"])

    return smallest(values, enough), made


def noticed(
    ground: Ground,
    poison: Poison,
    model: nn.Module,
    *,
    without: Tensor | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> float:
    """Whether `denoise` down-weights the poison: the AUC of its importance as a sign of a clean row.

    The trusted set is the validation rows but those of `without`: the bases of a clean-label attack come from there,
    and a defender has no clean copy of a point. 1: every point is below every clean row; 1/2: no better than chance.
    """
    from sklearn.metrics import roc_auc_score  # here: it takes as long to import as torch

    x, y = ground.train
    inputs, labels = torch.cat([x, poison.x.to(x)]), torch.cat([y, poison.labels])
    left = torch.ones(len(ground.validation[1]), dtype=torch.bool)
    if without is not None:
        left[without] = False
    trusted = (ground.validation[0][left], ground.validation[1][left])
    known = torch.isin(labels, trusted[1])
    if bool(known[len(y) :].logical_not().all()):
        raise DataError(
            "the trusted rows must have examples of a class of the points; without their bases none is left."
        )
    found = denoise((inputs[known], labels[known]), trusted, model, steps=steps, seed=seed)
    clean = (torch.arange(len(labels)) < len(y))[known]
    return float(roc_auc_score(clean.numpy(), found.importance.numpy()))
