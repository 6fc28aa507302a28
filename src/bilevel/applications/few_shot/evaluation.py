"""The accuracy of a representation: classifiers are trained on the support of many tasks and tested on the queries."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel._util.atomic_files import read_json, write_whole
from bilevel._util.checks import check_counts, in_range, one_of, require
from bilevel._util.random_state import derived, seeded
from bilevel.applications.few_shot.tasks import (
    PROXIMITY,
    SCALE,
    CosineClassifier,
    Start,
    TaskSampler,
    Tell,
    embed,
    support_loss,
)
from bilevel.derivatives.mixed_precision import Precision
from bilevel.optim.variable_optimizer import OptimizerFactory
from bilevel.running import checkpoints as checkpoint
from bilevel.running.callbacks import Callback, Run

ADAPT_STEPS = 100
# The rate of gradient descent on the classifiers.
ADAPT_RATE = 0.05


@dataclass(frozen=True)
class Evaluation:
    """The accuracy of each task.

    `index` has the numbers of the tasks' images, as the sampler drew them; `predictions` the predicted class, within
    the task, of each query.
    """

    accuracies: Tensor
    index: Tensor
    predictions: Tensor

    @property
    def accuracy(self) -> float:
        return float(self.accuracies.double().mean())

    @property
    def interval(self) -> float:
        """Half the width of the 95% interval of the mean (Student's t); NaN with a single task."""
        if (count := len(self.accuracies)) < 2:
            return math.nan
        stats = require("scipy.stats", "apps")
        return float(stats.t.ppf(0.975, count - 1)) * float(self.accuracies.double().std()) / math.sqrt(count)


def adapt(
    support: Tensor,
    ways: int,
    *,
    steps: int = ADAPT_STEPS,
    scale: float = SCALE,
    proximity: float = PROXIMITY,
    start: Start = "means",
    optimizer: OptimizerFactory | None = None,
) -> CosineClassifier:
    """Train a classifier for each task on its support (tasks, ways * shots, features), all tasks at once.

    - `steps` (100), `optimizer`: a factory, default gradient descent at 0.05.
    - `scale` (10): the factor on the cosines. `proximity` (5): see `meta_train`.
    - `start`: "means" (of the classes, default) or "random".
    """
    tasks, images, features = support.shape
    v = CosineClassifier(tasks, features, ways, scale=scale, device=support.device, dtype=support.dtype)
    if start == "means":
        v.start_at_means(support)
    labels = torch.arange(ways, device=support.device).repeat_interleave(images // ways)
    descent = (optimizer or partial(torch.optim.SGD, lr=ADAPT_RATE))([v.weight])
    for _ in range(steps):
        descent.zero_grad()
        support_loss(v, support, labels, proximity).backward()  # type: ignore[no-untyped-call]
        descent.step()
    return v


def adapt_and_evaluate(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    tasks: int = 600,
    steps: int = ADAPT_STEPS,
    scale: float = SCALE,
    proximity: float = PROXIMITY,
    start: Start = "means",
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
    precision: Precision | None = None,
    tell: Tell = lambda done, total: None,
) -> Evaluation:
    """Train a classifier on the support of each task, with a fixed representation, and test it on the queries.

    The representation is in evaluation mode, so its output for an image depends on no other image. `tasks` (600) tasks
    are drawn from `seed`; `steps` (100), `scale`, `proximity`, `start` and `optimizer` are passed to `adapt`.
    `tell(done, total)` counts the embedded images, which take most of the time.

    >>> adapt_and_evaluate(network, sampler, tasks=600).accuracy  # doctest: +SKIP
    """
    check_counts(tasks=tasks)
    in_range("steps", steps, least=0, whole=True)
    one_of("start", start, ("means", "random"))
    device = next(representation.parameters()).device
    index, z, place = embedded_tasks(representation, sampler, tasks, seed, precision, tell)
    labels = sampler.labels(device)[1]
    predicted = []
    with seeded(derived(seed, "classifiers"), device):
        for part in torch.split(place, max(1, 30_000 // (sampler.ways * sampler.shots))):
            found = z[part]
            support, query = found[:, :, : sampler.shots].flatten(1, 2), found[:, :, sampler.shots :].flatten(1, 2)
            v = adapt(
                support, sampler.ways, steps=steps, scale=scale, proximity=proximity, start=start, optimizer=optimizer
            )
            with torch.no_grad():
                predicted.append(v(query).argmax(-1))
    predictions = torch.cat(predicted)
    return Evaluation((predictions == labels).double().mean(1).cpu(), index, predictions.cpu())


def embedded_tasks(
    representation: nn.Module,
    sampler: TaskSampler,
    tasks: int,
    seed: int,
    precision: Precision | None = None,
    tell: Tell = lambda done, total: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tasks as numbers of images, the features of their images, and the tasks as rows of the features."""
    index = sampler.draw(tasks, torch.Generator().manual_seed(derived(seed, "tasks")))
    used, place = torch.unique(index, return_inverse=True)
    z = embed(representation, sampler.classes.images[used], precision=precision, tell=tell)
    return index, z, place.to(z.device)


class Best:
    """The weights at the step with the best accuracy, in memory and, if given, in a folder."""

    def __init__(self, representation: nn.Module, folder: Path | None = None) -> None:
        self.representation, self.folder = representation, folder
        self.state: dict[str, Any] | None = (
            checkpoint.load(folder) if folder is not None and checkpoint.exists(folder) else None
        )

    def update(self, step: int, accuracy: float) -> None:
        """Keep the present weights if the accuracy is better than before."""
        if self.state is not None and accuracy <= self.state["accuracy"]:
            return
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.representation.state_dict().items()}
        self.state = {"step": step, "accuracy": accuracy, "weights": weights}
        if self.folder is not None:
            checkpoint.save(self.folder, self.state)

    def restore(self) -> tuple[int, float] | None:
        """Load the best weights; return their step and accuracy, or None if there are none."""
        if self.state is None:
            return None
        self.representation.load_state_dict(self.state["weights"])
        return int(self.state["step"]), float(self.state["accuracy"])


class Validation(Callback):
    """Measures the accuracy on tasks of the sampler every `every` steps of a run, in `rows` and in `file` if given.

    The seconds of a row count the training only. With `keep`, `best` has the weights of the step with the best
    accuracy, also in a folder next to the file. After `deadline` (by `time.monotonic`) the run ends. `options` are
    passed to `adapt_and_evaluate`.
    """

    def __init__(
        self,
        representation: nn.Module,
        sampler: TaskSampler,
        *,
        every: int,
        tasks: int = 100,
        file: Path | None = None,
        deadline: float | None = None,
        keep: bool = False,
        **options: Any,
    ) -> None:
        self.representation, self.sampler, self.every, self.tasks = representation, sampler, every, tasks
        self.file, self.deadline, self.options = file, deadline, options
        self.best = Best(representation, None if file is None else file.with_suffix(".best")) if keep else None
        kept = {} if file is None else read_json(file)
        self.rows: list[dict[str, float]] = kept.get("rows", [])
        self.spent: float = kept.get("spent", 0.0)

    def start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["step"] <= run.step]
        self.spent = run.seconds - self.trained(run.seconds)
        self.next = (run.step // self.every + 1) * self.every

    def log(self, run: Run) -> bool:
        if run.step >= self.next or run.step >= run.max_steps:
            self.next = (run.step // self.every + 1) * self.every
            began = time.perf_counter()
            found = adapt_and_evaluate(self.representation, self.sampler, tasks=self.tasks, **self.options)
            row = {"step": run.step, "seconds": self.trained(run.seconds), "accuracy": found.accuracy}
            self.rows.append(row | {"interval": found.interval})
            if self.best is not None:
                self.best.update(run.step, found.accuracy)
            self.spent += time.perf_counter() - began
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.file, json.dumps({"rows": self.rows, "spent": self.spent}) + "\n")
        return self.deadline is not None and time.monotonic() >= self.deadline

    def trained(self, seconds: float) -> float:
        """Return the seconds of training only, from the seconds of a run at its last step.

        These do not include a measurement after that step, which is in `spent`.
        """
        return max(seconds - self.spent, self.rows[-1]["seconds"] if self.rows else 0.0)
