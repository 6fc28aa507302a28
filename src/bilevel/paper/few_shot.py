"""The few-shot study (Section 3.3, Appendix E.3, Table 3, Figures 4(b) and 5(b)): cells, and the paper's numbers.

Omniglot is split by character, 1,200 to learn from and 423 for the test, in an order drawn by a fixed seed, with
rotations as classes in both parts. mini-ImageNet's images are not free to hand on: its place is taken by CIFAR-FS.
Accuracies are those of 600 tasks of classes never seen, with classifiers trained for 100 steps on the support.

`penalty`, `approx-grad`, `rmd` and `prototypes` see the same tasks: of more ways than those of the test, which is how
prototypical networks are trained (Snell et al. 2017), with fewer queries. `paper` is the setting of Appendix E.3:
Algorithm 2 with its constants, tasks as in the test with 15 queries, 30 a meta-batch (15 with 20 ways, as Section 3.3
says; Appendix E.3 says 30), cosines without a scale, classifiers that start at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from ..cells import Cell, Settings

TABLE, EFFECT, TIME, CHOICES = "table", "effect-of-T", "time", "choices"
PARTS = (TABLE, EFFECT, TIME, CHOICES)
OMNIGLOT, CIFAR = "omniglot", "cifar-fs"
DATASETS = (OMNIGLOT, CIFAR)
METHODS = {
    "penalty": "Penalty, ours",
    "prototypes": "ProtoNet",
    "approx-grad": "ApproxGrad",
    "paper": "Penalty, the paper's setting",
    "rmd": "RMD",
}
"""The methods by their names in cells, those of most worth first."""
TASKS = {OMNIGLOT: ((5, 1), (5, 5), (20, 1), (20, 5)), CIFAR: ((5, 1), (5, 5))}
"""(ways, shots) of the table."""
PAPER = {
    (OMNIGLOT, 5, 1): {"penalty": 97.83, "approx-grad": 97.75, "rmd": 98.6, "prototypes": 98.8},
    (OMNIGLOT, 5, 5): {"penalty": 99.45, "approx-grad": 99.51, "rmd": 99.5, "prototypes": 99.7},
    (OMNIGLOT, 20, 1): {"penalty": 94.06, "approx-grad": 94.69, "rmd": 95.5, "prototypes": 96.0},
    (OMNIGLOT, 20, 5): {"penalty": 98.47, "approx-grad": 98.46, "rmd": 98.4, "prototypes": 98.9},
}
"""Percent, as Table 3 has them."""
PAPER_MINI = {1: {"penalty": 53.17, "approx-grad": 43.74, "rmd": 50.54, "prototypes": 49.42},
              5: {"penalty": 67.74, "approx-grad": 65.56, "rmd": 64.53, "prototypes": 68.20}}  # fmt: skip
WANTED = {(OMNIGLOT, 5, 1): 98.9, (OMNIGLOT, 5, 5): 99.6, (OMNIGLOT, 20, 1): 96.0, (OMNIGLOT, 20, 5): 98.8}
"""What our setting is to reach."""
TRAIN = {OMNIGLOT: {"train_ways": 60, "tasks": 4, "queries": 5}, CIFAR: {"train_ways": 20, "tasks": 4, "queries": 8}}
"""A meta-batch of all methods but the paper's setting."""
STEPS = {(OMNIGLOT, "conv4"): 3000, (CIFAR, "conv4"): 2500, (CIFAR, "resnet"): 3000}
"""Upper steps of Penalty."""
SHARE = {"rmd": 0.25, "paper": 0.5}
"""Of the upper steps: those that are ranked last have fewer, for want of time."""
LONGER = {(CIFAR, "conv4", "prototypes"): 2.0}
"""Its step is the cheapest, and after as many as Penalty has its accuracy still rises there."""
ALSO = 5
"""Ways that are tried on a training of Omniglot for 20: but for the paper's setting, the two are the same."""
BACKBONES = {OMNIGLOT: ("conv4",), CIFAR: ("conv4", "resnet")}
T = {"penalty": 10, "approx-grad": 20, "paper": 20, "rmd": 5}
LOWER_STEPS = (1, 5, 10, 20)
EFFECT_STEPS, CHOICE_STEPS, TIME_STEPS = 600, 800, 200
PAPER_STEPS = 10_000
"""Upper steps in the paper."""
TEST_TASKS, TEST_QUERIES = 600, 15
VARIED: dict[str, dict[str, Any]] = {
    "as the table": {},
    "T = 1": {"T": 1},
    "T = 5": {"T": 5},
    "T = 20": {"T": 20},
    "gamma 0.4, lower rate 0.06": {"gamma": 0.4, "lower_rate": 0.06},
    "gamma 40, lower rate 6e-4": {"gamma": 40.0, "lower_rate": 6e-4},
    "proximity 1, gamma 1, lam 0.1, lower rate 0.1": {"proximity": 1.0, "gamma": 1.0, "lam": 0.1, "lower_rate": 0.1},
    "no proximity, gamma 1, lam 0.1, lower rate 0.1": {
        "proximity": 0.0, "gamma": 1.0, "lam": 0.1, "lower_rate": 0.1,
    },
    "scale 5": {"scale": 5.0},
    "scale 20": {"scale": 20.0},
    "upper rate 1e-3": {"upper_rate": 1e-3},
    "upper rate 5e-3": {"upper_rate": 5e-3},
    "5 ways": {"train_ways": 5, "tasks": 30, "queries": 15},
    "moved images": {"moved": True},
}  # fmt: skip
"""What the part `choices` changes, on Omniglot, 20 ways, 1 shot."""
LOOSE: dict[str, Any] = {"proximity": 1.0, "gamma": 10.0, "lower_rate": 0.03}
"""Classifiers that go further from the class means, with the price and the rate that go with that."""
CONV4_VARIED: dict[str, dict[str, Any]] = {
    "upper rate 2e-3": {},
    "upper rate 1e-3": {"upper_rate": 1e-3},
    "upper rate 2e-3, scale 5": {"scale": 5.0},
    "upper rate 1e-3, scale 5": {"upper_rate": 1e-3, "scale": 5.0},
    "upper rate 2e-3, scale 20": {"scale": 20.0},
    "upper rate 2e-3, proximity 1": LOOSE,
    "upper rate 2e-3, distances / 16": {"distances": 1 / 16},
    "upper rate 1e-3, distances / 16": {"upper_rate": 1e-3, "distances": 1 / 16},
    "upper rate 2e-3, distances / 4": {"distances": 1 / 4},
    "upper rate 2e-3, distances / 64": {"distances": 1 / 64},
}
"""The same on CIFAR-FS, 5 ways, 1 and 5 shots. The softmax of ProtoNet is of distances, not of cosines."""
ERASED: dict[str, Any] = {"decay": 0.5, "erased": True}
FASTER, SLOWER = ({**ERASED, "upper_rate": rate} for rate in (1e-3, 5e-4))
RESNET_VARIED: dict[str, dict[str, Any]] = {
    "upper rate 1e-3, scale 10": {**FASTER, "scale": 10.0},
    "upper rate 5e-4, scale 10": {**SLOWER, "scale": 10.0},
    "upper rate 1e-3, scale 5": {**FASTER, "scale": 5.0},
    "upper rate 5e-4, scale 5": {**SLOWER, "scale": 5.0},
    "upper rate 1e-3, scale 7": {**FASTER, "scale": 7.0},
    "upper rate 1e-3, scale 20": {**FASTER, "scale": 20.0},
    "upper rate 1e-3, scale 10, proximity 1": {**FASTER, "scale": 10.0, **LOOSE},
    "upper rate 1e-3, distances / 128": {**FASTER, "distances": 1 / 128},
    "upper rate 5e-4, distances / 128": {**SLOWER, "distances": 1 / 128},
    "upper rate 1e-3, distances / 32": {**FASTER, "distances": 1 / 32},
    "upper rate 1e-3, distances / 512": {**FASTER, "distances": 1 / 512},
    "upper rate 1e-3, plain": {**FASTER, "plain": True},
    "upper rate 5e-4, plain": {**SLOWER, "plain": True},
}
"""The same with the residual network."""
CIFAR_VARIED = {"conv4": CONV4_VARIED, "resnet": RESNET_VARIED}
CIFAR_CHOICE_STEPS = {"conv4": STEPS[CIFAR, "conv4"], "resnet": 1500}
OURS: dict[str, Any] = {"proximity": 5.0, "gamma": 4.0, "lower_rate": 0.006}
"""Our setting of the classifiers and of Penalty: the defaults of `meta_train`."""
OWN = {"penalty": ("scale", "proximity"), "prototypes": ("distances", "plain")}
"""What is changed for one method alone: the classifiers, what squared distances are multiplied by, and whether the
residual network ends without normalisation, by which distances are shorter and cosines differ little."""
PENALTYS = ("gamma", "lower_rate")
"""What the other bilevel methods do not have."""
CHOSEN: dict[tuple[str, str, int], dict[str, Any]] = {
    ("conv4", "penalty", 5): CONV4_VARIED["upper rate 2e-3, scale 5"],
    ("conv4", "penalty", 1): CONV4_VARIED["upper rate 2e-3"],
    ("conv4", "prototypes", 5): CONV4_VARIED["upper rate 1e-3, distances / 16"],
    ("conv4", "prototypes", 1): CONV4_VARIED["upper rate 2e-3, distances / 16"],
    ("resnet", "penalty", 5): RESNET_VARIED["upper rate 1e-3, scale 10"],
    ("resnet", "penalty", 1): RESNET_VARIED["upper rate 1e-3, scale 5"],
    ("resnet", "prototypes", 5): RESNET_VARIED["upper rate 1e-3, plain"],
    ("resnet", "prototypes", 1): RESNET_VARIED["upper rate 1e-3, distances / 128"],
}
"""The best on CIFAR-FS by (backbone, method, shots); the other bilevel methods have Penalty's, the paper's setting
none."""
KIND = ("decay", "erased", "upper_rate", "distances", "plain", "scale", "proximity", *PENALTYS, "selected")
"""What a cell may have beside the others of its place in the table; a step takes no more time by it."""
SELECTED = {(CIFAR, "resnet")}
"""Where the representation is that of the step with the best accuracy on meta-validation classes."""


