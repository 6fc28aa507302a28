"""The three ways in which `tune` searches: to the minimum, through the training, and by a run on minibatches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import OptionError, Solution, solve
from bilevel._util.checks import warn_user
from bilevel.applications.training import fit, loader, refuse_end
from bilevel.applications.tuning.hyperparameters import values
from bilevel.applications.tuning.implicit_descent import descend, objective
from bilevel.applications.tuning.knob import Knob
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.unrolled_training import Mark, UnrolledTraining
from bilevel.applications.tuning.value_search import DESCENT, START, Trial, ValueSearch, folder_name
from bilevel.methods.base import Method
from bilevel.optim.linear_solvers import FlatError
from bilevel.running.run_identity import described

# Called with the stage, the steps done in it, and their number.
OnProgress = Callable[[str, int, int], object]
MINIBATCHES = "run on minibatches"
# Two losses that differ by less than this share count as the same.
SAME = 1e-3


@dataclass(frozen=True)
class Tries:
    """The tries before a descent: the values at the start, the caller's values, and the size of the grid."""

    first: Mapping[str, Tensor]
    given: Mapping[str, Mapping[str, Tensor]]
    grid: int


@dataclass(frozen=True)
class TuningTask:
    """What all modes read."""

    objective: TrainingLoss
    hyper: Mapping[str, Knob]
    model: nn.Module
    # Of the training, and of the validation.
    examples: tuple[Sequence[Tensor], Sequence[Tensor]]
    tries: Tries
    seed: int
    # The folder, and what identifies the tuning there.
    place: tuple[Path | None, Mapping[str, Any]]
    on_progress: OnProgress
    measure: Callable[[nn.Module], Any] | None

    @property
    def train(self) -> Sequence[Tensor]:
        return self.examples[0]

    @property
    def valid(self) -> Sequence[Tensor]:
        return self.examples[1]

    @property
    def folder(self) -> Path | None:
        return self.place[0]

    def trial(self, values: Mapping[str, Tensor], slope: Callable[[], dict[str, Tensor]]) -> Trial:
        """Return what the present weights of the model show."""
        loss = self.objective.measured(values, self.model, self.valid)
        measured = self.measure and self.measure(self.model)
        if self.folder is not None and not _storable(measured):
            raise OptionError(
                "with a checkpoint, measure must return tensors, numbers, text, or dicts (with names as text) and "
                f"lists of them; got {measured!r}. Return such values, or leave out the checkpoint."
            )
        return Trial(loss, measured, self.model.state_dict(), slope)

    def search(self, attempt: Callable[[Mapping[str, Tensor]], Trial], **options: Any) -> ValueSearch:
        """Return a search; a search that resumes must have the same `options` of the training."""
        task = {**self.place[1], **options, "seed": self.seed}

        def told(name: str, done: int) -> None:
            self.on_progress(f"trying values ({name})", done, done)

        return ValueSearch(attempt, self.hyper, self.folder and self.folder / "candidates", task, told)

    def begin(self, search: ValueSearch) -> None:
        """Try the start, the values of the caller and the grid."""
        search.attempt(START, self.tries.first)
        for name, value in self.tries.given.items():
            search.attempt(name, value)
        search.grid(self.tries.grid)


