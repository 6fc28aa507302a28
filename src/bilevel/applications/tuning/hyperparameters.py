"""The hyperparameters that `tune` knows: what each changes in the training loss, its range and its scale.

    training loss = sum_i w_i l(model(a(x_i)), s(y_i)) / sum_i w_i  +  penalties of the model's parameters

A knob changes the inputs (a), the targets (s), the weights (w), the losses (l) or the penalties. Its value is one
tensor. `Free` changes nothing; your own loss reads it. See `ranges` for how values stay in their range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bilevel import OptionError
from bilevel._util.checks import check_counts, one_of
from bilevel.applications.tuning.knob import Knob, Losses, Parameters, Sizes
from bilevel.applications.tuning.ranges import Scale


@dataclass(frozen=True, kw_only=True, repr=False)
class WeightDecay(Knob):
    """A weight decay, 1/2 sum_i value_i p_i^2: one value per model, layer, tensor or weight.

    Args:
        low, high: The range of the values. Default: 1e-7 and 0.1.
        start: The first value. Default: 1e-4.
        scale: The scale on which values move, "log" (default) or "linear".
        per: What shares a value: "model" (default), "layer", "tensor" or "weight".
        biases: Whether biases and all other vectors decay as well. Default: False.

    >>> WeightDecay(per="tensor", biases=True).start
    0.0001
    """

    low: float = 1e-7
    high: float = 1e-1
    start: float = 1e-4
    per: Literal["model", "layer", "tensor", "weight"] = "model"
    biases: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("per", self.per, ("model", "layer", "tensor", "weight"))

    def groups(self, parameters: Parameters) -> dict[str, list[Tensor]]:
        """Return the parameters under the names of their groups: "model", layers or tensors."""
        found: dict[str, list[Tensor]] = {}
        for name, p in parameters.items():
            if self.biases or p.ndim > 1:
                group = {"model": "model", "layer": name.rpartition(".")[0]}.get(self.per, name)
                found.setdefault(group, []).append(p)
        if not found:
            raise OptionError("WeightDecay finds no matrices in the model; pass biases=True.")
        return found

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        groups = self.groups(sizes.parameters)
        return (sum(p.numel() for (p,) in groups.values()) if self.per == "weight" else len(groups),)

    def penalty(self, value: Tensor, parameters: Parameters) -> Tensor:
        groups = self.groups(parameters)
        if self.per == "weight":
            parts = torch.split(value, [p.numel() for (p,) in groups.values()])
            terms = [(v * p.reshape(-1).square()).sum() for v, (p,) in zip(parts, groups.values(), strict=True)]
        else:
            terms = [value[i] * p.square().sum() for i, group in enumerate(groups.values()) for p in group]
        return torch.stack(terms).sum() / 2


@dataclass(frozen=True, kw_only=True, repr=False)
class FeaturePenalty(Knob):
    """A penalty on the first layer's weights, 1/2 sum_j value_j |w_j|^2: one value for each feature or group.

    Args:
        low, high: The range of the values. Default: 1e-6 and 100.
        start: The first value. Default: 1e-3.
        scale: The scale on which values move, "log" (default) or "linear".
        groups: The group of each feature, numbered from 0. None (default): each feature is its own group.

    >>> FeaturePenalty(groups=[0, 0, 1]).groups
    [0, 0, 1]
    """

    low: float = 1e-6
    high: float = 1e2
    start: float = 1e-3
    groups: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None and sorted(set(self.groups)) != list(range(len(set(self.groups)))):
            raise OptionError("groups must hold a number for each feature, from 0 without gaps.")

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        first = self._first(sizes.parameters)
        if first.shape[1] != sizes.features:
            raise OptionError(
                f"FeaturePenalty needs a model whose first matrix has a column for each feature, {sizes.features}; it "
                f"has {first.shape[1]}."
            )
        if self.groups is None:
            return (sizes.features,)
        if len(self.groups) != sizes.features:
            raise OptionError(
                f"groups must have {sizes.features} entries, one for each feature; got {len(self.groups)}."
            )
        return (max(self.groups) + 1,)

    def penalty(self, value: Tensor, parameters: Parameters) -> Tensor:
        squares = self._first(parameters).square().sum(0)
        if self.groups is not None:
            at = torch.as_tensor(list(self.groups), device=squares.device)
            squares = torch.zeros(len(value), dtype=squares.dtype, device=at.device).index_add(0, at, squares)
        return (value * squares).sum() / 2

    def _first(self, parameters: Parameters) -> Tensor:
        if (found := next((p for p in parameters.values() if p.ndim == 2), None)) is None:
            raise OptionError("FeaturePenalty needs a model with a linear layer.")
        return found


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelSmoothing(Knob):
    """Label smoothing: the share of each label that is spread over all classes.

    Args:
        low, high: The range of the share. Default: 0 and 0.9.
        start: The first value. Default: 0.05.
        scale: The scale on which the value moves, "log" or "linear" (default).

    >>> LabelSmoothing().targets(torch.tensor([0.2]), torch.tensor([[1.0, 0.0]]))
    tensor([[0.9000, 0.1000]])
    """

    low: float = 0.0
    high: float = 0.9
    start: float = 0.05
    scale: Scale = "linear"

    def targets(self, value: Tensor, target: Tensor) -> Tensor:
        return (1 - value) * target + value / target.shape[1]


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassWeights(Knob):
    """A weight for the examples of each class, such as a higher one for a rare class.

    Args:
        low, high: The range of the weights. Default: 0.1 and 10.
        start: The first value of every weight. Default: 1.
        scale: The scale on which values move, "log" (default) or "linear".

    >>> ClassWeights().weights(torch.tensor([1.0, 5.0]), torch.tensor([0, 1, 1]), None)
    tensor([1., 5., 5.])
    """

    has_singles = False

    low: float = 0.1
    high: float = 10.0
    start: float = 1.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if sizes.classes is None:
            raise OptionError(
                "ClassWeights needs labels of classes and the usual loss. With your own loss, use Free(size=...)."
            )
        return (sizes.classes,)

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor:
        return value[y]


@dataclass(frozen=True, kw_only=True, repr=False)
class SourceWeights(Knob):
    """A weight for the examples of each source. `train` of `tune` then has a third entry, the source of each example.

    Args:
        low, high: The range of the weights. Default: 0.01 and 100.
        start: The first value of every weight. Default: 1.
        scale: The scale on which values move, "log" (default) or "linear".

    >>> SourceWeights().weights(torch.tensor([1.0, 0.1]), torch.tensor([3, 7]), torch.tensor([0, 1]))  # sources 0 and 1
    tensor([1.0000, 0.1000])
    """

    has_singles = False

    low: float = 1e-2
    high: float = 1e2
    start: float = 1.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if not sizes.sources:
            raise OptionError("SourceWeights needs the sources: pass train=(inputs, targets, sources).")
        return (sizes.sources,)

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor | None:
        return None if source is None else value[source]


@dataclass(frozen=True, kw_only=True, repr=False)
class LossMix(Knob):
    """The shares of several losses; the shares sum to 1.

    Args:
        mixed: Functions (scores, targets) that return one loss for each example. Targets are probabilities.
        low, high: The range of the values, which are divided by their sum. Default: 0.01 and 100.
        start: The first value of each loss. Default: 1, so that all shares are equal.
        scale: The scale on which values move, "log" (default) or "linear".

    >>> def brier(scores, targets):
    ...     return (scores.softmax(1) - targets).square().sum(1)
    >>> def cross_entropy(scores, targets):
    ...     return -(targets * scores.log_softmax(1)).sum(1)
    >>> hyper = {"mix": LossMix(mixed=[cross_entropy, brier])}
    """

    has_singles = False

    mixed: Sequence[Losses]
    low: float = 1e-2
    high: float = 1e2
    start: float = 1.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if len(self.mixed) < 2:
            raise OptionError(f"LossMix needs at least two losses; got {len(self.mixed)}.")
        return (len(self.mixed),)

    def losses(self, value: Tensor, scores: Tensor, target: Tensor) -> Tensor:
        share = value / value.sum()
        return torch.stack([share[i] * loss(scores, target) for i, loss in enumerate(self.mixed)]).sum(0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Augmentation(Knob):
    """The strength of a change of the inputs.

    Args:
        transform: A function (x, strength) that is differentiable in the strength, such as
            `bilevel.applications.augmentation.add_noise`.
        low, high: The range of the strength. Default: 0 and 1.
        start: The first value. Default: 0.1.
        scale: The scale on which the value moves, "log" or "linear" (default).

    >>> from bilevel.applications.augmentation import add_noise
    >>> hyper = {"noise": Augmentation(transform=add_noise, high=0.5)}
    """

    transform: Callable[[Tensor, Tensor], Tensor]
    low: float = 0.0
    high: float = 1.0
    start: float = 0.1
    scale: Scale = "linear"

    def inputs(self, value: Tensor, x: Tensor) -> Tensor:
        return self.transform(x, value[0])


@dataclass(frozen=True, kw_only=True, repr=False)
class LearningRate(Knob):
    """The learning rate of the training, which still falls linearly to zero. Only for the mode "training" of `tune`.

    Args:
        low, high: The range of the rate. Default: 1e-5 and 0.1.
        start: The first value. Default: 1e-3.
        scale: The scale on which the value moves, "log" (default) or "linear".
        phases: The number of equal parts of the training, each with its own rate. Default: 1.

    >>> hyper = {"rate": LearningRate(phases=3)}
    """

    low: float = 1e-5
    high: float = 1e-1
    start: float = 1e-3
    phases: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(phases=self.phases)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (self.phases,)

    def phase(self, step: int, steps: int) -> int:
        """Return the part of the training that a step is in."""
        return step * self.phases // steps


@dataclass(frozen=True, kw_only=True, repr=False)
class Free(Knob):
    """A tensor that your own loss reads.

    Args:
        low, high: The range of the values.
        start: The first value of every entry.
        scale: The scale on which values move, "log" (default) or "linear".
        size: The shape of the tensor. Default: (1,).

    >>> hyper = {"temperature": Free(low=0.05, high=20.0, start=1.0)}
    """

    has_singles = False

    size: Sequence[int] = (1,)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(self.size)


def values(hyper: Mapping[str, Knob], free: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of free variables."""
    return {name: knob.value(free[name]) for name, knob in hyper.items()}


def starts(hyper: Mapping[str, Knob], sizes: Sizes, like: Tensor) -> dict[str, Tensor]:
    """Return the free variables at the start, like the tensor `like` in dtype and device."""
    return {
        name: knob.free(like.new_full(knob.shape(sizes), knob.start)).requires_grad_() for name, knob in hyper.items()
    }


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
