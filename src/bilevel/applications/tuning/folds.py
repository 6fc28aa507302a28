"""The rows that are held out in turn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import DataError


def folds_of(y: np.ndarray, classes: int, folds: int, seed: int) -> Tensor:
    """The fold that holds each row out; each class is spread over all of them. With few rows of a class, fewer folds.

    `y` holds indices of classes; with `classes=0`, numbers to predict.
    """
    from sklearn.model_selection import KFold, StratifiedKFold  # here: it takes as long to import as torch

    most = int(np.bincount(y, minlength=classes).min()) if classes else len(y)
    if most < 2:
        what, remedy = ("rows of each class", " Leave rare classes out.") if classes else ("rows", "")
        raise DataError(f"folds need at least 2 {what}; got n_samples = {len(y)}, of the rarest {most}.{remedy}")
    many = StratifiedKFold if classes else KFold
    fold = np.empty(len(y), dtype=np.int64)
    for k, (_, out) in enumerate(many(min(folds, most), shuffle=True, random_state=seed).split(y, y)):
        fold[out] = k
    return torch.from_numpy(fold)
