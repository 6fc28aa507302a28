"""Random changes of images that keep their class, drawn by torch on the device of the images, without host reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# The most pixels that an image is shifted by.
MARGIN = 4


def crop_and_flip(x: Tensor) -> Tensor:
    """Shift each image (n, channels, height, width) by up to 4 pixels over zeros, and mirror it with probability 1/2.

    This is the usual augmentation of CIFAR-10.

    >>> crop_and_flip(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 3, 32, 32])
    """
    return crop(x, mirror=True)


def crop(x: Tensor, *, mirror: bool = False) -> Tensor:
    """Shift each image like `crop_and_flip`, without mirroring by default: for digits and letters."""
    n, _, height, width = x.shape
    padded = pad(x, (MARGIN,) * 4)
    top, left = torch.randint(2 * MARGIN + 1, (2, n, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    if mirror:
        columns = torch.where(torch.rand(n, 1, device=x.device) < 0.5, columns.flip(1), columns)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def crop_flip_and_erase(x: Tensor) -> Tensor:
    """Change each image like `crop_and_flip`, and set a square of half its side to zero.

    This is Cutout (DeVries and Taylor 2017), for large networks and few images. The centre of the square is anywhere in
    the image.
    """
    n, _, height, width = x.shape
    moved, holes = crop_and_flip(x), []
    for size in (height, width):
        place = torch.arange(size, device=x.device) - torch.randint(size, (n, 1), device=x.device)  # from the centre
        holes.append((place >= -(size // 4)) & (place < (size + 3) // 4))
    # In place: channels stay innermost in memory, which is the fastest layout for convolutions on a GPU.
    return moved.masked_fill_((holes[0][:, :, None] & holes[1][:, None, :])[:, None], 0.0)


def add_noise(x: Tensor, strength: Tensor) -> Tensor:
    """Return x plus normal noise whose deviation is `strength`; the result is differentiable in `strength`."""
    return x + strength * torch.randn_like(x)
