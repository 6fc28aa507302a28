"""The rows that are held out in turn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError


def folds_of(y: np.ndarray, classes: int, folds: int, seed: int) -> Tensor:
    """The fold that holds each row out; each class is spread over all of them. With few rows of a class, fewer folds.

    `classes=0` is for numbers to predict.
    """
    from sklearn.model_selection import KFold, StratifiedKFold  # here: it takes as long to import as torch

    most = int(np.unique(y, return_counts=True)[1].min()) if classes else len(y)
    if most < 2:
        what = "rows of each class" if classes else "rows"
        raise DataError(f"folds need at least 2 {what}; got n_samples = {len(y)}, of the rarest {most}.")
    many = StratifiedKFold if classes else KFold
    fold = np.empty(len(y), dtype=np.int64)
    for k, (_, out) in enumerate(many(min(folds, most), shuffle=True, random_state=seed).split(y, y)):
        fold[out] = k
    return torch.from_numpy(fold)
