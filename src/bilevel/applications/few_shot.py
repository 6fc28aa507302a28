"""Few-shot learning: one representation for many tasks, each with a classifier of its own.

    min_u  sum_i f_i(u, w_i)   subject to   w_i = argmin_w g_i(u, w)                           (the paper's Eq. 4)

g_i is the cross-entropy of task i on the few images to learn from (its support), f_i that on its other images (its
queries). Scores are cosines between the representation T(x; u) and the class weights w_i, times a fixed scale. All
tasks of a meta-batch are solved at once: v has a leading dimension of tasks, and so have the multipliers, which start
anew with every meta-batch. The representation of a meta-batch is computed once for each upper step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ..callbacks import Callback, Run
from ..data.image_classes import ImageClasses
from ..descent import OptimizerFactory
from ..errors import OptionError
from ..method import Method
from ..methods.penalty import Penalty
from ..models import cosine_logits
from ..options import in_range, one_of
from ..precision import Precision, reduced
from ..problem import Problem
from ..replay import derived, seeded
from ..solution import Solution
from ..solve import solve
from ..training import Augment
from .few_shot_tasks import TaskSampler

SCALE = 10.0
"""What cosines are multiplied by before the softmax; 1 in the paper."""
GAMMA, LAM, LOWER_STEPS = 10.0, 1.0, 5
UPPER_RATE, LOWER_RATE = 2e-3, 1e-2
ADAPT_STEPS = 100
BATCH = 2000
"""Images that are embedded at once."""
Start = Literal["means", "random"]


class CosineClassifier(nn.Module):
    """A linear classifier for each of several tasks, whose scores are cosines times `scale`."""

    def __init__(
        self,
        tasks: int,
        features: int,
        ways: int,
        *,
        scale: float = SCALE,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        in_range("scale", scale, above=0)
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(tasks, features, ways, device=device, dtype=dtype))
        self.start_at_random()

    def forward(self, features: Tensor) -> Tensor:
        """The scores (tasks, n, ways) of features (tasks, n, features)."""
        return self.scale * cosine_logits(features, self.weight)

    @torch.no_grad()
    def start_at_random(self) -> None:
        """Weights of a normal distribution, each class of length about 1."""
        self.weight.normal_(0.0, 1.0 / math.sqrt(self.weight.shape[1]))

    @torch.no_grad()
    def start_at_means(self, support: Tensor) -> None:
        """The mean direction of the features (tasks, ways * shots, features) of each class, which come class by class."""
        tasks, features, ways = self.weight.shape
        directions = normalize(support, dim=-1).reshape(tasks, ways, -1, features).mean(2)
        self.weight.copy_(normalize(directions, dim=-1).transpose(1, 2))


class Episodes:
    """The problem of a sampler's tasks: images live on the device, a batch is the numbers of some of them."""

    def __init__(
        self, sampler: TaskSampler, device: torch.device, *, start: Start = "means", augment: Augment | None = None
    ) -> None:
        self.images = sampler.classes.images.to(device)
        self.shots, self.start, self.augment = sampler.shots, start, augment
        self.support_labels, self.query_labels = sampler.labels(device)

    def problem(self) -> Problem:
        return Problem(self.upper, self.lower, prepare=self.prepare, start_lower=self.start_lower)

    def prepare(self, u: nn.Module, batches: Any) -> tuple[Tensor, Tensor]:
        """The representation of the support (tasks, ways * shots, features) and of the queries."""
        index = batches[0]
        tasks, ways, images = index.shape
        x = pixels(self.images[index.reshape(-1)], next(u.parameters()).dtype)
        z = u(self.augment(x) if self.augment is not None else x)
        z = (z.float() if z.dtype is torch.bfloat16 else z).reshape(tasks, ways, images, -1)
        return z[:, :, : self.shots].flatten(1, 2), z[:, :, self.shots :].flatten(1, 2)

    def start_lower(self, v: CosineClassifier, prepared: tuple[Tensor, Tensor]) -> None:
        if self.start == "means":
            v.start_at_means(prepared[0])
        else:
            v.start_at_random()

    def lower(self, u: nn.Module, v: CosineClassifier, prepared: tuple[Tensor, Tensor]) -> Tensor:
        return _loss(v, prepared[0], self.support_labels)

    def upper(self, u: nn.Module, v: CosineClassifier, prepared: tuple[Tensor, Tensor]) -> Tensor:
        return _loss(v, prepared[1], self.query_labels)


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes as numbers from 0 to 1."""
    return images.to(dtype) / 255


def _loss(v: CosineClassifier, features: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of each task, summed over the tasks: prices are then those of a task by itself."""
    # Out of autocast: the classifiers are small, and second derivatives of rounded cosines are not worth having.
    with torch.autocast(features.device.type, enabled=False):
        scores = v(features)
        tasks = scores.shape[0]
        return cross_entropy(scores.flatten(0, 1), labels.repeat(tasks), reduction="sum") / len(labels)


