"""The few-shot study (Section 3.3, Appendix E.3, Table 3, Figures 4(b) and 5(b)): cells, and the paper's numbers.

Omniglot is split by character, 1,200 to learn from and 423 for the test, in an order drawn by a fixed seed, with
rotations as classes in both parts. mini-ImageNet's images are not free to hand on: its place is taken by CIFAR-FS.
Accuracies are those of 600 tasks of classes never seen, with classifiers trained for 100 steps on the support.

`penalty`, `approx-grad`, `rmd`, `prototypes` and `cosines`, which is Penalty without a lower problem, see the same
tasks: of more ways than those of the test, which is how prototypical networks are trained (Snell et al. 2017), with
fewer queries; on CIFAR-FS with 5 shots for a test with 1, too (Lee et al. 2019 found more shots in training to be
better), but for what is `APART`. `paper` is the setting of Appendix E.3: Algorithm 2 with its constants, tasks as in
the test with 15 queries, 30 a meta-batch (15 with 20 ways, as Section 3.3 says; Appendix E.3 says 30), cosines without
a scale, classifiers that start at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from bilevel.running.run_many import RunItem, Settings

TABLE, EFFECT, TIME, CHOICES = "table", "effect-of-T", "time", "choices"
PARTS = (TABLE, EFFECT, TIME, CHOICES)
OMNIGLOT, CIFAR = "omniglot", "cifar-fs"
DATASETS = (OMNIGLOT, CIFAR)
METHODS = {
    "penalty": "Penalty, ours",
    "prototypes": "ProtoNet",
    "cosines": "Class means, cosines",
    "approx-grad": "ApproxGrad",
    "paper": "Penalty, the paper's setting",
    "rmd": "RMD",
}
"""The methods by their names in cells, those of most worth first."""
KIN = {"cosines": "prototypes"}
"""The method whose step takes as long."""
TASKS = {OMNIGLOT: ((5, 1), (5, 5), (20, 1), (20, 5)), CIFAR: ((5, 1), (5, 5))}
"""(ways, shots) of the table."""
PAPER = {
    (OMNIGLOT, 5, 1): {"penalty": 97.83, "approx-grad": 97.75, "rmd": 98.6, "prototypes": 98.8},
    (OMNIGLOT, 5, 5): {"penalty": 99.45, "approx-grad": 99.51, "rmd": 99.5, "prototypes": 99.7},
    (OMNIGLOT, 20, 1): {"penalty": 94.06, "approx-grad": 94.69, "rmd": 95.5, "prototypes": 96.0},
    (OMNIGLOT, 20, 5): {"penalty": 98.47, "approx-grad": 98.46, "rmd": 98.4, "prototypes": 98.9},
}
"""Percent, as Table 3 has them."""
PAPER_MINI = {
    1: {"penalty": 53.17, "approx-grad": 43.74, "rmd": 50.54, "prototypes": 49.42},
    5: {"penalty": 67.74, "approx-grad": 65.56, "rmd": 64.53, "prototypes": 68.20},
}
WANTED = {(OMNIGLOT, 5, 1): 98.9, (OMNIGLOT, 5, 5): 99.6, (OMNIGLOT, 20, 1): 96.0, (OMNIGLOT, 20, 5): 98.8}
"""What our setting is to reach."""
TRAIN = {OMNIGLOT: {"train_ways": 60, "tasks": 4, "queries": 5}, CIFAR: {"train_ways": 20, "tasks": 4, "queries": 8}}
"""A meta-batch of all methods but the paper's setting."""
STEPS = {(OMNIGLOT, "conv4"): 3000, (CIFAR, "conv4"): 2500, (CIFAR, "resnet"): 3000}
"""Upper steps of Penalty."""
SHARE = {"paper": 0.5}
"""Of the upper steps: what is ranked last has fewer, for want of time."""
LONGER = {(CIFAR, "conv4", "prototypes"): 2.0}
"""Its step is the cheapest, and after as many as Penalty has its accuracy still rises there."""
BACKBONES = {OMNIGLOT: ("conv4",), CIFAR: ("conv4", "resnet")}
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}
T = {"penalty": 10, "approx-grad": 20, "paper": 20, "rmd": 5}
LOWER_STEPS = (1, 5, 10, 20)
EFFECT_STEPS, CHOICE_STEPS, TIME_STEPS = 600, 800, 200
TEST_TASKS, TEST_QUERIES, CURVE_TASKS = 600, 15, 200
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
"""What the part `choices` changes, on Omniglot, 20 ways, 1 shot."""
LOOSE: dict[str, Any] = {"proximity": 1.0, "gamma": 10.0, "lower_rate": 0.03}
"""Classifiers that go further from the class means, with the price and the rate that go with that."""
LOW: dict[str, Any] = {"gamma": 0.4, "lower_rate": 0.05}
LOWEST: dict[str, Any] = {"gamma": 0.1, "lower_rate": 0.15}
"""Low prices: the classifiers then fit the queries, too, and u no longer moves by the hypergradient."""
WIDER = {"train_ways": 40, "tasks": 2}
WIDEST = {"train_ways": 64, "tasks": 1, "queries": 11}
"""About as many images, in fewer tasks of more classes."""
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
"""The same on CIFAR-FS. The softmax of ProtoNet is of distances, not of cosines."""
REGULAR: dict[str, Any] = {"decay": 0.5, "erased": True, "upper_rate": 1e-3}
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
"""The same with the residual network."""
CIFAR_VARIED = {"conv4": CONV4_VARIED, "resnet": RESNET_VARIED}
CIFAR_CHOICE_STEPS = {"conv4": 2500, "resnet": 1500}
CHOICE_SEEDS = 2
ONE_SHOT = {
    "conv4": ("scale 10", "scale 5", "distances / 16", "distances / 64", "distances / 256"),
    "resnet": ("scale 10", "distances / 128", "distances / 32"),
}
"""What is trained with 1 shot, too, by one seed: whether 5 are better for a test with 1."""
OURS: dict[str, Any] = {"proximity": 5.0, "gamma": 4.0, "lower_rate": 0.006}
"""Our setting of the classifiers and of Penalty: the defaults of `meta_train`."""
OWN = {"penalty": ("scale", "proximity"), "prototypes": ("distances", "plain")}
"""What is changed for one method alone: the classifiers, what squared distances are multiplied by, and whether the
residual network ends without normalisation, by which distances are shorter and cosines differ little."""
PENALTYS = ("gamma", "lower_rate")
"""What the other bilevel methods do not have."""
NONE_OF: dict[str, tuple[str, ...]] = {"penalty": (), "cosines": ("proximity", *PENALTYS)}
"""The same by method, where it is another."""
CHOSEN = {
    ("conv4", "penalty"): "proximity 1, gamma 10, lower rate 0.03",
    ("conv4", "prototypes"): "distances / 64",
    ("resnet", "penalty"): "scale 20, decay 4",
    ("resnet", "prototypes"): "distances / 32",
}
"""What is taken on CIFAR-FS by (backbone, method): the best in the mean of tests with 5 shots and with 1, but where it
was tried again at the length of the table (`ALSO_RUN`). The other bilevel methods have Penalty's, the paper's setting
none."""
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
"""What else has the length of the table, which that of choices is half of: the best of them on meta-validation classes
is taken; with four convolutions, where runs have none, what is better for ProtoNet at the test."""
ALSO_SEEDS = 3
"""Those by which settings of that length are compared. What the table had before has more."""
APART = {("conv4", "prototypes"): "distances / 16"}
"""What is trained with 1 shot for tests with 1, for this was better than the best that is trained with 5."""
BETTER_APART = {("conv4", "prototypes"): "distances / 64"}
"""What is better than that, by a comparison after which no table was run."""
KIND = ("decay", "erased", "turned", "upper_rate", "distances", "plain", "scale", "proximity", *PENALTYS, "selected")
"""What a cell may have beside the others of its place in the table; a step takes no more time by it."""
MEETS = ("train_ways", "tasks", "queries")
"""What a meta-batch is, by which it may take more."""
SELECTED = {(CIFAR, "resnet"): 5}
"""Where the representation is that of the step with the best accuracy on meta-validation classes, and of how many steps
that is."""


