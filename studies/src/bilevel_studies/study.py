"""What every study shares: results in one JSON file, cells run in several sittings, tables in Markdown.

A study is a list of cells. A cell is a dict of plain settings, all that its result depends on. The result of each cell
is a file in the folder of the run, and all results together are one JSON file, so that a new checkout can continue.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from bilevel import Callback, OptionError, Run, Solution
from bilevel._util.atomic_files import read_json, write_whole
from bilevel.running.checkpoints import BEFORE, FILE
from bilevel.running.run_many import Found, ResultFolder, RunItem, Settings, Where, run_items

__all__ = ["FiledStore", "Found", "Kept", "Report", "RunItem", "Settings", "Sitting", "Study"]
Kept = tuple[Settings, Found]
Function = Callable[[Settings], Found | None]
INTERRUPTED = 130
SECONDS = "seconds.json"
# The result files of all studies, in a checkout.
RESULTS = Path(__file__).parents[2] / "results"


class FiledStore(ResultFolder):
    """Keeps cells in a folder, and reads cells from `file` that the folder lacks.

    A cell that stopped early has a `partial` result: it is shown, and the next run continues it.
    """

    def __init__(self, folder: Path, file: Path) -> None:
        super().__init__(folder)
        self.file = file
        self._filed = {key_of(settings): (settings, found) for settings, found in read(file)}

    def get(self, cell: RunItem) -> Found | None:
        """Return the result of a finished cell, or None."""
        kept = self.kept(cell)
        return None if kept is None or kept.get("partial") else kept

    def put(self, cell: RunItem, found: Found) -> None:
        """Keep a result, unless it is partial and has fewer steps than the one that is kept."""
        old = self.kept(cell)
        if old is None or not found.get("partial") or found["steps"] >= old["steps"]:
            super().put(cell, found)

    def kept(self, cell: RunItem) -> Found | None:
        """Return the result of a cell, finished or not."""
        own, filed = super().get(cell), self._filed.get(key_of(cell.settings))
        if filed is not None and (own is None or own.get("partial", False) > filed[1].get("partial", False)):
            return filed[1]
        return own

    def all(self) -> list[Kept]:
        """Return every cell of the folder and the file, in the order of their settings."""
        found = dict(self._filed)
        for path in self.folder.glob("*.json"):
            kept = read_json(path)
            if isinstance(kept.get("settings"), dict) and isinstance(kept.get("result"), dict):
                result = self.kept(RunItem(kept["settings"], 0))
                found[key_of(kept["settings"])] = (kept["settings"], result or kept["result"])
        return [found[key] for key in sorted(found)]

    def write(self) -> None:
        """Write all cells to the file, one per line."""
        lines = ",\n".join(json.dumps(kept) for kept in self.all())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, '{"cells": [\n' + lines + "\n]}\n")


def read(file: Path) -> list[Kept]:
    """Return the cells of a result file, or an empty list if the file is missing."""
    return [(settings, found) for settings, found in read_json(file).get("cells", ())]


def key_of(settings: Settings) -> str:
    """Return a text that two equal settings share."""
    return json.dumps(settings, sort_keys=True)


class OutOfTimeError(Exception):
    """The deadline has come. What was done before it is saved."""


class Sitting:
    """The part of a cell that runs until a deadline (of `time.monotonic`).

    `place` is the folder of the cell's state; with None nothing is saved and the deadline is ignored. `done` of `of`
    steps are taken so far, over all sittings.
    """

    def __init__(self, place: Path | None = None, deadline: float | None = None) -> None:
        self.place, self.deadline = place, deadline
        self.done = self.of = 0
        self.began, self.before = time.perf_counter(), 0.0
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
            if (place / SECONDS).is_file():
                self.before = float(json.loads((place / SECONDS).read_text(encoding="utf-8")))

    def folder(self, name: str) -> Path | None:
        """Return the folder for the state of a stage."""
        return None if self.place is None else self.place / name

    def late(self) -> bool:
        return self.deadline is not None and self.place is not None and time.monotonic() >= self.deadline

    def reached(self, done: int, of: int) -> None:
        """Record the steps so far. Raise OutOfTimeError after the deadline, if steps are left."""
        self.done, self.of = done, of
        if done < of and self.late():
            raise OutOfTimeError

    def seconds(self) -> float:
        """Return the seconds of all sittings that were not killed."""
        return self.before + time.perf_counter() - self.began

    def pause(self, seconds: float) -> None:
        """Save the seconds for the next sitting and drop the second copies of states."""
        if self.place is not None:
            write_whole(self.place / SECONDS, json.dumps(seconds))
            for old in self.place.rglob(BEFORE):
                if (old.parent / FILE).exists():
                    old.unlink()


class Deadline(Callback):
    """Stops a bilevel run after the deadline of its sitting; the run is saved."""

    def __init__(self, sitting: Sitting) -> None:
        self.sitting = sitting

    def log(self, run: Run) -> bool:
        return run.step < run.max_steps and self.sitting.late()


class Leave(Deadline):
    """A `Deadline` that also ends the stage around the run: `begins` of `of` steps come before the run."""

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


@dataclass
class Report:
    """The outcome of a study: plain numbers, and tables in Markdown by their titles."""

    summary: dict[str, Any]
    tables: dict[str, str] = field(default_factory=dict)
    message: str = ""

    def text(self) -> str:
        return "".join(f"## {title}\n\n{body}\n\n" for title, body in self.tables.items())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def make_folder(path: Path) -> None:
    """Make the folder of `--out`, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"--out must be a folder; {path} is a file, or is in one.") from None
    except OSError as error:
        raise OptionError(f"--out must be a writable folder; {path}: {error.strerror}.") from None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass
