"""Rounds of `denoise` in one process leave neither open files nor processes, and memory stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def soaked(minutes: float) -> dict[str, float]:
    """In a process of its own: tests before it have left their caches here."""
    script = Path(__file__).parent / "soak.py"
    ended = subprocess.run(
        [sys.executable, script, "--minutes", str(minutes)], capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_memory_stays_flat_and_nothing_is_left_open():
    found = soaked(2)
    assert found["handles left"] == 0
    assert found["processes left"] == 0
    assert abs(found["growth"]) < 0.02
