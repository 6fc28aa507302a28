"""Poisoning: how few changed training examples break a model."""

from bilevel.applications.poisoning.attack import attack, evaluate
from bilevel.applications.poisoning.bounds import Bound
from bilevel.applications.poisoning.goals import untargeted
from bilevel.applications.poisoning.victims import Recipe

__all__ = ["Bound", "Recipe", "attack", "evaluate", "untargeted"]
