"""Tuning: continuous hyperparameters by gradient."""

from bilevel.applications.tuning.hyperparameters import (
    Augmentation,
    ClassWeights,
    FeaturePenalty,
    Free,
    LabelSmoothing,
    LearningRate,
    LossMix,
    SourceWeights,
    WeightDecay,
)
from bilevel.applications.tuning.tune import Tuned, tune
from bilevel.applications.tuning.tune_table import TunedTable, tune_table
from bilevel.applications.tuning.value_search import Candidate

__all__ = [
    "Augmentation",
    "Candidate",
    "ClassWeights",
    "FeaturePenalty",
    "Free",
    "LabelSmoothing",
    "LearningRate",
    "LossMix",
    "SourceWeights",
    "Tuned",
    "TunedTable",
    "WeightDecay",
    "tune",
    "tune_table",
]
