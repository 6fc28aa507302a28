"""Tune the penalties of a linear model or an MLP on a labelled data set, next to a grid of single penalties.

Without a test set, a fifth of the rows of each class is held out from all training. Linear models are tuned on folds;
for an MLP a fifth of the remaining rows is held out to tune on. For the training, numbers to predict are scaled to mean
0 and deviation 1, and the penalties of an MLP refer to this scale; the losses and the weights that are returned are in
the units of the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import Callback, DataError, OptionError
from bilevel._util.checks import ShortRepr
from bilevel._util.random_state import seeded
from bilevel.applications.networks import mlp
from bilevel.applications.training import accuracy
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Loss, Rows, folds_of
from bilevel.applications.tuning.hyperparameters import FeaturePenalty, WeightDecay
from bilevel.applications.tuning.knob import Knob
from bilevel.applications.tuning.linear_tuning import (
    LinearTuned,
    held_out_loss,
    loss_of,
    trained,
    tune_cautiously,
)
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.searches import OnProgress
from bilevel.applications.tuning.tune import STEPS, Mode, mode_of, tune
from bilevel.applications.tuning.value_search import START, comparable, comparison, least
from bilevel.data import Labelled, Pair, split_test
from bilevel.running.run_many import ResultFolder, RunItem, Settings

Kind = Literal["logistic", "ridge", "mlp"]
Penalty = Literal["per-feature", "per-layer", "single"]
HELD_OUT = 0.2
LOSSES: dict[str, Loss] = {"ridge": "squared", "logistic": "logistic"}
# The number of penalties in the grid of linear models.
GRID = 11
NO_BETTER = (
    "On rows that the tuning did not see, penalties for each feature, tuned on {folds} folds, are not better than a "
    "single penalty beyond chance. This is the single penalty; --caution 1 or 0 still gives one penalty for each "
    "feature."
)
GRID_WON = (
    "The gradient ended with the validation loss {:.4g} (in units of the scaled labels). The single penalty {:.3g} of "
    "the grid has {:.4g}, and is used."
)


@dataclass(frozen=True)
class Point:
    """A single penalty of the grid."""

    penalty: float
    valid_loss: float
    test_loss: float


@dataclass(frozen=True, repr=False)
class TunedTable(ShortRepr):
    """The tuned penalties and the model. `tune_table` returns it.

    Losses are means of -log(probability), or half the mean squared errors.

    Fields:
        names: The feature, the layer or the model that each penalty belongs to.
        penalties: The tuned penalties.
        sizes: The size of the weights that each penalty acts on.
        valid_loss: The loss on the rows that the penalties are tuned on.
        test_loss: The loss on the test rows.
        test_accuracy: The share of the test rows that the model gets right. None if numbers are predicted.
        curve: The validation loss after each step.
        grid: The losses of single penalties, to compare with.
        state: The weights of the trained model.
        caution: The caution used. None for a single penalty and for an MLP.
        seconds: The time of the tuning and of the grid. Default: 0.
        notes: Sentences about the data and the tuning. Default: none.
        mode: The mode that tuned the model: "convex" for a linear model, else as in `tune`. Default: "convex".

    >>> from bilevel.data import Labelled
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> data = Labelled("toy", "arrays", x, y, classes=("no", "yes"), keys=[f"row {i}" for i in range(40)])
    >>> found = tune_table(data, "logistic", "single", folds=2, steps=2)
    >>> found.names, found.best.penalty > 0
    (('column 0', 'column 1', 'column 2'), True)
    """

    names: tuple[str, ...]
    penalties: Tensor
    sizes: Tensor
    valid_loss: float
    test_loss: float
    test_accuracy: float | None
    curve: list[float]
    grid: list[Point]
    state: dict[str, Tensor]
    caution: float | None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    mode: Mode = "convex"

    @property
    def best(self) -> Point:
        """Return the point of the grid with the least validation loss."""
        return least(self.grid)


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
    on_progress: OnProgress = lambda *_: None,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
) -> TunedTable:
    """Tune the penalties, train on all rows except the test rows, and try a grid of single penalties.

    Args:
        data: The data, from `load`, or from `load_numbers` to predict numbers.
        model: "logistic" for classes, "ridge" for numbers, or "mlp", a network with hidden layers, for both.
        penalty: "per-feature", "single" or, for an MLP, "per-layer".
        folds: The number of folds that linear models are tuned on, each held out in turn. Default: 5.
        caution: The price of a penalty that differs from the single one, for linear models. 0: none; 1: as under a
            normal prior. None (default): a part of the rows decides.
        steps: The largest number of steps of each stage. None (default): 100, or 1,000 for an MLP.
        seed: The seed of all random draws. Default: 0.
        callbacks: Callbacks of the bilevel run of a large MLP. Default: none.
        on_progress: A function that is called after each step as `on_progress(stage, done, total)`. By default nothing
            is called.
        device: The device on which the model is trained. Default: "cpu".
        checkpoint: A folder to write to, and to resume from if it holds a state. None (default): nothing is written.

    >>> from bilevel.data import Labelled
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> data = Labelled("toy", "arrays", x, y, classes=("no", "yes"), keys=[f"row {i}" for i in range(40)])
    >>> found = tune_table(data, "logistic", "per-feature", folds=2, caution=0, steps=2)
    >>> found.penalties.shape, 0 <= found.test_accuracy <= 1
    (torch.Size([3]), True)
    """
    began, notes, names = time.perf_counter(), list(data.notes), feature_names(data)
    if model != "mlp" and penalty == "per-layer":
        raise OptionError(f"penalty='per-layer' is for model='mlp'; {model} has one layer. Use 'per-feature'.")
    if model != "mlp" and (model == "logistic") != bool(data.classes):
        raise OptionError(f"model must be 'ridge' or 'mlp' for numbers, else 'logistic' or 'mlp'; got {model!r}.")
    data = replace(
        data, features=names, x=data.x.flatten(1), test=data.test and (data.test[0].flatten(1), data.test[1])
    )
    if data.test is None:
        data = _with_test(data, seed, keep=2)
        of_each = " of each class" if data.classes else ""
        notes.append(
            f"A fifth of the rows{of_each} ({len(data.part('test')[1]):,}) is held out to measure the test loss."
        )
    center, spread = (0.0, 1.0) if data.classes else _units(data.y)
    if not data.classes:
        kind = torch.float32 if model == "mlp" else torch.float64
        y, y_test = (((y - center) / spread).to(kind) for y in (data.y, data.part("test")[1]))
        data = replace(data, y=y, test=(data.part("test")[0], y_test))
    common: dict[str, Any] = {
        "seed": seed,
        "on_progress": on_progress,
        "device": torch.device(device),
        "checkpoint": checkpoint,
    }
    if model == "mlp":
        found = _network(data, penalty, steps, callbacks, unit=spread**2, **common)
    else:
        found = _linear(data, LOSSES[model], penalty == "single", folds, caution, steps or 100, **common)
    *_, weight, bias = found.state.values()  # of the last layer
    weight.mul_(spread)
    bias.mul_(spread).add_(center)
    return replace(
        found,
        sizes=found.sizes if model == "mlp" else spread * found.sizes,
        valid_loss=spread**2 * found.valid_loss,
        test_loss=spread**2 * found.test_loss,
        curve=[spread**2 * value for value in found.curve],
        grid=[Point(p.penalty, spread**2 * p.valid_loss, spread**2 * p.test_loss) for p in found.grid],
        notes=(*notes, *found.notes),
        seconds=time.perf_counter() - began,
    )


def feature_names(data: Labelled) -> tuple[str, ...]:
    """Return a name for each number of an input; for images, the places of the pixels."""
    if data.kind != "images":
        return data.features or tuple(f"column {j}" for j in range(data.x.shape[1]))
    _, channels, height, width = data.x.shape
    return tuple(
        f"row {i}, column {j}" + (f", channel {c}" if channels > 1 else "")
        for c in range(channels)
        for i in range(height)
        for j in range(width)
    )


def _with_test(data: Labelled, seed: int, keep: int) -> Labelled:
    """Move a fifth of the rows (of each class, if there are classes, leaving at least `keep`) into the test set."""
    if data.classes:
        return split_test(data, share=HELD_OUT, seed=seed, keep=keep)
    order = np.random.default_rng(seed).permutation(data.count)
    count = max(1, round(HELD_OUT * data.count))
    out, rest = torch.from_numpy(order[:count]), np.sort(order[count:])
    return replace(data.select(rest), test=(data.x[out], data.y[out]))


def _units(y: Tensor) -> tuple[float, float]:
    """Return the mean and the deviation of the numbers to predict."""
    if bool((y == y[0]).all()):
        raise DataError(f"the numbers to predict must vary outside the test set; all {len(y)} are {float(y[0]):g}.")
    center, spread = float(y.mean()), float(y.std())
    if not 1e-150 < spread < 1e150:
        raise DataError(
            f"the numbers to predict must have a deviation between 1e-150 and 1e150; got {spread:g}. Use another unit."
        )
    return center, spread


def _grid(
    penalties: np.ndarray,
    losses: Callable[[float], tuple[float, float]],
    on_progress: OnProgress,
    checkpoint: Path | None,
    identity: Settings,
) -> list[Point]:
    """Return the validation and test losses of single penalties; each is saved when it is known."""
    store, grid = None if checkpoint is None else ResultFolder(checkpoint / "grid"), []
    for k, penalty in enumerate(map(float, penalties)):
        cell = RunItem({"penalty": penalty, **identity}, 0)
        kept = None if store is None else store.get(cell)
        if kept is None:
            kept = dict(zip(("valid_loss", "test_loss"), losses(penalty), strict=True))
            if store is not None:
                store.put(cell, kept)
        grid.append(Point(penalty, **kept))
        on_progress("trying a grid", k + 1, len(penalties))
    return grid


def _linear(
    data: Labelled,
    loss: Loss,
    single: bool,
    folds: int,
    caution: float | None,
    steps: int,
    *,
    seed: int,
    on_progress: OnProgress,
    device: torch.device,
    checkpoint: Path | None,
) -> TunedTable:
    outputs = len(data.classes) if len(data.classes) > 2 else 1

    def rows_of(pair: Pair, fold: Tensor) -> Rows:
        y = pair[1].double() if outputs == 1 else pair[1]
        return Rows(pair[0].to(device, torch.float64), y.to(device), fold.to(device), loss, outputs)

    test = data.part("test")
    rows = rows_of((data.x, data.y), folds_of(data.y.numpy(), len(data.classes), folds, seed))
    others = rows_of(test, torch.full((len(test[1]),), -1))
    found, used = tune_cautiously(
        rows,
        penalty="single" if single else "per-feature",
        caution=caution,
        seed=seed,
        steps=steps,
        on_progress=lambda stage, done, value: on_progress(f"tuning {stage}", done, steps),
        checkpoint=checkpoint and checkpoint / "tuning",
    )
    unit = float(FoldedModel(rows).curvature.mean()) * data.count

    def losses(alpha: float) -> tuple[float, float]:
        each = torch.full_like(found.alpha, alpha)
        return held_out_loss(rows, each), loss_of(others, *trained(rows, each))

    identity = {} if checkpoint is None else {"rows": rows.digest(), "test": others.digest()}
    grid = _grid(unit * np.logspace(-5, 5, GRID), losses, on_progress, checkpoint, identity)
    notes = [NO_BETTER.format(folds=folds)] if used is None and not single else []
    found = _least(rows, found, grid, notes)
    right = None
    if loss == "logistic":
        scores = (others.x @ found.weight.T + found.bias).cpu()
        predicted = (scores[:, 0] > 0).long() if outputs == 1 else scores.argmax(1)
        right = float((predicted == test[1]).double().mean())
    return TunedTable(
        data.features,
        penalties=found.alpha.cpu(),
        sizes=found.weight.norm(dim=0).cpu(),
        valid_loss=found.valid_loss,
        test_loss=loss_of(others, found.weight, found.bias),
        test_accuracy=right,
        curve=found.path,
        grid=grid,
        state={"weight": found.weight.cpu(), "bias": found.bias.cpu()},
        caution=used,
        notes=tuple(notes),
    )


def _least(rows: Rows, found: LinearTuned, grid: Sequence[Point], notes: list[str]) -> LinearTuned:
    """Return what was found, or the best single penalty of the grid if its validation loss is lower."""
    best = least(grid)
    if not best.valid_loss < comparable(found.valid_loss):
        return found
    notes.append(GRID_WON.format(found.valid_loss, best.penalty, best.valid_loss))
    alpha = torch.full_like(found.alpha, best.penalty)
    weight, bias = trained(rows, alpha)
    return replace(found, alpha=alpha, weight=weight, bias=bias, valid_loss=best.valid_loss)


def _network(
    data: Labelled,
    penalty: Penalty,
    steps: int | None,
    callbacks: Sequence[Callback],
    *,
    unit: float,
    seed: int,
    on_progress: OnProgress,
    device: torch.device,
    checkpoint: Path | None,
) -> TunedTable:
    classes = len(data.classes) or None
    tuned_on, test = _with_test(replace(data, test=None), seed, keep=1), data.part("test")
    train, valid = (tuned_on.x, tuned_on.y), tuned_on.part("test")
    with seeded(seed):
        network = mlp(data.x.shape[1], (128,), classes or 1).to(device)
    decay, per_layer = WeightDecay(), WeightDecay(per="layer")
    kinds: dict[str, dict[str, Knob]] = {
        "per-feature": {"decay": decay, "penalty": FeaturePenalty(start=FeaturePenalty.low)},
        "per-layer": {"decay": per_layer},
        "single": {"decay": decay},
    }
    hyper, measured = kinds[penalty], TrainingLoss({}, classes)
    mode = mode_of(network, train, hyper, None, None, steps or STEPS)
    found = tune(
        network,
        train,
        valid,
        hyper,
        mode=mode,
        steps=steps,
        seed=seed,
        callbacks=callbacks if mode == "minibatch" else (),
        on_progress=on_progress,
        checkpoint=checkpoint,
        measure=lambda model: measured.measured({}, model, test),
    )
    grid = [
        Point(float(tried.values["decay"][0]), tried.valid_loss, tried.measured)
        for tried in found.candidates
        if tried.stage == START or tried.moved.startswith("decay")
    ]
    names, penalties, sizes = _penalised(network, found.values, data.features)
    return TunedTable(
        names,
        penalties=penalties,
        sizes=sizes,
        valid_loss=found.valid_loss,
        test_loss=measured.measured({}, network, test),
        test_accuracy=accuracy(network, test) if classes else None,
        curve=found.curve,
        grid=sorted(grid, key=lambda point: point.penalty),
        state={name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()},
        caution=None,
        notes=(comparison(found.candidates, unit),),
        mode=mode,
    )


def _penalised(
    network: nn.Module, values: dict[str, Tensor], features: tuple[str, ...]
) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Return what each penalty belongs to, the penalties, and the size of the weights that each acts on."""
    matrices = {name: p.detach().cpu() for name, p in network.named_parameters() if p.ndim > 1}
    sizes, decay = torch.stack([p.norm() for p in matrices.values()]), values["decay"]
    if "penalty" in values:
        first, *_ = matrices.values()
        names, each = (*features, "all later layers"), torch.cat([decay + values["penalty"], decay])
        return names, each, torch.cat([first.norm(dim=0), sizes[1:].norm()[None]])
    if len(decay) == 1:
        return ("all weights",), decay, sizes.norm()[None]
    return tuple(f"layer {name.rpartition('.')[0]}" for name in matrices), decay, sizes
