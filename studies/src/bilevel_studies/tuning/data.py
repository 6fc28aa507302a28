"""The problems of the tuning study: training, validation and test rows of three classifications and a regression."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import DataError
from bilevel.applications.tuning.folded_linear_model import Rows, from_scipy

DATASETS = ("a9a", "digits", "text")
# Training and validation rows; all others are for the test.
SIZES = {"a9a": (4000, 4000), "digits": (600, 600), "text": (1000, 1000)}
WORDS, TEXTS = 20_000, 4000
# Features of the regression.
INFORMATIVE, NOISE = 10, 90
REGRESSION_ROWS, REGRESSION_TEST, REGRESSION_FOLDS = 200, 2000, 5


def problem(name: str, seed: int) -> tuple[Rows, Rows]:
    """Return training rows (fold -1) with validation rows (fold 0), and test rows."""
    x, y, test = _source(name, seed)
    train, valid = SIZES[name]
    order = np.random.default_rng(seed).permutation(len(y) if test is None else test)
    if name == "text":  # the weights of words come from the training rows
        from sklearn.feature_extraction.text import TfidfTransformer

        x = TfidfTransformer().fit(x[order[:train]]).transform(x)
    first = order[: train + valid]
    rest = order[train + valid :] if test is None else np.arange(test, len(y))
    fold = np.r_[np.full(train, -1), np.zeros(valid, dtype=int)]
    return _rows(x[first], y[first], fold), _rows(x[rest], y[rest], np.full(len(rest), -1))


def sparse_regression(seed: int) -> tuple[Rows, Rows]:
    """Return rows in five folds and test rows. Few features matter in the linear target; its noise has deviation 1."""
    draw = np.random.default_rng(seed)
    w = np.zeros(INFORMATIVE + NOISE)
    w[:INFORMATIVE] = draw.normal(size=INFORMATIVE) + np.sign(draw.normal(size=INFORMATIVE))
    x = draw.normal(size=(REGRESSION_ROWS + REGRESSION_TEST, len(w)))
    y = x @ w + draw.normal(size=len(x))
    fold = np.r_[np.arange(REGRESSION_ROWS) % REGRESSION_FOLDS, np.full(REGRESSION_TEST, -1)]
    rows = Rows(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(fold), "squared")
    return rows.select(rows.fold >= 0), rows.select(rows.fold < 0)


def _rows(x: Any, y: np.ndarray, fold: np.ndarray) -> Rows:
    many = int(y.max()) > 1
    labels = torch.from_numpy(y).long() if many else torch.from_numpy(y).double()
    inputs = torch.from_numpy(x).double() if isinstance(x, np.ndarray) else from_scipy(x)
    return Rows(inputs, labels, torch.from_numpy(fold), "logistic", int(y.max()) + 1 if many else 1)


def _source(name: str, seed: int) -> tuple[Any, np.ndarray, int | None]:
    """Return inputs (for text, counts of words), labels, and the first test row; None if no rows are for the test."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return x / 16, y, None
    if name == "text":
        from sklearn.datasets import make_multilabel_classification

        x, labels = make_multilabel_classification(
            n_samples=TEXTS, n_features=WORDS, n_classes=5, n_labels=2, length=100, sparse=True, random_state=seed
        )
        return x.tocsr(), labels[:, 0], None
    path = Path(os.environ.get("BILEVEL_DATA", "data")) / "tabular" / "a9a.npz"
    if not path.exists():
        raise DataError(f"a9a needs {path}, with X_train, y_train, X_test and y_test. Set BILEVEL_DATA to its folder.")
    with np.load(path) as file:
        x = np.concatenate([file["X_train"], file["X_test"]]).astype(np.float64)
        y = (np.concatenate([file["y_train"], file["y_test"]]) > 0).astype(np.int64)
        return x, y, len(file["y_train"])


def to_sklearn(x: Tensor) -> Any:
    """Return inputs for scikit-learn: an array, or a sparse array."""
    if x.layout is torch.strided:
        return x.numpy()
    from scipy.sparse import csr_array

    return csr_array((x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()), shape=tuple(x.shape))
