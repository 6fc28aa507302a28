"""Tuning: continuous hyper-parameters by gradient (the paper's Eq. 2).

    min over the hyper-parameters of the loss on `valid`   subject to   the model minimises its training loss with them

On minibatches by the penalty method; the weights of that run have seen the validation data, so that the model that is
handed out is trained anew, from its first weights, with the tuned values. A single linear layer on data of moderate
size is tuned without minibatches: its training is convex, and is kept at its minimum (see `nested`).
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel._util.atomic_files import write_whole
from bilevel._util.checks import in_range, one_of
from bilevel.applications.training import fit
from bilevel.applications.tuning.hyperparameters import (
    Knob,
    LabelSmoothing,
    LossMix,
    Sizes,
    parameters_of,
    starts,
    values,
)
from bilevel.applications.tuning.implicit_descent import Place, descend
from bilevel.applications.tuning.losses import OwnLoss, TrainingLoss
from bilevel.errors import DataError, OptionError, ProblemError
from bilevel.methods.base import Method
from bilevel.methods.penalty import Penalty
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback
from bilevel.running.run_identity import compare, described, digest_of
from bilevel.running.solve import solve

Examples = Sequence[Tensor | ArrayLike]
"""Inputs and targets: indices of classes, or numbers; of `train` also sources, where a knob asks for them."""
STEPS, CONVEX_STEPS = 1000, 60
SMALL = 50_000_000
"""Numbers of the inputs times outputs of a linear layer up to which it is tuned without minibatches."""
RATE = 1e-3
Mode = Literal["convex", "minibatch"]


@dataclass(frozen=True)
class Tuned:
    """The tuned values by the names of their knobs, the trained model, and the path there."""

    values: dict[str, Tensor]
    model: nn.Module
    curve: list[float]
    """The validation loss after each step: on minibatches that of a batch, seen by the weights of the run."""
    valid_loss: float
    """Of the model that is handed out, which was trained on `train` alone."""
    mode: Mode
    seconds: float
    solution: Solution | None = None
    """Of the penalty method; None in the mode `convex`."""
    settings: dict[str, Any] = field(default_factory=dict)


def tune(
    model: nn.Module,
    train: Examples,
    valid: Examples,
    hyper: Mapping[str, Knob],
    *,
    loss: OwnLoss | None = None,
    valid_loss: OwnLoss | None = None,
    mode: Mode | None = None,
    method: Method | None = None,
    steps: int | None = None,
    final_steps: int | None = None,
    batch: int = 100,
    rate: float | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    watch: Callable[[str, int, int], object] | None = None,
    engine: str = "auto",
    log_every: int | None = None,
    checkpoint: str | Path | None = None,
) -> Tuned:
    """Tune the hyper-parameters on `valid`, and train `model` in place on `train` with them.

    `hyper` names knobs: see `knobs`. Targets that are whole numbers are classes, and the loss is the cross-entropy; of
    others it is half of the squared error. `loss(values, model, batch)` replaces the part of the training loss that
    depends on data, and `valid_loss(values, model, batch)` the loss on `valid`. `mode` is `convex` for a single linear
    layer on data of moderate size, and `minibatch` else. `method`, `batch`, `rate`, `callbacks`, `engine` and
    `log_every` are for `minibatch`, the last two as in `solve`: `rate` is that of the final training, None the one that
    the penalty method chose. `steps` are those of the tuning, None 1,000, and 60 in `convex`; `final_steps` None as
    many. `watch` is told the stage, the steps done in it, and their number. A `checkpoint` folder is written to, and
    gone on from where it holds a state.
    """
    began = time.perf_counter()
    like = next(model.parameters())
    columns = _columns(train, "train", like.dtype)
    kept = _columns(valid, "valid", like.dtype)
    objective, sizes = _objective(model, columns, kept, hyper, loss, valid_loss)
    for name, value in {"steps": steps, "final_steps": final_steps, "batch": batch}.items():
        in_range(name, value, least=1, whole=True)
    in_range("rate", rate, above=0)
    one_of("mode", mode, ("convex", "minibatch"), optional=True)
    if mode is None:
        mode = "convex" if method is None and loss is None and _convex(model, columns, hyper) else "minibatch"
    if mode == "convex" and method is not None:
        raise OptionError("method is for mode='minibatch'; leave it out, or pass that mode.")
    folder = None if checkpoint is None else Path(checkpoint)
    task: dict[str, Any] = {}
    if folder is not None:
        task = {
            "examples": digest_of([*columns, *kept]),
            "mode": mode,
            "loss": [described(loss), described(valid_loss)],
        }
        task["hyper"] = {name: described(knob) for name, knob in hyper.items()}
        _claim(folder, task)
    u = starts(hyper, sizes, like)
    settings = {"batch": batch, "seed": seed, "hyper_parameters": sum(t.numel() for t in u.values())}
    if mode == "convex":
        count = steps or CONVEX_STEPS
        problem = objective.problem(columns, kept)
        found = descend(
            problem,
            u,
            model,
            max_steps=count,
            tolerance=1e-6,
            watch=watch and (lambda done, value: watch("tuning", done, count)),
            place=None if folder is None else Place(folder / "tuning", task | {"steps": count}),
        )
        if found.interrupted:
            raise KeyboardInterrupt
        tuned = _detached(hyper, u)
        return Tuned(
            tuned,
            model,
            found.path,
            objective.measured(tuned, model, kept),
            mode,
            time.perf_counter() - began,
            settings=settings | {"steps": count},
        )
    count, size = steps or STEPS, min(batch, len(columns[1]))
    v = copy.deepcopy(model)
    data = (
        DataLoader(TensorDataset(*kept), min(batch, len(kept[1])), shuffle=True, drop_last=True),
        DataLoader(TensorDataset(*columns), size, shuffle=True, drop_last=True),
    )
    solution = solve(
        objective.problem(),
        method or Penalty(),
        u,
        v,
        data,
        max_steps=count,
        seed=seed,
        hypergradient=False,
        callbacks=callbacks,
        engine=engine,
        log_every=log_every,
        checkpoint=folder and folder / "tuning",
        resume=folder is not None,
    )
    if solution.interrupted:
        raise KeyboardInterrupt
    if solution.status is Status.DIVERGED:
        raise ProblemError(
            f"the tuning diverged after {solution.steps} steps. Scale the inputs, narrow the ranges of `hyper`, or use "
            "another method."
        )
    tuned = _detached(hyper, u)
    total = final_steps or count
    if rate is None:
        rate = max(solution.history["lower_rate"]) if method is None and len(solution.history) else RATE
    train_with(
        objective,
        tuned,
        model,
        columns,
        steps=total,
        batch=size,
        rate=rate,
        seed=seed + 1,
        watch=watch and (lambda done: watch("training", done, total)),
        checkpoint=folder and folder / "training",
    )
    return Tuned(
        tuned,
        model,
        solution.history["upper"],
        objective.measured(tuned, model, kept),
        mode,
        time.perf_counter() - began,
        solution,
        settings=settings | {"steps": count, "final_steps": total, "rate": rate},
    )


def train_with(
    objective: TrainingLoss,
    tuned: Mapping[str, Tensor],
    model: nn.Module,
    columns: Sequence[Tensor],
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    watch: Callable[[int], object] | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train the model in place with hyper-parameters of these values; `checkpoint` is that of `fit`."""
    device = next(model.parameters()).device
    held = {name: value.to(device) for name, value in tuned.items()}
    rest = [column.to(device) for column in columns[1:]]

    def loss(model: nn.Module, x: Tensor, row: Tensor, w: Tensor) -> Tensor:
        return objective(held, model, (x, *(column[row] for column in rest)))

    fit(
        model,
        columns[0],
        torch.arange(len(columns[0])),
        steps=steps,
        batch=batch,
        rate=rate,
        seed=seed,
        watch=watch,
        loss=loss,
        checkpoint=checkpoint,
    )