def cells(
    parts: Sequence[str], datasets: Sequence[str], methods: Sequence[str], seeds: int, backbones: Sequence[str]
) -> list[Cell]:
    """The cells of these parts, those of most worth first."""
    found: list[tuple[dict[str, Any], tuple[float, ...]]] = []
    if TABLE in parts:
        for dataset in datasets:
            for backbone in (name for name in BACKBONES[dataset] if name in backbones):
                for ways, shots in TASKS[dataset]:
                    for method in (name for name in METHODS if name in methods):
                        for seed in range(seeds):
                            settings = table_settings(dataset, backbone, ways, shots, method, seed)
                            if dataset == OMNIGLOT and method != "paper":
                                if ways == ALSO:
                                    continue
                                settings["also"] = ALSO
                            found.append((settings, (seed, *_rank(dataset, backbone, method))))
    effect = [
        table_settings(OMNIGLOT, "conv4", 20, 5, method, 0) | {"part": EFFECT, "T": count, "steps": EFFECT_STEPS}
        for method in ("penalty", "approx-grad") if method in methods
        for count in LOWER_STEPS if OMNIGLOT in datasets and "conv4" in backbones
    ]  # fmt: skip
    if EFFECT in parts:
        found += [(settings, (0, 5.5)) for settings in effect]
    if TIME in parts:
        table = [cell.settings for cell in cells([TABLE], datasets, methods, 1, backbones)]
        timed = {timed_as(settings): settings for settings in [*table, *effect]}
        for i, one in enumerate(timed.values()):
            kept = {key: value for key, value in one.items() if key not in (*KIND, "also")}
            found.append((kept | {"part": TIME, "steps": TIME_STEPS}, (1e6, i)))
    if CHOICES in parts:
        tried = [settings for dataset in datasets for settings in _choices(dataset)]
        found += [(s, (-1.0, 0)) for s in tried if s["method"] in methods and s["backbone"] in backbones]
    found.sort(key=lambda pair: pair[1])
    return [Cell(settings, float(-i)) for i, (settings, _) in enumerate(found)]


