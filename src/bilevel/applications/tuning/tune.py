"""Tuning: continuous hyperparameters by gradient (the paper's Eq. 2).

    min over the hyperparameters of the loss on `valid`   subject to   the model minimises its training loss with them

The penalty method tunes on minibatches. The weights of that run have seen the validation data, so the model that is
returned is trained again from its first weights, with the tuned values. A single linear layer on data of moderate size
is tuned without minibatches: its training is convex, and `implicit_descent` keeps it at its minimum.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from bilevel import Callback, DataError, OptionError, Penalty, Solution, solve
from bilevel._util.checks import ShortRepr, check_counts, in_range, one_of
from bilevel.applications.training import evaluating, fit, loader, refuse_end
from bilevel.applications.tuning.hyperparameters import (
    Knob,
    LabelSmoothing,
    LossMix,
    Sizes,
    parameters_of,
    starts,
    values,
)
from bilevel.applications.tuning.implicit_descent import descend
from bilevel.applications.tuning.losses import OwnLoss, TrainingLoss
from bilevel.methods.base import Method
from bilevel.running.run_identity import claim, described, digest_of

# Inputs and targets (class indices, or numbers); in `train` also sources, if `SourceWeights` is used.
Examples = Sequence[Tensor | ArrayLike]
# Called with the stage, the steps done in it, and their number.
OnProgress = Callable[[str, int, int], object]
STEPS, CONVEX_STEPS = 1000, 60
# A linear layer is tuned without minibatches if its inputs times its outputs are at most this many numbers.
SMALL = 50_000_000
RATE = 1e-3
Mode = Literal["convex", "minibatch"]


@dataclass(frozen=True, repr=False)
class Tuned(ShortRepr):
    """The tuned hyperparameters and the trained model. `tune` returns it.

    Fields:
        values: The tuned values by the names of their knobs.
        model: The model that was passed, trained on `train` only.
        curve: The validation loss after each step; on minibatches, of a batch, with the weights of the run.
        valid_loss: The validation loss of `model`.
        mode: "convex" or "minibatch".
        seconds: The time of the tuning and of the final training.
        solution: The `Solution` of the bilevel run. Default: None, in the mode "convex".
        settings: The options that were used. Default: empty.

    >>> x = torch.randn(40, 3)
    >>> y = x[:, 0]
    >>> found = tune(nn.Linear(3, 1), (x[:30], y[:30]), (x[30:], y[30:]), {"decay": WeightDecay()}, steps=5)
    >>> found.mode, found.valid_loss > 0
    ('convex', True)
    """

    values: dict[str, Tensor]
    model: nn.Module
    curve: list[float]
    valid_loss: float
    mode: Mode
    seconds: float
    solution: Solution | None = None
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
    on_progress: OnProgress | None = None,
    engine: str = "auto",
    log_every: int | None = None,
    checkpoint: str | Path | None = None,
) -> Tuned:
    """Tune the hyperparameters on `valid`, then train `model` in place on `train` with them.

    Args:
        model: The model with its first weights.
        train: (inputs, targets). Whole numbers are classes, and the loss is the cross-entropy; other targets are
            numbers, and the loss is half the squared error. With `SourceWeights`, a third entry has the source of each
            example.
        valid: (inputs, targets) to tune on; the model is not trained on them.
        hyper: The knobs by name, such as `{"decay": WeightDecay()}`.
        loss: A function (values, model, batch) that replaces the part of the training loss that depends on data. None
            (default): the usual loss.
        valid_loss: The same for the loss on `valid`. None (default): the usual loss.
        mode: "convex", without minibatches, or "minibatch". None (default): "convex" for a single linear layer on data
            of moderate size.
        method: The method of the bilevel run, only in the mode "minibatch". None (default):
            `Penalty(cotangent="same", decay="linear")`.
        steps: The number of tuning steps. None (default): 1,000, or 60 in the mode "convex".
        final_steps: The number of steps of the final training, only in the mode "minibatch". None (default): `steps`.
        batch: The number of examples in a batch, only in the mode "minibatch". Default: 100.
        rate: The learning rate of the final training, only in the mode "minibatch". None (default): the rate that the
            default method chose, or 1e-3 with a `method`.
        seed: The seed of all random draws. Default: 0.
        callbacks: Callbacks of the bilevel run, only in the mode "minibatch". Default: none.
        on_progress: A function that is called after each step as `on_progress(stage, done, total)`. None (default):
            nothing is called.
        engine: What runs the steps, as in `solve`, only in the mode "minibatch". Default: "auto".
        log_every: The number of steps between calls of the callbacks. None (default): as in `solve`.
        checkpoint: A folder to write to, and to resume from if it holds a state of the same tuning. None (default):
            nothing is written.

    >>> x = torch.randn(40, 3)
    >>> y = x[:, 0]
    >>> found = tune(nn.Linear(3, 1), (x[:30], y[:30]), (x[30:], y[30:]), {"decay": WeightDecay()}, steps=5)
    >>> found.values["decay"].shape
    torch.Size([1])
    """
    began = time.perf_counter()
    like = next(model.parameters())
    columns, kept = _columns(train, "train", like.dtype), _columns(valid, "valid", like.dtype)
    objective, u = _objective(model, columns, kept, hyper, loss, valid_loss)
    one_of("mode", mode, ("convex", "minibatch"), optional=True)
    if mode == "convex" and method is not None:
        raise OptionError("method is for mode='minibatch'; leave it out, or pass that mode.")
    if mode is None:
        mode = "convex" if method is None and loss is None and _convex(model, columns, hyper) else "minibatch"
    check_counts(steps=steps, final_steps=final_steps, batch=batch)
    in_range("rate", rate, above=0)
    count, on_progress = steps or (CONVEX_STEPS if mode == "convex" else STEPS), on_progress or (lambda *_: None)
    folder, task = None if checkpoint is None else Path(checkpoint), dict[str, Any]()
    if folder is not None:
        task = {
            "examples": digest_of([*columns, *kept]),
            "mode": mode,
            "loss": [described(loss), described(valid_loss)],
            "hyper": {name: described(knob) for name, knob in hyper.items()},
        }
        claim(folder, task)
    options: dict[str, Any] = {"callbacks": callbacks, "engine": engine, "log_every": log_every, "seed": seed}
    place = folder and folder / "tuning"
    curve, solution = _tune(
        mode, objective, u, model, columns, kept, method, count, batch, on_progress, place, task, options
    )
    tuned = {name: value.detach().cpu() for name, value in values(hyper, u).items()}
    size, final = sum(t.numel() for t in u.values()), final_steps or count
    settings: dict[str, Any] = {"batch": batch, "seed": seed, "hyper_parameters": size, "steps": count}
    if solution is not None:
        if rate is None:
            rate = max(solution.history["lower_rate"]) if method is None and len(solution.history) else RATE
        settings |= {"final_steps": final, "rate": rate}
        options = {"steps": final, "batch": batch, "rate": rate, "seed": seed + 1}
        options["on_progress"] = lambda done: on_progress("training", done, final)
        train_with(objective, tuned, model, columns, checkpoint=folder and folder / "training", **options)
    loss_on_valid = objective.measured(tuned, model, kept)
    return Tuned(tuned, model, curve, loss_on_valid, mode, time.perf_counter() - began, solution, settings)


def _tune(
    mode: Mode,
    objective: TrainingLoss,
    u: dict[str, Tensor],
    model: nn.Module,
    columns: Sequence[Tensor],
    kept: Sequence[Tensor],
    method: Method | None,
    count: int,
    batch: int,
    on_progress: OnProgress,
    checkpoint: Path | None,
    task: dict[str, Any],
    options: dict[str, Any],
) -> tuple[list[float], Solution | None]:
    """Tune u, with a copy of the model on minibatches; return the validation loss after each step and the solution."""
    if mode == "convex":
        curve = descend(
            objective.problem(columns, kept),
            u,
            model,
            max_steps=count,
            tolerance=1e-6,
            on_progress=lambda done, value: on_progress("tuning", done, count),
            checkpoint=checkpoint,
            task=task | {"steps": count},
        )
        return curve, None
    solution = solve(
        objective.problem(),
        method or Penalty(cotangent="same", decay="linear"),
        u,
        copy.deepcopy(model),
        (loader(kept, batch), loader(columns, batch)),
        max_steps=count,
        hypergradient=False,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
        **options,
    )
    refuse_end(solution, "tuning", ". Scale the inputs, narrow the ranges of `hyper`, or use another method.")
    return solution.history["upper"], solution


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
    on_progress: Callable[[int], object] | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train the model in place with these values of the hyperparameters; the options are passed to `fit`."""
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
        on_progress=on_progress,
        loss=loss,
        checkpoint=checkpoint,
    )


