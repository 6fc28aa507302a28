"""Kill one rank of three at random moments: rank 0 names it, and the resumed run ends with the same bits."""

from __future__ import annotations

import pytest
import rank_kills


def test_run_of_which_a_rank_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    tally = rank_kills.killed(tmp_path, kills=4, seed=0)
    assert tally.failures == []
    assert tally.tried == 4
    assert tally.facts["files read after kills"] > 0


@pytest.mark.slow
def test_run_of_which_a_rank_is_killed_at_fifty_random_moments_ends_with_the_same_bits(tmp_path):
    assert rank_kills.killed(tmp_path, kills=50, seed=1).failures == []
