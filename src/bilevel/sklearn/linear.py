"""Linear models with tuned penalties as scikit-learn estimators: `TunedRidge` and `TunedLogisticRegression`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from scipy.special import softmax
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel import OptionError
from bilevel._util.checks import check_counts, in_range, one_of
from bilevel._util.threads import threads_for
from bilevel.applications.tuning.folded_linear_model import Loss, Rows, folds_of, from_scipy, invertible
from bilevel.applications.tuning.linear_tuning import Penalty, tune_cautiously
from bilevel.sklearn.denoising import _LabelledClasses, _plain

AUTO = "auto"
# Sparse inputs with a larger share of nonzero numbers are faster as dense inputs.
FULL = 0.1


class _Tuned(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The options of both estimators, the folds, and the tuning itself."""

    coef_: np.ndarray
    intercept_: Any

    def __init__(
        self,
        *,
        penalty: Penalty = "per-feature",
        folds: float = 5,
        caution: float | str = AUTO,
        steps: int = 100,
        tol: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.penalty, self.folds, self.caution = penalty, folds, caution
        self.steps, self.tol, self.random_state = steps, tol, random_state

    def _tune(self, X: Any, y: np.ndarray, loss: Loss, classes: int) -> None:
        """Tune on the rows that the folds hold out; set all attributes. `classes` is 0 for numbers to predict."""
        caution, steps, tol = _plain(self.caution), _plain(self.steps), _plain(self.tol)
        one_of("penalty", self.penalty, ("per-feature", "single"))
        check_counts(steps=steps)
        in_range("tol", tol, above=0)
        if isinstance(caution, str) and caution != AUTO:
            raise OptionError(f"caution must be 'auto' or a number of at least 0; got {caution!r}.")
        if caution != AUTO:
            in_range("caution", caution, least=0)
        random = check_random_state(self.random_state)
        fold = self._fold(X, y, classes, int(random.randint(2**31 - 1)))
        kind = torch.int64 if classes > 2 else torch.float64
        outputs = classes if classes > 2 else 1
        inputs = _inputs(X, outputs * (int(fold.max()) + 1))
        rows = Rows(inputs, torch.from_numpy(np.array(y)).to(kind), torch.from_numpy(fold), loss, outputs)
        with threads_for(X.shape[0] * X.shape[1]):
            found, self.caution_ = tune_cautiously(
                rows,
                penalty=self.penalty,
                caution=None if caution == AUTO else float(caution),
                seed=int(random.randint(2**31 - 1)),
                steps=steps,
                tolerance=tol,
            )
        self.alpha_ = found.alpha.numpy()
        self.single_alpha_ = found.single
        self.valid_loss_, self.single_valid_loss_ = found.valid_loss, found.single_loss
        self.path_, self.n_iter_ = np.array(found.path), len(found.path)
        self.coef_, self.intercept_ = found.weight.numpy(), found.bias.numpy()

    def _fold(self, X: Any, y: np.ndarray, classes: int, seed: int) -> np.ndarray:
        """Return the fold that holds each row out, or -1 for rows that are never held out."""
        folds = _plain(self.folds)
        if isinstance(folds, float) and 0 < folds < 1:
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
        return X @ np.atleast_2d(self.coef_).T + self.intercept_  # type: ignore[no-any-return]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _inputs(X: Any, outputs: int) -> torch.Tensor:
    """Return X as a tensor, sparse only if that is faster; `outputs` counts the scores of all folds."""
    rows, features = X.shape
    if issparse(X) and X.nnz <= FULL * rows * features and not invertible(rows, features, outputs):
        return from_scipy(X)
    return torch.from_numpy(X.toarray() if issparse(X) else np.array(X, order="C"))


class TunedRidge(RegressorMixin, _Tuned):  # type: ignore[misc]
    """Ridge regression with a penalty for each feature, tuned by gradient on held-out rows.

    Minimises sum_i (x_i w + b - y_i)^2 + sum_j alpha_j w_j^2, as `sklearn.linear_model.Ridge` does with one alpha.
    X can be sparse.

    Parameters
    ----------
    penalty : "per-feature" (default), or "single" for one penalty of all features, as scikit-learn has.
    folds : the number of folds, which are held out in turn and tuned on at once, or a share of the rows to hold out.
        Default 5.
    caution : the price of a penalty that differs from the single one. 0: none, for data with few features that matter;
        1: as under a normal prior; "auto" (default): a part of the rows decides.
    steps : the largest number of steps of each stage, default 100.
    tol : a stage ends if five steps lower the validation loss by less than this share of it, default 1e-4.
    random_state : a seed or a numpy.random.RandomState, which draws the folds. None (default): numpy's global
        generator.

    Attributes
    ----------
    alpha_ : the penalty of each feature.
    coef_, intercept_ : the model, trained on all rows.
    single_alpha_, single_valid_loss_ : the single penalty and its validation loss.
    valid_loss_ : the validation loss of `alpha_`, half of the mean squared error.
    path_ : the tuned objective after each step; `n_iter_` is the number of steps.
    caution_ : the caution used; None for a single penalty.

    >>> X = np.random.default_rng(0).normal(size=(60, 5))
    >>> TunedRidge(caution=0, random_state=0).fit(X, X[:, 0]).alpha_.argmin()
    np.int64(0)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> TunedRidge:
        """Tune the penalties and train on all rows."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        y = np.asarray(y, dtype=np.float64)
        spread = float(np.abs(y - y.mean()).max()) or 1.0  # in units of y the squared error is of the order of 1
        self._tune(X, (y - y.mean()) / spread, "squared", 0)
        self.coef_, self.intercept_ = spread * self.coef_[0], float(y.mean() + spread * self.intercept_[0])
        self.valid_loss_, self.single_valid_loss_ = spread**2 * self.valid_loss_, spread**2 * self.single_valid_loss_
        self.path_ = spread**2 * self.path_
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the predicted number of each row."""
        return self._scores(X)[:, 0]


class TunedLogisticRegression(_LabelledClasses, _Tuned):
    """Logistic regression with a penalty for each feature, tuned by gradient on held-out rows.

    Minimises sum_i loss(x_i w + b, y_i) + 1/2 sum_j alpha_j |w_j|^2, as `sklearn.linear_model.LogisticRegression` does
    with one alpha = 1 / C. With three classes or more, every class has its own weights (softmax), and all weights of a
    feature share its penalty.

    Parameters
    ----------
    penalty : "per-feature" (default), or "single" for one penalty of all features, as scikit-learn has.
    folds : the number of folds, which are held out in turn and tuned on at once, or a share of the rows to hold out.
        Default 5.
    caution : the price of a penalty that differs from the single one. 0: none, for data with few features that matter;
        1: as under a normal prior; "auto" (default): a part of the rows decides.
    steps : the largest number of steps of each stage, default 100.
    tol : a stage ends if five steps lower the validation loss by less than this share of it, default 1e-4.
    random_state : a seed or a numpy.random.RandomState, which draws the folds. None (default): numpy's global
        generator.

    Attributes
    ----------
    alpha_ : the penalty of each feature.
    intercept_ : one number for each row of `coef_`.
    single_alpha_, single_valid_loss_ : the single penalty and its validation loss.
    path_ : the tuned objective after each step; `n_iter_` is the number of steps.
    caution_ : the caution used; None for a single penalty.
    valid_loss_ : the validation loss of `alpha_`, the mean of -log(probability of the class).
    coef_ : its shape is (1, features) for two classes and (classes, features) for more.
    classes_ : the classes.

    >>> X = np.random.default_rng(0).normal(size=(60, 5))
    >>> TunedLogisticRegression(caution=0, steps=5, random_state=0).fit(X, X[:, 0] > 0).alpha_.argmin()
    np.int64(0)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> TunedLogisticRegression:
        """Tune the penalties and train on all rows."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        labels = self._indices(y)
        self._tune(X, labels, "logistic", len(self.classes_))
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Return the scores of each row: one for each class; with two classes, one number, high for the second."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        scores = self._scores(X)
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        return softmax(scores, axis=1)  # type: ignore[no-any-return]
