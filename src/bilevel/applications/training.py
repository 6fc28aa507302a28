"""Plain training of a classifier on weighted examples: Adam, with a rate that falls linearly to zero.

Batches are drawn by index from tensors that live on the model's device. On a GPU the step is captured once and
replayed; where there are many, it is compiled first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from bilevel._util.random_state import random_state, seeded, set_random_state
from bilevel.derivatives.mixed_precision import Precision, reduced
from bilevel.distributed.process_group import first_rank
from bilevel.engines.engine import Engines
from bilevel.optim.variable_optimizer import Descent, adam
from bilevel.problem.variables import Variable
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

Augment = Callable[[Tensor], Tensor]
"""A batch of inputs, changed at random by torch's draws; the shape stays."""
Watch = Callable[[int], object]
"""Told how many steps are done; where it returns True or raises, the training ends there, and is saved."""
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
    """Trains a model on examples that stay on its device, once or several times with one record of the step.

    `tensors` are inputs, targets and weights; between trainings they and the model may be changed in place. `steps` is
    how many there will be in all.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        *,
        steps: int,
        augment: Augment | None = None,
        precision: Precision | None = None,
        loss: Loss | None = None,
        decay: float = 0.0,
        engine: str = "auto",
    ) -> None:
        self.model, self.augment, self.precision = model, augment, precision
        self.loss = loss or weighted_cross_entropy
        self.v = Variable(model, "model")
        x, y, w = (tensor.to(self.v.device) for tensor in tensors)
        self.x, self.y, self.w = x, y, w
        self.decay = decay
        self.descent = Descent(self.v, adam(self.v, 1.0, decay), "optimizer")
        self.derivatives: Any = SimpleNamespace(v=self.v, lower_evaluations=0, upper_evaluations=0)
        self._engines = partial(Engines, engine, self, gradients=steps)
        self.engines = self._engines()

    def train(
        self,
        rows: Tensor,
        *,
        steps: int,
        batch: int,
        rate: float,
        seed: int,
        watch: Watch | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Train on these rows from the model's present weights. All draws come from `seed`."""
        device = self.v.device
        with seeded(seed, device) as generator:
            self.model.train()
            self.descent.restart()
            rates = rate * torch.linspace(1, 0, steps + 1, device=device)
            task = {"steps": steps, "batch": batch, "rate": rate, "seed": seed, "examples": len(rows)}
            task |= {"decay": self.decay} if self.decay else {}
            done = 0 if checkpoint is None else self.load(checkpoint, task)
            for k, index in zip(range(steps), _batches(rows, batch, generator, device), strict=False):
                if k < done:
                    continue
                self.engines.outer.wrap(self.inner)(index, rates[k])
                keeps = checkpoint if first_rank() else None
                due = (k + 1) % max(1, steps // SAVES) == 0 or k + 1 == steps
                if keeps is not None and due:
                    self.save(keeps, task, k + 1)
                ends = True  # where the watch raises, too
                try:
                    ends = watch is not None and watch(k + 1) is True
                finally:
                    if keeps is not None and ends and not due:
                        self.save(keeps, task, k + 1)
                if ends:
                    break
        self.model.eval()

    def inner(self, index: Tensor, rate: Tensor) -> Tensor:
        loss: Tensor = self.engines.inner.wrap(self.step)(index, rate)
        return loss

    def step(self, index: Tensor, rate: Tensor) -> Tensor:
        """Move by the gradient of the weighted mean of these examples' losses."""
        x, y, w = self.x[index], self.y[index], self.w[index]
        with reduced(self.precision, self.v.device):
            loss = self.loss(self.model, self.augment(x) if self.augment else x, y, w)
        self.descent.step(torch.autograd.grad(loss, self.v.leaves), (), rate)
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
        store.save(
            folder,
            {
                "task": task,
                "step": step,
                "model": self.v.tensors(),
                "descent": self.descent.state_dict(),
                "random": list(random_state(device)),
            },
        )

    @torch.no_grad()
    def load(self, folder: Path, task: dict[str, float]) -> int:
        """Go on from the folder, where it holds a state; returns the steps done."""
        if not store.exists(folder):
            return 0
        state = store.load(folder)
        with store.understood(folder):
            compare(state["task"], task, folder)
            return self._restored(state)

    def _restored(self, state: dict[str, Any]) -> int:
        for name, tensor in self.v.tensors().items():
            tensor.copy_(state["model"][name])
        self.descent.load_state_dict(state["descent"])
        self.engines = self._engines()  # a record holds on to the moments from before
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
    decay: float = 0.0,
    engine: str = "auto",
) -> None:
    """Train the model in place on (x, y). `y` holds class indices, or one row of probabilities for each example.

    Examples of weight zero are not drawn. The draws of this function and of the model come from `seed`; the global
    generators are put back. A `checkpoint` folder is written to, and gone on from where it holds a state. `loss` takes
    the place of the weighted cross-entropy; what `y` holds is then for it to know. `decay` is AdamW's.
    """
    w = torch.ones(len(x)) if weights is None else weights.float().cpu()
    trainer = Trainer(
        model, (x, y, w), steps=steps, augment=augment, precision=precision, loss=loss, decay=decay, engine=engine
    )
    rows = w.nonzero().squeeze(1)
    trainer.train(rows, steps=steps, batch=batch, rate=rate, seed=seed, watch=watch, checkpoint=checkpoint)


def _batches(rows: Tensor, size: int, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Batches of rows without end, in a new order at every pass; a last partial batch is left out."""
    size = min(size, len(rows))
    while True:
        order = rows[torch.randperm(len(rows), generator=generator)]
        order = order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order
        yield from torch.split(order[: len(order) // size * size], size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and back into its mode at the end."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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
    """Return the model's probabilities of the classes, in evaluation mode, on the CPU.

    `batch` inputs are computed at once. With `augment` it is the mean over 8 random changes of each input, drawn from
    `seed`.
    """
    device = next(model.parameters()).device
    with evaluating(model), reduced(precision, device), seeded(seed, device):
        found = []
        for part in torch.split(x, batch):
            inputs = part.to(device)
            draws = [augment(inputs) for _ in range(DRAWS)] if augment else [inputs]
            found.append(torch.stack([model(draw).float().softmax(1) for draw in draws]).mean(0))
    return torch.cat(found).cpu()


def accuracy(model: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    """The share of these inputs to which the model gives their label."""
    x, y = pair
    return float((probabilities(model, x).argmax(1) == y).double().mean())
