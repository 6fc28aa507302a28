"""Progress on standard error (a bar on a terminal, elsewhere a line every ten seconds), and tables of results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bilevel.distributed.process_group import first_rank
from bilevel.running import callbacks
from bilevel.running.callbacks import Run

# Seconds between two lines, and before the first: a short command prints none.
EVERY = 10.0


def waiting(label: str) -> AbstractContextManager[object]:
    """Show a spinner while waiting, if standard error is a terminal."""
    console = Console(stderr=True)
    return console.status(label) if console.is_terminal and first_rank() else nullcontext()


# When the last line was printed, by any bar of the command.
_last = time.monotonic()


def say(label: str, done: float, total: float | None, of: str = "") -> None:
    """Print `done` of `total` things, whose plural is `of`, on the first rank, at most once every `EVERY` seconds."""
    global _last
    if time.monotonic() - _last >= EVERY and first_rank():
        _last = time.monotonic()
        count = f"{done:,.0f}" if total is None else f"{done:,.0f} of {total:,.0f}"
        print(f"{label}: {count} {of}".rstrip(), file=sys.stderr, flush=True)


class Bar(Progress):
    """A progress bar. `of` is the plural of the things that are counted."""

    def __init__(self, of: str = "") -> None:
        console, self.of = Console(stderr=True), of
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn(of), TimeElapsedColumn())
        off = not console.is_terminal or not first_rank()
        super().__init__(*columns, console=console, transient=True, disable=off)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.disable:
            task = self._tasks[task_id]
            say(task.description, task.completed, task.total, self.of)


@contextmanager
def stages(of: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Show several stages in one bar; yields `on_progress(stage, done, total)`. `of` is as in `Bar`."""
    bar = Bar(of)
    task = bar.add_task("", total=None)

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage != bar.tasks[0].description:
            bar.start()
            bar.reset(task, total=total, description=stage)
        bar.update(task, completed=done)
        if done == total:  # the next stage can show another bar
            bar.stop()

    try:
        yield on_progress
    finally:
        bar.stop()


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]], *lines: str) -> None:
    """Print rows of text under their heads, if there are any, and below them the lines that are not empty."""
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table if len(table) > 1 else ():
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in filter(None, lines):
        print(line)


class RunBar(callbacks.Progress):
    """The bar of a run of `solve`. Its label is `label`, followed by the text that `more()` returns."""

    def __init__(self, label: str, more: Callable[[], str] = str) -> None:
        super().__init__(label)
        self.begins, self.more = label, more

    def log(self, run: Run) -> bool | None:
        stop, self.label = super().log(run), self.begins + self.more()
        if self._bar is None:
            say(self.label, run.step, run.max_steps, "steps")
        else:
            self._bar.update(self._task, description=self.label)
        return stop
