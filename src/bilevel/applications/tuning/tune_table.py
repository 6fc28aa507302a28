"""Tune the penalties of a linear model or an MLP on a labelled data set, next to a grid of single penalties.

Without a test set, a fifth of the rows of each class is held out from all training. Linear models are tuned on folds;
for an MLP a fifth of the remaining rows is held out to tune on. For the training, numbers to predict are scaled to mean
0 and deviation 1, and the penalties of an MLP refer to this scale; the losses and the weights that are returned are in
the units of the data.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel._util.random_state import seeded
from bilevel.applications.networks import mlp
from bilevel.applications.training import accuracy
from bilevel.applications.tuning.caution import loss_of, tune_cautiously
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Loss, Rows, folds_of
from bilevel.applications.tuning.hyperparameters import FeaturePenalty, Knob, WeightDecay, parameters_of
from bilevel.applications.tuning.linear_tuning import LinearTuned, held_out_loss, trained, tune_linear
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
LOSSES: dict[str, Loss] = {"ridge": "squared", "logistic": "logistic"}
GRID, NETWORK_GRID = 11, 5
"""The number of penalties in the grid, for linear models and for networks."""
LEAST = 1e-150
"""The least deviation of the numbers to predict."""
DECADES = 5.0
"""The powers of ten that the grid reaches below and above the middle of the single penalty's range."""
Tell = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Point:
    """A single penalty of the grid."""

    penalty: float
    valid_loss: float
    test_loss: float


