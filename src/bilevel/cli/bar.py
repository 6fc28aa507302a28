"""How far a command is, on standard error: a bar where that is a terminal, elsewhere nothing, or lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..distributed import first_rank

EVERY = 30.0
"""Seconds from one line to the next."""


def progress_bar() -> Progress:
    """A bar; it shows nothing where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not first_rank())


def waiting(label: str) -> AbstractContextManager[object]:
    """What is being waited for, and that it goes on, where standard error is a terminal; it is gone afterwards."""
    console = Console(stderr=True)
    return console.status(label) if console.is_terminal and first_rank() else nullcontext()


class Lines:
    """Lines on standard error: the first at once, others where some time has passed since the one before."""

    def __init__(self) -> None:
        self._last = -math.inf

    def say(self, line: str) -> None:
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)


@contextmanager
def stage(label: str, of: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `tell(done, total)`, which shows how much of a stage is done, in a bar or in lines.

    `of` is what is counted, in the plural.
    """
    lines = Lines()
    with progress_bar() as bar:
        task = bar.add_task(label)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if bar.disable:
                lines.say(f"{label}: {done:,} of {total:,} {of}")

        yield tell


class StageBar:
    """One bar for all stages of a command, each under its own name; it is quiet where is no terminal."""

    def __init__(self) -> None:
        self.bar, self.stage = progress_bar(), ""
        self.task: TaskID | None = None

    def tell(self, stage: str, done: int, total: int) -> None:
        if self.task is None:
            self.task = self.bar.add_task(stage, total=total)
        if stage != self.stage:
            self.stage = stage
            self.bar.start()
            self.bar.reset(self.task, total=total, description=stage)
        if done % max(1, total // 100) == 0 or done == total:
            self.bar.update(self.task, completed=done)
        if done == total:  # what comes next may show a bar of its own
            self.bar.stop()

    def stop(self) -> None:
        self.bar.stop()
