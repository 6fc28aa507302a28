"""N-way K-shot tasks, drawn as the numbers of their images, and cosine classifiers of many tasks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from bilevel import OptionError
from bilevel._util.checks import agreeing, check_counts, in_range, one_of
from bilevel.applications.networks import cosine_logits, few_shot_cnn, mini_imagenet_resnet
from bilevel.applications.training import evaluating
from bilevel.data.class_images import ImageClasses
from bilevel.derivatives.mixed_precision import Precision, reduced

# The number of meta-batches in a pass; each pass has its own seed.
EPISODES = 100
# The factor on the cosines before the softmax; 1 in the paper.
SCALE = 10.0
# Keeps the class weights near the class means; 0 in the paper. Without it, a few images are soon separated with
# certainty, g is flat, and its minimum is not unique. With this value the curvature of g is nearly the same in all
# directions, and ten steps solve the lower problem.
PROXIMITY = 5.0
# The standard deviation of random first weights.
SMALL = 0.01
# The number of images that are embedded at once.
BATCH = 500
Start = Literal["means", "random"]
# Called with the number of embedded images and the number of all images.
OnProgress = Callable[[int, int], None]
BACKBONES = ("conv4", "resnet")


class TaskSampler:
    """Draws meta-batches of tasks: some classes, with a few images of each to learn from and others to test on.

    Iteration yields tensors (tasks, ways, shots + queries) with the numbers of the images, the images to learn from
    first, drawn by torch's global generator. No class and no image is twice in a task.

    Args:
        classes: The images, class after class, as `bilevel.data.class_images.load_classes` reads them.
        ways: The number of classes in a task, at least 2.
        shots: The number of images to learn from, for each class.
        queries: The number of images to test on, for each class. Default: 15.
        tasks: The number of tasks in a meta-batch. Default: 30. Lower it if a meta-batch does not fit into memory.
        episodes: The number of meta-batches in a pass. Default: 100. Each pass has its own seed.

    >>> from bilevel.data.class_images import ImageClasses
    >>> images = torch.randint(256, (6 * 20, 1, 28, 28), dtype=torch.uint8)
    >>> classes = ImageClasses(images, counts=(20,) * 6, names=tuple("abcdef"))
    >>> TaskSampler(classes, ways=5, shots=1).draw(2).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        classes: ImageClasses,
        ways: int,
        shots: int,
        queries: int = 15,
        *,
        tasks: int = 30,
        episodes: int = EPISODES,
    ) -> None:
        in_range("ways", ways, least=2, whole=True)
        check_counts(shots=shots, queries=queries, tasks=tasks, episodes=episodes)
        if ways > len(classes.names):
            raise OptionError(
                f"ways must be at most the number of classes that tasks are drawn from, {len(classes.names)} (a folder "
                f"is split into three parts, and the smallest has 16% of its classes); got {ways}. Use more "
                "classes or fewer ways."
            )
        if few := [count for count in classes.counts if count < shots + queries]:
            name = classes.names[classes.counts.index(min(few))]
            raise OptionError(
                f"shots + queries must be at most the number of images of every class; got {shots} + {queries}, and "
                f"{len(few)} of {len(classes.counts)} classes {agreeing(len(few), 'has', 'have')} fewer, {name!r} the "
                f"least, {min(few)}. Use fewer, or add images."
            )
        self.classes, self.ways, self.shots, self.queries = classes, ways, shots, queries
        self.tasks, self.episodes = tasks, episodes
        self._firsts, self._counts = torch.tensor(classes.firsts), torch.tensor(classes.counts)

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.episodes):
            yield self.draw(self.tasks)

    def draw(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the image numbers of this many tasks."""
        drawn = torch.rand(tasks, len(self.classes.names), generator=generator).topk(self.ways).indices
        counts = self._counts[drawn][..., None]
        most, wanted = int(self._counts.max()), self.shots + self.queries
        order = torch.rand(tasks, self.ways, most, generator=generator)
        order.masked_fill_(torch.arange(most) >= counts, -1.0)
        return self._firsts[drawn][..., None] + order.topk(wanted).indices

    def labels(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the class within the task of each image to learn from, and of each query, sorted by class."""
        ways = torch.arange(self.ways, device=device)
        return ways.repeat_interleave(self.shots), ways.repeat_interleave(self.queries)


@dataclass(frozen=True)
class Training:
    """The training settings that depend on the size of a representation; `TRAINING` has those of both backbones.

    Args:
        rate: The learning rate of AdamW. Default: 2e-3.
        decay: The weight decay of AdamW. Default: 0. Large representations and few images need some.
        scale: The factor on the cosines. Default: 10.
        erase: Whether a square of each colour image is erased (`crop_flip_and_erase`). Default: False.

    >>> Training(rate=1e-3, erase=True)
    Training(rate=0.001, decay=0.0, scale=10.0, erase=True)
    """

    rate: float = 2e-3
    decay: float = 0.0
    scale: float = SCALE
    erase: bool = False


# The settings by the name of the backbone. Those for `resnet` were the best on meta-validation classes of CIFAR-FS with
# 3,000 steps; no other scale was tried with this decay. For `conv4`, proximity 1 has 0.3 points more, and is less
# exact.
TRAINING = {"conv4": Training(), "resnet": Training(rate=1e-3, decay=4.0, erase=True, scale=20.0)}


def backbone(name: str, channels: int) -> nn.Module:
    """Return one of the paper's representations, with random weights.

    Args:
        name: "conv4", four layers for Omniglot, or "resnet", 3.8M weights for mini-ImageNet and CIFAR-FS.
        channels: The number of channels of the images: 1 for grey, 3 for colour. "resnet" needs 3.

    >>> sum(p.numel() for p in backbone("conv4", channels=1).parameters())
    111936
    """
    one_of("backbone", name, BACKBONES)
    if name == "conv4":
        return few_shot_cnn(channels)
    if channels != 3:
        raise OptionError(f"backbone 'resnet' takes colour images with 3 channels; got {channels}. Use 'conv4'.")
    return mini_imagenet_resnet(512, 3)


class CosineClassifier(nn.Module):
    """A linear classifier for each of several tasks, with random weights; its scores are cosines times `scale`.

    Args:
        tasks: The number of tasks, and so of classifiers.
        features: The number of features of an image.
        ways: The number of classes in a task.
        scale: The factor on the cosines before the softmax. Default: 10. With 1, no probability comes close to 1.
        device: The device of the weights. None (default): torch's default device.
        dtype: The type of the weights. Default: torch.float32.

    >>> v = CosineClassifier(tasks=2, features=64, ways=5)
    >>> v(torch.randn(2, 75, 64)).shape  # scores of 75 images in each task
    torch.Size([2, 75, 5])
    """

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
        """Return the scores (tasks, n, ways) of features (tasks, n, features)."""
        return self.scale * cosine_logits(features, self.weight)

    @torch.no_grad()
    def start_at_random(self) -> None:
        """Draw small weights from a normal distribution; cosines depend on their direction only."""
        self.weight.normal_(0.0, SMALL)

    @torch.no_grad()
    def start_at_means(self, support: Tensor) -> None:
        """Set the weights to the class means of the support."""
        self.weight.copy_(self.means(support))

    def means(self, support: Tensor) -> Tensor:
        """Return the mean direction of each class in features (tasks, ways * shots, size), sorted by class.

        Its length is 1, or a tenth of the scale if the scale is above 10. Scores do not depend on the length, but their
        curvature in the weights falls with its square, so rates and penalties for one scale also fit the others.
        """
        tasks, features, ways = self.weight.shape
        directions = normalize(support, dim=-1).reshape(tasks, ways, -1, features).mean(2)
        return max(1.0, self.scale / SCALE) * normalize(directions, dim=-1).transpose(1, 2)


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return bytes as numbers from 0 to 1."""
    return images.to(dtype) / 255


def task_loss(v: CosineClassifier, features: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over tasks of the mean cross-entropy of each task, so that penalties do not depend on `tasks`."""
    # Without autocast: the classifiers are small, and second derivatives of rounded cosines are useless.
    with torch.autocast(features.device.type, enabled=False):
        scores = v(features)
        return cross_entropy(scores.flatten(0, 1), labels.repeat(len(scores)), reduction="sum") / len(labels)


def support_loss(v: CosineClassifier, support: Tensor, labels: Tensor, proximity: float) -> Tensor:
    """Return g: the loss of the support, plus a term that keeps the weights near the class means.

    The term is `proximity` / 2 times the squared distance of the weights from the means.
    """
    loss = task_loss(v, support, labels)
    if not proximity:
        return loss
    with torch.autocast(support.device.type, enabled=False):
        return loss + 0.5 * proximity * (v.weight - v.means(support)).square().sum()


@torch.no_grad()
def embed(
    representation: nn.Module,
    images: Tensor,
    *,
    batch: int = BATCH,
    precision: Precision | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Tensor:
    """Return the representation of images, in evaluation mode, on the representation's device.

    Args:
        representation: A network that maps images (n, channels, height, width) to features (n, features).
        images: The images as bytes, (n, channels, height, width).
        batch: The number of images that are computed at once. Default: 500. Lower it if memory is short.
        precision: "bf16" runs the network under bfloat16 autocast. None (default): its own precision.
        on_progress: A function that is called before each batch and at the end as `on_progress(done, total)`, with the
            number of images. By default nothing is called.

    >>> images = torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)
    >>> embed(backbone("conv4", channels=1), images).shape
    torch.Size([3, 64])
    """
    first, found = next(representation.parameters()), []
    with evaluating(representation), reduced(precision, first.device):
        for i, x in enumerate(torch.split(images, batch)):
            on_progress(i * batch, len(images))
            found.append(representation(pixels(x.to(first.device), first.dtype)))
        on_progress(len(images), len(images))
    return torch.cat([z.float() if z.dtype is torch.bfloat16 else z for z in found])
