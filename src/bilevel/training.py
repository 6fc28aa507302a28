"""Plain training of a classifier on weighted examples: Adam, with a rate that falls linearly to zero.

Batches are drawn by index from tensors that live on the model's device. On a GPU the step is captured once and
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from . import checkpoint as store
from .descent import Descent, adam
from .engine import Engines
from .errors import CheckpointError
from .precision import Precision, reduced
from .problem import Variable
from .replay import random_state, seeded, set_random_state

Augment = Callable[[Tensor], Tensor]
"""A batch of inputs, changed at random by torch's draws; the shape stays."""
Watch = Callable[[int], object]
"""Told how many steps are done."""
DRAWS = 8
"""How often inputs are changed at random where the mean of the answers is asked for."""
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""(model, inputs, targets, weights) of a batch -> its loss."""
SAVES = 10
"""How often a training is saved."""


def weighted_cross_entropy(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = cross_entropy(model(x), y, reduction="none")
    return (w * losses).sum() / w.sum()


class Trainer:
    """The step, and all that it changes."""

    def __init__(
        self,
        model: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        rate: float,
        augment: Augment | None,
        precision: Precision | None,
        loss: Loss | None = None,
    ) -> None:
        self.model, self.tensors, self.augment, self.precision = model, tensors, augment, precision
        self.loss = loss or weighted_cross_entropy
        self.v = Variable(model, "model")
        self.descent = Descent(self.v, adam(self.v, rate), "optimizer")
        self.derivatives: Any = SimpleNamespace(v=self.v, lower_evaluations=0, upper_evaluations=0)
        self.engine = Engines("graph" if self.v.device.type == "cuda" else "eager", self, gradients=0).outer

    def step(self, index: Tensor, factor: Tensor) -> Tensor:
        """Move by the gradient of the weighted mean of these examples' losses; `factor` scales the rate."""
        x, y, w = (tensor[index] for tensor in self.tensors)
        with reduced(self.precision, self.v.device):
            loss = self.loss(self.model, self.augment(x) if self.augment else x, y, w)
        self.descent.step(torch.autograd.grad(loss, self.v.leaves), (), factor)
        return loss.detach()

    def live(self) -> list[Tensor]:
        held = pytree.tree_leaves(self.descent.state_dict())
        return [*self.v.tensors().values(), *(t for t in held if isinstance(t, Tensor))]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.descent.optimizer is None else [self.descent.optimizer]

    def obstacle(self) -> str:
        return ""

    def save(self, folder: Path, task: dict[str, float], step: int) -> None:
        device = self.v.device
        store.save(folder, {
            "task": task, "step": step, "model": self.v.tensors(), "descent": self.descent.state_dict(),
            "random": list(random_state(device)),
        })  # fmt: skip

    @torch.no_grad()
    def load(self, folder: Path, task: dict[str, float]) -> int:
        """Go on from the folder, where it holds a state; returns the steps done."""
        if not store.exists(folder):
            return 0
        state = store.load(folder)
        with store.understood(folder):
            return self._restored(state, folder, task)

    def _restored(self, state: dict[str, Any], folder: Path, task: dict[str, float]) -> int:
        for name, value in task.items():
            if state["task"].get(name) != value:
                raise CheckpointError(
                    f"{folder} holds a training with {name}={state['task'].get(name)}; got {value}. Use another folder."
                )
        for name, tensor in self.v.tensors().items():
            tensor.copy_(state["model"][name])
        self.descent.load_state_dict(state["descent"])
        set_random_state(state["random"], self.v.device)
        return int(state["step"])


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    weights: Tensor | None = None,
    batch: int = 100,
    rate: float = 1e-3,
    seed: int = 0,
    augment: Augment | None = None,
    precision: Precision | None = None,
    watch: Watch | None = None,
    checkpoint: Path | None = None,
    loss: Loss | None = None,
) -> None:
    """Train the model in place on (x, y). `y` holds class indices, or one row of probabilities for each example.

    Examples of weight zero are not drawn. The draws of this function and of the model come from `seed`; the global
    generators are put back. A `checkpoint` folder is written to, and gone on from where it holds a state. `loss` takes
    the place of the weighted cross-entropy; what `y` holds is then for it to know.
    """
    device = next(model.parameters()).device
    w = torch.ones(len(x)) if weights is None else weights.float().cpu()
    rows = w.nonzero().squeeze(1)
    tensors = x.to(device), y.to(device), w.to(device)
    with seeded(seed, device) as generator:
        model.train()
        trainer = Trainer(model, tensors, rate, augment, precision, loss)
        factors = torch.linspace(1, 0, steps + 1, device=device)
        task = {"steps": steps, "batch": batch, "rate": rate, "seed": seed, "examples": len(rows)}
        done = 0 if checkpoint is None else trainer.load(checkpoint, task)
        for k, index in zip(range(steps), _batches(rows, batch, generator, device), strict=False):
            if k < done:
                continue
            trainer.engine.call(trainer.step, (index, factors[k]))
            if checkpoint is not None and ((k + 1) % max(1, steps // SAVES) == 0 or k + 1 == steps):
                trainer.save(checkpoint, task, k + 1)
            if watch is not None:
                watch(k + 1)
    model.eval()


def _batches(rows: Tensor, size: int, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Batches of rows without end, in a new order at every pass; a last partial batch is left out."""
    size = min(size, len(rows))
    while True:
        order = rows[torch.randperm(len(rows), generator=generator)]
        order = order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order
        yield from torch.split(order[: len(order) // size * size], size)


@torch.no_grad()
def probabilities(
    model: nn.Module,
    x: Tensor,
    *,
    batch: int = 2000,
    precision: Precision | None = None,
    augment: Augment | None = None,
    seed: int = 0,
) -> Tensor:
    """The model's probabilities of the classes, in evaluation mode, on the CPU; with `augment` the mean of 8 draws."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    with reduced(precision, device), seeded(seed, device):
        found = []
        for part in torch.split(x, batch):
            inputs = part.to(device)
            draws = [augment(inputs) for _ in range(DRAWS)] if augment else [inputs]
            found.append(torch.stack([model(draw).float().softmax(1) for draw in draws]).mean(0))
    model.train(training)
    return torch.cat(found).cpu()


def accuracy(model: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    """The share of these inputs to which the model gives their label."""
    x, y = pair
    return float((probabilities(model, x).argmax(1) == y).double().mean())
