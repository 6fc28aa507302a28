"""Few-shot learning: one representation for many small tasks."""

from bilevel.applications.few_shot.evaluation import Evaluation, Validation, adapt, adapt_and_evaluate
from bilevel.applications.few_shot.meta_train import Episodes, default_method, feature_count, meta_train
from bilevel.applications.few_shot.tasks import TRAINING, CosineClassifier, TaskSampler, Training, backbone, embed

__all__ = [
    "TRAINING",
    "CosineClassifier",
    "Episodes",
    "Evaluation",
    "TaskSampler",
    "Training",
    "Validation",
    "adapt",
    "adapt_and_evaluate",
    "backbone",
    "default_method",
    "embed",
    "feature_count",
    "meta_train",
]
