"""Tuning: continuous hyperparameters by gradient."""

from bilevel.applications.tuning.hyperparameters import (
    Augmentation,
    ClassWeights,
    FeaturePenalty,
    Free,
    LabelSmoothing,
    LossMix,
    SourceWeights,
    WeightDecay,
)
from bilevel.applications.tuning.tune import Tuned, tune
from bilevel.applications.tuning.tune_table import TunedTable, tune_table

__all__ = [
    "Augmentation",
    "ClassWeights",
    "FeaturePenalty",
    "Free",
    "LabelSmoothing",
    "LossMix",
    "SourceWeights",
    "Tuned",
    "TunedTable",
    "WeightDecay",
    "tune",
    "tune_table",
]