def _choices(dataset: str) -> list[dict[str, Any]]:
    """What is compared on meta-validation classes of a data set."""
    if dataset == OMNIGLOT:
        settings = table_settings(OMNIGLOT, "conv4", 20, 1, "penalty", 0) | {"part": CHOICES, "steps": CHOICE_STEPS}
        return [settings | {"varied": varied} | options for varied, options in VARIED.items()]
    found = []
    for backbone in BACKBONES[CIFAR]:
        tried = product((5, 1), CIFAR_VARIED[backbone].items(), OWN)
        for shots, (varied, options), method in tried:
            if not any(key in options for other, keys in OWN.items() if other != method for key in keys):
                place = _settings(CIFAR, backbone, 5, shots, method, 0) | options
                found.append(place | {"part": CHOICES, "varied": varied, "steps": CIFAR_CHOICE_STEPS[backbone]})
    return found


def small_cells() -> list[Cell]:
    """Every method for a few steps: whether all of it runs here, and no more."""
    few = {"steps": 10, "train_ways": 5, "tasks": 2, "queries": 2, "points": 1, "test_tasks": 5}
    found = [table_settings(OMNIGLOT, "conv4", 5, 1, method, 0) | few for method in METHODS]
    return [Cell(settings, float(-i)) for i, settings in enumerate(found)]