def _storable(value: Any) -> bool:
    """Return whether a checkpoint can hold the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _storable(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_storable, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def training_search(task: TuningTask, options: dict[str, Any], rounds: int) -> tuple[ValueSearch, list[float]]:
    """Descend through the steps of the training; return the search and the loss of each training."""
    training = UnrolledTraining(task.objective, task.model, task.train, seed=task.seed + 1, **options)

    def attempt(value: Mapping[str, Tensor]) -> Trial:
        marks: list[Mark] = []
        steps = options["steps"]
        training.train(value, marks if rounds else None, lambda done: task.on_progress("training", done, steps))
        return task.trial(value, lambda: training.slope(value, marks, task.valid))

    search = task.search(attempt, **options)
    task.begin(search)
    search.descend(rounds)
    return search, [found.valid_loss for found in search.candidates]


def minibatch_search(task: TuningTask, u: Mapping[str, Tensor], options: dict[str, Any]) -> ValueSearch:
    """Train with the values that the bilevel run ended with, and with the others."""
    untrained = copy.deepcopy(task.model.state_dict())

    def attempt(value: Mapping[str, Tensor]) -> Trial:
        task.model.load_state_dict(untrained)
        place = task.folder and task.folder / "training" / folder_name(value)
        told = lambda done: task.on_progress("training", done, options["steps"])  # noqa: E731
        train_with(
            task.objective,
            value,
            task.model,
            task.train,
            seed=task.seed + 1,
            on_progress=told,
            checkpoint=place,
            **options,
        )
        return task.trial(value, dict)

    search = task.search(attempt, **options)
    run = search.attempt(MINIBATCHES, values(task.hyper, u))
    task.begin(search)
    if search.best.valid_loss < (1 - SAME) * run.valid_loss:
        warn_user(
            f"the {MINIBATCHES} ended with values whose validation loss after a training from scratch is "
            f"{run.valid_loss:.4g}. {search.best.name} has {search.best.valid_loss:.4g}, and its values are returned. "
            "mode='training' tunes what will be trained."
        )
    return search


def convex_search(task: TuningTask, u: dict[str, Tensor], count: int) -> tuple[ValueSearch, list[float]]:
    """Descend with the model at its minimum, from the best candidate; return the search and the descent's path."""
    untrained = copy.deepcopy(task.model.state_dict())

    def attempt(value: Mapping[str, Tensor]) -> Trial:
        task.model.load_state_dict(untrained)
        held = {name: tensor.detach().clone().requires_grad_() for name, tensor in value.items()}
        pose = task.objective.fixed_problem(task.train, task.valid)
        try:
            objective(pose, held, task.model).newton.minimise()
        except FlatError:  # with these values, the training loss has no minimum
            return Trial(math.inf, None, task.model.state_dict(), dict)
        return task.trial(value, dict)

    search = task.search(attempt)
    task.begin(search)
    if not math.isfinite(search.best.valid_loss):
        return search, []
    place = task.folder and task.folder / "tuning" / folder_name(search.best.values, described(search.hyper))
    with torch.no_grad():
        for name, free in u.items():
            free.copy_(search.hyper[name].free(search.best.values[name].to(free)))
    task.model.load_state_dict(search.state)
    grown = TrainingLoss(search.hyper, task.objective.classes, task.objective.own, task.objective.valid)
    curve = descend(
        objective(grown.problem(task.train, task.valid), u, task.model, tolerance=1e-6),
        max_steps=count,
        tolerance=1e-6,
        on_progress=lambda done, value: task.on_progress("tuning", done, count),
        checkpoint=place,
        task={**task.place[1], "steps": count},
    )
    search.attempt(DESCENT, values(search.hyper, u))
    return search, curve


def solved_on_batches(
    task: TuningTask, u: dict[str, Tensor], method: Method, count: int, batch: int, options: dict[str, Any]
) -> Solution:
    """Tune u by a bilevel run, with a copy of the model."""
    checkpoint = task.folder and task.folder / "tuning"
    solution = solve(
        task.objective.problem(),
        method,
        u,
        copy.deepcopy(task.model),
        (loader(task.valid, batch), loader(task.train, batch)),
        max_steps=count,
        hypergradient=False,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
        **options,
    )
    refuse_end(solution, "tuning", ". Scale the inputs, narrow the ranges of `hyper`, or use another method.")
    return solution


def train_with(
    objective: TrainingLoss,
    tuned: Mapping[str, Tensor],
    model: nn.Module,
    columns: Sequence[Tensor],
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    on_progress: Callable[[int], object] | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train the model in place with these values of the hyperparameters; the options are passed to `fit`."""
    device = next(model.parameters()).device
    held = {name: value.to(device) for name, value in tuned.items()}
    rest = [column.to(device) for column in columns[1:]]

    def loss(model: nn.Module, x: Tensor, row: Tensor, w: Tensor) -> Tensor:
        return objective(held, model, (x, *(column[row] for column in rest)))

    fit(
        model,
        columns[0],
        torch.arange(len(columns[0])),
        steps=steps,
        batch=batch,
        rate=rate,
        seed=seed,
        on_progress=on_progress,
        loss=loss,
        checkpoint=checkpoint,
    )
