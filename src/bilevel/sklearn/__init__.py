"""Estimators with scikit-learn's interface: `fit`, `predict`, and what was learnt in attributes that end in `_`."""

from bilevel.sklearn.denoising import DenoisingClassifier
from bilevel.sklearn.logistic import TunedLogisticRegression
from bilevel.sklearn.ridge import TunedRidge

__all__ = ["DenoisingClassifier", "TunedLogisticRegression", "TunedRidge"]
