"""Training and trusted examples as tensors, with errors that name the fault in them or in the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from bilevel._util.checks import agreeing, counted
from bilevel.applications.training import probabilities
from bilevel.data import Pair
from bilevel.errors import DataError, OptionError, reason

# Inputs and labels, or a torch Dataset of (input, label).
Examples = tuple[Tensor | ArrayLike, Tensor | ArrayLike] | Dataset[Any]
# What a module raises on inputs that it does not take.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)


def with_trusted(train: Examples, trusted: Examples, model: nn.Module) -> tuple[Pair, Pair, int]:
    """Return both parts on the CPU, the labels as int64, and the number of classes that the model has scores for."""
    if (first := next(model.parameters(), None)) is None:
        raise OptionError("model must have parameters; this module has none.")
    (x, y), (x_trusted, y_trusted) = examples(train, "train"), examples(trusted, "trusted")
    if not len(y):
        raise DataError("train must have at least one example; got none.")
    if x.shape[1:] != x_trusted.shape[1:]:
        shapes = tuple(x.shape[1:]), tuple(x_trusted.shape[1:])
        raise DataError(f"train and trusted must have inputs of one shape; got {shapes[0]} and {shapes[1]}.")
    # Integers stay integers if the model takes nothing else, as an embedding.
    whole = not (x.is_floating_point() or x_trusted.is_floating_point() or _takes(model, x[:2].to(first.dtype)))
    kind = torch.int64 if whole and _takes(model, x[:2].long()) else first.dtype
    x, x_trusted = _finite(x.to(kind), "train"), _finite(x_trusted.to(kind), "trusted")
    try:
        classes = probabilities(model, x[:2]).shape[1]
    except FAILURES as error:
        raise OptionError(
            f"model must take inputs of shape {tuple(x.shape[1:])} and give one score for each class; it fails: "
            f"{reason(error)}."
        ) from error
    for name, labels in (("train", y), ("trusted", y_trusted)):
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DataError(
                f"the labels of {name} must be 0 to {classes - 1}, as the model has {counted(classes, 'score')}; got "
                f"{int(labels.min())} to {int(labels.max())}."
            )
    if missing := sorted(set(y.tolist()) - set(y_trusted.tolist())):
        raise DataError(
            f"the trusted set must have an example of every class of train; it has none of {missing[:10]}. Add some, "
            "or leave these classes out of train."
        )
    return (x, y), (x_trusted, y_trusted), classes


def _takes(model: nn.Module, x: Tensor) -> bool:
    try:
        probabilities(model, x)
    except FAILURES:
        return False
    return True


def examples(given: Examples, name: str, dtype: torch.dtype | None = None) -> Pair:
    """Return inputs (in `dtype`, if given) and labels as int64, on the CPU; `name` is for error messages."""
    columns = _together(given, name) if isinstance(given, Dataset) else given
    if not isinstance(columns, (tuple, list)) or len(columns) != 2:
        raise DataError(
            f"{name} must be a pair (inputs, labels) or a Dataset of such pairs; got {type(given).__name__}."
        )
    try:
        x, y = (part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part)) for part in columns)
    except (TypeError, ValueError):
        kinds = " and ".join(_kind(part) for part in columns)
        raise DataError(f"{name} must hold numbers, the labels as class indices; got {kinds}.") from None
    if x.is_complex() or y.is_complex():
        raise DataError(f"{name} must hold real numbers; got {x.dtype} and {y.dtype}.")
    if x.ndim < 2:
        raise DataError(f"the inputs of {name} must have a row for each example; got shape {tuple(x.shape)}.")
    if len(x) != len(y):
        raise DataError(f"{name} must have one label for each input; got {len(x)} inputs and {len(y)} labels.")
    if y.ndim != 1:
        raise DataError(f"the labels of {name} must be one index for each input; got shape {tuple(y.shape)}.")
    if y.is_floating_point() and (wrong := int((~torch.isfinite(y) | (y != y.round())).sum())):
        raise DataError(f"the labels of {name} must be whole numbers; {wrong} of {len(y)} are not.")
    return _finite(x.detach().to("cpu", dtype), name), y.detach().cpu().long()


def _finite(x: Tensor, name: str) -> Tensor:
    if bad := int((~torch.isfinite(x)).flatten(1).any(1).sum()):
        hold = agreeing(bad, "holds", "hold")
        raise DataError(f"the inputs of {name} must be finite; {bad} of {len(x)} examples {hold} NaN or infinity.")
    return x


def _together(given: Dataset[Any], name: str) -> Any:
    """Return the examples of a Dataset as one pair of tensors."""
    try:
        count = len(given)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"{name} must be a Dataset with a length, as every example has an importance; {type(given).__name__} has "
            "none. Read its examples into tensors first."
        ) from None
    items = [given[i] for i in range(count)]
    try:
        return default_collate(items) if items else (torch.zeros(0, 1), torch.zeros(0))
    except FAILURES as error:
        raise DataError(
            f"{name} must be a Dataset of pairs (input, label) whose inputs are tensors or arrays of one shape; they "
            f"cannot be put together: {reason(error)}. Add a transform to tensors of one size."
        ) from None


def _kind(part: Any) -> str:
    try:
        return str(np.asarray(part).dtype)
    except ValueError:
        return "rows of different lengths"
