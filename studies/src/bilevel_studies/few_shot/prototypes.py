"""Prototypical networks (Snell, Swersky and Zemel 2017): the baseline that is not bilevel.

A query belongs to the class with the nearest mean of the support. The representation is trained by the cross-entropy of
minus the squared distances; nothing is trained for a task. With cosines instead of distances this is our few-shot
learning without its lower problem: `CosineClassifier` stays at the class means, its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from bilevel._util.checks import in_range, one_of
from bilevel._util.random_state import derived
from bilevel.applications.few_shot.evaluation import Evaluation, embedded_tasks
from bilevel.applications.few_shot.tasks import TaskSampler, pixels
from bilevel.applications.networks import cosine_logits
from bilevel.applications.training import Augment, OnProgress, fit
from bilevel.derivatives.mixed_precision import Precision

RATE = 2e-3
Similarity = Literal["distance", "cosine"]


def scores(features: Tensor, shots: int, similarity: Similarity = "distance") -> Tensor:
    """Return minus the squared distances (tasks, queries, ways) from the class means, or cosines with mean directions.

    `features` has the shape (tasks, ways, shots + queries, size).
    """
    support, queries = features[:, :, :shots], features[:, :, shots:].flatten(1, 2)
    if similarity == "cosine":
        return cosine_logits(queries, normalize(support, dim=-1).mean(2).transpose(1, 2))
    means = support.mean(2)
    return 2 * queries @ means.transpose(1, 2) - means.square().sum(-1)[:, None] - queries.square().sum(-1)[..., None]


def train_prototypes(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    steps: int,
    rate: float = RATE,
    decay: float = 0.0,
    scale: float = 1.0,
    similarity: Similarity = "distance",
    seed: int = 0,
    augment: Augment | None = None,
    precision: Precision | None = None,
    on_progress: OnProgress | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train the representation in place by Adam (AdamW if `decay` is positive); the rate falls linearly to zero.

    `scale` multiplies the distances, or the cosines with `similarity="cosine"`, before the softmax: distances of many
    normalised features are long, and cosines are short.
    """
    in_range("scale", scale, above=0)
    one_of("similarity", similarity, ("distance", "cosine"))
    device = next(representation.parameters()).device
    generator = torch.Generator().manual_seed(derived(seed, "episodes"))
    # A step takes one meta-batch: its image numbers are one example of `fit`.
    episodes = torch.stack([sampler.draw(sampler.tasks, generator) for _ in range(steps)]).to(torch.int32)
    images, labels = sampler.classes.images.to(device), sampler.labels(device)[1].repeat(sampler.tasks)

    def loss(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        index = x[0].long()
        inputs = pixels(images[index.reshape(-1)])
        z = model(augment(inputs) if augment is not None else inputs).float()
        with torch.autocast(device.type, enabled=False):
            found = scale * scores(z.reshape(*index.shape, -1), sampler.shots, similarity)
            return cross_entropy(found.flatten(0, 1), labels)

    fit(
        representation,
        episodes,
        torch.zeros(steps),
        steps=steps,
        batch=1,
        rate=rate,
        decay=decay,
        seed=seed,
        loss=loss,
        precision=precision,
        on_progress=on_progress,
        checkpoint=checkpoint,
    )


@torch.no_grad()
def evaluate_prototypes(
    representation: nn.Module,
    sampler: TaskSampler,
    *,
    tasks: int = 600,
    seed: int = 0,
    similarity: Similarity = "distance",
) -> Evaluation:
    """Return the accuracy of nearest class means on the tasks that `adapt_and_evaluate` draws with this seed."""
    index, z, place = embedded_tasks(representation, sampler, tasks, seed)
    labels = sampler.labels(z.device)[1]
    parts = torch.split(place, 100)
    predictions = torch.cat([scores(z[part], sampler.shots, similarity).argmax(-1) for part in parts])
    return Evaluation((predictions == labels).double().mean(1).cpu(), index, predictions.cpu())
