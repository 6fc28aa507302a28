"""Few-shot learning: one representation for many tasks, each with its own classifier.

    min_u  sum_i f_i(u, w_i)   subject to   w_i = argmin_w g_i(u, w)                           (the paper's Eq. 4)

g_i is the cross-entropy of task i on the few images to learn from (its support), and f_i on its other images (its
queries). Scores are cosines between the representation T(x; u) and the class weights w_i, times a fixed scale. All
tasks of a meta-batch are solved at once: v and the multipliers have a leading dimension of tasks, and start again with
every meta-batch. The representation of a meta-batch is computed once for each upper step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import Callback, Penalty, Problem, Solution, solve
from bilevel._util.checks import check_counts, in_range, one_of
from bilevel.applications.few_shot.tasks import (
    PROXIMITY,
    SCALE,
    TRAINING,
    CosineClassifier,
    Start,
    TaskSampler,
    embed,
    pixels,
    support_loss,
    task_loss,
)
from bilevel.applications.training import Augment
from bilevel.data.class_images import ImageClasses
from bilevel.derivatives.mixed_precision import Precision
from bilevel.errors import OptionError, reason
from bilevel.methods.base import Method
from bilevel.optim.variable_optimizer import OptimizerFactory

# A high penalty, and enough steps to solve the lower problem with it, so that u moves by the hypergradient.
GAMMA, LOWER_STEPS = 4.0, 10
# The lower rate times the curvature of F, to which the loss adds about 1; from 2 on, F rises.
REACH = 0.864
UPPER_RATE = TRAINING["conv4"].rate


class Episodes:
    """The bilevel problem of a sampler's tasks, for your own call of `solve`; `meta_train` makes one.

    The images are on `device`, and a batch has the numbers of some images.

    Args:
        sampler: Draws the tasks, a `TaskSampler`.
        device: The device of the representation.
        start: The first class weights in each meta-batch: "means" (default) of the classes, or "random".
        proximity: How much the class weights are held near the class means, as in `meta_train`. Default: 5.
        augment: A function that changes a batch of images at random. None (default): images stay as they are.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 4, 1, 28, 28), dtype=torch.uint8)
    >>> sampler = TaskSampler(ImageClasses(images, (4,) * 6, tuple("abcdef")), ways=5, shots=1, queries=3)
    >>> problem = Episodes(sampler, torch.device("cpu")).problem()
    >>> support, queries = problem.prepare(backbone("conv4", channels=1), (sampler.draw(2), None))
    >>> support.shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        sampler: TaskSampler,
        device: torch.device,
        *,
        start: Start = "means",
        proximity: float = PROXIMITY,
        augment: Augment | None = None,
    ) -> None:
        self.images = sampler.classes.images.to(device)
        self.shots, self.start, self.proximity, self.augment = sampler.shots, start, proximity, augment
        self.support_labels, self.query_labels = sampler.labels(device)

    def problem(self) -> Problem:
        return Problem(self.upper, self.lower, prepare=self.prepare, start_lower=self.start_lower)

    def prepare(self, u: nn.Module, batches: Any) -> tuple[Tensor, Tensor]:
        """Return the representation of the support (tasks, ways * shots, features) and of the queries."""
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
        return support_loss(v, prepared[0], self.support_labels, self.proximity)

    def upper(self, u: nn.Module, v: CosineClassifier, prepared: tuple[Tensor, Tensor]) -> Tensor:
        return task_loss(v, prepared[1], self.query_labels)


def upper_adam(rate: float = UPPER_RATE, decay: float = 0.0) -> OptimizerFactory:
    """Return a factory of AdamW for the representation; without a decay it is Adam."""
    return partial(torch.optim.AdamW, lr=rate, weight_decay=decay)


def default_method(
    *,
    lower_steps: int = LOWER_STEPS,
    upper_rate: float = UPPER_RATE,
    lower_rate: float | None = None,
    gamma: float = GAMMA,
    proximity: float = PROXIMITY,
    decay: float = 0.0,
    **options: Any,
) -> Penalty:
    """Return the `Penalty` that `meta_train` uses, with a fixed penalty.

    The curvature of F is mostly gamma g_vv^2, and g_vv is mostly the `proximity` of the classifiers; the default
    `lower_rate` fits both. With fewer than ten lower steps, or a proximity below 1, use a lower gamma.

    Args:
        lower_steps: The number of steps on the classifiers before each step on the representation. Default: 10.
        upper_rate: The learning rate of AdamW for the representation. Default: 2e-3.
        lower_rate: The learning rate of gradient descent for the classifiers. None (default): the rate that fits gamma
            and proximity.
        gamma: The price of |grad_v g|^2 / 2. Default: 4.
        proximity: The `proximity` of `meta_train`. Default: 5.
        decay: The weight decay of the representation, for large representations and few images. Default: 0.
        options: More options of `Penalty`, which replace these.

    >>> default_method(lower_steps=5, gamma=2.0).lower_steps
    5
    """
    in_range("gamma", gamma, above=0)
    in_range("proximity", proximity, least=0)
    lower_rate = REACH / (gamma * (proximity + 1) ** 2) if lower_rate is None else lower_rate
    base: dict[str, Any] = {
        "mode": "stochastic",
        "lower_steps": lower_steps,
        "gamma": gamma,
        "lam": 0.0,
        "advances": 0,
        "decay": "linear",
        "upper_optimizer": upper_adam(upper_rate, decay),
        "lower_optimizer": partial(torch.optim.SGD, lr=lower_rate),
    }
    return Penalty(**(base | options))


