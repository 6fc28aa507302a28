"""SIGKILL of one rank of three at random moments of `solve`, which goes on from its checkpoint with three again."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import CONTEXT
from ranks import ends, started
from tally import Tally, readable
from test_kill_solve import Tell, bits, stochastic

SIZE, STEPS, EVERY, FURTHEST = 3, 80, 2, 12
"""Ranks, steps of a run and between its checkpoints; a kill comes at most so many steps after the start of its life."""


def live(folder: str, pipe: Connection) -> dict[str, Any]:
    """A rank of one life: go on from the checkpoint, if there is one, to the end."""
    found = stochastic(STEPS, checkpoint=folder, every=EVERY, resume=True, log_every=1, callbacks=[Tell(pipe)], seed=5)
    assert found.ranks == SIZE
    return bits(found)


def one_life(folder: Path, kill: tuple[int, int, float] | None = None) -> dict[int, Any]:
    """How the ranks end; with `kill` = (rank, steps, seconds), one is killed so long after it has gone so far."""
    mine, theirs = CONTEXT.Pipe(duplex=False)
    ranks, results = started(SIZE, live, str(folder), theirs)
    try:
        if kill is not None:
            rank, further, delay = kill
            first = _heard(mine)
            while first is not None and (step := _heard(mine)) is not None and step < first + further:
                pass
            time.sleep(delay)
            if ranks[rank].is_alive():
                os.kill(ranks[rank].pid, signal.SIGKILL)
        theirs.close()
        return ends(ranks, results, SIZE - (kill is not None))
    finally:
        mine.close()
        for process in ranks:
            process.kill()
            process.join()


def _heard(pipe: Connection) -> int | None:
    """The next step that the first rank tells; None where it tells nothing more."""
    return pipe.recv() if pipe.poll(120) else None


def killed(folder: Path, kills: int, seed: int) -> Tally:
    """Kill one rank so many times. Rank 0 must name it, and each run that resumes must end with the same bits."""
    tally, draw = Tally(), random.Random(seed)
    straight = one_life(folder / "straight")[0]
    assert straight[0], straight[1]
    run = files = finished = 0

    def compared(end: dict[int, Any]) -> None:
        for rank, (good, found) in end.items():
            assert good, found
            different = [name for name in straight[1] if straight[1][name] != found[name]]
            assert different == [], f"{different} of rank {rank} differ from those of a run that was not killed"

    while tally.tried < kills:
        out, rank = folder / f"killed-{run}", draw.randrange(SIZE)
        end = one_life(out, (rank, draw.randrange(1, FURTHEST), draw.uniform(0.0, 0.02)))
        if all(good for good, _ in end.values()):  # it ended before its kill
            compared(end)
            run, finished = run + 1, finished + 1
            continue
        with tally.attempt(f"kill {tally.tried} of run {run}, of rank {rank}"):
            assert rank not in end, f"ends came from {sorted(end)}"
            for good, found in end.values():
                assert good or found.startswith("RankError: "), found.splitlines()[0]
            if rank != 0 and not end[0][0]:
                assert f"rank {rank} of {SIZE} did not answer rank 0: " in end[0][1], end[0][1].splitlines()[0]
            files += readable(out)
    with tally.attempt("the last life"):
        compared(one_life(folder / f"killed-{run}"))
        readable(folder / f"killed-{run}")
    tally.tried -= 1
    tally.facts = {"runs ended and compared": finished + 1, "files read after kills": files}
    return tally
