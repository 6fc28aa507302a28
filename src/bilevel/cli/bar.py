"""The progress bar of a command: how much is done, on standard error, and only where that is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..distributed import first_rank


def progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not first_rank())


class StageBar:
    """One bar for all stages of a command, each under its own name."""

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
