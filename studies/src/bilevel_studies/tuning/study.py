"""The tuning study: penalties of linear models next to other ways to choose them, a network, and a million.

The result of every way is a set of penalties. Their validation and test losses belong to the model that is trained with
them on the training rows, to the minimum. All ways except the grid stop at the budget of their data set.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import ApproxGrad, Callback, Problem, ReverseMode, Run, solve
from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.training import accuracy
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows
from bilevel.applications.tuning.hyperparameters import ClassWeights, Free, LabelSmoothing, WeightDecay
from bilevel.applications.tuning.knob import Knob
from bilevel.applications.tuning.linear_tuning import (
    HIGH,
    LOW,
    held_out_loss,
    loss_of,
    trained,
    tune_cautiously,
    tune_linear,
)
from bilevel.applications.tuning.losses import Batch, TrainingLoss
from bilevel.applications.tuning.ranges import Range
from bilevel.applications.tuning.searches import train_with
from bilevel.applications.tuning.tune import tune
from bilevel.data import corrupt
from bilevel.methods.base import Method
from bilevel_studies.study import Found, RunItem, Settings
from bilevel_studies.tuning import ridge as tuning_ridge
from bilevel_studies.tuning.data import DATASETS, problem, to_sklearn

PARTS = ("linear", "ridge", "network", "scale", "curve")
WAYS = {
    "per-feature": "per feature",
    "per-feature, caution 1": "per feature, caution 1",
    "single": "single, by gradient",
    "grid": "LogisticRegressionCV",
    "implicit": "per feature, ApproxGrad",
    "unrolled": "per feature, ReverseMode",
    "folds": "per feature, 5 folds, caution 1",
    "folds, auto": "per feature, 5 folds, caution by the rows",
    "folds, single": "single, 5 folds",
}
# CPU seconds of one thread, because the machine can be shared.
BUDGETS = {"a9a": 6.0, "digits": 6.0, "text": 60.0}
# The share of a budget after which `tune_linear` starts no evaluation; its last one and the training follow.
OURS = 0.85
FOLDS = 5
# The start of the other methods, in units of the features' curvature.
START = 0.1
# Seeds of the regression; `--seeds` does not change them.
RIDGE_SEEDS = 20
# Steps of a first run, which measures how many steps fit a budget.
TRIAL_STEPS = 6
METHODS: dict[str, Method] = {
    "implicit": ApproxGrad(lower_steps=10, linear_steps=10, decay="linear"),
    "unrolled": ReverseMode(lower_steps=20, decay="linear"),
}
TRAIN, VALID, NOISE, HIDDEN = 5000, 1000, 0.3, 100
NETWORK_STEPS, NETWORK_RATE = 2000, 1e-3
# The weight decay of all tensors and the label smoothing to compare `tuned` with.
FIXED = {"default": (1e-4, 0.0), "by hand": (1e-3, 0.3)}
# Hidden units of the network with a million weights.
MILLION = 1260
# Steps of tuning and of plain training, and runs of each: the time of one run has an error of a tenth.
SCALE_STEPS, TURNS = 60, 5


def cells(parts: Sequence[str] = PARTS, datasets: Sequence[str] = DATASETS, seeds: int = 3) -> list[RunItem]:
    found: list[Settings] = []
    if "linear" in parts:
        found += [
            {"part": "linear", "dataset": name, "way": way, "seed": seed}
            for seed in range(seeds)
            for name in datasets
            for way in WAYS
        ]
    if "ridge" in parts:
        found += [{"part": "ridge", "seed": seed} for seed in range(RIDGE_SEEDS)]
    if "network" in parts:
        found += [
            {"part": "network", "way": way, "steps": NETWORK_STEPS, "seed": seed}
            for seed in range(seeds)
            for way in ("tuned", *FIXED)
        ]
    if "scale" in parts:
        found.append({"part": "scale", "hidden": MILLION, "steps": SCALE_STEPS, "turns": TURNS})
    if "curve" in parts:
        found += [
            {"part": "curve", "left_out": what, "seed": seed}
            for what in tuning_ridge.LEFT_OUT
            for seed in range(RIDGE_SEEDS)
        ]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def run(settings: Settings) -> Found | None:
    """Run a cell; return None after Ctrl-C. The settings are the arguments of the function of their part."""
    parts: dict[str, Callable[..., Found]] = {
        "linear": _linear,
        "ridge": tuning_ridge.features,
        "curve": tuning_ridge.single,
        "network": _network,
        "scale": _scale,
    }
    options = {name: value for name, value in settings.items() if name != "part"}
    try:
        return parts[settings["part"]](**options)
    except KeyboardInterrupt:
        return None


# -- linear models -----------------------------------------------------------------------------------------------------


def load_late_modules() -> None:
    """Load the modules that torch and scikit-learn load at first use, so that their time does not count."""
    import sklearn.linear_model  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def _linear(dataset: str, way: str, seed: int) -> Found:
    rows, test = problem(dataset, seed)
    load_late_modules()
    budget, began = BUDGETS[dataset], time.process_time()
    if way.startswith("folds"):
        return _folded(rows, test, way, seed, budget)
    if way.startswith("per-feature"):
        caution = 1.0 if way.endswith("1") else 0.0
        alpha = tune_linear(rows, caution=caution, tolerance=1e-6, seconds=OURS * budget, clock=time.process_time).alpha
    elif way == "single":
        alpha = tune_linear(
            rows, penalty="single", tolerance=1e-6, seconds=OURS * budget, clock=time.process_time
        ).alpha
    elif way == "grid":
        alpha = _grid(rows)
    else:
        alpha = _stepwise(rows, METHODS[way], budget, seed)
    seconds = time.process_time() - began
    train = rows.select(rows.fold < 0)
    return {
        "valid_loss": held_out_loss(rows, alpha),
        "test_loss": loss_of(test, *trained(train, alpha)),
        "seconds": round(seconds, 2),
        "features": rows.x.shape[1],
    }


def _folded(rows: Rows, test: Rows, way: str, seed: int, budget: float) -> Found:
    """Tune on folds of the training and validation rows together, and train on all of them."""
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows.y)) % FOLDS)
    began = time.process_time()
    given, caution = replace(rows, fold=fold), None
    options: dict[str, Any] = {"tolerance": 1e-6, "seconds": OURS * budget, "clock": time.process_time}
    if way.endswith("auto"):  # two tunings: on a part of the rows, to decide, and on all
        found, caution = tune_cautiously(given, seed=seed, **options | {"seconds": OURS * budget / 2})
    else:
        found = tune_linear(given, penalty="single" if way.endswith("single") else "per-feature", **options)
    return {
        "valid_loss": found.valid_loss,
        "test_loss": loss_of(test, found.weight, found.bias),
        "seconds": round(time.process_time() - began, 2),
        "features": rows.x.shape[1],
        **({"caution": caution} if way.endswith("auto") else {}),
    }


def _grid(rows: Rows) -> Tensor:
    """Choose among scikit-learn's grid of twenty penalties by the log-loss of the validation rows."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.model_selection import PredefinedSplit

    unit = float(FoldedModel(rows).curvature.mean()) * int((rows.fold < 0).sum())
    model = LogisticRegressionCV(
        Cs=1 / (unit * np.logspace(np.log10(LOW), np.log10(HIGH), 20)),
        cv=PredefinedSplit(rows.fold.numpy()),
        scoring="neg_log_loss",
        max_iter=10_000,
        tol=1e-8,
        refit=True,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    )
    model.fit(to_sklearn(rows.x), rows.y.long().numpy())
    return torch.full((rows.x.shape[1],), 1 / float(np.ravel(model.C_)[0]), dtype=torch.float64)