def cells(
    parts: Sequence[str], datasets: Sequence[str], methods: Sequence[str], seeds: int, backbones: Sequence[str]
) -> list[RunItem]:
    """The cells of these parts, those of most worth first."""
    found: list[tuple[dict[str, Any], tuple[float, ...]]] = []
    if TABLE in parts:
        for dataset in datasets:
            for backbone in (name for name in BACKBONES[dataset] if name in backbones):
                places = product(TASKS[dataset], (name for name in METHODS if name in methods), range(seeds))
                for (ways, shots), method, seed in places:
                    if trained_for(dataset, backbone, ways, shots, method) == (ways, shots):
                        more = _also(dataset, backbone, ways, shots, method)
                        settings = table_settings(dataset, backbone, ways, shots, method, seed)
                        found.append((settings | more, (seed, *_rank(dataset, backbone, method))))
                        for name in also_run(dataset, backbone, shots, method) if seed < ALSO_SEEDS else ():
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
    """What is compared on meta-validation classes of a data set."""
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
    """The ways and shots whose training these are tried on: but for the paper's setting and what is `APART`, tasks of 5
    ways of Omniglot are tried on one for 20, and tasks of 1 shot of CIFAR-FS on one for 5."""
    if method == "paper" or (dataset == CIFAR and (backbone, method) in APART):
        return ways, shots
    return (20, shots) if dataset == OMNIGLOT else (ways, 5)


