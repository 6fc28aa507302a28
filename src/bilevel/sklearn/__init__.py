"""Estimators with scikit-learn's interface: `fit`, `predict`, and what was learnt in attributes that end in `_`."""

from .denoising import DenoisingClassifier
from .logistic import TunedLogisticRegression
from .ridge import TunedRidge

__all__ = ["DenoisingClassifier", "TunedLogisticRegression", "TunedRidge"]
