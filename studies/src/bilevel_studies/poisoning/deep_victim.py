"""A deep victim, beyond the paper: clean-label poison against a network that is trained from scratch.

The victim is the paper's CIFAR-10 network without dropout on 5,000 images. 50 more images of one class, with their
correct label and changed by at most 8/255 per pixel, should make the victim give one test image that class. Penalty has
all weights of the network as the lower variable, with a tether (see `bilevel.applications.poisoning.attack`). Feature
collision moves the points to the target's features in the network trained on clean data. Both know one set of first
weights; the test trains networks from scratch, from these weights and from others.

A cell is one target with all methods. They share its bases and the clean networks of the process, whose bits differ
between processes on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from bilevel._util.random_state import seeded
from bilevel.applications.networks import cifar_cnn
from bilevel.applications.poisoning.attack import TETHER, Poison, attack, evaluate, unmoved
from bilevel.applications.poisoning.goals import Bound, Goal, clean_label
from bilevel.applications.poisoning.victims import Recipe, mapped, trained
from bilevel.applications.training import probabilities
from bilevel.data import load
from bilevel_studies.poisoning.clean_label_batch import collide, let_go
from bilevel_studies.statistics import Numbers, values
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings, device_name, table

PENALTY = "penalty"
METHODS = {PENALTY: "Penalty", "feature-collision": "feature collision", "unmoved": "the bases as they are"}
# Images for training, for bases and for targets.
ROWS, POOL, TEST = 5000, 5000, 2000
POINTS = 50
EPSILON = 8 / 255
# Mean and spread of the pixels.
MEAN, SPREAD = 0.47, 0.25
TARGETS = 20
STEPS = {PENALTY: 300, "feature-collision": 500}
# Training images in a step of Penalty, together with all points.
BATCH = 500
RECIPE = Recipe(optimizer="adam", steps=1000, rate=1e-3, batch=100, decay=5e-4)
# The seed of the first weights that the attack knows, and the seeds of other victims.
KNOWN, OTHERS = 0, (1, 2)
COLLISION_RATE = 0.01
# The weights of the tether of Penalty's lower variable to compare.
TETHERS = (0.0003, 0.003, 0.03)
# The choice uses targets from the thousandth, which no table has.
CHOICE, CHOICE_TARGETS, FIRST_CHOICE = "choice", 2, 1000


def cells(targets: int = TARGETS, *, rows: int = ROWS, tether: float = TETHER) -> list[RunItem]:
    """Return a cell for each target: Penalty with one tether, and the other methods."""
    return [RunItem(_settings(target, rows, [tether]), float(-target)) for target in range(targets)]


def choice_cells(choose: int = CHOICE_TARGETS, *, rows: int = ROWS) -> list[RunItem]:
    """Return cells of Penalty only, with every tether, on targets that no table has."""
    some = range(FIRST_CHOICE, FIRST_CHOICE + choose)
    return [RunItem({"part": CHOICE} | _settings(target, rows, list(TETHERS)), float(-target)) for target in some]


def current(kept: Sequence[Kept]) -> list[Kept]:
    """Return the cells with the current settings: a file can contain others."""
    now = {"steps": dict(STEPS), "batch": BATCH, "training": RECIPE.steps}
    return [pair for pair in kept if now == {key: pair[0].get(key) for key in now}]


def _settings(target: int, rows: int, tethers: list[float]) -> dict[str, Any]:
    return {
        "target": target,
        "rows": rows,
        "points": max(1, rows * POINTS // ROWS),
        "tethers": tethers,
        "steps": dict(STEPS),
        "batch": BATCH,
        "training": RECIPE.steps,
    }


def tried(kept: Sequence[Kept], rows: int) -> dict[float, float]:
    """Return the mean margin of the wanted class in retrained victims, by the tether."""
    found: dict[float, list[float]] = {}
    for settings, one in current(kept):
        if settings.get("part") == CHOICE and settings["rows"] == rows:
            for tether, run in zip(settings["tethers"], one["runs"], strict=True):
                found.setdefault(tether, []).extend(run["margins"])
    return {tether: sum(margins) / len(margins) for tether, margins in found.items()}


def best(kept: Sequence[Kept], rows: int) -> float:
    """Return the tether with the largest mean margin; the default of `attack` if none were compared."""
    means = tried(kept, rows)
    return max(means, key=lambda tether: means[tether]) if means else TETHER


def run(settings: Settings, device: torch.device | None = None) -> Found | None:
    """Attack one target and return the class that every retrained victim gives it, by method; None after Ctrl-C.

    `runs` has Penalty with each tether, then, if there is only one tether, the other methods.
    """
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scene = scene_of(int(settings["rows"]), where, int(settings["training"]))
    began = time.perf_counter()  # the clean victims, trained once for all cells, do not count
    row, wanted = scene.target(int(settings["target"]))
    goal = clean_label(
        scene.pool,
        scene.test[0][row],
        wanted,
        points=int(settings["points"]),
        features=scene.body,
        collision=0.0,
        device=where,
    )
    attacks = [(PENALTY, float(tether)) for tether in settings["tethers"]]
    if len(attacks) == 1:
        attacks += [(method, 0.0) for method in METHODS if method != PENALTY]
    predicted = {seed: scene.predicted(seed) for seed in (KNOWN, *OTHERS)}
    clean = {seed: int(found[row]) for seed, found in predicted.items()}
    runs: list[dict[str, Any]] = []
    for method, tether in attacks:
        let_go(where)
        began_one = time.perf_counter()
        try:
            poison = scene.attack(goal, method, settings, tether)
        except KeyboardInterrupt:
            return None
        made = time.perf_counter() - began_one
        retrained = {seed: scene.retrained(poison, row, seed) for seed in clean}
        scores = {seed: found for seed, (found, _) in retrained.items()}
        given = {seed: int(found.argmax()) for seed, found in scores.items()}
        runs.append(
            {
                "method": method,
                "given": list(given.values()),
                "linf": float(poison.linf.max()),
                "flips": [given[seed] == wanted != clean[seed] for seed in given],
                "margins": [ahead(found, wanted) for found in scores.values()],
                "attack_seconds": round(made, 2),
                "accuracies": [accuracy for _, accuracy in retrained.values()],
            }
        )
    return {
        "row": row,
        "label": int(scene.test[1][row]),
        "wanted": wanted,
        "clean": list(clean.values()),
        "runs": runs,
        "clean_accuracies": [float((found == scene.test[1]).double().mean()) for found in predicted.values()],
        "seconds": round(time.perf_counter() - began, 2),
        "device": device_name(where),
    }


class Scene:
    """The images, the first weights, and the victims trained on clean images."""

    def __init__(self, rows: int, device: torch.device, training: int) -> None:
        self.device = device
        if device.type == "cuda":  # thousands of passes have few sizes, and the search for kernels pays
            torch.backends.cudnn.benchmark = True
        self.recipe = Recipe(optimizer="adam", steps=training, rate=RECIPE.rate, batch=RECIPE.batch, decay=RECIPE.decay)
        data = load("cifar10")
        order = torch.randperm(data.count, generator=torch.Generator().manual_seed(0))
        first, second = order[:rows], order[rows : rows + POOL]
        self.train, self.pool = ((data.x[some], data.y[some]) for some in (first, second))
        x, y = data.part("test")
        self.test = (x[:TEST], y[:TEST])
        self.victims = {seed: trained(self.first(seed), *self.train, self.recipe) for seed in (KNOWN, *OTHERS)}
        self.body = nn.Sequential(*list(self.victims[KNOWN].children())[:-1]).requires_grad_(False)

    def first(self, seed: int) -> nn.Module:
        """Return the network at first weights, in the form `channels_last`, in which convolutions are fastest."""
        with seeded(seed):
            network = cifar_cnn(dropout=False).to(self.device)
        return nn.Sequential(Standard(), *network).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def predicted(self, seed: int) -> Tensor:
        return probabilities(self.victims[seed], mapped(None, self.test[0], self.device)).argmax(1).cpu()

    def target(self, k: int) -> tuple[int, int]:
        """Return the k-th of the test images in random order, and a wanted class, which is not its class."""
        generator = torch.Generator().manual_seed(1)
        row = int(torch.randperm(len(self.test[1]), generator=generator)[k])
        shift = torch.randint(1, 10, (TEST,), generator=generator)[k]
        return row, int((self.test[1][row] + shift) % 10)

    def attack(self, goal: Goal, method: str, settings: Settings, tether: float) -> Poison:
        steps, bound = int(settings["steps"].get(method, 0)), Bound(EPSILON, "linf")
        match method:
            case "penalty":
                return attack(
                    goal,
                    self.train,
                    self.first(KNOWN),
                    recipe=self.recipe,
                    bound=bound,
                    steps=steps,
                    tether=tether,
                    batch=int(settings["batch"]),
                )
            case "feature-collision":
                return collide(
                    goal, features=self.body, bound=bound, steps=steps, rate=COLLISION_RATE, device=self.device
                )
        return unmoved(goal)

    def retrained(self, poison: Poison, row: int, seed: int) -> tuple[Tensor, float]:
        """Return the scores of the target under a victim trained from scratch, and the victim's accuracy."""
        found = evaluate(poison, self.train, self.test, self.first(seed), recipe=self.recipe)
        with torch.no_grad():
            scores: Tensor = found.model(self.test[0][row : row + 1].to(self.device))[0]
        return scores.cpu(), found.accuracy