@dataclass(frozen=True)
class Evaluation:
    """The accuracies of tasks, a number for each."""

    accuracies: Tensor
    index: Tensor
    """The numbers of their images, as the sampler drew them."""
    predictions: Tensor
    """The class within the task that each query was given."""

    @property
    def accuracy(self) -> float:
        return float(self.accuracies.double().mean())

    @property
    def interval(self) -> float:
        """Half the width of the 95% interval of the mean."""
        return 1.96 * float(self.accuracies.double().std()) / math.sqrt(len(self.accuracies))


@torch.no_grad()
def embed(
    representation: nn.Module, images: Tensor, *, batch: int = BATCH, precision: Precision | None = None
) -> Tensor:
    """The representation of images given as bytes, in evaluation mode, on the representation's device."""
    first = next(representation.parameters())
    training = representation.training
    representation.eval()
    try:
        with reduced(precision, first.device):
            found = [representation(pixels(x.to(first.device), first.dtype)) for x in torch.split(images, batch)]
    finally:
        representation.train(training)
    return torch.cat([z.float() if z.dtype is torch.bfloat16 else z for z in found])


def adapt(
    support: Tensor,
    ways: int,
    *,
    steps: int = ADAPT_STEPS,
    scale: float = SCALE,
    start: Start = "means",
    optimizer: OptimizerFactory | None = None,
) -> CosineClassifier:
    """Train a classifier for each task on its support (tasks, ways * shots, features), all of them at once."""
    tasks, images, features = support.shape
    v = CosineClassifier(tasks, features, ways, scale=scale, device=support.device, dtype=support.dtype)
    if start == "means":
        v.start_at_means(support)
    labels = torch.arange(ways, device=support.device).repeat_interleave(images // ways)
    descent = (optimizer or partial(torch.optim.Adam, lr=LOWER_RATE))([v.weight])
    for _ in range(steps):
        descent.zero_grad()
        _loss(v, support, labels).backward()  # type: ignore[no-untyped-call]
        descent.step()
    return v


def adapt_and_evaluate(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    tasks: int = 600,
    steps: int = ADAPT_STEPS,
    scale: float = SCALE,
    start: Start = "means",
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
    precision: Precision | None = None,
) -> Evaluation:
    """Hold the representation, train a classifier on the support of each of `tasks` tasks, and try it on the queries.

    The representation is in evaluation mode: what it says of an image depends on no other image.
    """
    in_range("tasks", tasks, least=1, whole=True)
    in_range("steps", steps, least=0, whole=True)
    one_of("start", start, ("means", "random"))
    device = next(representation.parameters()).device
    index = sampler.draw(tasks, torch.Generator().manual_seed(derived(seed, "tasks")))
    used, place = torch.unique(index, return_inverse=True)
    z = embed(representation, sampler.classes.images[used], precision=precision)
    labels = sampler.labels(device)[1]
    said = []
    with seeded(derived(seed, "classifiers"), device):
        for part in torch.split(place.to(device), max(1, 30_000 // (sampler.ways * sampler.shots))):
            found = z[part]
            support, query = found[:, :, : sampler.shots].flatten(1, 2), found[:, :, sampler.shots :].flatten(1, 2)
            v = adapt(support, sampler.ways, steps=steps, scale=scale, start=start, optimizer=optimizer)
            with torch.no_grad():
                said.append(v(query).argmax(-1))
    predictions = torch.cat(said)
    return Evaluation((predictions == labels).double().mean(1).cpu(), index, predictions.cpu())


class Validation(Callback):
    """Accuracy on tasks of the sampler every so many steps of a run; `rows` has them, and a file where one is named.

    `seconds` of a row are those of training alone.
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
        **options: Any,
    ) -> None:
        self.representation, self.sampler, self.every, self.tasks = representation, sampler, every, tasks
        self.file, self.deadline, self.options = file, deadline, options
        self.rows: list[dict[str, float]] = []
        self.spent = 0.0
        if file is not None and file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            self.rows, self.spent = kept["rows"], kept["spent"]

    def start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["step"] <= run.step]
        self.next = (run.step // self.every + 1) * self.every

    def log(self, run: Run) -> bool:
        if run.step >= self.next or run.step >= run.max_steps:
            self.next = (run.step // self.every + 1) * self.every
            began = time.perf_counter()
            found = adapt_and_evaluate(self.representation, self.sampler, tasks=self.tasks, **self.options)
            row = {"step": run.step, "seconds": run.seconds - self.spent, "accuracy": found.accuracy}
            self.rows.append(row | {"interval": found.interval})
            self.spent += time.perf_counter() - began
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps({"rows": self.rows, "spent": self.spent}) + "\n", encoding="utf-8")
        return self.deadline is not None and time.monotonic() >= self.deadline


def default_method(
    *, lower_steps: int = LOWER_STEPS, upper_rate: float = UPPER_RATE, lower_rate: float = LOWER_RATE, **options: Any
) -> Penalty:
    """`Penalty` as `meta_train` uses it: fixed prices, classifiers that keep near their own minimum."""
    base: dict[str, Any] = {
        "mode": "stochastic", "lower_steps": lower_steps, "gamma": GAMMA, "lam": LAM, "advances": 0,
        "upper_optimizer": partial(torch.optim.Adam, lr=upper_rate),
        "lower_optimizer": partial(torch.optim.Adam, lr=lower_rate),
    }  # fmt: skip
    return Penalty(**(base | options))


def meta_train(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    steps: int,
    method: Method | None = None,
    scale: float = SCALE,
    start: Start = "means",
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    engine: str | None = None,
    precision: Precision | None = None,
    log_every: int | None = None,
    seed: int = 0,
) -> Solution:
    """Learn the representation, in place, on the sampler's tasks; the classifiers are those of the last meta-batch.

    `method` is any method of the library; None is `default_method()`. `scale` and `start` are those of the classifiers:
    at the class means of the support, or at random. `augment` changes images at random. `engine` is that of `solve`;
    None captures the steps on a GPU and compiles nothing.
    """
    in_range("steps", steps, least=1, whole=True)
    one_of("start", start, ("means", "random"))
    first = next(iter(representation.parameters()), None)
    if first is None:
        raise OptionError("representation must have parameters; this module has none.")
    episodes = Episodes(sampler, first.device, start=start, augment=augment)
    features = feature_count(representation, sampler.classes)
    v = CosineClassifier(sampler.tasks, features, sampler.ways, scale=scale, device=first.device, dtype=first.dtype)
    representation.train()
    solution = solve(
        episodes.problem(), method or default_method(), representation, v, (sampler, [torch.zeros(0)]),
        max_steps=steps, callbacks=callbacks, checkpoint=checkpoint, resume=resume, engine=engine or _engine(first.device), precision=precision,
        log_every=log_every, seed=seed, hypergradient=False,
    )  # fmt: skip
    representation.eval()
    return solution


def _engine(device: torch.device) -> str:
    return "graph" if device.type == "cuda" else "eager"


def feature_count(representation: nn.Module, classes: ImageClasses) -> int:
    """How many numbers the representation has for an image; refuses one that is not a row of them."""
    found = embed(representation, classes.images[:2])
    if found.ndim != 2 or len(found) != len(classes.images[:2]):
        raise OptionError(
            f"representation must give a row of features for each image; it gives shape {tuple(found.shape)} for "
            f"{len(classes.images[:2])} images."
        )
    return found.shape[1]
