"""The regression of the tuning study, whose answers are known: the informative features, and the leave-out curve.

In ridge regression with one penalty, the squared error of left-out rows has a closed form: the normal equations for a
fold, and e_i / (1 - h_ii) for single rows, with the residuals and the diagonal of the hat matrix of all rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from bilevel.applications.tuning.folded_linear_model import Rows
from bilevel.applications.tuning.linear_tuning import loss_of, trained, tune_linear
from bilevel_studies.study import Found
from bilevel_studies.tuning.data import INFORMATIVE, sparse_regression

# The number of single penalties to compare with.
GRID = 25
# The rows that are left out in turn.
LEFT_OUT = {"folds": "five folds", "rows": "single rows"}
# The interval of logarithms that is searched for the minimum of the curve, and the tolerance of the tuning.
REACH, EXACT = (-5.0, 10.0), 1e-9


def features(seed: int) -> Found:
    """Tune a penalty for each feature, and compare with the single penalty that is best on the test rows."""
    rows, test = sparse_regression(seed)
    found = tune_linear(rows, caution=0.0)
    singles = [loss_of(test, *trained(rows, torch.full_like(found.alpha, alpha))) for alpha in np.logspace(-1, 4, GRID)]
    return {
        "ratio": float(found.alpha[INFORMATIVE:].median() / found.alpha[:INFORMATIVE].median()),
        "test_error": 2 * loss_of(test, found.weight, found.bias),
        "best_single_error": 2 * min(singles),
        "valid_loss": found.valid_loss,
    }


def single(left_out: str, seed: int) -> Found:
    """Tune one penalty by gradient, and compare with the minimiser of the closed form."""
    from scipy.optimize import minimize_scalar

    rows, _ = sparse_regression(seed)
    curve = leave_fold_out
    if left_out == "rows":
        rows, curve = replace(rows, fold=torch.arange(len(rows.y))), leave_one_out
    best = minimize_scalar(
        lambda log: curve(rows, float(np.exp(log))), bounds=REACH, method="bounded", options={"xatol": 1e-7}
    )
    found = tune_linear(rows, penalty="single", tolerance=EXACT)
    return {
        "penalty": found.single,
        "minimiser": float(np.exp(best.x)),
        "valid_loss": found.valid_loss,
        "minimum": float(best.fun),
    }


def leave_fold_out(rows: Rows, alpha: float) -> float:
    """Return half of the mean squared error of the folds' rows; the bias is not penalised."""
    total = 0.0
    for k in range(rows.folds):
        out = rows.fold == k
        x, y = rows.x[~out], rows.y[~out]
        mean, level = x.mean(0), y.mean()
        x = x - mean
        w = torch.linalg.solve(x.T @ x + alpha * torch.eye(x.shape[1], dtype=x.dtype), x.T @ (y - level))
        total += float(((level + (rows.x[out] - mean) @ w - rows.y[out]) ** 2).sum()) / 2
    return total / int((rows.fold >= 0).sum())


def leave_one_out(rows: Rows, alpha: float) -> float:
    """Return half of the mean squared error of rows that are left out one by one; the bias is not penalised."""
    x, y, n = rows.x - rows.x.mean(0), rows.y - rows.y.mean(), len(rows.y)
    hat = x @ torch.linalg.solve(x.T @ x + alpha * torch.eye(x.shape[1], dtype=x.dtype), x.T)
    left_out = (y - hat @ y) / (1 - 1 / n - hat.diagonal())
    return float(left_out.square().mean()) / 2
