"""Comparison: several methods on one problem, with the same starts and the same budget."""

from bilevel.applications.comparison.compare import (
    METHODS,
    Budget,
    ComparisonResult,
    Start,
    Subject,
    compare,
    synthetic,
)
from bilevel.applications.comparison.synthetic_problems import Example, examples

__all__ = [
    "METHODS",
    "Budget",
    "ComparisonResult",
    "Example",
    "Start",
    "Subject",
    "compare",
    "examples",
    "synthetic",
]
