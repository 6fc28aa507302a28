"""`Penalty()` without options finds the sources of text that help, while v is trained as plain training trains it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parents[2] / "tests")]
from common import needs
from mixture import TARGETS, Mixture, synthetic, texts


def check(mixture: Mixture, steps: int, seed: int) -> None:
    weights, model, found = mixture.solve(steps, seed)
    # Equal weights would give 0.4 to the two sources that help, and 0.2 to the noise.
    assert weights[:TARGETS].sum() > 0.8
    assert weights[-1] < 0.05
    same = mixture.plain(steps, seed, weights, found.history["lower_rate"])
    assert mixture.g(model, weights) <= 1.02 * mixture.g(same, weights)
    assert mixture.tested(model) <= 1.02 * mixture.tested(same)


def test_weights_of_markov_chains():
    check(synthetic(), 250, 1)


@pytest.mark.slow
@needs("text")
def test_weights_of_texts():
    check(texts(), 400, 0)
