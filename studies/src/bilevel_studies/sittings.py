"""A cell of a study in several sittings: where its state lies, when it must stop, and the seconds that it has taken."""

from __future__ import annotations

import json
import time
from pathlib import Path

from bilevel._util.atomic_files import write_whole
from bilevel.results import Solution
from bilevel.running.callbacks import Callback, Run
from bilevel.running.checkpoints import BEFORE, FILE

SECONDS = "seconds.json"


class OutOfTimeError(Exception):
    """The deadline has come; what was done until then is saved."""


class Sitting:
    """The part of a cell that is run until a deadline of `time.monotonic`.

    `place` is the folder of the cell's state; None: it is not kept, and there is no deadline. `done` of `of` steps are
    taken, over all sittings.
    """

    def __init__(self, place: Path | None = None, deadline: float | None = None) -> None:
        self.place, self.deadline = place, deadline
        self.done = self.of = 0
        self.began, self.before = time.perf_counter(), 0.0
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
            if (place / SECONDS).is_file():
                self.before = float(json.loads((place / SECONDS).read_text(encoding="utf-8")))

    def go_on(self) -> None:
        """The seconds count from here."""
        self.began = time.perf_counter()

    def folder(self, name: str) -> Path | None:
        """Where a stage keeps its state."""
        return None if self.place is None else self.place / name

    def late(self) -> bool:
        return self.deadline is not None and self.place is not None and time.monotonic() >= self.deadline

    def reached(self, done: int, of: int) -> None:
        """So many steps are done. Raises where it is late and more are left: a training saves itself then."""
        self.done, self.of = done, of
        if done < of and self.late():
            raise OutOfTimeError

    def seconds(self) -> float:
        """Of all sittings but those that were killed."""
        return self.before + time.perf_counter() - self.began

    def pause(self, seconds: float) -> None:
        """Keep the seconds for the sitting that goes on, and no second copy of a state: it may go on elsewhere."""
        if self.place is not None:
            write_whole(self.place / SECONDS, json.dumps(seconds))
            for old in self.place.rglob(BEFORE):
                if (old.parent / FILE).exists():
                    old.unlink()


class Deadline(Callback):
    """Ends a bilevel run where the sitting is late; the run is saved."""

    def __init__(self, sitting: Sitting) -> None:
        self.sitting = sitting

    def log(self, run: Run) -> bool:
        return run.step < run.max_steps and self.sitting.late()


class Leave(Deadline):
    """The same, and leaves what the run is a stage of: `begins` steps come before it, and all have `of`."""

    def __init__(self, sitting: Sitting, begins: int, of: int) -> None:
        super().__init__(sitting)
        self.begins, self.of, self.stopped = begins, of, False

    def log(self, run: Run) -> bool:
        self.stopped = super().log(run)
        return self.stopped

    def end(self, solution: Solution) -> None:
        self.sitting.done, self.sitting.of = self.begins + solution.steps, self.of
        if self.stopped and not solution.interrupted:
            raise OutOfTimeError