@dataclass(frozen=True)
class TunedTable:
    """The tuned penalties and the model. Losses are means of -log(probability), or half the mean squared errors."""

    names: tuple[str, ...]
    """The feature, the layer or the model that each penalty belongs to."""
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
        """Return the point of the grid with the least validation loss."""
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
    """Tune the penalties, train on all rows except the test rows, and try a grid of single penalties.

    - `model`: "logistic", "ridge" or "mlp"; `penalty`: "per-feature", "single" or, for an MLP, "per-layer".
    - `folds`, `caution`: for linear models; if `caution` is None, the rows decide it.
    - `steps`: the most steps of each stage, by default 100, or 1,000 for an MLP.
    - `callbacks` are passed to `solve`; `tell(stage, done, total)` is called as the tuning goes on.
    - `checkpoint`: a folder to write to, and to resume from if it holds a state.

    >>> from bilevel.data import load
    >>> tune_table(load("digits"), "logistic", "per-feature").test_accuracy  # doctest: +SKIP
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
        of_each = " of each class" if data.classes else ""
        notes.append(
            f"A fifth of the rows{of_each} ({len(data.part('test')[1]):,}) is held out to measure the test loss."
        )
    center, spread = (0.0, 1.0) if data.classes and model != "ridge" else _units(data.y)
    run = _Run(data, penalty, seed, notes, tell, torch.device(device), checkpoint, center, spread, time.perf_counter())
    return _network(run, steps, callbacks) if model == "mlp" else _linear(run, model, folds, caution, steps or 100)


def feature_names(data: Labelled) -> tuple[str, ...]:
    """Return a name for each number of an input; for images, the places of the pixels."""
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
    if not LEAST < spread < 1 / LEAST:
        raise DataError(
            f"the numbers to predict must have a deviation between {LEAST:g} and {1 / LEAST:g}; got {spread:g}. Use "
            "another unit."
        )
    return center, spread


@dataclass(frozen=True)
class _Run:
    """What linear models and networks share: the data, the units of the numbers to predict, and where states are kept.

    `center` and `spread` are the mean and the deviation of the numbers to predict; losses are measured in their units.
    """

    data: Labelled
    penalty: Penalty
    seed: int
    notes: list[str]
    tell: Tell
    device: torch.device
    checkpoint: Path | None
    center: float
    spread: float
    began: float

    def grid(
        self, penalties: np.ndarray, losses: Callable[[float], tuple[float, float]], identity: Settings
    ) -> list[Point]:
        """Return the validation and test losses of single penalties; each is kept as soon as it is known."""
        store, grid = None if self.checkpoint is None else ResultFolder(self.checkpoint / "grid"), []
        for k, penalty in enumerate(map(float, penalties)):
            cell = RunItem({"penalty": penalty, **identity}, 0)
            kept = None if store is None else store.get(cell)
            if kept is None:
                on_valid, on_test = losses(penalty)
                kept = {"valid_loss": self.spread**2 * on_valid, "test_loss": self.spread**2 * on_test}
                if store is not None:
                    store.put(cell, kept)
            grid.append(Point(penalty, kept["valid_loss"], kept["test_loss"]))
            self.tell("trying a grid", k + 1, len(penalties))
        return grid

    def table(self, valid_loss: float, test_loss: float, curve: Sequence[float], **found: Any) -> TunedTable:
        """Return the result, with losses in the units of the data."""
        return TunedTable(
            valid_loss=self.spread**2 * valid_loss,
            test_loss=self.spread**2 * test_loss,
            curve=[self.spread**2 * value for value in curve],
            seconds=time.perf_counter() - self.began,
            notes=tuple(self.notes),
            **found,
        )


def _linear(run: _Run, model: Kind, folds: int, caution: float | None, steps: int) -> TunedTable:
    data, test, loss = run.data, run.data.part("test"), LOSSES[model]
    outputs = len(data.classes) if len(data.classes) > 2 else 1

    def rows_of(pair: Pair, fold: Tensor) -> Rows:
        y = (pair[1].double() - run.center) / run.spread if outputs == 1 else pair[1]
        return Rows(pair[0].to(run.device, torch.float64), y.to(run.device), fold.to(run.device), loss, outputs)

    rows = rows_of((data.x, data.y), folds_of(data.y.numpy(), len(data.classes), folds, run.seed))
    others = rows_of(test, torch.full((len(test[1]),), -1))
    found, used = _tune_rows(run, rows, folds, caution, steps)
    unit = float(FoldedModel(rows).curvature.mean()) * data.count

    def losses(alpha: float) -> tuple[float, float]:
        each = torch.full_like(found.alpha, alpha)
        return held_out_loss(rows, each), loss_of(others, *trained(rows, each))

    identity = {} if run.checkpoint is None else {"rows": rows.digest(), "test": others.digest()}
    accuracy = None
    if model == "logistic":
        scores = (others.x @ found.weight.T + found.bias).cpu()
        predicted = (scores[:, 0] > 0).long() if outputs == 1 else scores.argmax(1)
        accuracy = float((predicted == test[1]).double().mean())
    state = {"weight": run.spread * found.weight.cpu(), "bias": run.center + run.spread * found.bias.cpu()}
    return run.table(
        found.valid_loss,
        loss_of(others, found.weight, found.bias),
        found.path,
        names=data.features,
        penalties=found.alpha.cpu(),
        sizes=state["weight"].norm(dim=0),
        test_accuracy=accuracy,
        grid=run.grid(unit * np.logspace(-DECADES, DECADES, GRID), losses, identity),
        state=state,
        caution=used,
    )


def _tune_rows(
    run: _Run, rows: Rows, folds: int, caution: float | None, steps: int
) -> tuple[LinearTuned, float | None]:
    """Return the tuned penalties and the caution used: None if there is a single penalty."""

    def watch(stage: str, done: int, value: float) -> None:
        run.tell(f"tuning {stage}", done, steps)

    options: dict[str, Any] = {
        "steps": steps,
        "watch": watch,
        "checkpoint": run.checkpoint and run.checkpoint / "tuning",
    }
    if run.penalty == "single":
        found, caution = tune_linear(rows, penalty="single", **options), None
    elif caution is not None:
        found = tune_linear(rows, caution=caution, **options)
    else:
        found, caution = tune_cautiously(rows, seed=run.seed, **options)
        if caution is None:
            run.notes.append(
                f"On rows that the tuning did not see, penalties for each feature, tuned on {folds} folds, are not "
                "better than a single penalty beyond chance. The single penalty is given here; --caution 1 or 0 gives "
                "one penalty for each feature all the same."
            )
    if found.interrupted:
        raise KeyboardInterrupt
    return found, caution


def _network(run: _Run, steps: int | None, callbacks: Sequence[Callback]) -> TunedTable:
    data, checkpoint, seed = run.data, run.checkpoint, run.seed
    classes = len(data.classes) or None
    tuned_on = _with_test(replace(data, test=None), seed, keep=1)

    def pair(given: Pair) -> Pair:
        return given[0], given[1] if classes else ((given[1] - run.center) / run.spread).float()

    train, valid, test = pair((tuned_on.x, tuned_on.y)), pair(tuned_on.part("test")), pair(data.part("test"))
    with seeded(seed):
        network = mlp(data.x.shape[1], (128,), classes or 1).to(run.device)
    first = copy.deepcopy(network)
    per: Literal["layer", "model"] = "layer" if run.penalty == "per-layer" else "model"
    knob: Knob = FeaturePenalty(high=10.0) if run.penalty == "per-feature" else WeightDecay(per=per)
    found = tune(
        network,
        train,
        valid,
        {"penalty": knob},
        steps=steps,
        seed=seed,
        callbacks=callbacks,
        mode="minibatch",
        watch=run.tell,
        checkpoint=checkpoint,
    )
    single = WeightDecay()
    objective, used = TrainingLoss({"penalty": single}, classes), found.settings

    def losses(decay: float) -> tuple[float, float]:
        rival, value = copy.deepcopy(first), {"penalty": torch.tensor([decay])}
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
        return objective.measured(value, rival, valid), objective.measured(value, rival, test)

    identity = {} if checkpoint is None else {"rate": used["rate"], "examples": digest_of([*train, *valid, *test])}
    penalties = np.logspace(np.log10(single.low), np.log10(single.high), NETWORK_GRID)
    names, sizes = _penalised(network, knob, data.features)
    return run.table(
        found.valid_loss,
        objective.measured({}, network, test),
        found.curve,
        names=names,
        penalties=found.values["penalty"],
        sizes=sizes.detach().cpu(),
        test_accuracy=accuracy(network, test) if classes else None,
        grid=run.grid(penalties, losses, identity),
        state=_state_in_units(network, run.center, run.spread),
        caution=None,
    )


def _penalised(network: nn.Module, knob: Knob, features: tuple[str, ...]) -> tuple[tuple[str, ...], Tensor]:
    """Return what each penalty belongs to, and the size of the weights that it acts on."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    if not isinstance(knob, WeightDecay):
        return features, matrices[0].norm(dim=0)
    sizes = torch.stack([p.norm() for p in matrices])
    if knob.per == "model":
        return ("all weights",), sizes.norm()[None]
    return tuple(f"layer {name}" for name in knob.groups(parameters_of(network))), sizes


@torch.no_grad()
def _state_in_units(network: nn.Module, center: float, spread: float) -> dict[str, Tensor]:
    """Return the weights of the network that predicts in the units of the data."""
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    last.weight *= spread
    last.bias.mul_(spread).add_(center)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
