"""Inception-V3 (Szegedy et al., *Rethinking the Inception Architecture*, CVPR 2016) in plain layers, from a stored one.

A stored convolution has its batch normalisation apart, with a fixed mean and variance and no scale. Here they are one:

    relu((w * x - mean) / sqrt(var + 0.001) + beta) = relu(w' * x + b'),    w' = w / sqrt(var + 0.001),
                                                                            b' = beta - mean / sqrt(var + 0.001)

The weights are `channels_last`, the form in which a GPU convolves fastest; what they return is, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bilevel import DataError

TINY = 1e-3
"""What the stored batch normalisation adds to a variance."""


class Joined(nn.Module):
    """What several branches make of one input, side by side in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def plain(layers: nn.Module) -> nn.Sequential:
    """The layers of a stored Inception-V3, one after another, for images of (3, 299, 299); weights have no gradient.

    They are known by the names of their classes and children: what is not known is refused.
    """
    network = nn.Sequential(*(_block(child) for child in layers.children()), nn.Flatten())
    return network.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _block(stored: Any) -> nn.Module:
    match name := _kind(stored):
        case "Conv2dLayer":
            return _convolution(stored)
        case "MaxPool2d" | "AvgPool2d":
            return _pool(stored)
        case "Sequential":
            return nn.Sequential(*(_block(child) for child in stored.children()))
        case "InceptionA" | "InceptionB" | "InceptionC" | "InceptionD":
            return Joined(*(_block(child) for child in stored.children()))
        case "InceptionE":
            return _last(dict(stored.named_children()))
    raise DataError(f"the layers must be those of Inception-V3; got a layer {name!r}, which it does not have.")


def _last(stored: dict[str, Any]) -> Joined:
    """The last kind of block, in which two branches fork once more."""

    def chain(*names: str) -> list[nn.Module]:
        return [_block(stored[name]) for name in names]

    def fork(name: str) -> Joined:
        return Joined(*chain(f"{name}_mixed_conv", f"{name}_mixed_conv_1"))

    return Joined(
        *chain("conv"),
        nn.Sequential(*chain("tower_conv"), fork("tower")),
        nn.Sequential(*chain("tower_1_conv", "tower_1_conv_1"), fork("tower_1")),
        nn.Sequential(*chain("tower_2_pool", "tower_2_conv")),
    )


def _convolution(stored: Any) -> nn.Sequential:
    weight, scale = stored.weight.detach(), (stored.var.detach() + TINY).rsqrt()
    out, channels, *size = weight.shape
    layer = nn.Conv2d(
        channels, out, size, stride=stored.stride, padding=stored.padding, device=weight.device, dtype=weight.dtype
    )
    with torch.no_grad():
        layer.weight.copy_(weight * scale[:, None, None, None])
        layer.bias.copy_(stored.beta - stored.mean * scale)  # type: ignore[union-attr]
    return nn.Sequential(layer, nn.ReLU(inplace=True))


def _pool(stored: Any) -> nn.Module:
    shape = {name: getattr(stored, name) for name in ("kernel_size", "stride", "padding")}
    if _kind(stored) == "MaxPool2d":
        return nn.MaxPool2d(**shape)
    return nn.AvgPool2d(**shape, count_include_pad=stored.count_include_pad)


def _kind(stored: Any) -> str:
    """The class of a layer; TorchScript keeps it by another name."""
    return str(getattr(stored, "original_name", type(stored).__name__))
