"""Label noise on scikit-learn's digits: with no option given, the importances tell wrong labels from right ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bilevel import Penalty, Problem, Rows, Status, solve

TRUSTED, NOISE, BATCH, STEPS = 100, 0.4, 100, 600


def upper(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return cross_entropy(v(x), y)


def lower(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    x, y, row = batch
    w = torch.sigmoid(u[row])
    return (w * cross_entropy(v(x), y, reduction="none")).sum() / w.sum()


def digits(seed: int) -> tuple[DataLoader[Any], DataLoader[Any], np.ndarray]:
    """Loaders of the trusted and of the noisy examples, and which of the latter have their right label."""
    draw = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = draw.permutation(len(labels))
    x, y = torch.from_numpy(images[order] / 16).float(), torch.from_numpy(labels[order]).long()
    trusted, x, y = (x[:TRUSTED], y[:TRUSTED]), x[TRUSTED:], y[TRUSTED:].clone()
    wrong = torch.from_numpy(draw.choice(len(y), round(NOISE * len(y)), replace=False))
    y[wrong] = (y[wrong] + torch.from_numpy(draw.integers(1, 10, len(wrong)))) % 10
    right = np.ones(len(y), dtype=bool)
    right[wrong] = False
    noisy = TensorDataset(x, y, torch.arange(len(y)))
    return DataLoader(TensorDataset(*trusted), BATCH, shuffle=True), DataLoader(noisy, BATCH, shuffle=True), right


def auc(model: str, seed: int) -> float:
    trusted, noisy, right = digits(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        v = nn.Linear(64, 10) if model == "softmax" else nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    u = Rows(len(right))
    solution = solve(
        Problem(upper, lower), Penalty(cotangent="same"), u, v, (trusted, noisy), max_steps=STEPS, seed=seed
    )
    assert solution.mode == "stochastic"
    assert solution.status is Status.MAX_STEPS
    return float(roc_auc_score(right, u.values.numpy()))


@pytest.mark.parametrize(("model", "least"), [("softmax", 0.96), ("mlp", 0.98)])
def test_importances_tell_wrong_labels_from_right_ones(model, least):
    assert auc(model, 0) >= least


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("model", "least"), [("softmax", 0.96), ("mlp", 0.98)])
def test_importances_tell_wrong_labels_from_right_ones_on_other_seeds(model, least, seed):
    assert auc(model, seed) >= least
