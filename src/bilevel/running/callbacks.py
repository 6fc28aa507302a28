"""Callbacks of a run: progress bar, CSV and TensorBoard writers, early stopping."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel._util.checks import check_counts, require
from bilevel.errors import OptionError
from bilevel.results import ALIASES, CODED, COLUMNS, History, Solution

# The message after the first Ctrl-C. It is shown at once, because a step can take long.
ENDING = "\r\nCtrl-C: the run ends after the current step; press it again to end at once.\r\n"


@dataclass
class Run:
    """The state of a run, as callbacks receive it. `rows()` yields the rows of the history since the last call.

    `solve` makes it and fills in every field. Its defaults fit the first step on one process.

    Fields:
        mode: `deterministic` or `stochastic`.
        max_steps: The budget of the run.
        step: The steps done.
        history: The recorded columns so far.
        seen: The number of rows of the history before the last call. Default: 0.
        seconds: The time since the run began, over all its parts. Default: 0.
        engine: The engine of the steps. With `compile`, the first step takes a minute or two. Default: "eager".
        ranks: The number of processes that share the batches. Default: 1.
        bytes_per_step: The bytes that each of them sends to the others in a step. Default: 0.

    >>> from bilevel import History
    >>> Run("stochastic", max_steps=100, step=10, history=History()).max_steps
    100
    """

    mode: str
    max_steps: int
    step: int
    history: History
    seen: int = 0
    seconds: float = 0.0
    engine: str = "eager"
    ranks: int = 1
    bytes_per_step: float = 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the history since the last call, each a dict of its columns."""
        return self.history.rows(self.seen)


class Callback:
    """The base class of callbacks: override the methods that you need.

    `log` is called every `log_every` steps; if it returns True, the run stops. Under torchrun only the first rank calls
    it, and stops all. With `every_rank = True` all ranks call it.

    >>> class StopBelow(Callback):
    ...     def log(self, run):
    ...         return run.history["f"][-1] < 0.1
    """

    every_rank = False

    def start(self, run: Run) -> None:
        """Run before the first step, or before the first step after a resume."""

    def log(self, run: Run) -> bool | None:
        """Run every `log_every` steps, when the history has new rows. Return True to stop the run."""

    def interrupted(self) -> None:
        """Run immediately after Ctrl-C, in the middle of a step; the run ends after this step."""

    def end(self, solution: Solution) -> None:
        """Run after the last step and the certificate."""

    def close(self) -> None:
        """Run last of all, even if the run ended with an exception."""


class Progress(Callback):
    """Shows a bar on standard error: steps per second, f, |grad_v g|, gamma, time left.

    Args:
        label: The text before the bar. Default: "solving".
        force: Whether to show the bar even if standard error is not a terminal, such as a log file. Default: False.

    >>> callbacks = [Progress("tuning")]
    """

    def __init__(self, label: str = "solving", *, force: bool = False) -> None:
        self.label, self.force = label, force
        self._bar: Any = None

    def start(self, run: Run) -> None:
        if not (self.force or sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} steps/s"),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=self.force or None),
            transient=True,
        )
        self._bar.start()
        self._compiling = "compile" in run.engine
        first = "compiling the first step" if self._compiling else ""
        self._task = self._bar.add_task(self.label, total=run.max_steps, completed=run.step, rate="-", values=first)
        self._first = (run.step, run.seconds)

    def log(self, run: Run) -> bool | None:
        if self._bar is None:
            return None
        steps, seconds = run.step - self._first[0], run.seconds - self._first[1]
        last = next(run.history.rows(len(run.history) - 1))
        values = f"f {last['upper']:.4g}  |grad_v g| {last['residual']:.2e}  gamma {last['gamma']:.2g}"
        if run.ranks > 1:
            values += f"  {run.ranks} ranks, {run.bytes_per_step / 1e6:.2g} MB a step"
        rate = f"{steps / seconds:.1f}" if seconds > 0 and not self._compiling else "-"
        if self._compiling:  # the first step is much slower than the others
            self._compiling, self._first = False, (run.step, run.seconds)
        self._bar.update(self._task, completed=run.step, rate=rate, values=values)
        return None

    def end(self, solution: Solution) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self.label}: {solution}", markup=False, highlight=False)

    def interrupted(self) -> None:
        if self._bar is not None:
            with suppress(OSError):  # not by the bar, which can be writing now; a notebook has no file
                os.write(sys.stderr.fileno(), ENDING.encode())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class CSVHistory(Callback):
    """Writes the history to a CSV file during the run, one line for each step.

    A killed run leaves the rows so far. A resumed run rewrites the file, so that each step occurs once.

    Args:
        path: The file. Its folder is created, and an existing file is replaced.

    >>> callbacks = [CSVHistory("runs/first/history.csv")]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def start(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        run.history.to_csv(self.path)

    def log(self, run: Run) -> bool | None:
        text = io.StringIO(newline="")
        csv.DictWriter(text, COLUMNS).writerows(run.rows())
        with open(self.path, "ab", buffering=0) as file:  # at once: a kill leaves whole rows
            file.write(text.getvalue().encode())
        return None


class TensorBoard(Callback):
    """Writes every column of the history to TensorBoard files (`pip install 'bilevel[tensorboard]'`).

    Args:
        folder: The folder of the files, for `tensorboard --logdir`.

    >>> callbacks = [TensorBoard("runs/first")]
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, run: Run) -> bool | None:
        for row in run.rows():
            for name, value in row.items():
                if name not in ("step", *CODED) and not math.isnan(value):
                    self._writer.add_scalar(name, value, row["step"])
        return None

    def close(self) -> None:
        self._writer.flush()


class EarlyStopping(Callback):
    """Stops the run if a value has not fallen for `patience` steps.

    The upper objective is part of the step on v, and does not show over-fitting: pass `value`.

    Args:
        monitor: The column of the history that should fall, such as `residual`. Default: `upper`, which is f.
        patience: The number of steps without progress after which the run stops. Default: 100. Raise it if the values
            are noisy.
        least: The relative fall below the best value that counts as progress. Default: 1e-4.
        value: A function without arguments that is observed instead of a column: it measures what matters to you, on
            data that neither level uses. None (default): the column.

    >>> stop = EarlyStopping("residual", patience=50)
    """

    def __init__(
        self,
        monitor: str = "upper",
        *,
        patience: int = 100,
        least: float = 1e-4,
        value: Callable[[], float] | None = None,
    ) -> None:
        monitor = ALIASES.get(monitor, monitor)
        if monitor not in COLUMNS:
            raise OptionError(f"monitor must be a column of the history ({', '.join(COLUMNS)}); got {monitor!r}.")
        if value is not None and not callable(value):
            raise OptionError(f"value must be a function of no arguments; got {value!r}.")
        check_counts(patience=patience)
        self.monitor, self.patience, self.least, self.value = monitor, patience, least, value
        self.best, self.best_step = math.inf, 0

    def start(self, run: Run) -> None:
        """Start from scratch; after a resume, from the rows of the history."""
        self.best, self.best_step = math.inf, run.step if self.value else 0
        if self.value is None:
            self._see((row["step"], row[self.monitor]) for row in run.history.rows())

    def log(self, run: Run) -> bool | None:
        self._see(
            [(run.step, float(self.value()))] if self.value else ((r["step"], r[self.monitor]) for r in run.rows())
        )
        return run.step - self.best_step >= self.patience

    def _see(self, values: Iterable[tuple[int, float]]) -> None:
        for step, now in values:
            if now < self.best - self.least * abs(self.best) or self.best == math.inf:
                self.best, self.best_step = now, step
