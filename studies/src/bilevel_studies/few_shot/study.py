"""The few-shot study (Section 3.3, Appendix E.3, Table 3, Figures 4(b) and 5(b)): cells, and the paper's numbers.

Omniglot is split by character, 1,200 to learn from and 423 for the test, in an order drawn by a fixed seed, with
rotations as classes in both parts. CIFAR-FS replaces mini-ImageNet, whose images must not be passed on.
Accuracies are measured on 600 tasks of unseen classes, with classifiers trained for 100 steps on the support.

`penalty`, `approx-grad`, `rmd`, `prototypes` and `cosines` (Penalty without a lower problem) see the same tasks. These
have more ways than the tests, as in the training of prototypical networks (Snell et al. 2017), and fewer queries. On
CIFAR-FS a training with 5 shots also serves the test with 1 (Lee et al. 2019 found more shots in training to be
better), except for `APART`. `paper` is the setting of Appendix E.3: Algorithm 2 with its constants, tasks as in the
test with 15 queries, 30 per meta-batch (15 with 20 ways, as Section 3.3 says; Appendix E.3 says 30), cosines without a
scale, classifiers that start at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from bilevel_studies.study import RunItem, Settings

TABLE, EFFECT, TIME, CHOICES = "table", "effect-of-T", "time", "choices"
PARTS = (TABLE, EFFECT, TIME, CHOICES)
OMNIGLOT, CIFAR = "omniglot", "cifar-fs"
DATASETS = (OMNIGLOT, CIFAR)
# The methods by their names in cells, the most important first.
METHODS = {
    "penalty": "Penalty, ours",
    "prototypes": "ProtoNet",
    "cosines": "Class means, cosines",
    "approx-grad": "ApproxGrad",
    "paper": "Penalty, the paper's setting",
    "rmd": "RMD",
}
# The method with the same time of a step.
KIN = {"cosines": "prototypes"}
# (ways, shots) of the table.
TASKS = {OMNIGLOT: ((5, 1), (5, 5), (20, 1), (20, 5)), CIFAR: ((5, 1), (5, 5))}
# Table 3, in percent.
PAPER = {
    (OMNIGLOT, 5, 1): {"penalty": 97.83, "approx-grad": 97.75, "rmd": 98.6, "prototypes": 98.8},
    (OMNIGLOT, 5, 5): {"penalty": 99.45, "approx-grad": 99.51, "rmd": 99.5, "prototypes": 99.7},
    (OMNIGLOT, 20, 1): {"penalty": 94.06, "approx-grad": 94.69, "rmd": 95.5, "prototypes": 96.0},
    (OMNIGLOT, 20, 5): {"penalty": 98.47, "approx-grad": 98.46, "rmd": 98.4, "prototypes": 98.9},
}
PAPER_MINI = {
    1: {"penalty": 53.17, "approx-grad": 43.74, "rmd": 50.54, "prototypes": 49.42},
    5: {"penalty": 67.74, "approx-grad": 65.56, "rmd": 64.53, "prototypes": 68.20},
}
# The accuracy that our setting aims at.
WANTED = {(OMNIGLOT, 5, 1): 98.9, (OMNIGLOT, 5, 5): 99.6, (OMNIGLOT, 20, 1): 96.0, (OMNIGLOT, 20, 5): 98.8}
# A meta-batch of all methods except the paper's setting.
TRAIN = {OMNIGLOT: {"train_ways": 60, "tasks": 4, "queries": 5}, CIFAR: {"train_ways": 20, "tasks": 4, "queries": 8}}
# Upper steps of Penalty.
STEPS = {(OMNIGLOT, "conv4"): 3000, (CIFAR, "conv4"): 2500, (CIFAR, "resnet"): 3000}
# The share of the upper steps for methods that are ranked last: a full run takes too long.
SHARE = {"paper": 0.5}
# A multiple of the upper steps: its step is the cheapest, and its accuracy still rises after the steps of Penalty.
LONGER = {(CIFAR, "conv4", "prototypes"): 2.0}
BACKBONES = {OMNIGLOT: ("conv4",), CIFAR: ("conv4", "resnet")}
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}
T = {"penalty": 10, "approx-grad": 20, "paper": 20, "rmd": 5}
LOWER_STEPS = (1, 5, 10, 20)
EFFECT_STEPS, CHOICE_STEPS, TIME_STEPS = 600, 800, 200
TEST_TASKS, TEST_QUERIES, CURVE_TASKS = 600, 15, 200
# The settings that the part `choices` compares on Omniglot, 20 ways, 1 shot.
VARIED: dict[str, dict[str, Any]] = {
    "as the table": {},
    "T = 1": {"T": 1},
    "T = 5": {"T": 5},
    "T = 20": {"T": 20},
    "gamma 0.4, lower rate 0.06": {"gamma": 0.4, "lower_rate": 0.06},
    "gamma 40, lower rate 6e-4": {"gamma": 40.0, "lower_rate": 6e-4},
    "proximity 1, gamma 1, lam 0.1, lower rate 0.1": {"proximity": 1.0, "gamma": 1.0, "lam": 0.1, "lower_rate": 0.1},
    "no proximity, gamma 1, lam 0.1, lower rate 0.1": {
        "proximity": 0.0,
        "gamma": 1.0,
        "lam": 0.1,
        "lower_rate": 0.1,
    },
    "scale 5": {"scale": 5.0},
    "scale 20": {"scale": 20.0},
    "upper rate 1e-3": {"upper_rate": 1e-3},
    "upper rate 5e-3": {"upper_rate": 5e-3},
    "5 ways": {"train_ways": 5, "tasks": 30, "queries": 15},
    "moved images": {"moved": True},
}
# Classifiers that move further from the class means, with a matching gamma and rate.
LOOSE: dict[str, Any] = {"proximity": 1.0, "gamma": 10.0, "lower_rate": 0.03}
# Low gammas: the classifiers then also fit the queries, and u no longer follows the hypergradient.
LOW: dict[str, Any] = {"gamma": 0.4, "lower_rate": 0.05}
LOWEST: dict[str, Any] = {"gamma": 0.1, "lower_rate": 0.15}
# About the same number of images, in fewer tasks with more classes.
WIDER = {"train_ways": 40, "tasks": 2}
WIDEST = {"train_ways": 64, "tasks": 1, "queries": 11}
# The same on CIFAR-FS. ProtoNet takes the softmax of distances instead of cosines.
CONV4_VARIED: dict[str, dict[str, Any]] = {
    "scale 10": {"scale": 10.0},
    "scale 5": {"scale": 5.0},
    "scale 20": {"scale": 20.0},
    "proximity 1, gamma 10, lower rate 0.03": {"scale": 10.0, **LOOSE},
    "proximity 1, gamma 20, lower rate 0.03": {"scale": 10.0, **LOOSE, "gamma": 20.0},
    "gamma 0.1, lower rate 0.15": {"scale": 10.0, **LOWEST},
    "upper rate 1e-3": {"scale": 10.0, "upper_rate": 1e-3},
    "proximity 1, gamma 20, lower rate 0.03, 40 ways": {"scale": 10.0, **LOOSE, "gamma": 20.0, **WIDER},
    "proximity 1, gamma 20, lower rate 0.03, turned": {"scale": 10.0, **LOOSE, "gamma": 20.0, "turned": True},
    "distances": {"distances": 1.0},
    "distances / 4": {"distances": 1 / 4},
    "distances / 16": {"distances": 1 / 16},
    "distances / 64": {"distances": 1 / 64},
    "distances / 256": {"distances": 1 / 256},
    "upper rate 1e-3, distances / 16": {"upper_rate": 1e-3, "distances": 1 / 16},
    "distances / 64, 40 ways": {"distances": 1 / 64, **WIDER},
    "distances / 64, turned": {"distances": 1 / 64, "turned": True},
    "distances / 256, turned": {"distances": 1 / 256, "turned": True},
    "distances / 1024": {"distances": 1 / 1024},
}
REGULAR: dict[str, Any] = {"decay": 0.5, "erased": True, "upper_rate": 1e-3}
# The same with the residual network.
RESNET_VARIED: dict[str, dict[str, Any]] = {
    "scale 10": {**REGULAR, "scale": 10.0},
    "scale 20": {**REGULAR, "scale": 20.0},
    "scale 40": {**REGULAR, "scale": 40.0},
    "proximity 1, gamma 10, lower rate 0.03": {**REGULAR, "scale": 10.0, **LOOSE},
    "distances / 8": {**REGULAR, "distances": 1 / 8},
    "distances / 32": {**REGULAR, "distances": 1 / 32},
    "distances / 128": {**REGULAR, "distances": 1 / 128},
    "distances / 512": {**REGULAR, "distances": 1 / 512},
    "plain": {**REGULAR, "plain": True},
    "scale 20, decay 1": {**REGULAR, "scale": 20.0, "decay": 1.0},
    "scale 20, decay 2": {**REGULAR, "scale": 20.0, "decay": 2.0},
    "scale 20, decay 4": {**REGULAR, "scale": 20.0, "decay": 4.0},
    "scale 10, decay 2": {**REGULAR, "scale": 10.0, "decay": 2.0},
    "scale 20, decay 2, gamma 0.4, lower rate 0.05": {**REGULAR, "scale": 20.0, "decay": 2.0, **LOW},
    "scale 20, decay 2, gamma 0.1, lower rate 0.15": {**REGULAR, "scale": 20.0, "decay": 2.0, **LOWEST},
    "scale 20, decay 2, proximity 1, gamma 10, lower rate 0.03": {**REGULAR, "scale": 20.0, "decay": 2.0, **LOOSE},
    "scale 40, decay 1": {**REGULAR, "scale": 40.0, "decay": 1.0},
    "scale 20, turned": {**REGULAR, "scale": 20.0, "turned": True},
    "scale 20, 40 ways": {**REGULAR, "scale": 20.0, **WIDER},
    "scale 20, 64 ways": {**REGULAR, "scale": 20.0, **WIDEST},
    "scale 20, turned, 40 ways": {**REGULAR, "scale": 20.0, "turned": True, **WIDER},
    "distances / 32, decay 1": {**REGULAR, "distances": 1 / 32, "decay": 1.0},
    "distances / 32, decay 2": {**REGULAR, "distances": 1 / 32, "decay": 2.0},
    "distances / 64, decay 1": {**REGULAR, "distances": 1 / 64, "decay": 1.0},
    "distances / 32, decay 0.2": {**REGULAR, "distances": 1 / 32, "decay": 0.2},
    "distances / 8, decay 1": {**REGULAR, "distances": 1 / 8, "decay": 1.0},
    "distances / 8, decay 2": {**REGULAR, "distances": 1 / 8, "decay": 2.0},
    "distances / 2, decay 2": {**REGULAR, "distances": 1 / 2, "decay": 2.0},
    "distances * 2, decay 2": {**REGULAR, "distances": 2.0, "decay": 2.0},
    "distances / 8, decay 4": {**REGULAR, "distances": 1 / 8, "decay": 4.0},
    "distances / 2, decay 4": {**REGULAR, "distances": 1 / 2, "decay": 4.0},
    "distances * 2, decay 4": {**REGULAR, "distances": 2.0, "decay": 4.0},
    "distances * 8, decay 4": {**REGULAR, "distances": 8.0, "decay": 4.0},
    "distances / 32, turned": {**REGULAR, "distances": 1 / 32, "turned": True},
    "distances / 32, 40 ways": {**REGULAR, "distances": 1 / 32, **WIDER},
    "distances / 32, 64 ways": {**REGULAR, "distances": 1 / 32, **WIDEST},
    "distances / 32, turned, 40 ways": {**REGULAR, "distances": 1 / 32, "turned": True, **WIDER},
}
CIFAR_VARIED = {"conv4": CONV4_VARIED, "resnet": RESNET_VARIED}
CIFAR_CHOICE_STEPS = {"conv4": 2500, "resnet": 1500}
CHOICE_SEEDS = 2
# Settings that are also trained with 1 shot, by one seed, to see whether 5 shots are better for a test with 1.
ONE_SHOT = {
    "conv4": ("scale 10", "scale 5", "distances / 16", "distances / 64", "distances / 256"),
    "resnet": ("scale 10", "distances / 128", "distances / 32"),
}
# Our setting of the classifiers and of Penalty: the defaults of `meta_train`.
OURS: dict[str, Any] = {"proximity": 5.0, "gamma": 4.0, "lower_rate": 0.006}
# Settings of one method only: the classifiers; the factor of squared distances; and `plain`, a residual network that
# ends without normalisation, so that distances are shorter and cosines differ little.
OWN = {"penalty": ("scale", "proximity"), "prototypes": ("distances", "plain")}
# Settings that the other bilevel methods do not have.
PENALTYS = ("gamma", "lower_rate")
# Settings that a method does not have, if these differ from `PENALTYS`.
NONE_OF: dict[str, tuple[str, ...]] = {"penalty": (), "cosines": ("proximity", *PENALTYS)}
# The chosen settings on CIFAR-FS by (backbone, method): the best mean of the tests with 5 shots and with 1, unless they
# were compared again with the steps of the table (`ALSO_RUN`). The other bilevel methods have Penalty's settings, and
# the paper's setting has none.
CHOSEN = {
    ("conv4", "penalty"): "proximity 1, gamma 10, lower rate 0.03",
    ("conv4", "prototypes"): "distances / 64",
    ("resnet", "penalty"): "scale 20, decay 4",
    ("resnet", "prototypes"): "distances / 32",
}
# Settings that were also run with the steps of the table, twice as many as in `choices`. The best on meta-validation
# classes is chosen; runs with four convolutions have none, so ProtoNet has the better setting at the test.
ALSO_RUN = {
    ("conv4", "prototypes"): ("distances / 256",),
    ("resnet", "penalty"): ("scale 20, decay 2", "scale 20"),
    ("resnet", "approx-grad"): ("scale 20, decay 2", "scale 20"),
    ("resnet", "prototypes"): (
        "distances / 8, decay 2",
        "distances / 2, decay 4",
        "distances / 32, decay 1",
        "distances / 32, decay 2",
    ),
}
# The seeds of this comparison. The first settings of the table have more.
ALSO_SEEDS = 3
# Settings that are trained with 1 shot for tests with 1, because this was better than training with 5.
APART = {("conv4", "prototypes"): "distances / 16"}
# Settings in which cells of one place in the table can differ. They do not change the time of a step.
KIND = ("decay", "erased", "turned", "upper_rate", "distances", "plain", "scale", "proximity", *PENALTYS, "selected")
# Settings of a meta-batch, which change the time of a step.
MEETS = ("train_ways", "tasks", "queries")
# How many times a run is measured on meta-validation classes. It keeps the representation of the best step.
SELECTED = {(CIFAR, "resnet"): 5}


def cells(
    parts: Sequence[str], datasets: Sequence[str], methods: Sequence[str], seeds: int, backbones: Sequence[str]
) -> list[RunItem]:
    """Return the cells of some parts, the most important first."""
    found: list[tuple[dict[str, Any], tuple[float, ...]]] = []
    if TABLE in parts:
        for dataset in datasets:
            for backbone in (name for name in BACKBONES[dataset] if name in backbones):
                places = product(TASKS[dataset], (name for name in METHODS if name in methods), range(seeds))
                for (ways, shots), method, seed in places:
                    if trained_for(dataset, backbone, ways, shots, method) == (ways, shots):
                        others = ALSO_RUN.get((backbone, method), ())
                        more = _also(dataset, backbone, ways, shots, method)
                        settings = table_settings(dataset, backbone, ways, shots, method, seed)
                        found.append((settings | more, (seed, *_rank(dataset, backbone, method))))
                        for name in others if seed < ALSO_SEEDS and (dataset, shots) == (CIFAR, 5) else ():
                            settings = table_settings(dataset, backbone, ways, shots, method, seed, name)
                            found.append((settings | more, (seed, 8.0)))
    effect = [
        table_settings(OMNIGLOT, "conv4", 20, 5, method, 0) | {"part": EFFECT, "T": count, "steps": EFFECT_STEPS}
        for method in ("penalty", "approx-grad")
        if method in methods
        for count in LOWER_STEPS
        if OMNIGLOT in datasets and "conv4" in backbones
    ]
    if EFFECT in parts:
        found += [(settings, (0, 5.5)) for settings in effect]
    if TIME in parts:
        own = [KIN.get(name, name) for name in methods]
        table = [cell.settings for cell in cells([TABLE], datasets, own, 1, backbones)]
        timed = {timed_as(settings): settings for settings in [*table, *effect]}
        for i, one in enumerate(timed.values()):
            kept = {key: value for key, value in one.items() if key not in (*KIND, "also")}
            found.append((kept | {"part": TIME, "steps": TIME_STEPS}, (1e6, i)))
    if CHOICES in parts:
        tried = [settings for dataset in datasets for settings in study_choices(dataset)]
        found += [(s, (-1.0, 0)) for s in tried if s["method"] in methods and s["backbone"] in backbones]
    found.sort(key=lambda pair: pair[1])
    return [RunItem(settings, float(-i)) for i, (settings, _) in enumerate(found)]


def study_choices(dataset: str) -> list[dict[str, Any]]:
    """Return the settings that are compared on meta-validation classes of a data set."""
    if dataset == OMNIGLOT:
        settings = table_settings(OMNIGLOT, "conv4", 20, 1, "penalty", 0) | {"part": CHOICES, "steps": CHOICE_STEPS}
        return [settings | {"varied": varied} | options for varied, options in VARIED.items()]
    found = []
    for backbone in BACKBONES[CIFAR]:
        for (varied, options), method in product(CIFAR_VARIED[backbone].items(), OWN):
            if any(key in options for other, keys in OWN.items() if other != method for key in keys):
                continue
            changed = {**options, "part": CHOICES, "varied": varied, "steps": CIFAR_CHOICE_STEPS[backbone]}
            for seed in range(CHOICE_SEEDS):
                found.append(_settings(CIFAR, backbone, 5, 5, method, seed) | changed | {"also": [5, 1]})
            if varied in ONE_SHOT[backbone]:
                found.append(_settings(CIFAR, backbone, 5, 1, method, 0) | changed)
    return found


def trained_for(dataset: str, backbone: str, ways: int, shots: int, method: str) -> tuple[int, int]:
    """Return the ways and shots of the training that a test uses.

    On Omniglot, tests with 5 ways use a training for 20. On CIFAR-FS, tests with 1 shot use a training for 5. The
    paper's setting and `APART` have a training for each test.
    """
    if method == "paper" or (dataset == CIFAR and (backbone, method) in APART):
        return ways, shots
    return (20, shots) if dataset == OMNIGLOT else (ways, 5)


def _also(dataset: str, backbone: str, ways: int, shots: int, method: str) -> dict[str, Any]:
    """Return the other tasks that a training is tested on."""
    for place in TASKS[dataset]:
        if place != (ways, shots) and trained_for(dataset, backbone, *place, method) == (ways, shots):
            return {"also": list(place)}
    return {}


def chosen_for(backbone: str, method: str) -> str:
    """Return the name of a method's settings on CIFAR-FS."""
    return CHOSEN.get((backbone, method), CHOSEN[backbone, "penalty"])


