"""Ridge regression with a penalty for each feature as a scikit-learn estimator."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import validate_data

from bilevel.sklearn.tuned import Tuned


class TunedRidge(Tuned, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Ridge regression whose penalties, one for each feature, are tuned by gradient on held-out rows.

    Minimises sum_i (x_i w + b - y_i)^2 + sum_j alpha_j w_j^2, as `sklearn.linear_model.Ridge` does with one alpha.
    X may be sparse, as that of text is.

    Parameters: `penalty` is `per-feature` or `single`. `folds` is a number of folds, each held out in turn and all
    tuned on at once, or a share of the rows to hold out. `caution` says how much it costs a penalty to differ from the
    single one: 0 nothing, which is for data of which few features matter; 1 as under a normal prior; `auto` lets a part
    of the rows decide. `steps` are the most steps of each stage; a stage ends earlier where five steps lower the
    validation loss by less than `tol` of itself.

    Attributes: `alpha_` has the penalty of each feature, `coef_` and `intercept_` the model, trained on all rows.
    `single_alpha_` is the single penalty, `single_valid_loss_` its validation loss and `valid_loss_` that of `alpha_`
    (halves of mean squared errors), `path_` the tuned objective after each step, `caution_` the caution used (None: a
    single penalty), `n_iter_` the number of steps.
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
        """The target of each row."""
        return self._scores(X)[:, 0]
