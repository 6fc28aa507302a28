"""Numbers that are not finite, from a random moment on: reported with their step and name, the last state restored."""

from __future__ import annotations

import pytest
import values


def test_bad_numbers_are_reported_and_the_last_finite_state_is_restored():
    tally = values.injected(25, seed=0)
    assert tally.failures == []
    assert tally.facts["of them in numbers that the method does not use"] < 8


@pytest.mark.slow
def test_bad_numbers_at_very_many_moments():
    assert values.injected(300, seed=1).failures == []
