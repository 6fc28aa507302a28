"""The hyper-parameters that `tune` knows: what each changes in the training loss, its range and its natural scale.

    training loss = sum_i w_i l(model(a(x_i)), s(y_i)) / sum_i w_i  +  penalties of the model's parameters

A knob changes one of these: the inputs (a), the targets (s), the weights (w), the losses (l) or the penalties. Its
value is one tensor; `Free` changes nothing by itself and is for a loss of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bilevel._util.checks import in_range, one_of
from bilevel.applications.tuning.ranges import Range, Scale
from bilevel.errors import OptionError

Parameters = Mapping[str, Tensor]
Losses = Callable[[Tensor, Tensor], Tensor]
"""(scores, targets) -> one loss for each example."""
SMOOTH = 1e-3
"""Where the norm of a group in the group lasso becomes round, so that it has a derivative at zero."""


@dataclass(frozen=True)
class Sizes:
    """What the number of a knob's values depends on."""

    parameters: Parameters
    features: int
    """Numbers in one input."""
    classes: int | None
    """None: the targets are numbers."""
    sources: int
    """Sources that the training examples come from; 0 where they have none."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """The range of a hyper-parameter and where it starts; what a knob leaves alone, it hands back as it came."""

    low: float
    high: float
    start: float
    scale: Scale = "log"

    def __post_init__(self) -> None:
        in_range("start", self.start, least=self.range.low, most=self.range.high)

    @property
    def range(self) -> Range:
        return Range(self.low, self.high, self.scale)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Of the value."""
        return (1,)

    def inputs(self, value: Tensor, x: Tensor) -> Tensor:
        return x

    def targets(self, value: Tensor, target: Tensor) -> Tensor:
        """Of probabilities, one row for each example."""
        return target

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor | None:
        """One for each example; None where the knob has no say."""
        return None

    def losses(self, value: Tensor, scores: Tensor, target: Tensor) -> Tensor | None:
        """In place of the usual losses; None where the knob has no say."""
        return None

    def penalty(self, value: Tensor, parameters: Parameters) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class WeightDecay(Knob):
    """1/2 sum_i value_i p_i^2: one value for the model, for each layer, each tensor, or each weight.

    Biases, and all else that is a vector, are left out unless `biases`.
    """

    low: float = 1e-7
    high: float = 1e-1
    start: float = 1e-4
    per: Literal["model", "layer", "tensor", "weight"] = "model"
    biases: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("per", self.per, ("model", "layer", "tensor", "weight"))

    def _chosen(self, parameters: Parameters) -> dict[str, Tensor]:
        found = {name: p for name, p in parameters.items() if self.biases or p.ndim > 1}
        if not found:
            raise OptionError("WeightDecay finds no matrices in the model; pass biases=True.")
        return found

    def groups(self, parameters: Parameters) -> list[str]:
        """What the values belong to: the model, layers, or tensors; with one for each weight, the tensors of these."""
        names = list(self._chosen(parameters))
        if self.per == "model":
            return ["model"]
        if self.per == "layer":
            return list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return names

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if self.per == "weight":
            return (sum(p.numel() for p in self._chosen(sizes.parameters).values()),)
        return (len(self.groups(sizes.parameters)),)

    def penalty(self, value: Tensor, parameters: Parameters) -> Tensor:
        chosen = self._chosen(parameters)
        if self.per == "weight":
            parts = torch.split(value, [p.numel() for p in chosen.values()])
            pieces = [(part * p.reshape(-1).square()).sum() for part, p in zip(parts, chosen.values(), strict=True)]
            return torch.stack(pieces).sum() / 2
        groups = self.groups(parameters)
        place = {name: 0 if self.per == "model" else groups.index(self._group(name)) for name in chosen}
        return torch.stack([value[place[name]] * p.square().sum() for name, p in chosen.items()]).sum() / 2

    def _group(self, name: str) -> str:
        return name.rpartition(".")[0] if self.per == "layer" else name


