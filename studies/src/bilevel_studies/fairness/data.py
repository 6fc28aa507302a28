"""The rows of a9a as people: training, validation and test rows with the group of each.

The encoding of Platt has the Adult table's fields one after another; `sex` is columns 71 (Female) and 72 (Male).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bilevel_studies.fairness.parity import People
from bilevel_studies.tuning.data import _source as source

FEMALE = 71
SIZES = (16_000, 8000)
"""Training and validation rows of the training part; the test part is the test's."""


def people(seed: int) -> tuple[People, People, People]:
    """Training, validation and test rows, the first two drawn by the seed."""
    x, y, first_test = source("a9a", seed)
    count = first_test or len(y)
    order = np.random.default_rng(seed).permutation(count)
    train, valid = order[: SIZES[0]], order[SIZES[0] : sum(SIZES)]
    parts = train, valid, np.arange(count, len(y))
    return _people(x, y, parts[0]), _people(x, y, parts[1]), _people(x, y, parts[2])


def _people(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> People:
    own = torch.from_numpy(x[rows]).double()
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    group: Tensor = own[:, FEMALE].clone()
    return People(torch.cat([own, ones], 1), torch.from_numpy(y[rows]).double(), group)
