"""Random changes of images that keep their class: drawn by torch on the device of the images, without a host read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MARGIN = 4


def crop_and_flip(x: Tensor) -> Tensor:
    """Images (n, channels, height, width), each shifted by up to 4 pixels over a border of zeros and, every other one,
    mirrored: the usual augmentation of CIFAR-10."""
    n, _, height, width = x.shape
    padded = pad(x, (MARGIN,) * 4)
    top, left = torch.randint(2 * MARGIN + 1, (2, n, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    mirrored = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def add_noise(x: Tensor, strength: Tensor) -> Tensor:
    """Inputs with normal noise of this deviation: a change that can be differentiated in its strength."""
    return x + strength * torch.randn_like(x)