@dataclass(frozen=True, kw_only=True)
class FeaturePenalty(Knob):
    """A penalty on the first layer's weights of each feature, or of each group of them.

    `groups` has the number of its group, from 0, for each feature. `kind` is `ridge`, 1/2 sum_j value_j |w_j|^2, or
    `group-lasso`, sum_g value_g |w_g| with a norm that is round at zero.
    """

    low: float = 1e-6
    high: float = 1e2
    start: float = 1e-3
    groups: Sequence[int] | None = None
    kind: Literal["ridge", "group-lasso"] = "ridge"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, ("ridge", "group-lasso"))
        if self.groups is not None and sorted(set(self.groups)) != list(range(len(set(self.groups)))):
            raise OptionError("groups must be numbers from 0 on, none left out, one for each feature.")

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
        if self.kind == "ridge":
            return (value * squares).sum() / 2
        return (value * ((squares + SMOOTH**2).sqrt() - SMOOTH)).sum()

    def _first(self, parameters: Parameters) -> Tensor:
        found = next((p for p in parameters.values() if p.ndim == 2), None)
        if found is None:
            raise OptionError("FeaturePenalty needs a model with a linear layer.")
        return found


@dataclass(frozen=True, kw_only=True)
class LabelSmoothing(Knob):
    """The share of every label that goes to all classes alike."""

    low: float = 0.0
    high: float = 0.9
    start: float = 0.05
    scale: Scale = "linear"

    def targets(self, value: Tensor, target: Tensor) -> Tensor:
        return (1 - value) * target + value / target.shape[1]


@dataclass(frozen=True, kw_only=True)
class ClassWeights(Knob):
    """The weight of the examples of each class."""

    low: float = 0.1
    high: float = 10.0
    start: float = 1.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if sizes.classes is None:
            raise OptionError(
                "ClassWeights needs labels of classes and the usual loss. With a loss of your own, use Free(size=...)."
            )
        return (sizes.classes,)

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor:
        return value[y]


@dataclass(frozen=True, kw_only=True)
class SourceWeights(Knob):
    """The weight of the examples of each source; `train` then has a third column with the source's number from 0."""

    low: float = 1e-2
    high: float = 1e2
    start: float = 1.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if not sizes.sources:
            raise OptionError("SourceWeights needs the sources: pass train=(inputs, targets, sources).")
        return (sizes.sources,)

    def weights(self, value: Tensor, y: Tensor, source: Tensor | None) -> Tensor | None:
        return None if source is None else value[source]


@dataclass(frozen=True, kw_only=True)
class LossMix(Knob):
    """The shares of several losses: functions (scores, targets) -> one loss for each example. The shares sum to 1."""

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


@dataclass(frozen=True, kw_only=True)
class Augmentation(Knob):
    """The strength of a change of the inputs, `transform(x, strength)`, that can be differentiated in the strength."""

    transform: Callable[[Tensor, Tensor], Tensor]
    low: float = 0.0
    high: float = 1.0
    start: float = 0.1
    scale: Scale = "linear"

    def inputs(self, value: Tensor, x: Tensor) -> Tensor:
        return self.transform(x, value[0])


@dataclass(frozen=True, kw_only=True)
class Free(Knob):
    """Any tensor that a loss of the user's own reads."""

    size: Sequence[int] = (1,)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(self.size)


def values(hyper: Mapping[str, Knob], free: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that free variables stand for."""
    return {name: knob.range.value(free[name]) for name, knob in hyper.items()}


def starts(hyper: Mapping[str, Knob], sizes: Sizes, like: Tensor) -> dict[str, Tensor]:
    """The free variables at the start."""
    found = {}
    for name, knob in hyper.items():
        first = torch.full(knob.shape(sizes), knob.start, dtype=like.dtype, device=like.device)
        found[name] = knob.range.free(first).requires_grad_()
    return found


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
