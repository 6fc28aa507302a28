"""What `tune` is given: examples as tensors, the training loss, and the free variables at their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from bilevel import DataError, OptionError
from bilevel.applications.training import evaluating
from bilevel.applications.tuning.hyperparameters import LabelSmoothing, LossMix, parameters_of, starts
from bilevel.applications.tuning.knob import Knob, Sizes
from bilevel.applications.tuning.losses import OwnLoss, TrainingLoss

# Inputs and targets (class indices, or numbers); in `train` also sources, if `SourceWeights` is used.
Examples = Sequence[Tensor | ArrayLike]


def columns_of(given: Examples, name: str, dtype: torch.dtype) -> list[Tensor]:
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


def objective_of(
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
