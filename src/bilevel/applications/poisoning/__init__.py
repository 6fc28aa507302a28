"""Poisoning: how few changed training examples break a model."""

from bilevel.applications.poisoning.attack import Evaluation, Poison, attack, evaluate
from bilevel.applications.poisoning.audit import AttackResult, Audit, audit, carry_out, detection_auc
from bilevel.applications.poisoning.goals import Bound, Goal, clean_label, targeted, untargeted
from bilevel.applications.poisoning.setting import AttackGoal, AttackSetting, prepare
from bilevel.applications.poisoning.victims import Recipe

__all__ = [
    "AttackGoal",
    "AttackResult",
    "AttackSetting",
    "Audit",
    "Bound",
    "Evaluation",
    "Goal",
    "Poison",
    "Recipe",
    "attack",
    "audit",
    "carry_out",
    "clean_label",
    "detection_auc",
    "evaluate",
    "prepare",
    "targeted",
    "untargeted",
]
