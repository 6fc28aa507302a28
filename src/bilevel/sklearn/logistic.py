"""Logistic regression with a penalty for each feature as a scikit-learn estimator."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from bilevel.errors import DataError
from bilevel.sklearn.tuned import Tuned


class TunedLogisticRegression(Tuned, ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn: no types
    """Logistic regression whose penalties, one for each feature, are tuned by gradient on held-out rows.

    Minimises sum_i loss(x_i w + b, y_i) + 1/2 sum_j alpha_j |w_j|^2: what `sklearn.linear_model.LogisticRegression`
    does with one alpha = 1 / C. From three classes on every class has weights of its own (softmax), and all of a
    feature share its penalty.

    Parameters and attributes are those of `TunedRidge`; `valid_loss_` is the mean of -log(probability of the class).
    `coef_` has the shape (1, features) for two classes, and (classes, features) else. `classes_` are the classes.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> TunedLogisticRegression:
        """Tune the penalties and train on all rows."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y must have at least two classes; got 1 class, {self.classes_.tolist()[0]!r}.")
        self._tune(X, labels, "logistic", len(self.classes_))
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The scores: one for each row, that of the second class, where there are two."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The probability of each class, in the order of `classes_`."""
        scores = self._scores(X)
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        probabilities: np.ndarray = softmax(scores, axis=1)
        return probabilities

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The class of each row."""
        scores = self._scores(X)
        at = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(1)
        predicted: np.ndarray = self.classes_[at]
        return predicted
