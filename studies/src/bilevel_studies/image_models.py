"""The wide residual network, and small changes of images: parts that only the studies use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from bilevel.errors import OptionError

# The largest turn (radians), change of size and shift (shares of the image) of `move_slightly`.
TURN, STRETCH, SHIFT = 0.15, 0.1, 0.08


def wide_resnet(depth: int = 28, width: int = 10, classes: int = 10) -> nn.Sequential:
    """Return the wide residual network WRN-28-10, for images of shape (3, 32, 32): 36,479,194 weights.

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


def move_slightly(x: Tensor) -> Tensor:
    """Turn, stretch and shift each image (n, channels, height, width) a little, over zeros."""
    n = len(x)
    turn, across, down, right, low = (2 * torch.rand(5, n, device=x.device, dtype=x.dtype) - 1).unbind()
    angle, wide, high = TURN * turn, 1 + STRETCH * across, 1 + STRETCH * down
    rows = [wide * angle.cos(), -high * angle.sin(), SHIFT * right, wide * angle.sin(), high * angle.cos(), SHIFT * low]
    grid = affine_grid(torch.stack(rows, 1).reshape(n, 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="zeros", align_corners=False)