class _Until(Callback):
    """Stops a run at a given time and records when its steps ended."""

    def __init__(self, moment: float) -> None:
        self.moment, self.began = moment, 0.0
        self.times: list[float] = []

    def start(self, run: Run) -> None:
        self.began = time.process_time()

    def log(self, run: Run) -> bool | None:
        self.times.append(time.process_time())
        return self.times[-1] >= self.moment


def _stepwise(rows: Rows, method: Method, budget: float, seed: int) -> Tensor:
    """Tune the same penalties by another method of this library, with as many steps as the budget allows."""
    model = FoldedModel(rows)
    unit, every = model.curvature.mean() * model.counts.mean(), Range(LOW, HIGH)
    pose = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(unit * every.value(u), v))
    start = every.free(torch.full((rows.x.shape[1],), START, dtype=torch.float64))

    def attempt(steps: int, until: _Until) -> Tensor:
        u = start.clone().requires_grad_()
        v = {name: torch.zeros_like(leaf).requires_grad_() for name, leaf in model.v.items()}
        solve(pose, method, u, v, max_steps=steps, callbacks=[until], log_every=1, seed=seed, hypergradient=False)
        return u.detach()

    # Rates fall over the steps of a run: their number must fit the budget.
    began, trial = time.process_time(), _Until(float("inf"))
    attempt(TRIAL_STEPS, trial)
    spent = time.process_time() - began
    each = (trial.times[-1] - trial.times[0]) / (TRIAL_STEPS - 1)
    steps = max(10, int((budget - 2 * spent + TRIAL_STEPS * each) / each))
    return unit * every.value(attempt(steps, _Until(began + budget)))


