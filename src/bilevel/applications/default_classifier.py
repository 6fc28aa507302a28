"""The default classifiers of the commands, by kind and shape of the inputs, and their augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bilevel import OptionError
from bilevel._util.checks import one_of
from bilevel._util.random_state import seeded
from bilevel.applications import networks
from bilevel.applications.augmentation import crop, crop_and_flip
from bilevel.applications.training import Augment

KINDS = ("auto", "linear", "mlp", "cnn")
# Hidden units of the MLP with fewer than WIDE inputs, and with more.
HIDDEN = 128, 300
WIDE = 500
# The named set of house numbers.
NUMBERS = "svhn"
# The least pixels of the shorter side of an image for a convolutional network.
SMALLEST = 16


@dataclass(frozen=True)
class Classifier:
    """A network with its first weights, its `kind`, and the reason `why` if the kind was chosen automatically."""

    network: nn.Module
    kind: str
    why: str = ""
    augment: Augment | None = None


def classifier(
    kind: str, shape: Sequence[int], classes: int, *, device: torch.device, seed: int, source: str = ""
) -> Classifier:
    """Return a network for inputs of a shape; `kind` is "auto", "linear", "mlp" or "cnn".

    "auto" is a convolutional network for images on a GPU, and else an MLP. The convolutional networks are the paper's
    if the size fits: MNIST's for (1, 28, 28), and CIFAR-10's, or SVHN's if `source` is "svhn", for (3, 32, 32). Other
    images get three blocks of convolutions. Colour images are augmented by crops and flips, SVHN by crops only, because
    a mirrored number is not a number. `seed` draws the weights.

    >>> classifier("mlp", (64,), 10, device=torch.device("cpu"), seed=0).kind
    'mlp'
    """
    one_of("model", kind, KINDS)
    image = len(shape) == 3 and min(shape[1:]) >= SMALLEST
    why = ""
    if kind == "auto":
        kind = "cnn" if image and device.type == "cuda" else "mlp"
        if image and kind == "mlp":
            why = "An MLP, because no GPU was found; --model cnn is better on images and takes longer."
    if kind == "cnn" and not image:
        raise OptionError(
            f"model='cnn' needs images of at least {SMALLEST} by {SMALLEST} pixels; the inputs have shape "
            f"{tuple(shape)}. Use 'mlp' or 'linear'."
        )
    with seeded(seed):
        network = _built(kind, tuple(shape), classes, source).to(device)
    augment = crop if source == NUMBERS else crop_and_flip
    return Classifier(network, kind, why, augment if kind == "cnn" and shape[0] == 3 else None)


def _built(kind: str, shape: tuple[int, ...], classes: int, source: str) -> nn.Module:
    inputs = int(torch.Size(shape).numel())
    if kind == "linear":
        return networks.linear(inputs, classes)
    if kind == "mlp":
        return networks.mlp(inputs, (HIDDEN[inputs >= WIDE],), classes)
    if shape == (1, 28, 28):
        return networks.mnist_cnn(classes)
    if shape == (3, 32, 32):
        return networks.svhn_cnn(classes) if source == NUMBERS else networks.cifar_cnn(classes)
    blocks = [
        layer
        for before, after in ((shape[0], 32), (32, 64), (64, 128))
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, classes)
    )
