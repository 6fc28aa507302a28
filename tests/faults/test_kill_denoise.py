"""`bilevel denoise` killed at random moments and resumed: the same bits, and no file that cannot be read."""

from __future__ import annotations

import os

import kills
import pytest
from tally import readable


def test_denoise_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    tally = kills.killed(tmp_path, kills=4, seed=0)
    assert tally.failures == []
    assert tally.tried == 4
    assert tally.facts["files read after kills"] > 0


@pytest.mark.slow
def test_denoise_killed_at_fifty_random_moments_ends_with_the_same_bits(tmp_path):
    assert kills.killed(tmp_path, kills=50, seed=1).failures == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b'{"a": '), ("a.csv", b"a,b\n1,2\n3"), ("a.html", b"<html>"), ("a.npz", b"PK\x03\x04"), ("a.bin", b"")],
)
def test_file_that_is_cut_off_is_seen(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Exception, match=r"."):
        readable(tmp_path)
    os.rename(tmp_path / name, tmp_path / f".{name}.tmp")
    assert readable(tmp_path) == 0
