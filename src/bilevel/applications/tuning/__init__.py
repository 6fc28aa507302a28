"""Tuning: hyper-parameters by gradient."""

from bilevel.applications.tuning.hyperparameters import ClassWeights, LabelSmoothing, WeightDecay
from bilevel.applications.tuning.tune import tune

__all__ = ["ClassWeights", "LabelSmoothing", "WeightDecay", "tune"]
