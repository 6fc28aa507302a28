"""The networks of the paper (its Appendix E), as builder functions: plain modules, each with a double backward.

The paper leaves the padding open; its counts of weights (Table 7) tell. The MNIST network has none, the SVHN network
keeps the size of the image in its convolutions, and the CIFAR-10 network does so in the first of each pair alone. The
few-shot network keeps it, too: its last map is then one pixel of 64 channels, the size that the paper states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import normalize

from bilevel.errors import OptionError


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
    """The paper's CIFAR-10 network, for images of shape (3, 32, 32): 1,172,410 weights.

    Three blocks of two 3x3 convolutions with 48, 96 and 192 filters and ReLU, a 2x2 pool and dropout of 0.25, then
    dense layers of 512 and 256 with ReLU and dropout of 0.5. The second convolution of a block is not padded, which
    gives the 1.2M weights that the paper counts; padded, they were 2,352,058. `dropout=False` leaves the dropout out.
    """
    blocks = _pairs((48, 96, 192), padding=0, rate=0.25, dropout=dropout)
    return nn.Sequential(*blocks, nn.Flatten(), *_head(192 * 2 * 2, classes, dropout))


def svhn_cnn(classes: int = 10, *, dropout: bool = True) -> nn.Sequential:
    """The paper's SVHN network, for images of shape (3, 32, 32): 1,341,226 weights.

    Three blocks of two 3x3 convolutions with 32, 64 and 128 filters and ReLU, a 2x2 pool and dropout of 0.3, then a
    dense layer of 512 with ReLU and dropout of 0.3. `dropout=False` leaves the dropout out.
    """
    blocks = _pairs((32, 64, 128), padding=1, rate=0.3, dropout=dropout)
    dense = [nn.Linear(128 * 4 * 4, 512), nn.ReLU(), *_dropout(0.3, dropout)]
    return nn.Sequential(*blocks, nn.Flatten(), *dense, nn.Linear(512, classes))


def wide_resnet(depth: int = 28, width: int = 10, classes: int = 10) -> nn.Sequential:
    """The wide residual network WRN-28-10, for images of shape (3, 32, 32): 36,479,194 weights.

    A 3x3 convolution with 16 filters and three groups of (depth - 4) / 6 residual blocks with 16, 32 and 64 times
    `width` filters, then the mean over the image. No dropout.
    """
    if depth < 10 or (depth - 4) % 6:
        raise OptionError(f"depth must be 6 n + 4 with n at least 1, as 28 is; got {depth}.")
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    before = 16
    for group, filters in enumerate((16 * width, 32 * width, 64 * width)):
        for i in range((depth - 4) // 6):
            layers.append(_Wide(before, filters, 2 if group and not i else 1))
            before = filters
    tail = [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers, *tail)


def few_shot_cnn(channels: int = 1, filters: int = 64) -> nn.Sequential:
    """The paper's representation for Omniglot: images of shape (1, 28, 28) to 64 features, 111,936 weights.

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
    """The paper's representation for Mini-ImageNet: images of shape (3, 84, 84) to 384 features, 1,612,640 weights.

    Four residual blocks with 64, 96, 128 and 256 filters, a 1x1 convolution with 2,048 filters, the mean over the
    image, and a 1x1 convolution to the features. A block has three convolutions, each with batch normalisation and
    leaky ReLU, a 1x1 convolution around them, and dropout; we add a 2x2 pool, of which the paper says nothing. The
    paper calls the last two convolutions blocks, too: they have batch normalisation, and the last has no ReLU, as that
    of the Omniglot network. The shift of that normalisation starts at 1, which all images have in common: cosines then
    differ by half as much at first, and a scale of them that is right in the end is not too large for that. With
    `normalised=False` both have none: what all images have in common then fills the features, and cosines differ
    little. The paper's dropout "with rate = 0.9" is read as the share that is kept: `dropout` is the share that is not.

    The paper's text has `kernel` 1 and 384 features, but its Table 7 counts 3.8M weights here and 5K in the classifier
    of two tasks of five ways. These are the counts with `kernel=3` and 512 features: 3,809,888 and 5,120.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise OptionError(f"kernel must be odd, so that the convolutions keep the size of the image; got {kernel}.")
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 96), (96, 128), (128, 256)):
        layers += [_Residual(before, after, kernel), *_dropout(dropout, dropout > 0), nn.MaxPool2d(2)]
    wide, last = _pointwise(256, 2048, normalised), _pointwise(2048, features, normalised, shift=1.0)
    return nn.Sequential(*layers, *wide, nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), *last, nn.Flatten())


def _pointwise(before: int, after: int, normalised: bool, shift: float = 0.0) -> list[nn.Module]:
    """A 1x1 convolution, and a batch normalisation whose shift starts at this."""
    if not normalised:
        return [nn.Conv2d(before, after, 1)]
    norm = nn.BatchNorm2d(after)
    nn.init.constant_(norm.bias, shift)
    return [nn.Conv2d(before, after, 1, bias=False), norm]


def cosine_logits(features: Tensor, weights: Tensor) -> Tensor:
    """The cosines between features (..., n, d) and class weights (..., d, classes): the paper's few-shot classifier."""
    return normalize(features, dim=-1) @ normalize(weights, dim=-2)


class _Wide(nn.Module):
    """Two 3x3 convolutions, each after batch normalisation and ReLU, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.rest = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
        )
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        moved: Tensor = self.rest(y) + (x if self.around is None else self.around(y))
        return moved


class _Residual(nn.Module):
    """Three convolutions, each with batch normalisation and leaky ReLU, and a 1x1 convolution around them."""

    def __init__(self, before: int, after: int, kernel: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in (before, after, after):
            layers += [nn.Conv2d(size, after, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.LeakyReLU(0.1)]
        self.rest = nn.Sequential(*layers)
        self.around = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.rest(x) + self.around(x)
        return moved


def _pairs(filters: Sequence[int], *, padding: int, rate: float, dropout: bool) -> list[nn.Module]:
    """Blocks of two 3x3 convolutions, the second with this padding, a pool and dropout."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, *filters)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(2), *_dropout(rate, dropout)]
    return layers


def _head(size: int, classes: int, dropout: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in ((size, 512), (512, 256)):
        layers += [nn.Linear(before, after), nn.ReLU(), *_dropout(0.5, dropout)]
    return [*layers, nn.Linear(256, classes)]


def _dropout(rate: float, wanted: bool) -> list[nn.Module]:
    return [nn.Dropout(rate)] * wanted
