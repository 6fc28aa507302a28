"""Classifiers of many tasks at once, by cosines, on the features of a representation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from bilevel._util.checks import in_range, one_of
from bilevel.applications.networks import cosine_logits, few_shot_cnn, mini_imagenet_resnet
from bilevel.derivatives.mixed_precision import Precision, reduced
from bilevel.errors import OptionError

SCALE = 10.0
"""What cosines are multiplied by before the softmax; 1 in the paper."""
PROXIMITY = 5.0
"""What keeps class weights near the class means; 0 in the paper. Without it, a few images are soon told apart for
certain: g is flat there, and which of its minima is meant is left open. With this one the curvature of g is nearly the
same in all directions, and ten steps solve the lower problem."""
SMALL = 0.01
"""The deviation of weights that start at random."""
BATCH = 500
"""Images that are embedded at once."""
Start = Literal["means", "random"]
Tell = Callable[[int, int], None]
"""tell(done, total): how many images are embedded."""
BACKBONES = ("conv4", "resnet")


@dataclass(frozen=True)
class Training:
    """What goes with the size of a representation in its training."""

    rate: float = 2e-3
    """Of Adam on the representation."""
    decay: float = 0.0
    """Of AdamW."""
    scale: float = SCALE
    erase: bool = False
    """Whether a square of each image in colour is erased (`bilevel.applications.augmentation.crop_flip_and_erase`)."""


TRAINING = {"conv4": Training(), "resnet": Training(rate=1e-3, decay=4.0, erase=True, scale=20.0)}
"""That of `resnet` is the best of what was compared on meta-validation classes of CIFAR-FS (docs/results/few-shot.md),
with 3,000 steps; with its decay no other scale was tried. That of `conv4` is not: proximity 1 has 0.3 points more
there, and is less exact."""


def backbone(name: str, channels: int) -> nn.Module:
    """The paper's representations: `conv4` that of Omniglot, `resnet` that of mini-ImageNet, with 3.8M weights."""
    one_of("backbone", name, BACKBONES)
    if name == "conv4":
        return few_shot_cnn(channels)
    if channels != 3:
        raise OptionError(f"backbone 'resnet' takes images in colour; these have {channels} channel. Use 'conv4'.")
    return mini_imagenet_resnet(512, 3)


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
        """Small weights of a normal distribution: a cosine knows their direction alone, and soon turns it."""
        self.weight.normal_(0.0, SMALL)

    @torch.no_grad()
    def start_at_means(self, support: Tensor) -> None:
        """Weights that are the class means of the support."""
        self.weight.copy_(self.means(support))

    def means(self, support: Tensor) -> Tensor:
        """The mean direction of each class in features (tasks, ways * shots, size), which come class by class.

        Its length is 1, and with a scale above 10 a tenth of the scale: scores do not know it, but their curvature in
        the weights falls by its square, and rates and prices that fit one scale then fit the others.
        """
        tasks, features, ways = self.weight.shape
        directions = normalize(support, dim=-1).reshape(tasks, ways, -1, features).mean(2)
        return max(1.0, self.scale / SCALE) * normalize(directions, dim=-1).transpose(1, 2)


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes as numbers from 0 to 1."""
    return images.to(dtype) / 255


def task_loss(v: CosineClassifier, features: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of each task, summed over the tasks: prices are then those of a task by itself."""
    # Out of autocast: the classifiers are small, and second derivatives of rounded cosines are not worth having.
    with torch.autocast(features.device.type, enabled=False):
        scores = v(features)
        tasks = scores.shape[0]
        return cross_entropy(scores.flatten(0, 1), labels.repeat(tasks), reduction="sum") / len(labels)


def support_loss(v: CosineClassifier, support: Tensor, labels: Tensor, proximity: float) -> Tensor:
    """g: the loss of the support and `proximity` / 2 times the squared distance of the weights from the class means."""
    loss = task_loss(v, support, labels)
    if not proximity:
        return loss
    with torch.autocast(support.device.type, enabled=False):
        apart = v.weight - v.means(support)
        return loss + 0.5 * proximity * apart.square().sum()


@torch.no_grad()
def embed(
    representation: nn.Module,
    images: Tensor,
    *,
    batch: int = BATCH,
    precision: Precision | None = None,
    tell: Tell = lambda done, total: None,
) -> Tensor:
    """The representation of images given as bytes, in evaluation mode, on the representation's device.

    `tell` is called before each batch and at the end: how many images are done, and how many there are.
    """
    first = next(representation.parameters())
    training = representation.training
    representation.eval()
    try:
        found = []
        with reduced(precision, first.device):
            for i, x in enumerate(torch.split(images, batch)):
                tell(i * batch, len(images))
                found.append(representation(pixels(x.to(first.device), first.dtype)))
        tell(len(images), len(images))
    finally:
        representation.train(training)
    return torch.cat([z.float() if z.dtype is torch.bfloat16 else z for z in found])
