"""Which rank is lost, in a sentence: what the others say when a collective between them has failed.

A rank that waits for another in a collective hears of nothing before that one ends. Whoever finds out first leaves its
finding at the doors of all: they name the rank that was lost first, and not those which ended because of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bilevel.distributed.doors import Doors
from bilevel.errors import reason

GRACE = 5.0
"""Seconds in which a process that is dying may die, and others say what they found, once a collective has failed."""
AGAIN = "Start the job again: with checkpoint= and resume=True it goes on from the last checkpoint, at any number."


class Search:
    """The search of one rank for those that are lost, in one run."""

    def __init__(self, doors: Doors, size: int, run: int) -> None:
        self.doors, self.size, self.run = doors, size, run
        self.others = [rank for rank in range(size) if rank != doors.rank]
        self.failed: set[int] = set()
        """Ranks that have said that a collective of theirs failed, too."""

    def leave(self, why: str) -> None:
        """Tell the others that this rank ends, and why."""
        self.doors.knock(self._word(found=f"rank {self.doors.rank} of {self.size} ended: {why}."))

    def sentence(self, error: Exception) -> str:
        """Ask who is still there, and say who is not."""
        end, pause = time.monotonic() + GRACE, 0.05
        word: dict[str, Any] | None = self._word(failed=True)
        while True:
            if found := self._told():
                return f"{found} {AGAIN}"
            there = self.doors.knock(word)
            if found := self._told():  # before it ended, a rank that is not there may have left word
                return f"{found} {AGAIN}"
            gone = [rank for rank, answer in there.items() if answer is False]
            if gone or time.monotonic() > end:
                break
            word = None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # a rank that is stopped answers no caller: its door has room for so many
        found = f"{self._of(gone, there)}: {_why(error)}."
        self.doors.knock(self._word(found=found))
        return f"{found} {AGAIN}"

    def _of(self, gone: Sequence[int], there: dict[int, bool | None]) -> str:
        if gone:
            return self._names(gone, "is lost", "are lost")
        if silent := [rank for rank in self.others if there.get(rank) is None]:
            return self._names(silent, "is lost", "do not answer, one of them at least is lost")
        if stuck := [rank for rank in self.others if rank not in self.failed]:
            return self._names(stuck, "does not answer, though its process is there", "do not answer, though all live")
        return "the ranks lost each other, though all are there"

    def _told(self) -> str:
        """What another rank has found, if one has."""
        words = [word for word in self.doors.heard() if word.get("run") == self.run]
        self.failed |= {word["from"] for word in words if "failed" in word}
        return next((word["found"] for word in words if "found" in word), "")

    def _word(self, **what: Any) -> dict[str, Any]:
        return {"run": self.run, **what}

    def _names(self, ranks: Sequence[int], one: str, many: str) -> str:
        names = ", ".join(map(str, ranks))
        return f"ranks {names} of {self.size} {many}" if len(ranks) > 1 else f"rank {names} of {self.size} {one}"


def _why(error: Exception) -> str:
    """What a collective says of its failure, without the place in its source and its advice."""
    return reason(RuntimeError(re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". ")[0]))


def between_ranks(error: RuntimeError) -> bool:
    """Whether it is the failure of a collective: that of a sharded model, or of the user's own."""
    return isinstance(error, dist.DistError) or re.search(r"\bgloo\b", str(error)) is not None
