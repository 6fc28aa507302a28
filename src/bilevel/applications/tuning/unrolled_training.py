"""The derivative of a held-out loss in hyperparameters, through all steps of the training that will be used.

`fit` trains by Adam, with the rate r_k in step k. With g = the gradient of the training loss at p_k,

    m' = a m + (1 - a) g,    s' = b s + (1 - b) g^2,    p' = p - r_k m' / ((1 - a^k) d),    d = sqrt(s' / (1 - b^k)) + e

The adjoints P, M and S of p', m' and s' go back through one step as

    M = M - r_k P / ((1 - a^k) d),    S = S + r_k P m' / ((1 - a^k) d^2 2 sqrt(s' (1 - b^k)))
    G = (1 - a) M + 2 (1 - b) g S,    P = P + g_p G,    value adjoint += g_value G,    M = a M,    S = b S

`fit` does the training, to the bit. If its states fill too much memory, about the square root of them is
kept, and the steps between two of them are repeated on the way back. The statistics of batch normalisation count as
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from bilevel._util.random_state import keeping, random_state, seeded, set_random_state
from bilevel.applications.training import Trainer, evaluating, index_batches
from bilevel.applications.tuning.hyperparameters import LearningRate, parameters_of
from bilevel.applications.tuning.losses import TrainingLoss

FIRST, SECOND, EPSILON = 0.9, 0.999, 1e-8
# The most numbers of states that are kept; 200 MB in float32.
KEPT = 50_000_000


@dataclass(frozen=True)
class Mark:
    """The state before a step: weights, both moments, and the generators."""

    step: int
    weights: Tensor
    first: Tensor
    second: Tensor
    random: Any


class UnrolledTraining:
    """A training from the first weights of a model, and the derivative of what comes after it.

    `columns` are inputs, targets and sources of the training. `truncate`: only the last so many steps are
    differentiated; None for all.
    """

    def __init__(
        self,
        objective: TrainingLoss,
        model: nn.Module,
        columns: Sequence[Tensor],
        *,
        steps: int,
        batch: int,
        rate: float,
        seed: int,
        truncate: int | None = None,
    ) -> None:
        self.objective, self.model = objective, model
        self.leaves = list(parameters_of(model).values())
        self.device = self.leaves[0].device
        self.columns = [column.to(self.device) for column in columns]
        self.steps, self.batch, self.rate, self.seed = steps, batch, rate, seed
        self._first = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._from = 0 if truncate is None else max(0, steps - truncate)
        span, size = steps - self._from, 3 * sum(p.numel() for p in self.leaves)
        self._stride = 1 if span * size <= KEPT else max(1, isqrt(span))
        self._sizes = [p.numel() for p in self.leaves]
        self._index: list[Tensor] = []
        knobs = objective.hyper.items()
        self._knob = next(((name, knob) for name, knob in knobs if isinstance(knob, LearningRate)), None)

    def train(
        self, value: Mapping[str, Tensor], marks: list[Mark] | None = None, on_progress: Callable[[int], object] = print
    ) -> None:
        """Train from the first weights with these values; fill `marks`, if given, for `slope`."""
        self.model.load_state_dict(self._first)
        held = {name: tensor.detach().to(self.device) for name, tensor in value.items()}
        rest = self.columns[1:]

        def loss(model: nn.Module, x: Tensor, row: Tensor, w: Tensor) -> Tensor:
            return self.objective(held, model, (x, *(column[row] for column in rest)))

        count = len(self.columns[0])
        examples = (self.columns[0], torch.arange(count), torch.ones(count))
        trainer = Trainer(self.model, examples, steps=self.steps, loss=loss)

        def noted(done: int) -> object:
            if marks is not None and done >= self._from and (done - self._from) % self._stride == 0:
                marks.append(self._mark(done, trainer.descent.optimizer))
            return on_progress(done)

        if marks is not None and self._from == 0:
            zero = torch.zeros_like(self._flat(self.leaves))
            with seeded(self.seed, self.device):
                state = random_state(self.device)
            marks.append(Mark(0, self._flat(self.leaves).clone(), zero, zero.clone(), state))
        trainer.train(
            torch.arange(count),
            steps=self.steps,
            batch=self.batch,
            rate=self.rate if self._knob is None else [self._rate(held, step) for step in range(self.steps)],
            seed=self.seed,
            on_progress=noted,
        )
        if marks is not None and marks[-1].step < self.steps:
            marks.append(self._mark(self.steps, trainer.descent.optimizer))

    def slope(self, value: Mapping[str, Tensor], marks: Sequence[Mark], valid: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the derivative in `value` of the validation loss after the training that left these marks."""
        held = {name: tensor.detach().to(self.device).requires_grad_() for name, tensor in value.items()}
        self._write(marks[-1].weights)
        with evaluating(self.model):
            end = self.objective.validation(held, self.model, [column.to(self.device) for column in valid])
        found = torch.autograd.grad(end, [*self.leaves, *held.values()], materialize_grads=True, allow_unused=True)
        count = len(self.leaves)
        weights, total = self._flat(found[:count]), list(found[count:])
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._index = self._batches()
        with keeping(list(self.model.buffers())), seeded(self.seed, self.device):
            self.model.train()
            for start, end_mark in reversed(list(pairwise(marks))):
                states = [*self._repeated(held, start, end_mark.step), end_mark]
                for before, after in reversed(list(pairwise(states))):
                    weights, first, second = self._back(held, before, after, (weights, first, second), total)
        self.model.eval()
        return dict(zip(held, total, strict=True))

    def _batches(self) -> list[Tensor]:
        """Return the rows of each step's batch."""
        rows, generator = torch.arange(len(self.columns[0])), torch.Generator().manual_seed(self.seed)
        return list(islice(index_batches(rows, self.batch, generator, self.device), self.steps))

    def _repeated(self, held: Mapping[str, Tensor], start: Mark, end: int) -> list[Mark]:
        """Return the states before each step from `start` to before `end`."""
        found = [start]
        for step in range(start.step, end - 1):
            mark = found[-1]
            self._write(mark.weights)
            set_random_state(mark.random, self.device)
            g = self._flat(self._gradient(held, step, graph=False))
            first = mark.first.lerp(g, 1 - FIRST)
            second = (SECOND * mark.second).addcmul_(g, g, value=1 - SECOND)
            length, scale = self._scales(held, step)
            weights = mark.weights - length * first / (second.sqrt() / scale + EPSILON)
            found.append(Mark(step + 1, weights, first, second, random_state(self.device)))
        return found

    def _back(
        self,
        held: Mapping[str, Tensor],
        before: Mark,
        after: Mark,
        adjoint: tuple[Tensor, Tensor, Tensor],
        total: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take the adjoints of weights and moments back through one step; add to the values' adjoints in `total`."""
        weights, first, second = adjoint
        length, scale = self._scales(held, before.step)
        self._write(before.weights)
        set_random_state(before.random, self.device)
        slopes = self._gradient(held, before.step, graph=True)
        g, root = self._flat([s.detach() for s in slopes]), after.second.sqrt()
        pull = length * weights / (root / scale + EPSILON)
        if self._knob is not None:  # the step is the rate times a direction
            name, knob = self._knob
            at, phase = list(held).index(name), knob.phase(before.step, self.steps)
            total[at][phase] -= torch.dot(pull, after.first) / held[name][phase].detach()
        first = first - pull
        bent = pull * after.first / (root / scale + EPSILON) / (2 * scale * root)
        # A weight without a gradient so far stays where it is: its slope is 0, and the quotient is not a number.
        second = second + torch.where(root > 0, bent, 0.0)
        upon = (1 - FIRST) * first + 2 * (1 - SECOND) * g * second
        parts = [part.view_as(p) for part, p in zip(torch.split(upon, self._sizes), self.leaves, strict=True)]
        moved = torch.autograd.grad(
            slopes, [*self.leaves, *held.values()], parts, materialize_grads=True, allow_unused=True
        )
        count = len(self.leaves)
        for whole, part in zip(total, moved[count:], strict=True):
            whole += part
        return weights + self._flat(moved[:count]), FIRST * first, SECOND * second

    def _scales(self, value: Mapping[str, Tensor], step: int) -> tuple[float, float]:
        """Return the rate of a step over 1 - a^k, and the root of 1 - b^k."""
        k = step + 1
        return self._rate(value, step) / (1 - FIRST**k), (1 - SECOND**k) ** 0.5

    def _rate(self, value: Mapping[str, Tensor], step: int) -> float:
        rate = self.rate
        if self._knob is not None:
            name, knob = self._knob
            rate = value[name][knob.phase(step, self.steps)].item()
        return rate * (1 - step / self.steps)

    def _gradient(self, held: Mapping[str, Tensor], step: int, *, graph: bool) -> Sequence[Tensor]:
        """Return the gradient of the training loss of one batch in the weights."""
        batch = [column[self._index[step]] for column in self.columns]
        loss = self.objective(held, self.model, batch)
        return torch.autograd.grad(loss, self.leaves, create_graph=graph, materialize_grads=True, allow_unused=True)

    def _mark(self, step: int, optimizer: Any) -> Mark:
        kept = [optimizer.state[p] for p in self.leaves]
        first, second = (self._flat([state[name] for state in kept]) for name in ("exp_avg", "exp_avg_sq"))
        return Mark(step, self._flat(self.leaves), first, second, random_state(self.device))

    @staticmethod
    def _flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        for p, part in zip(self.leaves, torch.split(flat, self._sizes), strict=True):
            p.copy_(part.view_as(p))
