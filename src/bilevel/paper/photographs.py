"""Dog and fish photographs: a stand-in for the dog-fish set of Koh and Liang, which cannot be had."""

from __future__ import annotations

import os
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import DataError

CLASSES = ("dog", "fish")
ARCHIVE = Path("photos") / "photos256.zip"


@cache
def photos(part: str, side: int) -> tuple[Tensor, Tensor]:
    """Dogs (0) and fish (1) of a part, resized, in [-1, 1]."""
    folder = os.environ.get("BILEVEL_DATA")
    path = None if folder is None else Path(folder) / ARCHIVE
    if path is None or not path.is_file():
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