class Standard(nn.Module):
    """Scales pixels in [0, 1] to numbers around 0.

    Without this, decay moves the weights to zero before the network has learned anything.
    """

    def forward(self, x: Tensor) -> Tensor:
        return (x - MEAN) / SPREAD


def ahead(scores: Tensor, wanted: int) -> float:
    """Return the margin of the wanted class over all others; negative if it is not the first."""
    others = torch.cat([scores[:wanted], scores[wanted + 1 :]])
    return float(scores[wanted] - others.max())


scene_of = cache(Scene)


def of(kept: Iterable[Kept], method: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the runs of a method in the table by (rows, target), for Penalty with the chosen tether."""
    pairs = current(list(kept))
    taken = {rows: best(pairs, rows) for rows in {settings["rows"] for settings, _ in pairs}}
    found = {}
    for settings, one in pairs:
        if settings.get("part") != CHOICE and settings["tethers"] == [taken[settings["rows"]]]:
            runs = [run for run in one["runs"] if run["method"] == method]
            found[settings["rows"], settings["target"]] = runs[0] | ({"beside": 1} if "beside" in one else {})
    return found


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Return the tables of the cells with the current settings."""
    kept = current(kept)
    found = {method: shares(kept, method) for method in METHODS}
    tables = {
        "Flipped targets": flip_table({method: one for method, one in found.items() if one["targets"]}),
        "Pairs of methods, over targets": pair_table(kept),
        "Settings of Penalty": tether_table(kept),
    }
    cells = [one for settings, one in kept if settings.get("part") != CHOICE]
    clean = [accuracy for one in cells for accuracy in one["clean_accuracies"]]
    summary = {
        "cells": len(kept),
        "methods": found,
        "clean_accuracy": sum(clean) / len(clean) if clean else None,
        "wanted_without_poison": [
            sum(one["clean"][i] == one["wanted"] for one in cells) for i in range(1 + len(OTHERS))
        ],
    }
    return Report(summary, tables)


def shares(kept: Sequence[Kept], method: str) -> dict[str, Any]:
    """Return how many targets are flipped with the first weights that the attack knows, and with others."""
    mine = list(of(kept, method).values())
    timed = [found["attack_seconds"] for found in mine if "beside" not in found]
    accuracies = [accuracy for found in mine for accuracy in found["accuracies"]]
    return {
        "accuracy": sum(accuracies) / len(accuracies) if mine else None,
        "targets": len(mine),
        "known": sum(found["flips"][0] for found in mine),
        "others": sum(sum(found["flips"][1:]) for found in mine),
        "of_others": len(OTHERS) * len(mine),
        "seconds": sum(timed) / len(timed) if timed else None,
    }


def flip_table(found: dict[str, dict[str, Any]]) -> str:
    """Flipped targets with 95% intervals (Clopper and Pearson); seconds of attacks that had the GPU to themselves."""
    rows = []
    for method, one in found.items():
        known, others = (_share(one[a], one[b]) for a, b in (("known", "targets"), ("others", "of_others")))
        seconds = "" if one["seconds"] is None else f"{one['seconds']:.1f}"
        rows.append([METHODS[method], str(one["targets"]), known, others, f"{one['accuracy']:.1%}", seconds])
    flipped = ["flipped, known first weights", "flipped, other first weights"]
    return table(["method", "targets", *flipped, "accuracy of victims", "seconds an attack"], rows)


def pair_table(kept: Sequence[Kept]) -> str:
    """For how many targets a method flips more victims than another (sign test), and the difference of margins.

    The margin is the score of the wanted class minus the best other score, in the mean of a target's victims.
    """
    rows = []
    for one, other in combinations(METHODS, 2):
        mine, theirs = of(kept, one), of(kept, other)
        both = mine.keys() & theirs.keys()
        gaps = Numbers(tuple(fmean(mine[t]["margins"]) - fmean(theirs[t]["margins"]) for t in sorted(both)))
        if gaps.interval is None:
            continue
        more = sum(sum(mine[t]["flips"]) > sum(theirs[t]["flips"]) for t in both)
        less = sum(sum(mine[t]["flips"]) < sum(theirs[t]["flips"]) for t in both)
        p = float(stats.binomtest(more, more + less).pvalue) if more + less else 1.0
        low, high = gaps.interval
        margin = f"{gaps.mean:+.2f} ({low:+.2f} to {high:+.2f})"
        rows.append([METHODS[one], METHODS[other], str(more), str(less), f"{p:.2g}", margin])
    return table(["method", "other", "flips more for", "flips fewer for", "p", "difference of margins (95%)"], rows)


def tether_table(kept: Sequence[Kept]) -> str:
    """The mean margin of the wanted class by tether, on targets that are in no other table."""
    rows = [
        [f"{size:,}", f"{tether:g}" + " (taken)" * (tether == best(kept, size)), f"{mean:.2f}"]
        for size in sorted(values(kept, "rows"))
        for tether, mean in tried(kept, size).items()
    ]
    return table(["images", "tether", "mean margin"], rows)


def _share(some: int, of: int) -> str:
    interval = stats.binomtest(some, of).proportion_ci(0.95)
    return f"{some} of {of} ({some / of:.0%}; {interval.low:.0%} to {interval.high:.0%})"
