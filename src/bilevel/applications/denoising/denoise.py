"""Denoising: one importance for each training example, learned from a small trusted set.

    min_u  mean over the trusted set of l(x, y; v)   subject to
    v  =   argmin_v  sum_i w_i l(x_i, y_i; v) / sum_i w_i,    w_i = sigmoid(u_i)              (the paper's Eq. 3)

First we train the model on the trusted set only. How the labels differ from its predictions shows which class is
labelled as which (`label_mistakes`), and so how probable each label is: u starts there. After the bilevel run we train
the classifier that is returned, in two rounds. In the first, every example counts by its importance, a trusted example
by 1. In the second, every label is replaced by the probabilities of the classes, given the label and the prediction of
the first round. All three trainings begin at the model's first weights. An example is a suspect if its importance is
below 1/2 and the classifier predicts another class.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader

from bilevel import Callback, OptionError, Penalty, Problem, ProblemError, Rows, Solution, solve, weighted_mean
from bilevel._util.checks import ShortRepr, check_counts, in_range
from bilevel._util.random_state import derived
from bilevel.applications.denoising.examples import Examples, with_trusted
from bilevel.applications.denoising.label_mistakes import mistakes
from bilevel.applications.training import Augment, Trainer, loader, probabilities, refuse_end
from bilevel.data import Pair
from bilevel.derivatives.mixed_precision import Precision
from bilevel.distributed.process_group import first_rank
from bilevel.measures.batch_scales import DEEP_RATE
from bilevel.methods.base import Method
from bilevel.running.run_identity import claim, digest_of

# The cotangent of the same batch is biased by each example's own gradient, which is a sign of a wrong label.
METHOD = Penalty(cotangent="same", decay="linear")
# The default number of passes over the examples, and the least number of steps with up to FEW examples, and with more.
PASSES, LEAST_STEPS = 12, (600, 1200)
FEW = 2000
# The largest log-odds of a right label at the start of a run.
CERTAIN = 2.5
# If an example is seen less often, its importance moves by less, because few gradients say little about it.
VISITS = 24
# The size of a batch with fewer than LARGE examples, and with more.
BATCH = 100, 200
LARGE = 10_000
# Called with a stage, the steps done in it, and their number.
OnProgress = Callable[[str, int, int], object]


@dataclass(frozen=True, repr=False)
class Denoised(ShortRepr):
    """What was learned about each training example, in the order of `train`, and the classifier. `denoise` returns it.

    Fields:
        importance: A number in [0, 1] for each example. Below 1/2, its label is probably wrong.
        quality: The importance times the probability of the given label: review the examples with the lowest first.
        suspect: Whether each label is considered wrong: its importance is below 1/2, and the classifier predicts
            another class.
        suggested: The class that the classifier predicts for each example.
        confidence: The probability of this class.
        model: The trained classifier: the model that was passed.
        solution: The `Solution` of the bilevel run.
        seconds: The time of all trainings and of the run.
        settings: The steps, batch size, rate and seed that were used. Default: empty.

    >>> x, y = torch.randn(80, 2), torch.arange(80) % 2
    >>> found = denoise((x[:60], y[:60]), (x[60:], y[60:]), nn.Linear(2, 2), steps=5)
    >>> first = found.quality.argsort()[:10]  # the examples to review first
    >>> 0 <= found.noise_rate <= 1
    True
    """

    importance: Tensor
    quality: Tensor
    suspect: Tensor
    suggested: Tensor
    confidence: Tensor
    model: nn.Module
    solution: Solution
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def noise_rate(self) -> float:
        """The share of suspects, an estimate of the share of wrong labels."""
        return float(self.suspect.double().mean())


def denoise(
    train: Examples,
    trusted: Examples,
    model: nn.Module,
    *,
    method: Method | None = None,
    steps: int | None = None,
    final_steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    on_progress: OnProgress | None = None,
    engine: str = "auto",
    precision: Precision | None = None,
) -> Denoised:
    """Learn the importance of each training example, and train `model` in place with these importances.

    Args:
        train: The examples to judge: (inputs, labels), or a Dataset of pairs.
        trusted: Examples of the same form, whose labels are known to be right. Each class needs some.
        model: A network that maps inputs to one score for each class; it can be on any device. Integer inputs stay
            integers if the model takes them, as a model of words does.
        method: The method of the bilevel run. None (default): `Penalty(cotangent="same", decay="linear")`.
        steps: The number of steps of the bilevel run. None (default): 12 passes over `train`, and at least 600,
            or 1,200 with more than 2,000 examples.
        final_steps: The number of steps of each training before and after the run. None (default): `steps`.
        batch: The number of examples in a batch. None (default): 100, or 200 with 10,000 examples or more.
        rate: The learning rate of the trainings. None (default): 1e-3 before the run and, after it, the rate that the
            penalty method chose for the lower level.
        augment: A function that changes a batch of inputs at random, in the run and in the trainings, such as
            `bilevel.applications.augmentation.crop_and_flip`. None (default): inputs stay as they are.
        seed: The seed of all random draws. Default: 0.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        resume: Whether to resume from the state in `checkpoint`. Default: False.
        callbacks: Callbacks of the bilevel run, such as `[Progress()]`. Default: none.
        on_progress: A function that is called in the trainings as `on_progress(stage, done, total)`, with the steps
            done. None (default): nothing is called.
        engine: What runs the steps, as in `solve`. Default: "auto".
        precision: "bf16" runs the network under bfloat16 autocast. None (default): its own precision.

    >>> x, y = torch.randn(80, 2), torch.arange(80) % 2
    >>> found = denoise((x[:60], y[:60]), (x[60:], y[60:]), nn.Linear(2, 2), steps=5)
    >>> found.importance.shape
    torch.Size([60])
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be an nn.Module; got {type(model).__name__}.")
    began = time.perf_counter()
    pair, pair_trusted, classes = with_trusted(train, trusted, model)
    check_counts(batch=batch, steps=steps, final_steps=final_steps)
    in_range("rate", rate, above=0)
    y, count = pair[1], len(pair[1])
    size, steps = size_and_steps(count, batch, steps)
    rounds, folder = final_steps or steps, None if checkpoint is None else Path(checkpoint)
    if folder is not None and first_rank():
        task = {"train data": digest_of(pair), "trusted data": digest_of(pair_trusted), "steps": steps}
        claim(folder, task, resume=resume)
    trainings = _Trainings(
        model, pair, pair_trusted, classes, rounds, size, augment, precision, seed, folder, on_progress
    )
    guess = trainings.train("trusted set", trainings.every[count:], rate or DEEP_RATE)
    noise = mistakes(guess, y)
    right = noise.posterior(guess, y, noise.temperature)[torch.arange(count), y]
    model.load_state_dict(trainings.first)
    options: dict[str, Any] = {"callbacks": callbacks, "engine": engine, "precision": precision, "seed": seed}
    options |= {"max_steps": steps, "checkpoint": folder and folder / "importance", "resume": resume}
    batches = loaders(*pair, *pair_trusted, size)
    solution, importance = _learn(model, right, batches, VISITS * count / (steps * size), method, augment, options)
    rate = rate or _final_rate(method, solution)
    found = trainings.two_rounds(rate, importance, lambda found: noise.posterior(found, y))
    confidence, suggested = found.max(1)
    return Denoised(
        importance=importance,
        quality=importance * found[torch.arange(count), y],
        suspect=(importance < 0.5) & (suggested != y),
        suggested=suggested,
        confidence=confidence,
        model=model,
        solution=solution,
        seconds=time.perf_counter() - began,
        settings={"steps": steps, "final_steps": rounds, "batch": size, "rate": rate, "seed": seed},
    )


