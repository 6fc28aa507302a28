"""SIGKILL at random moments of `bilevel denoise digits`, resumed each time.

A life is a process of its own, forked from a server that has torch loaded, and is killed a random moment after its
start: while it reads, trains, saves, or writes its files.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from forked import CONTEXT
from tally import Tally, outcome, readable

ARGUMENTS = ("denoise", "digits", "--noise", "0.3", "--steps", "60", "--no-baselines", "--device", "cpu", "--json")


def live(out: str) -> None:
    """One life: go on from what is there to the end."""
    import torch

    from bilevel.cli.main import main

    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.exit(main([*ARGUMENTS, "--resume", "--out", out]))


def one_life(out: Path, seconds: float | None) -> int:
    """The exit code of a life that is killed after so many seconds; -9: it was."""
    process = CONTEXT.Process(target=live, args=(str(out),))
    process.start()
    try:
        process.join(seconds)
        process.kill()
        process.join()
        return int(process.exitcode or 0)
    finally:
        process.kill()


def killed_at(out: Path, path: Path) -> None:
    """A life that is killed as soon as the path is there."""
    process = CONTEXT.Process(target=live, args=(str(out),))
    process.start()
    try:
        while not path.exists():
            assert process.is_alive(), "the run ended before its kill"
            time.sleep(0.005)
    finally:
        process.kill()
        process.join()


def killed(folder: Path, kills: int, seed: int) -> Tally:
    """Kill so many lives; what is finished in between, and at the end, must be what a life without a kill finds."""
    tally, draw = Tally(), random.Random(seed)
    one_life(folder / "warm", None)  # the first fork waits for the server's imports
    began = time.monotonic()
    assert one_life(folder / "straight", None) == 0
    length, straight = time.monotonic() - began, outcome(folder / "straight")
    run, files, finished = 0, 0, 0

    def compared() -> None:
        found = outcome(folder / f"killed-{run}")
        different = [name for name in straight if straight[name] != found[name]]
        assert different == [], f"{different} differ from those of a run that was not killed"

    while tally.tried < kills:
        out = folder / f"killed-{run}"
        code = one_life(out, draw.uniform(0.0, 0.9 * length))
        if code == 0:
            compared()
            run, finished = run + 1, finished + 1
            continue
        with tally.attempt(f"kill {tally.tried} of run {run}"):
            assert code == -9, f"the life ended with code {code}"
            files += readable(out) if out.exists() else 0
    with tally.attempt("the last life"):
        assert one_life(folder / f"killed-{run}", None) == 0
        readable(folder / f"killed-{run}")
        compared()
    tally.tried -= 1
    tally.facts = {"runs ended and compared": finished + 1, "files read after kills": files}
    return tally