def _also(dataset: str, backbone: str, ways: int, shots: int, method: str) -> dict[str, Any]:
    """The other tasks that a training is tried on."""
    for place in TASKS[dataset]:
        if place != (ways, shots) and trained_for(dataset, backbone, *place, method) == (ways, shots):
            return {"also": list(place)}
    return {}


def chosen_for(backbone: str, method: str) -> str:
    """The name of a method's settings on CIFAR-FS."""
    return CHOSEN.get((backbone, method), CHOSEN[backbone, "penalty"])


def also_run(dataset: str, backbone: str, shots: int, method: str) -> tuple[str, ...]:
    """The names of settings that a place was run with at the length of the table, beside those that are taken."""
    return ALSO_RUN.get((backbone, method), ()) if (dataset, shots) == (CIFAR, 5) else ()


def small_cells() -> list[RunItem]:
    """Every method for a few steps: whether all of it runs here, and no more."""
    few = {"steps": 10, "train_ways": 5, "tasks": 2, "queries": 2, "points": 1, "test_tasks": 5}
    found = [table_settings(OMNIGLOT, "conv4", 5, 1, method, 0) | few for method in METHODS]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def timed_as(settings: Settings) -> tuple[Any, ...]:
    """What the time of an upper step depends on."""
    kin = KIN.get(settings["method"], settings["method"])
    return kin, *(settings.get(key) for key in ("dataset", "backbone", "shots", "T", "train_ways", "tasks"))


def _rank(dataset: str, backbone: str, method: str) -> tuple[float, ...]:
    order = list(METHODS).index(method)
    late = {"rmd": 6.0, "paper": 7.0}.get(method, 5.0 if backbone == "resnet" else 0.0)
    return late, float(order), float(dataset == CIFAR)


def table_settings(
    dataset: str, backbone: str, ways: int, shots: int, method: str, seed: int, name: str | None = None
) -> dict[str, Any]:
    """The settings of a place of the table: on CIFAR-FS with what was chosen for it, or with those of this name."""
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
