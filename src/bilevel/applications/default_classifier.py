"""The classifier that a command takes where the user names a kind, and its augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bilevel._util.checks import one_of
from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.augmentation import crop, crop_and_flip
from bilevel.applications.training import Augment
from bilevel.errors import OptionError

KINDS = ("auto", "linear", "mlp", "cnn")
HIDDEN = 128, 300
"""Hidden units of the MLP, and from WIDE inputs on."""
WIDE = 500
NUMBERS = "svhn"
"""The named set of house numbers."""
SMALLEST = 16
"""Pixels of the shorter side from which an image is for a convolutional network."""


@dataclass(frozen=True)
class Classifier:
    """A network at its first weights. `kind` says which it is, `why` for what reason where that was not asked for."""

    network: nn.Module
    kind: str
    why: str = ""
    augment: Augment | None = None


def classifier(
    kind: str, shape: Sequence[int], classes: int, *, device: torch.device, seed: int, source: str = ""
) -> Classifier:
    """The network of a kind for inputs of a shape. `auto`: convolutions for images where a GPU is at hand, else an MLP.

    Convolutions are the paper's where their size fits: MNIST's for (1, 28, 28), CIFAR-10's for (3, 32, 32), SVHN's
    where `source`, what the inputs are of, is that set. Other images get three blocks of them that end in the mean over
    the image. Colour images are augmented by crops and flips, those of SVHN by crops: a number mirrored is none.
    """
    one_of("model", kind, KINDS)
    image = len(shape) == 3 and min(shape[1:]) >= SMALLEST
    why = ""
    if kind == "auto":
        kind = "cnn" if image and device.type == "cuda" else "mlp"
        if image and kind == "mlp":
            why = "An MLP, as there is no GPU; --model cnn is better on images and takes longer."
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
        return models.linear(inputs, classes)
    if kind == "mlp":
        return models.mlp(inputs, (HIDDEN[inputs >= WIDE],), classes)
    if shape == (1, 28, 28):
        return models.mnist_cnn(classes)
    if shape == (3, 32, 32):
        return models.svhn_cnn(classes) if source == NUMBERS else models.cifar_cnn(classes)
    blocks: list[nn.Module] = []
    for before, after in ((shape[0], 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, classes)
    )
