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
from bilevel._util.checks import ShortRepr, check_counts, in_range, one_of, require
from bilevel._util.random_state import derived, seeded
from bilevel.applications.few_shot.tasks import (
    PROXIMITY,
    SCALE,
    CosineClassifier,
    OnProgress,
    Start,
    TaskSampler,
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


@dataclass(frozen=True, repr=False)
class Evaluation(ShortRepr):
    """The accuracy of each task. `adapt_and_evaluate` returns it.

    Fields:
        accuracies: The share of right queries in each task.
        index: The numbers of the tasks' images, as the sampler drew them: (tasks, ways, shots + queries).
        predictions: The predicted class, within the task, of each query: (tasks, ways * queries).

    >>> found = Evaluation(torch.tensor([0.8, 1.0]), torch.zeros(2, 5, 16), torch.zeros(2, 75))
    >>> round(found.accuracy, 3), round(found.interval, 3)
    (0.9, 1.271)
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
    """Train a classifier for each task on its support, all tasks at once.

    Args:
        support: The features of the images to learn from, (tasks, ways * shots, features), sorted by class.
        ways: The number of classes in a task.
        steps: The number of steps. Default: 100.
        scale: The factor on the cosines. Default: 10. Use the value of `meta_train`.
        proximity: How much the class weights are held near the class means, as in `meta_train`. Default: 5.
        start: The first class weights: "means" (default) of the classes, or "random".
        optimizer: A factory such as `partial(torch.optim.SGD, lr=0.1)`. None (default): gradient descent at 0.05.

    >>> v = adapt(torch.randn(8, 5 * 1, 64), ways=5, steps=10)  # 8 tasks with 5 classes, and one image of each
    >>> v(torch.randn(8, 75, 64)).shape
    torch.Size([8, 75, 5])
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
    on_progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Train a classifier on the support of each task, with a fixed representation, and test it on the queries.

    Args:
        representation: A network that maps images to features. It is in evaluation mode, so its output for an image
            depends on no other image.
        sampler: Draws the tasks: a `TaskSampler` of classes that the representation was not trained on.
        tasks: The number of tasks. Default: 600. Four times as many halve the interval.
        steps: The number of steps of each classifier. Default: 100.
        scale: The factor on the cosines. Default: 10. Use the value of `meta_train`.
        proximity: How much the class weights are held near the class means, as in `meta_train`. Default: 5.
        start: The first class weights: "means" (default) of the classes, or "random".
        optimizer: A factory such as `partial(torch.optim.SGD, lr=0.1)`. None (default): gradient descent at 0.05.
        seed: The seed of the tasks and of the classifiers. Default: 0. The same seed compares two networks on the same
            tasks.
        precision: "bf16" computes the features under bfloat16 autocast. None (default): the network's own precision.
        on_progress: A function that is called as `on_progress(done, total)` with the number of embedded images, which
            take most of the time. By default nothing is called.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 4, 1, 28, 28), dtype=torch.uint8)
    >>> sampler = TaskSampler(ImageClasses(images, (4,) * 6, tuple("abcdef")), ways=5, shots=1, queries=3)
    >>> found = adapt_and_evaluate(backbone("conv4", channels=1), sampler, tasks=2, steps=5)
    >>> 0 <= found.accuracy <= 1
    True
    """
    check_counts(tasks=tasks)
    in_range("steps", steps, least=0, whole=True)
    one_of("start", start, ("means", "random"))
    device = next(representation.parameters()).device
    index, z, place = embedded_tasks(representation, sampler, tasks, seed, precision, on_progress)
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
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tasks as numbers of images, the features of their images, and the tasks as rows of the features."""
    index = sampler.draw(tasks, torch.Generator().manual_seed(derived(seed, "tasks")))
    used, place = torch.unique(index, return_inverse=True)
    z = embed(representation, sampler.classes.images[used], precision=precision, on_progress=on_progress)
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
    """A callback that measures the accuracy on tasks during a run; `rows` has the step, the seconds and the accuracy.

    The seconds of a row count the training only.

    Args:
        representation: The network that the run trains.
        sampler: Draws the tasks: a `TaskSampler` of classes that are not trained on.
        every: The number of steps between two measurements.
        tasks: The number of tasks of a measurement. Default: 100.
        file: A JSON file for the rows; a resumed run continues it. None (default): nothing is written.
        deadline: The time at which the run ends, by `time.monotonic`. None (default): it takes all its steps.
        keep: Whether `best` keeps the weights of the step with the best accuracy, also in a folder next to the file.
            Default: False.
        options: More options of `adapt_and_evaluate`, such as `steps=50`.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 4, 1, 28, 28), dtype=torch.uint8)
    >>> sampler = TaskSampler(ImageClasses(images, (4,) * 6, tuple("abcdef")), ways=5, shots=1, queries=3, tasks=2)
    >>> network = backbone("conv4", channels=1)
    >>> validation = Validation(network, sampler, every=2, tasks=2, steps=5)
    >>> solution = meta_train(network, sampler, steps=2, method=default_method(lower_steps=2), callbacks=[validation])
    >>> [row["step"] for row in validation.rows]
    [2]
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