class Study:
    """A run of a study from the command line."""

    name: str
    out: Path
    # Makes the tables from all cells, and figures in the folder.
    report: Callable[[Sequence[Kept], Path], Report]
    # The folder of the file of all results; by default `out`.
    results: Path | None = None
    no_run: bool = False
    json: bool = False
    # No cell begins after this time.
    minutes: float | None = None
    workers: int = 1
    # The address of a Ray cluster.
    address: str | None = None
    gpus: float = 0.0
    # Leaves out the cells that cannot run here.
    possible: Callable[[list[RunItem]], list[RunItem]] = list

    def __post_init__(self) -> None:
        make_folder(self.out / "cells")
        self.store = FiledStore(self.out / "cells", (self.results or self.out) / f"{self.name}.json")
        self.deadline = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        self.done = self.unfinished = 0

    @property
    def states(self) -> Path:
        """The folder that has a folder for the state of each unfinished cell."""
        return self.out / "checkpoints"

    def run(
        self,
        cells: Sequence[RunItem],
        function: Function,
        then: Callable[[Sequence[Kept]], list[RunItem]] | None = None,
    ) -> None:
        """Run the cells that have no result, then write and print the tables of all results.

        `then` returns the cells that depend on the results of the first.
        """
        if self.no_run and not self.store.all():
            raise OptionError(f"--no-run needs results; {self.out} has none. Leave it out to run the study.")
        began = time.monotonic()
        if not self.no_run:
            self._run(cells, function)
            if then is not None:
                self._run(then(self.store.all()), function)
        self.store.write()
        kept = self.store.all()
        report = self.report(kept, self.out)
        left = f" ({self.unfinished} of them not to the end)" if self.unfinished else ""
        ran = f"Ran {self.done} cells{left} in {time.monotonic() - began:.0f} s; {len(kept)} have results."
        result = {"command": f"reproduce {self.name}", "status": "done", "message": report.message or ran}
        result |= report.summary
        write_whole(self.out / "tables.md", report.text())
        write_whole(self.out / "result.json", json.dumps(result, indent=2, default=str) + "\n")
        if self.json:
            typer.echo(json.dumps(result, indent=2, default=str))
            return
        typer.echo(report.text() + result["message"])
        typer.echo(f"tables: {self.out / 'tables.md'}\nresults: {self.store.file}")

    def _run(self, cells: Sequence[RunItem], function: Function) -> None:
        left = self.possible([cell for cell in cells if self.store.get(cell) is None])
        where = Where(min(self.workers, os.cpu_count() or 1), self.address, self.gpus)
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task, before = bar.add_task(self.name, total=len(left)), self.done

            def on_progress(cell: RunItem) -> None:
                self.done += 1
                bar.advance(task)
                if self.store.get(cell) is None:
                    self.unfinished += 1
                else:
                    shutil.rmtree(self.states / cell.name, ignore_errors=True)

            version = commit()
            made = partial(_marked, function, {"commit": version} if version else {})
            complete = run_items(left, self.store, made, where=where, deadline=self.deadline, on_progress=on_progress)
        if not complete:
            done = f"{self.done - before} of {len(left)} cells"
            print(f"Stopped: {done} are finished and kept. Run the same command to continue.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED)


def commit() -> str | None:
    """Return the commit of the code: `$BILEVEL_COMMIT` if it is set, or what git says; None if it is unknown."""
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = os.environ.get("BILEVEL_COMMIT") or subprocess.run(call, capture_output=True, text=True).stdout.strip()
    except OSError:
        return None
    return found or None


def _marked(function: Function, marks: Found, settings: Settings) -> Found | None:
    found = function(settings)
    return found | marks if found else found


def side_by_side(function: Function, workers: int) -> Function:
    """Return `function`, which marks results of cells that share the machine: their seconds are not comparable."""
    return function if workers == 1 else partial(_marked, function, {"beside": workers - 1})
