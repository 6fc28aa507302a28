"""`bilevel denoise digits` again and again in one process: what it keeps of memory, open files and processes.

python tests/faults/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from bilevel.cli.main import main as command

WARM = 5
"""Rounds before the first that counts: caches of torch and matplotlib fill."""
ARGUMENTS = ("denoise", "digits", "--noise", "0.3", "--steps", "60", "--no-baselines", "--device", "cpu", "--json")


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children() -> int:
    """Processes that this one began and that are there."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return len(file.read().split())


def soak(minutes: float, least: int = WARM + 4) -> dict[str, object]:
    """Run for so long, `least` rounds at least. Growth is of the median of the last quarter of the rounds over that of
    the first that counts."""
    sizes: list[int] = []
    began = time.monotonic()
    handles = processes = 0
    while len(sizes) < least or time.monotonic() - began < 60 * minutes:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            code = command([*ARGUMENTS, "--out", str(Path(folder) / "run")])
        assert code == 0, f"round {len(sizes)} ended with code {code}"
        gc.collect()
        sizes.append(resident())
        if len(sizes) == WARM:
            handles, processes = len(os.listdir("/proc/self/fd")), children()
    counted = sizes[WARM:]
    quarter = max(1, len(counted) // 4)
    first, last = median(counted[:quarter]), median(counted[-quarter:])
    minutes = round((time.monotonic() - began) / 60, 1)
    return {
        "minutes": minutes,
        "rounds": len(sizes),
        "memory MiB": round(last / 2**20, 1),
        "growth": round(last / first - 1, 4),
        "handles left": len(os.listdir("/proc/self/fd")) - handles,
        "processes left": children() - processes + len(multiprocessing.active_children()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    print(json.dumps(soak(parser.parse_args().minutes)))
