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

from bilevel.errors import DataError

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
