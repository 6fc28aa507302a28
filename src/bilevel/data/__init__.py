"""Labelled examples: named sets, user files (.npz, .csv, .parquet, image folders), splits, label noise, decisions."""

from bilevel.data.decisions import Applied, apply_decisions
from bilevel.data.labelled import Kind, Labelled, Pair, corrupt, split_test, split_trusted
from bilevel.data.load import load, load_numbers
from bilevel.data.named_sets import NAMES

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
