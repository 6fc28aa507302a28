"""Estimators with scikit-learn's interface: `fit`, `predict`, and results in attributes that end in `_`."""

from bilevel._util.checks import require

require("sklearn", "apps")
require("scipy", "apps")

from bilevel.sklearn.denoising import DenoisingClassifier  # noqa: E402
from bilevel.sklearn.linear import TunedLogisticRegression, TunedRidge  # noqa: E402

__all__ = ["DenoisingClassifier", "TunedLogisticRegression", "TunedRidge"]