def _claim(folder: Path, task: dict[str, Any]) -> None:
    """Write to the folder what makes a tuning this one; a folder of another is refused."""
    place = folder / "task.json"
    if place.exists():
        try:
            before = json.loads(place.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        compare(before if isinstance(before, dict) else {}, task, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(task) + "\n")


def _detached(hyper: Mapping[str, Knob], u: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values(hyper, u).items()}


def _convex(model: nn.Module, columns: Sequence[Tensor], hyper: Mapping[str, Knob]) -> bool:
    """Whether the model is one linear layer, the same for every batch, and the data of moderate size."""
    layers = [m for m in model.modules() if not list(m.children())]
    plain = all(isinstance(m, (nn.Linear, nn.Flatten, nn.Identity)) for m in layers)
    linear = [m for m in layers if isinstance(m, nn.Linear)]
    still = all(type(knob).inputs is Knob.inputs and type(knob).losses is Knob.losses for knob in hyper.values())
    on_cpu = next(model.parameters()).device.type == "cpu"
    small = columns[0].numel() * (linear[0].out_features if linear else 1) <= SMALL
    return plain and still and on_cpu and small and len(linear) == 1


def _columns(given: Examples, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of this type, targets as indices or as numbers of this type, sources; on the CPU."""
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise DataError(f"{name} must be (inputs, targets), or (inputs, targets, sources); got {type(given).__name__}.")
    try:
        found = [c if isinstance(c, Tensor) else torch.from_numpy(np.ascontiguousarray(c)) for c in given]
    except TypeError:
        raise DataError(f"{name} must hold numbers, the labels as indices of classes.") from None
    x, y = found[0].detach().to("cpu", dtype), found[1].detach().cpu()
    if x.ndim < 2 or not len(x):
        raise DataError(f"the inputs of {name} must have a row for each example; got shape {tuple(x.shape)}.")
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(f"{name} must have one target for each of {len(x)} inputs; got shape {tuple(y.shape)}.")
    y = y.to(dtype) if y.is_floating_point() else y.long()
    if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(y).all()):
        raise DataError(f"{name} must be finite; it holds NaN or infinity.")
    rest = [column.detach().cpu().long() for column in found[2:]]
    if rest and (rest[0].shape != y.shape or int(rest[0].min()) < 0):
        raise DataError(f"the sources of {name} must be numbers from 0 on, one for each example.")
    return [x, y, *rest]


@torch.no_grad()
def _scores(model: nn.Module, x: Tensor) -> Tensor:
    """In evaluation mode, in which layers such as batch normalisation learn nothing."""
    training = model.training
    model.eval()
    scores: Tensor = model(x.to(next(model.parameters()).device))
    model.train(training)
    return scores


def _objective(
    model: nn.Module,
    train: Sequence[Tensor],
    valid: Sequence[Tensor],
    hyper: Mapping[str, Knob],
    loss: OwnLoss | None,
    valid_loss: OwnLoss | None,
) -> tuple[TrainingLoss, Sizes]:
    if not isinstance(hyper, Mapping) or not hyper:
        raise OptionError(f"hyper must name at least one knob, as {{'decay': WeightDecay()}}; got {hyper!r}.")
    for name, knob in hyper.items():
        if not isinstance(knob, Knob):
            raise OptionError(f"hyper[{name!r}] must be a knob such as WeightDecay(); got {knob!r}.")
    if train[0].shape[1:] != valid[0].shape[1:]:
        shapes = tuple(train[0].shape[1:]), tuple(valid[0].shape[1:])
        raise DataError(f"train and valid must have inputs of one shape; got {shapes[0]} and {shapes[1]}.")
    if train[1].is_floating_point() != valid[1].is_floating_point():
        raise DataError("train and valid must both have labels of classes, or both numbers as targets.")
    if train[1].is_floating_point() and any(isinstance(knob, LabelSmoothing) for knob in hyper.values()):
        raise OptionError("LabelSmoothing needs labels of classes; the targets are numbers.")
    if sum(isinstance(knob, LossMix) for knob in hyper.values()) > 1:
        raise OptionError("hyper may name one LossMix; put all losses into its `mixed`.")
    classes = None
    if loss is None:
        scores = _scores(model, train[0][:2])
        if train[1].is_floating_point() and scores.numel() != len(scores):
            raise DataError(f"a model of numbers must give one for each example; got shape {tuple(scores.shape)}.")
    if loss is None and not train[1].is_floating_point():
        classes = scores.shape[-1]
        for name, y in (("train", train[1]), ("valid", valid[1])):
            if not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise DataError(
                    f"the labels of {name} must be 0 to {classes - 1}, as the model has {classes} scores; got "
                    f"{int(y.min())} to {int(y.max())}."
                )
    sources = int(train[2].max()) + 1 if len(train) > 2 else 0
    sizes = Sizes(parameters_of(model), train[0][0].numel(), classes, sources)
    return TrainingLoss(dict(hyper), classes, loss, valid_loss), sizes
