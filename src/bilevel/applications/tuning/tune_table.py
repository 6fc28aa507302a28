"""A labelled data set tuned: penalties of a linear model or of an MLP, beside a grid of single penalties.

Where there is no test set, a fifth of the rows, of each class its share, is held out from all training. Linear models
are tuned on folds; of an MLP's rows a fifth is held out to tune on. Numbers to predict are brought to mean 0 and
deviation 1 for the training, with which the penalties of an MLP go; losses and the weights that are handed out are in
the units of the table.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.training import accuracy
from bilevel.applications.tuning.caution import loss_of, tune_cautiously
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Loss, Rows
from bilevel.applications.tuning.folds import folds_of
from bilevel.applications.tuning.hyperparameters import FeaturePenalty, Knob, WeightDecay, parameters_of
from bilevel.applications.tuning.linear_tuning import held_out_loss, trained, tune_linear
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.tune import train_with, tune
from bilevel.data import Labelled, Pair, split_test
from bilevel.errors import DataError, OptionError
from bilevel.running.callbacks import Callback
from bilevel.running.run_identity import digest_of
from bilevel.running.run_many import ResultFolder, RunItem, Settings

Kind = Literal["logistic", "ridge", "mlp"]
Penalty = Literal["per-feature", "per-layer", "single"]
HELD_OUT = 0.2
GRID, NETWORK_GRID = 11, 5
"""Penalties of the grid, and of that of a network."""
LEAST = 1e-150
"""The least deviation of numbers to predict."""
DECADES = 5.0
"""How far the grid reaches below and above the middle of the single penalty's range, in powers of ten."""
Tell = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Point:
    """A single penalty of the grid."""

    penalty: float
    valid_loss: float
    test_loss: float


@dataclass(frozen=True)
class TunedTable:
    """What was tuned on a data set; losses are means of -log(probability), or halves of mean squared errors."""

    names: tuple[str, ...]
    """What each penalty belongs to."""
    penalties: Tensor
    sizes: Tensor
    """The size of the weights that each penalty acts on."""
    valid_loss: float
    test_loss: float
    test_accuracy: float | None
    curve: list[float]
    grid: list[Point]
    state: dict[str, Tensor]
    """The weights of the trained model."""
    caution: float | None
    seconds: float
    notes: tuple[str, ...]

    @property
    def best(self) -> Point:
        """The best of the grid, by the rows that penalties are tuned on."""
        return min(self.grid, key=lambda point: point.valid_loss)


def tune_table(
    data: Labelled,
    model: Kind,
    penalty: Penalty,
    *,
    folds: int = 5,
    caution: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    tell: Tell = lambda *_: None,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
) -> TunedTable:
    """Tune, train on all rows but the test ones, and try a grid of single penalties.

    `folds` and `caution` are for linear models; None lets the rows decide the caution. A `checkpoint` folder is written
    to, and gone on from where it holds a state.
    """
    if model != "mlp" and penalty == "per-layer":
        raise OptionError(f"penalty='per-layer' is for model='mlp'; {model} has one layer. Use 'per-feature'.")
    notes = list(data.notes)
    names = feature_names(data)
    data = replace(
        data, features=names, x=data.x.flatten(1), test=data.test and (data.test[0].flatten(1), data.test[1])
    )
    if data.test is None:
        data = _with_test(data, seed, keep=2)
        of_each = ", of each class its share" if data.classes else ""
        notes.append(
            f"A fifth of the rows, {len(data.part('test')[1]):,}{of_each}, is held out to measure the test loss."
        )
    device = torch.device(device)
    if model == "mlp":
        return _network(data, penalty, steps, seed, notes, callbacks, tell, device, checkpoint)
    return _linear(data, model, penalty, folds, caution, steps or 100, seed, notes, tell, device, checkpoint)


def feature_names(data: Labelled) -> tuple[str, ...]:
    """Of the numbers in one input; of an image, the places of its pixels."""
    if data.features:
        return data.features
    if data.kind == "images":
        _, channels, height, width = data.x.shape
        return tuple(
            f"row {i}, column {j}" + (f", channel {c}" if channels > 1 else "")
            for c in range(channels)
            for i in range(height)
            for j in range(width)
        )
    return tuple(f"column {j}" for j in range(data.x.shape[1]))