def small_cells() -> list[RunItem]:
    """Return one short cell per method: they show only that everything runs."""
    few = {"steps": 10, "train_ways": 5, "tasks": 2, "queries": 2, "points": 1, "test_tasks": 5}
    found = [table_settings(OMNIGLOT, "conv4", 5, 1, method, 0) | few for method in METHODS]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def timed_as(settings: Settings) -> tuple[Any, ...]:
    """Return the settings that the time of an upper step depends on."""
    kin = KIN.get(settings["method"], settings["method"])
    return kin, *(settings.get(key) for key in ("dataset", "backbone", "shots", "T", "train_ways", "tasks"))


def _rank(dataset: str, backbone: str, method: str) -> tuple[float, ...]:
    order = list(METHODS).index(method)
    late = {"rmd": 6.0, "paper": 7.0}.get(method, 5.0 if backbone == "resnet" else 0.0)
    return late, float(order), float(dataset == CIFAR)


def table_settings(
    dataset: str, backbone: str, ways: int, shots: int, method: str, seed: int, name: str | None = None
) -> dict[str, Any]:
    """Return the settings of a place in the table: on CIFAR-FS the chosen ones, or the ones with this name."""
    settings = _settings(dataset, backbone, ways, shots, method, seed)
    if dataset == CIFAR and method != "paper":
        place = (backbone, method)
        taken = APART[place] if shots == 1 and place in APART else chosen_for(backbone, method)
        kind = CIFAR_VARIED[backbone][name or taken]
        settings |= {key: value for key, value in kind.items() if key not in NONE_OF.get(method, PENALTYS)}
    return settings


def _settings(dataset: str, backbone: str, ways: int, shots: int, method: str, seed: int) -> dict[str, Any]:
    share = SHARE.get(method, 1.0) * LONGER.get((dataset, backbone, method), 1.0)
    steps = max(1, round(STEPS[dataset, backbone] * share))
    tasks: dict[str, Any] = dict(TRAIN[dataset])
    if method == "paper":
        tasks = {"train_ways": ways, "tasks": 15 if ways == 20 else 30, "queries": 15}
        if dataset == CIFAR:
            tasks["tasks"] = 2
        if backbone == "resnet":
            tasks["plain"] = True
    settings = {
        "part": TABLE,
        "dataset": dataset,
        "backbone": backbone,
        "ways": ways,
        "shots": shots,
        "method": method,
        "seed": seed,
        "steps": steps,
        **tasks,
    }
    if method not in ("paper", "prototypes", "cosines"):
        settings |= {key: value for key, value in OURS.items() if key not in NONE_OF.get(method, PENALTYS)}
    if (dataset, backbone) in SELECTED:
        settings["selected"] = SELECTED[dataset, backbone]
    return settings | ({"T": T[method]} if method in T else {})
