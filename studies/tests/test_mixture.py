"""`Penalty()` without options finds the sources of text that help, while v is trained as plain training trains it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from common import needs
from mixture import TARGETS, Mixture, synthetic, texts


def check(mixture: Mixture, steps: int, seed: int, least: float, most: float) -> None:
    """Check that the sources that help have `least` of the weight together, and each other source at most `most`.

    With equal weights these would be 0.4 and 0.2.
    """
    weights, model, found = mixture.solve(steps, seed)
    assert weights[:TARGETS].sum() > least
    assert weights[TARGETS:].max() < most
    same = mixture.plain(steps, seed, weights, found.history["lower_rate"])
    assert mixture.g(model, weights) <= 1.02 * mixture.g(same, weights)
    assert mixture.tested(model) <= 1.02 * mixture.tested(same)


def test_weights_of_markov_chains():
    check(synthetic(), 250, 1, least=0.8, most=0.05)


@pytest.mark.slow
@needs("text")
def test_weights_of_texts():
    check(texts(), 400, 0, least=0.6, most=0.15)  # not at the end of the way: u is still moving