def _convex(model: nn.Module, columns: Sequence[Tensor], hyper: Mapping[str, Knob]) -> bool:
    """Return True if the model is one linear layer, the same for every batch, and the data is of moderate size."""
    layers = [m for m in model.modules() if not list(m.children())]
    linear = [m for m in layers if isinstance(m, nn.Linear)]
    return (
        all(isinstance(m, (nn.Linear, nn.Flatten, nn.Identity)) for m in layers)
        and len(linear) == 1
        and all(type(knob).inputs is Knob.inputs and type(knob).losses is Knob.losses for knob in hyper.values())
        and next(model.parameters()).device.type == "cpu"
        and columns[0].numel() * linear[0].out_features <= SMALL
    )


def _columns(given: Examples, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return inputs in `dtype`, targets as indices or in `dtype`, and sources, all on the CPU."""
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise DataError(f"{name} must be (inputs, targets), or (inputs, targets, sources); got {type(given).__name__}.")
    try:
        found = [c if isinstance(c, Tensor) else torch.from_numpy(np.ascontiguousarray(c)) for c in given]
    except TypeError:
        raise DataError(f"{name} must hold numbers, the labels as class indices.") from None
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


def _objective(
    model: nn.Module,
    train: Sequence[Tensor],
    valid: Sequence[Tensor],
    hyper: Mapping[str, Knob],
    loss: OwnLoss | None,
    valid_loss: OwnLoss | None,
) -> tuple[TrainingLoss, dict[str, Tensor]]:
    """Check the data, the knobs and the model; return the training loss and the free variables at their start."""
    numbers = train[1].is_floating_point()
    if not isinstance(hyper, Mapping) or not hyper:
        raise OptionError(f"hyper must name at least one knob, as {{'decay': WeightDecay()}}; got {hyper!r}.")
    for name, knob in hyper.items():
        if not isinstance(knob, Knob):
            raise OptionError(f"hyper[{name!r}] must be a knob such as WeightDecay(); got {knob!r}.")
    if numbers and any(isinstance(knob, LabelSmoothing) for knob in hyper.values()):
        raise OptionError("LabelSmoothing needs class labels; the targets are numbers.")
    if sum(isinstance(knob, LossMix) for knob in hyper.values()) > 1:
        raise OptionError("hyper can name only one LossMix; put all losses into its `mixed`.")
    if train[0].shape[1:] != valid[0].shape[1:]:
        shapes = tuple(train[0].shape[1:]), tuple(valid[0].shape[1:])
        raise DataError(f"train and valid must have inputs of one shape; got {shapes[0]} and {shapes[1]}.")
    if numbers != valid[1].is_floating_point():
        raise DataError("train and valid must both have class labels, or both numbers as targets.")
    classes = None
    if loss is None:
        with evaluating(model), torch.no_grad():  # batch normalisation must not learn from this check
            scores = model(train[0][:2].to(next(model.parameters()).device))
        if numbers and scores.numel() != len(scores):
            raise DataError(f"a model of numbers must give one for each example; got shape {tuple(scores.shape)}.")
        classes = None if numbers else scores.shape[-1]
    for name, y in (("train", train[1]), ("valid", valid[1])):
        if classes is not None and not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise DataError(
                f"the labels of {name} must be 0 to {classes - 1}, as the model has {classes} scores; got "
                f"{int(y.min())} to {int(y.max())}."
            )
    sources = int(train[2].max()) + 1 if len(train) > 2 else 0
    sizes = Sizes(parameters_of(model), train[0][0].numel(), classes, sources)
    return TrainingLoss(dict(hyper), classes, loss, valid_loss), starts(hyper, sizes, next(model.parameters()))