def timed_as(settings: Settings) -> tuple[Any, ...]:
    """What the time of an upper step depends on."""
    return tuple(settings.get(key) for key in ("dataset", "backbone", "shots", "method", "T", "train_ways", "tasks"))


def _rank(dataset: str, backbone: str, method: str) -> tuple[float, ...]:
    order = list(METHODS).index(method)
    late = {"rmd": 6.0, "paper": 7.0}.get(method, 5.0 if backbone == "resnet" else 0.0)
    return late, float(order), float(dataset == CIFAR)


def table_settings(dataset: str, backbone: str, ways: int, shots: int, method: str, seed: int) -> dict[str, Any]:
    """The settings of a place of the table: on CIFAR-FS with what was chosen for it."""
    settings = _settings(dataset, backbone, ways, shots, method, seed)
    if dataset == CIFAR and method != "paper":
        kind = CHOSEN.get((backbone, method, shots), CHOSEN[backbone, "penalty", shots])
        settings |= {key: value for key, value in kind.items() if method == "penalty" or key not in PENALTYS}
    return settings


def _settings(dataset: str, backbone: str, ways: int, shots: int, method: str, seed: int) -> dict[str, Any]:
    share = SHARE.get(method, 1.0) * LONGER.get((dataset, backbone, method), 1.0)
    steps = max(1, round(STEPS[dataset, backbone] * share))
    tasks: dict[str, Any] = dict(TRAIN[dataset])
    if method == "paper":
        tasks = {"train_ways": ways, "tasks": 15 if ways == 20 else 30, "queries": 15}
        if dataset == CIFAR:
            tasks["tasks"] = 2
    settings = {
        "part": TABLE, "dataset": dataset, "backbone": backbone, "ways": ways, "shots": shots, "method": method,
        "seed": seed, "steps": steps, **tasks,
    }  # fmt: skip
    if method not in ("paper", "prototypes"):
        settings |= {key: value for key, value in OURS.items() if method == "penalty" or key not in PENALTYS}
    if (dataset, backbone) in SELECTED:
        settings["selected"] = True
    return settings | ({"T": T[method]} if method in T else {})