def _with_test(data: Labelled, seed: int, keep: int) -> Labelled:
    """A fifth of the rows moved into the test set: of each class its share, but the last `keep`; of numbers, any."""
    if data.classes:
        return split_test(data, share=HELD_OUT, seed=seed, keep=keep)
    order = np.random.default_rng(seed).permutation(data.count)
    count = max(1, round(HELD_OUT * data.count))
    out, rest = torch.from_numpy(order[:count]), np.sort(order[count:])
    return replace(data.select(rest), test=(data.x[out], data.y[out]))


def _units(y: Tensor) -> tuple[float, float]:
    """The mean and the deviation of numbers to predict."""
    if bool((y == y[0]).all()):
        raise DataError(f"the numbers to predict must vary outside the test set; all {len(y)} are {float(y[0]):g}.")
    center, spread = float(y.mean()), float(y.std())
    if not LEAST < spread < 1 / LEAST:
        raise DataError(
            f"the numbers to predict must have a deviation between {LEAST:g} and {1 / LEAST:g}; got {spread:g}. Use "
            "another unit."
        )
    return center, spread


def _linear(
    data: Labelled,
    model: Kind,
    penalty: Penalty,
    folds: int,
    caution: float | None,
    steps: int,
    seed: int,
    notes: list[str],
    tell: Tell,
    device: torch.device,
    checkpoint: Path | None,
) -> TunedTable:
    began = time.perf_counter()
    loss: Loss = "squared" if model == "ridge" else "logistic"
    outputs = len(data.classes) if len(data.classes) > 2 else 1
    center, spread = _units(data.y) if model == "ridge" else (0.0, 1.0)

    def rows_of(pair: Pair, fold: Tensor) -> Rows:
        y = (pair[1].double() - center) / spread if outputs == 1 else pair[1]
        return Rows(pair[0].to(device, torch.float64), y.to(device), fold.to(device), loss, outputs)

    rows, test = rows_of((data.x, data.y), folds_of(data.y.numpy(), len(data.classes), folds, seed)), data.part("test")
    others = rows_of(test, torch.full((len(test[1]),), -1))

    def watch(stage: str, done: int, value: float) -> None:
        tell(f"tuning {stage}", done, steps)

    used: float | None = caution
    place = checkpoint and checkpoint / "tuning"
    if penalty == "single":
        found = tune_linear(rows, penalty="single", steps=steps, watch=watch, checkpoint=place)
    elif caution is None:
        found, used = tune_cautiously(rows, seed=seed, steps=steps, watch=watch, checkpoint=place)
        if used is None:
            notes.append(
                f"Penalties that differ, tuned on {folds} folds, are no better than a single one beyond chance, on "
                "rows that neither saw: the single one is what is given here. --caution 1 or 0 gives one for each "
                "feature all the same."
            )
    else:
        found = tune_linear(rows, caution=caution, steps=steps, watch=watch, checkpoint=place)
    if found.interrupted:
        raise KeyboardInterrupt
    unit = float(FoldedModel(rows).curvature.mean()) * data.count

    def losses(alpha: float) -> tuple[float, float]:
        each = torch.full_like(found.alpha, alpha)
        return spread**2 * held_out_loss(rows, each), spread**2 * loss_of(others, *trained(rows, each))

    what = {} if checkpoint is None else {"rows": rows.digest(), "test": others.digest()}
    grid = _tried(unit * np.logspace(-DECADES, DECADES, GRID), losses, tell, checkpoint, what)
    correct = None
    if model == "logistic":
        scores = (others.x @ found.weight.T + found.bias).cpu()
        said = (scores[:, 0] > 0).long() if outputs == 1 else scores.argmax(1)
        correct = float((said == test[1]).double().mean())
    state = {"weight": spread * found.weight.cpu(), "bias": center + spread * found.bias.cpu()}
    return TunedTable(
        names=data.features,
        penalties=found.alpha.cpu(),
        sizes=state["weight"].norm(dim=0),
        valid_loss=spread**2 * found.valid_loss,
        test_loss=spread**2 * loss_of(others, found.weight, found.bias),
        test_accuracy=correct,
        curve=[spread**2 * value for value in found.path],
        grid=grid,
        state=state,
        caution=used if penalty != "single" else None,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _tried(
    penalties: np.ndarray,
    losses: Callable[[float], tuple[float, float]],
    tell: Tell,
    checkpoint: Path | None,
    what: Settings,
) -> list[Point]:
    """The validation and test losses of single penalties, each kept as soon as it is there."""
    store, grid = None if checkpoint is None else ResultFolder(checkpoint / "grid"), []
    for k, penalty in enumerate(map(float, penalties)):
        cell = RunItem({"penalty": penalty, **what}, 0)
        kept = None if store is None else store.get(cell)
        if kept is None:
            kept = dict(zip(("valid_loss", "test_loss"), losses(penalty), strict=True))
            if store is not None:
                store.put(cell, kept)
        grid.append(Point(penalty, kept["valid_loss"], kept["test_loss"]))
        tell("trying a grid", k + 1, len(penalties))
    return grid


def _network(
    data: Labelled,
    penalty: Penalty,
    steps: int | None,
    seed: int,
    notes: list[str],
    callbacks: Sequence[Callback],
    tell: Tell,
    device: torch.device,
    checkpoint: Path | None,
) -> TunedTable:
    began = time.perf_counter()
    classes = len(data.classes) or None
    dtype = torch.float32
    center, spread = (0.0, 1.0) if classes else _units(data.y)
    tuned_on = _with_test(replace(data, test=None), seed, keep=1)

    def pair(x: Tensor, y: Tensor) -> Pair:
        return x, y if classes else ((y - center) / spread).to(dtype)

    train, valid, test = pair(tuned_on.x, tuned_on.y), pair(*tuned_on.part("test")), pair(*data.part("test"))
    with seeded(seed):
        network = models.mlp(data.x.shape[1], (128,), classes or 1).to(device)
    first = copy.deepcopy(network)
    knob: Knob = (
        FeaturePenalty(high=10.0)
        if penalty == "per-feature"
        else WeightDecay(per="layer" if penalty == "per-layer" else "model")
    )
    found = tune(
        network,
        train,
        valid,
        {"penalty": knob},
        steps=steps,
        seed=seed,
        callbacks=callbacks,
        mode="minibatch",
        watch=tell,
        checkpoint=checkpoint,
    )
    single = WeightDecay()
    objective, used = TrainingLoss({"penalty": single}, classes), found.settings

    def losses(decay: float) -> tuple[float, float]:
        rival, value = copy.deepcopy(first), {"penalty": torch.tensor([decay], dtype=dtype)}
        train_with(
            objective,
            value,
            rival,
            train,
            steps=used["final_steps"],
            batch=used["batch"],
            rate=used["rate"],
            seed=seed + 1,
            checkpoint=checkpoint and checkpoint / f"grid-{decay:.0e}",
        )
        on_valid, on_test = (spread**2 * objective.measured(value, rival, part) for part in (valid, test))
        return on_valid, on_test

    what = {} if checkpoint is None else {"rate": used["rate"], "examples": digest_of([*train, *valid, *test])}
    penalties = np.logspace(np.log10(single.low), np.log10(single.high), NETWORK_GRID)
    grid = _tried(penalties, losses, tell, checkpoint, what)
    parameters = parameters_of(network)
    if isinstance(knob, WeightDecay):
        names = tuple(f"layer {name}" if penalty == "per-layer" else "all weights" for name in knob.groups(parameters))
        matrices = [p.detach().norm() for p in parameters.values() if p.ndim > 1]
        sizes = torch.stack(matrices) if len(names) > 1 else torch.stack(matrices).norm()[None]
    else:
        names = data.features
        sizes = next(p for p in parameters.values() if p.ndim == 2).detach().norm(dim=0)
    correct = accuracy(network, test) if classes else None
    test_loss = spread**2 * objective.measured({}, network, test)
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():  # the model that is handed out predicts in the units of the table
        last.weight *= spread
        last.bias.mul_(spread).add_(center)
    return TunedTable(
        names=names,
        penalties=found.values["penalty"],
        sizes=sizes.cpu(),
        valid_loss=spread**2 * found.valid_loss,
        test_loss=test_loss,
        test_accuracy=correct,
        curve=[spread**2 * value for value in found.curve],
        grid=grid,
        state=_plain(network),
        caution=None,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _plain(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
