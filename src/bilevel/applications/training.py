"""Plain training of a classifier on weighted examples: Adam, with a rate that falls linearly to zero.

Batches are drawn by index from tensors on the model's device. On a GPU the step is captured once and replayed; if there
are many steps, it is compiled first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from bilevel import ProblemError, Solution, Status
from bilevel._util.nested import copy_state
from bilevel._util.random_state import random_state, seeded, set_random_state
from bilevel.derivatives.mixed_precision import Precision, reduced
from bilevel.distributed.process_group import first_rank
from bilevel.engines.engine import Engines
from bilevel.optim.variable_optimizer import VariableOptimizer, adam
from bilevel.problem import Variable
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

# Changes a batch of inputs at random, by torch's generator; the shape stays the same.
Augment = Callable[[Tensor], Tensor]
# Called with the number of steps done; if it returns True or raises, the training is saved and ends.
OnProgress = Callable[[int], object]
# The number of random changes of each input over which `probabilities` takes the mean.
DRAWS = 8
# Maps (model, inputs, targets, weights) of a batch to its loss.
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
# The number of checkpoints in a training.
SAVES = 10


def weighted_cross_entropy(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return the weighted mean of the cross-entropies."""
    losses = cross_entropy(model(x), y, reduction="none")
    return (w * losses).sum() / w.sum()


class Trainer:
    """Trains a model on examples on its device, once or several times, with one recorded step.

    `tensors` are inputs, targets and weights; they and the model can be changed in place between trainings. `steps` is
    the number of steps of all trainings. For the other options see `fit`.
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
        self.x, self.y, self.w = (tensor.to(self.v.device) for tensor in tensors)
        self.decay = decay
        self.descent = VariableOptimizer(self.v, adam(self.v, 1.0, decay), "optimizer")
        # Engines count evaluations of objectives, which a training has not.
        self.derivatives: Any = SimpleNamespace(v=self.v, lower_evaluations=0, upper_evaluations=0)
        self._engines = partial(Engines, engine, self, gradients=steps)
        self.engines = self._engines()

    def train(
        self,
        rows: Tensor,
        *,
        steps: int,
        batch: int,
        rate: float | Sequence[float],
        seed: int,
        on_progress: OnProgress | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Train on these rows from the model's present weights; all random draws come from `seed`.

        A `rate` falls linearly to zero; a sequence has the rate of each step.
        """
        device = self.v.device
        with seeded(seed, device) as generator:
            self.model.train()
            self.descent.restart()
            if isinstance(rate, Sequence):
                rates = torch.tensor(rate, device=device)
            else:
                rates = rate * torch.linspace(1, 0, steps + 1, device=device)
            task: dict[str, Any] = {"steps": steps, "batch": batch, "rate": rate, "seed": seed, "examples": len(rows)}
            task |= {"decay": self.decay} if self.decay else {}
            done = 0 if checkpoint is None else self.load(checkpoint, task)
            keeps = checkpoint if first_rank() else None
            for k, index in islice(enumerate(index_batches(rows, batch, generator, device)), done, steps):
                self.engines.outer.wrap(self.inner)(index, rates[k])
                due = (k + 1) % max(1, steps // SAVES) == 0 or k + 1 == steps
                if keeps is not None and due:
                    self.save(keeps, task, k + 1)
                ends = True  # also if on_progress raises
                try:
                    ends = on_progress is not None and on_progress(k + 1) is True
                finally:
                    if keeps is not None and ends and not due:
                        self.save(keeps, task, k + 1)
                if ends:
                    break
        self.model.eval()

    def inner(self, index: Tensor, rate: Tensor) -> Any:
        return self.engines.inner.wrap(self.step)(index, rate)

    def step(self, index: Tensor, rate: Tensor) -> Tensor:
        """Take one step on the weighted mean loss of some rows."""
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

    def save(self, folder: Path, task: dict[str, Any], step: int) -> None:
        state = {
            "task": task,
            "step": step,
            "model": self.v.tensors(),
            "descent": self.descent.state_dict(),
            "random": list(random_state(self.v.device)),
        }
        store.save(folder, state)

    def load(self, folder: Path, task: dict[str, Any]) -> int:
        """Load the state in the folder, if there is one; return the number of steps done."""
        if not store.exists(folder):
            return 0
        state = store.load(folder)
        with store.understood(folder):
            compare(state["task"], task, folder)
            copy_state(self.v.tensors(), state["model"])
            self.descent.load_state_dict(state["descent"])
            self.engines = self._engines()  # a recorded step holds the old moments
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
    on_progress: OnProgress | None = None,
    checkpoint: Path | None = None,
    loss: Loss | None = None,
    decay: float = 0.0,
    engine: str = "auto",
) -> None:
    """Train the model in place on (x, y) with Adam.

    - `y`: class indices, or a row of probabilities for each example, or what `loss` reads.
    - `steps`, `batch` (100), `rate` (1e-3, falling linearly to zero), `decay` (0, of AdamW).
    - `weights`: of the examples, default 1; examples of weight 0 are not drawn.
    - `loss(model, x, y, w)`: of a batch, default the weighted cross-entropy.
    - `augment`: changes inputs at random. `on_progress(done)`: called after each step.
    - `seed`: of all random draws, here and in the model; the global generators are restored at the end.
    - `checkpoint`: a folder to write to, and to resume from if it holds a state.

    >>> x = torch.randn(50, 3)
    >>> fit(nn.Linear(3, 2), x, (x[:, 0] > 0).long(), steps=10)
    """
    w = torch.ones(len(x)) if weights is None else weights.float().cpu()
    trainer = Trainer(
        model, (x, y, w), steps=steps, augment=augment, precision=precision, loss=loss, decay=decay, engine=engine
    )
    rows = w.nonzero().squeeze(1)
    trainer.train(rows, steps=steps, batch=batch, rate=rate, seed=seed, on_progress=on_progress, checkpoint=checkpoint)


def loader(tensors: Sequence[Tensor], batch: int) -> DataLoader[Any]:
    """Return shuffled batches of the rows of these tensors, without partial batches."""
    data = TensorDataset(*(tensor.cpu() for tensor in tensors))
    return DataLoader(data, min(batch, len(data)), shuffle=True, drop_last=True)


def refuse_end(solution: Solution, what: str, advice: str, *, fine: bool = True) -> None:
    """Raise KeyboardInterrupt if Ctrl-C ended a run, and ProblemError if it diverged, or if it is not `fine`.

    `what` names the run, and `advice` ends the sentence of the error.
    """
    if solution.interrupted:
        raise KeyboardInterrupt
    if solution.status is Status.DIVERGED or not fine:
        raise ProblemError(f"the {what} diverged after {solution.steps} steps{advice}")


def index_batches(rows: Tensor, size: int, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Yield batches of rows without end, in a new order in every pass, without partial batches."""
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
    """Return the share of the inputs for which the model predicts the label."""
    x, y = pair
    return float((probabilities(model, x).argmax(1) == y).double().mean())
