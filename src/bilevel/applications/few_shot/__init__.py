"""Few-shot learning: one representation for many small tasks."""

from bilevel.applications.few_shot.evaluation import adapt_and_evaluate
from bilevel.applications.few_shot.meta_train import meta_train
from bilevel.applications.few_shot.tasks import TaskSampler

__all__ = ["TaskSampler", "adapt_and_evaluate", "meta_train"]
