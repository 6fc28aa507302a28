"""How far a command is, on standard error: a bar where that is a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bilevel.distributed.process_group import first_rank
from bilevel.running import callbacks
from bilevel.running.callbacks import Run

EVERY = 10.0
"""Seconds from one line to the next, and to the first: a short command says nothing."""


def waiting(label: str) -> AbstractContextManager[object]:
    """What is being waited for, and that it goes on, where standard error is a terminal; it is gone afterwards."""
    console = Console(stderr=True)
    return console.status(label) if console.is_terminal and first_rank() else nullcontext()


class Lines:
    """Lines on standard error, of the first rank alone, where some time has passed since the one before."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Have the first line come some time from now."""
        self._last = time.monotonic()

    def say(self, label: str, done: float, total: float | None, of: str = "") -> None:
        if time.monotonic() - self._last >= EVERY and first_rank():
            self._last = time.monotonic()
            count = f"{done:,.0f}" if total is None else f"{done:,.0f} of {total:,.0f}"
            print(f"{label}: {count} {of}".rstrip(), file=sys.stderr, flush=True)


LINES = Lines()
"""Those of all bars of a command: together they come no more often."""


class Bar(Progress):
    """The bar of what is counted, in the plural, as `of`."""

    def __init__(self, of: str = "") -> None:
        console, self.of = Console(stderr=True), of
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(of),
            TimeElapsedColumn(),
        )
        off = not console.is_terminal or not first_rank()
        super().__init__(*columns, console=console, transient=True, disable=off)

    def update(self, task_id: TaskID, **given: Any) -> None:
        super().update(task_id, **given)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if self.disable:
            LINES.say(task.description, task.completed, task.total, self.of)


@contextmanager
def stage(label: str, of: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `tell(done, total)`, which shows how much of a stage is done.

    `of` is what is counted, in the plural.
    """
    with Bar(of) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class StageBar:
    """One bar for all stages of a command, each under its own name."""

    def __init__(self) -> None:
        self.bar, self.stage = Bar(), ""
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


class RunBar(callbacks.Progress):
    """The bar of a run of `solve`, under the present label."""

    def log(self, run: Run) -> bool | None:
        stop = super().log(run)
        if self._bar is None:
            LINES.say(self.label, run.step, run.max_steps, "steps")
        else:
            self._bar.update(self._task, description=self.label)
        return stop
