"""Wrong labels on purpose: to measure how well they are found."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bilevel._util.checks import in_range, one_of
from bilevel.errors import DataError


def corrupt(
    y: Tensor, rate: float, classes: int, seed: int, kind: Literal["symmetric", "asymmetric"] = "symmetric"
) -> Tensor:
    """New labels of which exactly round(rate * n) are wrong, in rows drawn at random; y stays as it is.

    `symmetric`: a wrong label is any other class, each as likely. `asymmetric`: class c becomes c + 1 (the last one 0).
    """
    in_range("rate", rate, least=0, below=1)
    in_range("classes", classes, least=2, whole=True)
    in_range("seed", seed, least=0, whole=True)
    one_of("kind", kind, ("symmetric", "asymmetric"))
    if y.ndim != 1 or y.is_floating_point() or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes):
        raise DataError(f"y must be a vector of whole numbers from 0 to {classes - 1}.")
    random = np.random.default_rng(seed)
    rows = random.permutation(len(y))[: round(rate * len(y))]
    shift = random.integers(1, classes, len(rows)) if kind == "symmetric" else np.ones(len(rows), np.int64)
    at = torch.from_numpy(rows).to(y.device)
    new = y.clone()
    new[at] = (y[at] + torch.from_numpy(shift).to(y)) % classes
    return new