# -- the network -------------------------------------------------------------------------------------------------------


def network_task(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return the untrained network, and training, validation and test examples of MNIST."""
    from bilevel_studies.denoising.runs import loaded

    data = loaded("mnist")
    order = np.random.default_rng(seed).permutation(data.count)
    train, valid = data.select(order[:TRAIN]), data.select(order[TRAIN : TRAIN + VALID])
    with seeded(seed):
        network = models.mlp(784, (HIDDEN,), 10)
    return network, (train.x, corrupt(train.y, NOISE, 10, seed)), (valid.x, valid.y), data.part("test")


def network_knobs() -> dict[str, Knob]:
    """Return the hyper-parameters. The temperature makes up for noisy training labels."""
    return {
        "decay": WeightDecay(per="tensor", biases=True, low=1e-6, high=1.0, start=1e-3),
        "smoothing": LabelSmoothing(),
        "classes": ClassWeights(),
        "temperature": Free(low=0.05, high=20.0, start=1.0),
    }


def tempered(value: Any, model: Any, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]) / value["temperature"], batch[1])


def _network(way: str, steps: int, seed: int) -> Found:
    network, train, valid, test = network_task(seed)
    hyper, began = network_knobs(), time.process_time()
    if way == "tuned":
        found = tune(
            network,
            train,
            valid,
            hyper,
            valid_loss=tempered,
            steps=steps,
            final_steps=steps,
            rate=NETWORK_RATE,
            seed=seed,
        )
        value = {name: tensor.tolist() for name, tensor in found.values.items()}
    else:
        decay, smoothing = FIXED[way]
        value = {"decay": [decay] * 4, "smoothing": [smoothing], "classes": [1.0] * 10, "temperature": [1.0]}
        tensors = {name: torch.tensor(numbers) for name, numbers in value.items()}
        objective = TrainingLoss(hyper, 10, None, tempered)
        train_with(objective, tensors, network, train, steps=steps, batch=100, rate=NETWORK_RATE, seed=seed + 1)
    seconds = time.process_time() - began
    return {
        "test_accuracy": accuracy(network, test),
        "valid_accuracy": accuracy(network, valid),
        "seconds": round(seconds, 2),
        "values": value,
    }


def _scale(hidden: int, steps: int, turns: int) -> Found:
    """Return the least CPU seconds of the same number of steps of tuning and of plain training, run in turn."""
    _, train, valid, _ = network_task(0)
    with seeded(0):
        network = models.mlp(784, (hidden,), 10)
    knob = WeightDecay(per="weight")
    hyper: dict[str, Knob] = {"decay": knob}
    decays = {"decay": torch.full((sum(p.numel() for p in network.parameters() if p.ndim > 1),), knob.start)}
    objective, plain, tuned, count = TrainingLoss(hyper, 10), [], [], 0
    for _ in range(turns + 1):
        model, clock = copy.deepcopy(network), time.process_time()
        train_with(objective, decays, model, train, steps=steps, batch=100, rate=NETWORK_RATE, seed=0)
        plain.append(time.process_time() - clock)
        watch = _Until(float("inf"))
        found = tune(
            copy.deepcopy(network),
            train,
            valid,
            hyper,
            mode="minibatch",
            grid=0,
            steps=steps,
            final_steps=1,
            rate=NETWORK_RATE,
            callbacks=[watch],
            log_every=steps,
        )
        tuned.append(watch.times[-1] - watch.began)
        count = found.settings["hyper_parameters"]
    plain, tuned = plain[1:], tuned[1:]  # the first turn loads modules
    return {
        "hyper_parameters": count,
        "plain_seconds": min(plain),
        "tuned_seconds": min(tuned),
        "ratio": min(tuned) / min(plain),
        "ratios": [t / p for t, p in zip(tuned, plain, strict=True)],
    }