def meta_train(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    steps: int,
    method: Method | None = None,
    scale: float = SCALE,
    proximity: float = PROXIMITY,
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
    """Learn the representation, in place, on the sampler's tasks; return the solution with the last classifiers.

    Args:
        representation: A network that maps images to features, such as `backbone("conv4", channels=1)`.
        sampler: Draws the tasks, a `TaskSampler`.
        steps: The number of meta-batches to learn from.
        method: Any method of the library. None (default): `default_method(proximity=proximity)`.
        scale: The factor on the cosines before the softmax. Default: 10.
        proximity: The weight of a term of g, half the squared distance of the class weights from the class means.
            Default: 5. With 0, as in the paper, the minimum of g is not unique.
        start: The first class weights in each meta-batch: "means" (default) of the classes, or "random". From "random",
            the ten steps of the default method are too few.
        augment: A function that changes a batch of images at random, such as
            `bilevel.applications.augmentation.crop_and_flip`. None (default): images stay as they are.
        callbacks: Callbacks of the run, such as `[Progress()]` or a `Validation`. Default: none.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        resume: Whether to resume from the state in `checkpoint`. Default: False.
        engine: What runs the steps, as in `solve`. None (default): "graph" on a GPU, so that the steps are captured and
            nothing is compiled, and "eager" on a CPU.
        precision: "bf16" runs the network under bfloat16 autocast. None (default): its own precision.
        log_every: The number of steps between calls of the callbacks. None (default): as in `solve`.
        seed: The seed of all random draws. Default: 0.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 4, 1, 28, 28), dtype=torch.uint8)
    >>> sampler = TaskSampler(ImageClasses(images, (4,) * 6, tuple("abcdef")), ways=5, shots=1, queries=3, tasks=2)
    >>> network = backbone("conv4", channels=1)
    >>> solution = meta_train(network, sampler, steps=2, method=default_method(lower_steps=2))
    >>> solution.steps
    2
    """
    check_counts(steps=steps)
    in_range("proximity", proximity, least=0)
    one_of("start", start, ("means", "random"))
    features = feature_count(representation, sampler.classes)
    first = next(representation.parameters())
    episodes = Episodes(sampler, first.device, start=start, proximity=proximity, augment=augment)
    v = CosineClassifier(sampler.tasks, features, sampler.ways, scale=scale, device=first.device, dtype=first.dtype)
    representation.train()
    method = method or default_method(proximity=proximity)
    solution = solve(
        episodes.problem(),
        method,
        representation,
        v,
        (sampler, [torch.zeros(0)]),
        max_steps=steps,
        callbacks=callbacks,
        checkpoint=checkpoint,
        resume=resume,
        log_every=log_every,
        seed=seed,
        engine=engine or ("graph" if first.device.type == "cuda" else "eager"),
        precision=precision,
        hypergradient=False,
    )
    representation.eval()
    return solution


def feature_count(representation: nn.Module, classes: ImageClasses) -> int:
    """Return how many features the representation gives for an image; refuse one that does not return a row.

    Args:
        representation: A network that maps images to features.
        classes: The images, of which the first two are tried.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 4, 1, 28, 28), dtype=torch.uint8)
    >>> feature_count(backbone("conv4", channels=1), ImageClasses(images, (4,) * 6, tuple("abcdef")))
    64
    """
    if next(representation.parameters(), None) is None:
        raise OptionError("representation must have parameters; this module has none.")
    try:
        found = embed(representation, classes.images[:2])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape = "x".join(map(str, classes.shape))
        raise OptionError(
            f"representation must take images of shape {shape} (channels, height, width); it fails: {reason(error)}."
        ) from error
    if found.ndim != 2 or len(found) != len(classes.images[:2]):
        raise OptionError(
            f"representation must return a row of features for each image; it returns shape {tuple(found.shape)} for "
            f"{len(classes.images[:2])} images."
        )
    return found.shape[1]
