"""The training loss with its hyperparameters, the validation loss, and the bilevel problem of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from bilevel import Problem
from bilevel.applications.training import evaluating
from bilevel.applications.tuning.hyperparameters import parameters_of, values
from bilevel.applications.tuning.knob import Knob

Batch = Sequence[Tensor]
# (values of the hyperparameters, model, batch) -> scalar tensor.
OwnLoss = Callable[[Mapping[str, Tensor], nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class TrainingLoss:
    """The training loss: a function of the values of the hyperparameters, the model and a batch.

    `classes` is None if the targets are numbers, or if only `own` reads them. `own` replaces the part that depends on
    data, `valid` the validation loss.
    """

    hyper: Mapping[str, Knob]
    classes: int | None
    own: OwnLoss | None = None
    valid: OwnLoss | None = None

    def __call__(self, value: Mapping[str, Tensor], model: nn.Module, batch: Batch) -> Tensor:
        loss = self._data(value, model, batch) if self.own is None else self.own(value, model, batch)
        parameters = parameters_of(model)
        for name, knob in self.hyper.items():
            penalty = knob.penalty(value[name], parameters)
            loss = loss if penalty is None else loss + penalty
        return loss

    def _data(self, value: Mapping[str, Tensor], model: nn.Module, batch: Batch) -> Tensor:
        x, y, *rest = batch
        knobs = [(value[name], knob) for name, knob in self.hyper.items()]
        for own, knob in knobs:
            x = knob.inputs(own, x)
        scores = model(x)
        target = y if self.classes is None else one_hot(y, self.classes).to(scores.dtype)
        for own, knob in knobs if self.classes is not None else ():
            target = knob.targets(own, target)
        given = [knob.weights(own, y, rest[0] if rest else None) for own, knob in knobs]
        weights = [weight for weight in given if weight is not None]
        mixed = [losses for own, knob in knobs if (losses := knob.losses(own, scores, target)) is not None]
        losses = mixed[0] if mixed else self._losses(scores, target)
        if not weights:
            return losses.mean()
        weight = reduce(torch.mul, weights)
        return (weight * losses).sum() / weight.sum()

    def _losses(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.classes is None:
            return (scores.reshape(len(target)) - target).square() / 2
        return cross_entropy(scores, target, reduction="none")

    def validation(self, value: Mapping[str, Tensor], model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss on validation data. Hyperparameters enter it only through a loss of the user."""
        if self.valid is not None:
            return self.valid(value, model, batch)
        x, y = batch[:2]
        return self._losses(model(x), y).mean() if self.classes is None else cross_entropy(model(x), y)

    def problem(self, train: Batch | None = None, valid: Batch | None = None) -> Problem:
        """Return the bilevel problem on minibatches, or on all of `train` and `valid`."""

        def upper(u: Mapping[str, Tensor], v: nn.Module, batch: Any) -> Tensor:
            # A million values take as long as a pass through the model: compute them only if a loss reads them.
            value = {} if self.valid is None else values(self.hyper, u)
            return self.validation(value, v, batch if valid is None else valid)

        def lower(u: Mapping[str, Tensor], v: nn.Module, batch: Any) -> Tensor:
            return self(values(self.hyper, u), v, batch if train is None else train)

        return Problem(upper, lower)

    def fixed_problem(self, train: Batch, valid: Batch) -> Problem:
        """Return the problem whose u are the values themselves, on all of `train` and `valid`."""
        return Problem(lambda u, v, _: self.validation(u, v, valid), lambda u, v, _: self(u, v, train))

    @torch.no_grad()
    def measured(self, value: Mapping[str, Tensor], model: nn.Module, columns: Batch) -> float:
        """Return the validation loss of these examples, in evaluation mode."""
        device = next(model.parameters()).device
        held = {name: tensor.to(device) for name, tensor in value.items()}
        parts = zip(*(torch.split(c, 2000) for c in columns), strict=True)
        with evaluating(model):
            total = sum(len(p[0]) * self.validation(held, model, [c.to(device) for c in p]).item() for p in parts)
        return total / len(columns[0])
