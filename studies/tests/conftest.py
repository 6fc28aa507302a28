"""Settings of the study tests: one thread, and the folder of the data sets. Helpers are in tests/common.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind & in a shell, and in all that is started here
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[3] / "shared" / "data"
if SHARED.is_dir():
    os.environ.setdefault("BILEVEL_DATA", str(SHARED))
