"""What all tests share: one thread, the folder of data sets, and a quadratic problem whose solution is known."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from quadratic import Quadratic

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind & in a shell, and in all that is started here
    signal.signal(signal.SIGINT, signal.default_int_handler)

BESIDE = Path(__file__).parents[2] / "shared" / "data"
if BESIDE.is_dir():
    os.environ.setdefault("BILEVEL_DATA", str(BESIDE))


@pytest.fixture
def quadratic() -> Quadratic:
    return Quadratic()