def size_and_steps(count: int, batch: int | None, steps: int | None) -> tuple[int, int]:
    """Return the size of a batch of `count` examples, and the number of steps of a training."""
    size = min(batch or BATCH[count >= LARGE], count)
    return size, steps or max(LEAST_STEPS[count > FEW], PASSES * count // size)


def _learn(
    model: nn.Module,
    right: Tensor,
    batches: tuple[DataLoader[Any], DataLoader[Any]],
    scale: float,
    method: Method | None,
    augment: Augment | None,
    options: dict[str, Any],
) -> tuple[Solution, Tensor]:
    """Learn the importances, which start at the probabilities `right`; return the solution and the importances."""
    scale, device = max(1.0, scale), next(model.parameters()).device
    u = Rows(len(right), init=scale * torch.logit(right, eps=1e-6).clamp(-CERTAIN, CERTAIN), device=device)
    solution = solve(
        importance_problem(augment, lambda u: torch.sigmoid(u / scale)),
        method or METHOD,
        u,
        copy.deepcopy(model).train(),
        batches,
        hypergradient=False,
        **options,
    )
    importance = torch.sigmoid(u.values / scale).float().cpu()
    advice = ", and nothing was learned. Scale the inputs, or use another model, method or seed."
    refuse_end(solution, "bilevel run", advice, fine=bool(torch.isfinite(importance).all()))
    return solution, importance


class _Trainings:
    """The trainings before and after the bilevel run, each from the model's first weights."""

    def __init__(
        self,
        model: nn.Module,
        pair: Pair,
        trusted: Pair,
        classes: int,
        steps: int,
        batch: int,
        augment: Augment | None,
        precision: Precision | None,
        seed: int,
        folder: Path | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.model, self.first, self.x, self.steps = model, copy.deepcopy(model.state_dict()), pair[0], steps
        self.batch, self.seed, self.folder, self.on_progress = batch, seed, folder, on_progress
        self.changes: dict[str, Any] = {"augment": augment, "precision": precision}
        x, y = (torch.cat(parts) for parts in zip(pair, trusted, strict=True))
        self.every = torch.arange(len(y))
        tensors = x, one_hot(y, classes).float(), torch.ones(len(y))
        self.trainer = Trainer(model, tensors, steps=3 * steps, **self.changes)

    def train(self, stage: str, part: Tensor, rate: float) -> Tensor:
        """Train the model from scratch on a part of the examples; return its probabilities on the training inputs."""
        on_progress, seed = self.on_progress, derived(self.seed, stage)
        self.model.load_state_dict(self.first)
        self.trainer.train(
            part,
            steps=self.steps,
            batch=self.batch,
            rate=rate,
            seed=seed,
            checkpoint=self.folder and self.folder / stage.replace(" ", "-"),
            on_progress=on_progress and (lambda done: on_progress(stage, done, self.steps)),
        )
        found = probabilities(self.model, self.x, seed=seed, **self.changes)
        if not bool(torch.isfinite(found).all()):
            raise ProblemError(f"training at the rate {rate:g} diverged. Use a smaller rate, or scale the inputs.")
        return found

    def two_rounds(self, rate: float, importance: Tensor, posterior: Callable[[Tensor], Tensor]) -> Tensor:
        """Train with the importances, then on the posterior of the labels; return the last probabilities."""
        trainer, count = self.trainer, len(importance)
        trainer.w[:count] = importance.to(trainer.w.device)
        found = self.train("round 1", self.every, rate)
        trainer.w.fill_(1.0)
        trainer.y[:count] = posterior(found).to(trainer.y.device)
        return self.train("round 2", self.every, rate)


def importance_problem(
    augment: Augment | None = None, importance: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Problem:
    """Return Eq. 3 of the paper on batches (x, y) of trusted examples and (x, y, row) of the other examples.

    u has one row for each of the other examples; `importance` maps it into [0, 1].
    """

    def upper(u: Rows, v: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return cross_entropy(v(augment(x) if augment else x), y)

    def lower(u: Rows, v: nn.Module, triple: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, row = triple
        losses = cross_entropy(v(augment(x) if augment else x), y, reduction="none")
        return weighted_mean(losses, importance(u[row]))

    return Problem(upper, lower)


def _final_rate(method: Method | None, solution: Solution) -> float:
    """Return the rate that the penalty method took from the scale of the loss; the rate of others is not for Adam."""
    own = method is None or (isinstance(method, Penalty) and method.lower_optimizer is None)
    return float(max(solution.history["lower_rate"])) if own and len(solution.history) else DEEP_RATE


def loaders(
    x: Tensor, y: Tensor, x_trusted: Tensor, y_trusted: Tensor, size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return shuffled batches of trusted examples, and of the others with their rows, without partial batches."""
    return loader((x_trusted, y_trusted), size), loader((x, y, torch.arange(len(y))), size)
