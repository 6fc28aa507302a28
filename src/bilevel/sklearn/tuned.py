"""What the tuned linear estimators share: their options, the folds, and the tuning itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel._util.checks import in_range, one_of
from bilevel.applications.tuning.caution import tune_cautiously
from bilevel.applications.tuning.folded_linear_model import Loss, Rows, folds_of, invertible
from bilevel.applications.tuning.linear_tuning import tune_linear
from bilevel.applications.tuning.sparse_inputs import from_scipy
from bilevel.errors import OptionError
from bilevel.sklearn.denoising import _plain

AUTO = "auto"
FULL = 0.1
"""The share of numbers that are not zero from which sparse inputs are faster dense."""


class Tuned:
    """The part of an estimator that tunes the penalties of a linear model."""

    n_features_in_: int
    coef_: np.ndarray
    intercept_: Any

    def __init__(
        self,
        *,
        penalty: str = "per-feature",
        folds: float = 5,
        caution: float | str = AUTO,
        steps: int = 100,
        tol: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.penalty = penalty
        self.folds = folds
        self.caution = caution
        self.steps = steps
        self.tol = tol
        self.random_state = random_state

    def _tune(self, X: Any, y: np.ndarray, loss: Loss, classes: int) -> None:
        """Tune on what the folds hold out; sets all attributes but the coefficients' shape."""
        caution, steps, tol = _plain(self.caution), _plain(self.steps), _plain(self.tol)
        one_of("penalty", self.penalty, ("per-feature", "single"))
        in_range("steps", steps, least=1, whole=True)
        in_range("tol", tol, above=0)
        if isinstance(caution, str):
            if caution != AUTO:
                raise OptionError(f"caution must be 'auto' or a number of at least 0; got {caution!r}.")
        else:
            in_range("caution", caution, least=0)
        random = check_random_state(self.random_state)
        fold = self._fold(X, y, classes, int(random.randint(2**31 - 1)))
        kind = torch.int64 if classes > 2 else torch.float64
        outputs = classes if classes > 2 else 1
        inputs = _inputs(X, outputs * (int(fold.max()) + 1))
        rows = Rows(inputs, torch.from_numpy(np.array(y)).to(kind), torch.from_numpy(fold), loss, outputs)
        options: dict[str, Any] = {"steps": steps, "tolerance": tol}
        self.caution_ = None if self.penalty == "single" or caution == AUTO else float(caution)
        if self.penalty == "per-feature" and caution == AUTO:
            found, self.caution_ = tune_cautiously(rows, seed=int(random.randint(2**31 - 1)), **options)
        elif self.penalty == "per-feature":
            found = tune_linear(rows, caution=float(caution), **options)
        else:
            found = tune_linear(rows, penalty="single", **options)
        if found.interrupted:
            raise KeyboardInterrupt
        self.alpha_ = found.alpha.numpy()
        self.single_alpha_ = found.single
        self.valid_loss_, self.single_valid_loss_ = found.valid_loss, found.single_loss
        self.path_ = np.array(found.path)
        self.n_iter_ = len(found.path)
        self.coef_, self.intercept_ = found.weight.numpy(), found.bias.numpy()

    def _fold(self, X: Any, y: np.ndarray, classes: int, seed: int) -> np.ndarray:
        """The fold that holds each row out; -1 for none. With few rows of a class, fewer folds."""
        folds = _plain(self.folds)
        if isinstance(folds, float) and not isinstance(folds, bool) and 0 < folds < 1:
            one = StratifiedShuffleSplit if classes else ShuffleSplit
            fold = np.full(len(y), -1, dtype=np.int64)
            fold[next(one(1, test_size=folds, random_state=seed).split(X, y))[1]] = 0
            return fold
        if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
            raise OptionError(f"folds must be a whole number of at least 2, or a share of the rows; got {folds!r}.")
        return folds_of(y, classes, folds, seed).numpy()

    def _scores(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, "coef_")
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        scores: np.ndarray = X @ np.atleast_2d(self.coef_).T + self.intercept_
        return scores

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.sparse = True
        return tags


def _inputs(X: Any, outputs: int) -> torch.Tensor:
    """A tensor; a sparse one stays so where dense it would be no faster. `outputs` are those of all folds."""
    if not issparse(X):
        return torch.from_numpy(np.array(X, order="C"))
    if X.nnz > FULL * X.shape[0] * X.shape[1] or invertible(X.shape[0], X.shape[1], outputs):
        return torch.from_numpy(X.toarray())
    return from_scipy(X)
