"""What watches a run: progress bar, CSV and TensorBoard writers, early stopping. The only printing in the library."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel.errors import OptionError
from bilevel.results import COLUMNS, History, Solution

ENDING = "\r\nCtrl-C: the run ends after the step in hand; once more ends it at once.\r\n"
"""What a terminal is told at once: a step may take long."""


@dataclass
class Run:
    """A run as callbacks see it: `rows()` are the history's rows since the last call."""

    mode: str
    max_steps: int
    step: int
    history: History
    seen: int = 0
    seconds: float = 0.0
    engine: str = "eager"
    """What runs the steps: `compile` among it means a first step that takes a minute or two."""
    ranks: int = 1
    """How many processes share the batches."""
    bytes_per_step: float = 0.0
    """What each of them hands to the others in a step."""

    def rows(self) -> Iterator[dict[str, Any]]:
        return self.history.rows(self.seen)


class Callback:
    """Override what you need. `log` is called every `log_every` steps; returning True stops the run.

    Under torchrun the first rank alone calls it, and stops all. With `every_rank = True` all ranks call it.
    """

    every_rank = False

    def start(self, run: Run) -> None:
        """Before the first step, or before the first resumed one."""

    def log(self, run: Run) -> bool | None:
        """After `log_every` steps, when the history has new rows."""

    def interrupted(self) -> None:
        """Ctrl-C came: the run ends after the step in hand. This is called within whatever was going on."""

    def end(self, solution: Solution) -> None:
        """After the last step and the certificate."""

    def close(self) -> None:
        """Last of all, also where the run ended with an exception."""


class Progress(Callback):
    """A bar on standard error: steps per second, f, |grad_v g|, gamma, time left. Quiet where that is no terminal."""

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
        if self._compiling:  # the steps from here on tell how fast they are
            self._compiling, self._first = False, (run.step, run.seconds)
        self._bar.update(self._task, completed=run.step, rate=rate, values=values)
        return None

    def interrupted(self) -> None:
        if self._bar is not None:
            with suppress(OSError):  # past the bar, which may be at work on the same stream; a notebook has no file
                os.write(sys.stderr.fileno(), ENDING.encode())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class CSVHistory(Callback):
    """Writes the history to a CSV file as the run goes, over one that is there; a killed run leaves its rows."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def start(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The rows of a resumed run are in its history: written again, so that the file has each step once.
        run.history.to_csv(self.path)

    def log(self, run: Run) -> bool | None:
        text = io.StringIO(newline="")
        csv.DictWriter(text, COLUMNS).writerows(run.rows())
        with open(self.path, "ab", buffering=0) as file:  # at once: a kill leaves whole rows
            file.write(text.getvalue().encode())
        return None


class TensorBoard(Callback):
    """Writes every column to TensorBoard (`pip install bilevel[tensorboard]`)."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise OptionError(
                "TensorBoard is not installed. Install it with: pip install 'bilevel[tensorboard]'."
            ) from error
        self._writer = SummaryWriter(str(folder))

    def log(self, run: Run) -> bool | None:
        for row in run.rows():
            for name, value in row.items():
                if name not in ("step", "advanced") and not math.isnan(value):
                    self._writer.add_scalar(name, value, row["step"])
        return None

    def close(self) -> None:
        self._writer.flush()


class EarlyStopping(Callback):
    """Stops when `monitor` has not fallen by `least` (relative) for `patience` steps.

    The upper objective is part of v's own step, so it cannot tell over-fitting: pass `value`, a function of no
    arguments that measures what you care about on data held out from both levels.
    """

    def __init__(self, monitor: str = "upper", *, patience: int = 100, least: float = 1e-4, value: Any = None) -> None:
        if monitor not in COLUMNS:
            raise OptionError(f"monitor must be a column of the history ({', '.join(COLUMNS)}); got {monitor!r}.")
        if value is not None and not callable(value):
            raise OptionError(f"value must be a function of no arguments; got {value!r}.")
        if patience < 1:
            raise OptionError(f"patience must be at least 1; got {patience}.")
        self.monitor, self.patience, self.least, self.value = monitor, patience, least, value
        self.best, self.best_step = math.inf, 0

    def start(self, run: Run) -> None:
        """Begin anew; of a resumed run, with what its history shows."""
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


def show(text: str) -> None:
    """Print to standard output."""
    print(text)
