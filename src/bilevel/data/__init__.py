"""Labelled examples: named sets, user files (.npz, .csv, .parquet, image folders), splits, wrong labels on purpose."""

from .decisions import Applied, apply_decisions
from .labelled import Kind, Labelled, Pair
from .named import NAMES
from .noise import corrupt
from .numbers import load_numbers
from .reading import load
from .split import split_test, split_trusted

__all__ = [
    "NAMES",
    "Applied",
    "Kind",
    "Labelled",
    "Pair",
    "apply_decisions",
    "corrupt",
    "load",
    "load_numbers",
    "split_test",
    "split_trusted",
]
