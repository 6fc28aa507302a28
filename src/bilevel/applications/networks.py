"""The networks of the paper (Appendix E), as functions that return plain modules; each can be differentiated twice.

The paper does not state the padding, but its counts of weights (Table 7) imply it. The MNIST network has none. The SVHN
and few-shot networks keep the size of the image in their convolutions; the few-shot network ends with one pixel of 64
channels, as the paper says. The CIFAR-10 network keeps the size only in the first convolution of each pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from bilevel import OptionError


def linear(inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Return softmax regression on flattened images.

    >>> linear(64, 10)(torch.zeros(2, 8, 8)).shape
    torch.Size([2, 10])
    """
    return mlp(inputs, (), classes)


def mlp(inputs: int = 784, hidden: Sequence[int] = (300,), classes: int = 10) -> nn.Sequential:
    """Return fully connected layers with ReLU between them, for flattened images: 784-300-10 by default."""
    sizes = [inputs, *hidden, classes]
    if min(sizes) < 1:
        raise OptionError(f"every layer must have at least 1 unit; got {sizes}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)


def mnist_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """Return the paper's MNIST network, for images of shape (1, 28, 28): 1,389,578 weights.

    Two convolutions of 5x5 with 64 and 128 filters, each with ReLU, a 2x2 pool and dropout of 0.25, then dense layers
    of 512 and 256 with ReLU and dropout of 0.5. `dropout=False` leaves out all dropout.
    """
    blocks = [
        layer
        for before, after in ((1, 64), (64, 128))
        for layer in (nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2), *_dropout(0.25, dropout))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), *_head(128 * 4 * 4, classes, dropout))


def cifar_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """Return the paper's CIFAR-10 network, for images of shape (3, 32, 32): 1,172,410 weights.

    Three blocks of two 3x3 convolutions with 48, 96 and 192 filters and ReLU, a 2x2 pool and dropout of 0.25, then
    dense layers of 512 and 256 with ReLU and dropout of 0.5. The second convolution of a block is not padded, which
    gives the paper's 1.2M weights; with padding there are 2,352,058. `dropout=False` leaves out all dropout.
    """
    blocks = _pairs((48, 96, 192), padding=0, rate=0.25, dropout=dropout)
    return nn.Sequential(*blocks, nn.Flatten(), *_head(192 * 2 * 2, classes, dropout))


def svhn_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """Return the paper's SVHN network, for images of shape (3, 32, 32): 1,341,226 weights.

    Three blocks of two 3x3 convolutions with 32, 64 and 128 filters and ReLU, a 2x2 pool and dropout of 0.3, then a
    dense layer of 512 with ReLU and dropout of 0.3. `dropout=False` leaves out all dropout.
    """
    blocks = _pairs((32, 64, 128), padding=1, rate=0.3, dropout=dropout)
    dense = [nn.Linear(128 * 4 * 4, 512), nn.ReLU(), *_dropout(0.3, dropout)]
    return nn.Sequential(*blocks, nn.Flatten(), *dense, nn.Linear(512, classes))


def few_shot_cnn(channels: int = 1, filters: int = 64) -> nn.Sequential:
    """Return the paper's representation for Omniglot: images of shape (1, 28, 28) to 64 features, 111,936 weights.

    Four blocks of a 3x3 convolution, batch normalisation, ReLU and a 2x2 pool; the last one has no ReLU.
    """
    layers: list[nn.Module] = []
    for i, before in enumerate((channels, filters, filters, filters)):
        layers += [nn.Conv2d(before, filters, 3, padding=1), nn.BatchNorm2d(filters)]
        layers += [nn.ReLU()] * (i < 3) + [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def mini_imagenet_resnet(
    features: int = 384, kernel: int = 1, *, dropout: float = 0.1, normalised: bool = True
) -> nn.Sequential:
    """Return the paper's representation for Mini-ImageNet: images of shape (3, 84, 84) to 384 features.

    Four residual blocks with 64, 96, 128 and 256 filters, a 1x1 convolution with 2,048 filters, the mean over the
    image, and a 1x1 convolution to the features: 1,612,640 weights. A block has three convolutions, each with batch
    normalisation and leaky ReLU, a 1x1 convolution around them, and dropout. We add a 2x2 pool, which the paper does
    not mention.

    - `features` (384), `kernel` (1): the text of the paper has these, but its Table 7 counts 3.8M weights here and 5K
      in the classifier of two tasks of five ways. With `kernel=3` and 512 features there are 3,809,888 and 5,120.
    - `dropout` (0.1): the share that is set to zero. We read the paper's "rate = 0.9" as the share that is kept.
    - `normalised` (True): batch normalisation after the last two convolutions, which the paper also calls blocks. The
      last has no ReLU, like the Omniglot network. Its shift starts at 1, which all images have in common, so cosines
      differ half as much at first and their scale is not too large. Without normalisation, the common part of all
      images fills the features, and cosines differ little.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise OptionError(f"kernel must be odd, so that the convolutions keep the size of the image; got {kernel}.")
    layers = [
        layer
        for before, after in ((3, 64), (64, 96), (96, 128), (128, 256))
        for layer in (_Residual(before, after, kernel), *_dropout(dropout, dropout > 0), nn.MaxPool2d(2))
    ]
    wide, last = _pointwise(256, 2048, normalised), _pointwise(2048, features, normalised, shift=1.0)
    return nn.Sequential(*layers, *wide, nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), *last, nn.Flatten())


def _pointwise(before: int, after: int, normalised: bool, shift: float = 0.0) -> list[nn.Module]:
    """Return a 1x1 convolution, and a batch normalisation whose shift starts at `shift`."""
    if not normalised:
        return [nn.Conv2d(before, after, 1)]
    norm = nn.BatchNorm2d(after)
    nn.init.constant_(norm.bias, shift)
    return [nn.Conv2d(before, after, 1, bias=False), norm]


def cosine_logits(features: Tensor, weights: Tensor) -> Tensor:
    """Return the cosines of features (..., n, d) and class weights (..., d, classes), as few-shot scores."""
    return normalize(features, dim=-1) @ normalize(weights, dim=-2)


class _Residual(nn.Module):
    """Three convolutions, each with batch normalisation and leaky ReLU, and a 1x1 convolution around them."""

    def __init__(self, before: int, after: int, kernel: int) -> None:
        super().__init__()
        layers = [
            (nn.Conv2d(size, after, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.1))
            for size in (before, after, after)
        ]
        self.rest = nn.Sequential(*itertools.chain.from_iterable(layers))
        self.around = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.rest(x), self.around(x))


def _pairs(filters: Sequence[int], *, padding: int, rate: float, dropout: bool) -> list[nn.Module]:
    """Return blocks of two 3x3 convolutions, the second with this padding, a pool and dropout."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, *filters)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *_dropout(rate, dropout),
        ]
    return layers


def _head(size: int, classes: int, dropout: bool) -> list[nn.Module]:
    first = [nn.Linear(size, 512), nn.ReLU(), *_dropout(0.5, dropout)]
    return [*first, nn.Linear(512, 256), nn.ReLU(), *_dropout(0.5, dropout), nn.Linear(256, classes)]


def _dropout(rate: float, wanted: bool) -> list[nn.Module]:
    return [nn.Dropout(rate)] * wanted
