"""The networks of the paper (its Appendix E), as builder functions: plain modules, each with a double backward.

The paper leaves the padding open. The MNIST network has none, as its count of weights tells; the CIFAR-10 network keeps
the size of the image in its convolutions, and so does the few-shot network, whose last map is then one pixel of 64
channels, the size that the paper states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import normalize

from .errors import OptionError


def linear(inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Softmax regression on flattened images."""
    return mlp(inputs, (), classes)


def mlp(inputs: int = 784, hidden: Sequence[int] = (300,), classes: int = 10) -> nn.Sequential:
    """Fully connected layers with ReLU between them, on flattened images: 784-300-10 by default."""
    sizes = [inputs, *hidden, classes]
    for size in sizes:
        if size < 1:
            raise OptionError(f"every layer must have at least 1 unit; got {sizes}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)


def mnist_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """The paper's MNIST network, for images of shape (1, 28, 28): 1,389,578 weights.

    Two convolutions of 5x5 with 64 and 128 filters, each with ReLU, a 2x2 pool and dropout of 0.25, then dense layers
    of 512 and 256 with ReLU and dropout of 0.5. `dropout=False` leaves the dropout out.
    """
    blocks: list[nn.Module] = []
    for before, after in ((1, 64), (64, 128)):
        blocks += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2), *_dropout(0.25, dropout)]
    return nn.Sequential(*blocks, nn.Flatten(), *_head(128 * 4 * 4, classes, dropout))


def cifar_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """The paper's CIFAR-10 network, for images of shape (3, 32, 32): 2,352,058 weights.

    Three blocks of two 3x3 convolutions with 48, 96 and 192 filters and ReLU, a 2x2 pool and dropout of 0.25, then
    dense layers of 512 and 256 with ReLU and dropout of 0.5. `dropout=False` leaves the dropout out.
    """
    blocks: list[nn.Module] = []
    for before, after in ((3, 48), (48, 96), (96, 192)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()]
        blocks += [nn.MaxPool2d(2), *_dropout(0.25, dropout)]
    return nn.Sequential(*blocks, nn.Flatten(), *_head(192 * 4 * 4, classes, dropout))


def few_shot_cnn(channels: int = 1, filters: int = 64) -> nn.Sequential:
    """The paper's representation for Omniglot: images of shape (1, 28, 28) to 64 features, 111,936 weights.

    Four blocks of a 3x3 convolution, batch normalisation, ReLU and a 2x2 pool; the last one has no ReLU.
    """
    layers: list[nn.Module] = []
    for i, before in enumerate((channels, filters, filters, filters)):
        layers += [nn.Conv2d(before, filters, 3, padding=1), nn.BatchNorm2d(filters)]
        layers += [nn.ReLU()] * (i < 3) + [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def cosine_logits(features: Tensor, weights: Tensor) -> Tensor:
    """The cosines between features (..., n, d) and class weights (..., d, classes): the paper's few-shot classifier."""
    return normalize(features, dim=-1) @ normalize(weights, dim=-2)


def _head(size: int, classes: int, dropout: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in ((size, 512), (512, 256)):
        layers += [nn.Linear(before, after), nn.ReLU(), *_dropout(0.5, dropout)]
    return [*layers, nn.Linear(256, classes)]


def _dropout(rate: float, wanted: bool) -> list[nn.Module]:
    return [nn.Dropout(rate)] * wanted
