"""What the studies share on the command line: options, the run of cells with a bar, and the end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.progress import TaskID

from bilevel._util.checks import one_of
from bilevel._util.parallel_map import Where
from bilevel._util.text import agreeing, counted
from bilevel.cli.progress import Bar
from bilevel.cli.run_folder import RunFolder, Stopped, to_json
from bilevel.errors import OptionError
from bilevel.running.run_many import Cell, Found, Settings, Store, run_cells
from bilevel_studies.filed import FiledStore, Kept

OutOption = Annotated[Path, typer.Option(help="The folder for results; finished cells in it are not run again.")]
PageOption = Annotated[
    Path | None, typer.Option(help="The folder for the page and its figures. By default that of --out.")
]
NoRunOption = Annotated[bool, typer.Option("--no-run", help="Write the page from what is there and run nothing.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A small version that ends within a minute.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="The address of a Ray cluster that runs the cells instead (bilevel[ray]).")
]
SideOption = Annotated[
    int,
    typer.Option("--workers", min=1, help="Cells side by side. On one GPU, several gain where its MPS daemon runs."),
]
MinutesOption = Annotated[float | None, typer.Option(min=0, help="No cell is begun after these.")]
SittingOption = Annotated[
    float | None,
    typer.Option("--minutes", min=0, help="The cell that runs then ends, is saved, and is gone on with the next time."),
]
Function = Callable[[Settings], Found | None]
Write = Callable[[Sequence[tuple[Settings, Found]], Path], dict[str, Any]]
"""Writes the page of these cells into a folder; returns the summary, with its `message` where the study has one."""


def words(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    """The words of a list with commas, each one of those allowed; all of them where there is none."""
    found = list(allowed) if text is None else [word.strip() for word in text.split(",")]
    for word in found:
        one_of(option, word, tuple(allowed))
    return found


def folders_of(out: Path, page: Path | None) -> tuple[RunFolder, RunFolder]:
    """Those of the results and of the page: refused here, before anything is run."""
    return RunFolder(out), RunFolder(out if page is None else page, "--page")


def run(
    name: str, cells: Sequence[Cell], folders: tuple[RunFolder, RunFolder], function: Function, where: Where
) -> Store:
    """Run what is not finished, with a bar. Where Ctrl-C came first, says so and ends the command."""
    store = Store(cells_folder(folders))
    done: list[str] = []
    with Bar("cells") as bar:
        task = bar.add_task(name, total=len(cells))

        def tell(cell: Cell) -> None:
            done.append(cell.name)
            bar.advance(task)

        began = time.perf_counter()
        complete = run_cells(cells, store, function, where=where, tell=tell)
    if not complete:
        stopped(len(done), len(cells))
    folders[0].write_json("config.json", {"command": f"reproduce {name}", "cells": len(cells)})
    print(f"{counted(len(cells), 'cell')}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return store


def run_filed(
    name: str,
    cells: Sequence[Cell],
    function: Function,
    write: Write,
    folders: tuple[RunFolder, RunFolder],
    *,
    no_run: bool,
    json: bool,
    deadline: float | None = None,
    where: Where | None = None,
    possible: Callable[[list[Cell]], list[Cell]] = list,
    then: Callable[[Sequence[Kept]], list[Cell]] | None = None,
    checkpoints: Path | None = None,
) -> None:
    """Run the cells that are in neither the folder nor the file beside the page, and write the page from all that are.

    The weightiest first; after the deadline none is begun. `possible` leaves out those that cannot be run here. `then`
    has the cells that depend on what came of the first. `checkpoints` has a folder for each cell that is begun, which
    is of no more use when the cell is kept.
    """
    store = FiledStore(cells_folder(folders), folders[1].path / f"{name}.json")
    if no_run and not store.all():
        raise OptionError(f"--no-run shows what is there; {folders[0].path} has no results. Leave it out to run them.")
    began, done, total, complete, unfinished = time.monotonic(), 0, 0, True, 0
    for stage in () if no_run else (None, then)[: 1 if then is None else 2]:
        wanted = cells if stage is None else stage(store.all())
        left = possible([cell for cell in wanted if store.get(cell) is None])
        total += len(left)
        with Bar("cells") as bar:
            task = bar.add_task(name, total=len(left))

            def tell(cell: Cell, bar: Bar = bar, task: TaskID = task) -> None:
                nonlocal done, unfinished
                done += 1
                bar.advance(task)
                if store.get(cell) is None:
                    unfinished += 1
                elif checkpoints is not None:
                    shutil.rmtree(checkpoints / cell.name, ignore_errors=True)

            complete = run_cells(left, store, function, where=where or Where(), deadline=deadline, tell=tell)
        if not complete:
            break
    if not complete:
        stopped(done, total)
    store.write()
    summary = write(store.all(), folders[1].path)
    message = summary.pop("message", None)
    if message is None:
        were = agreeing(done, "was", "were")
        seconds = f"{time.monotonic() - began:.0f} s"
        rest = f", {unfinished} of them until the time was over" if unfinished else ""
        message = f"{counted(done, 'cell')} {were} run in {seconds}{rest}; the page shows {summary['cells']}."
    end(name, message, summary, folders, json)


def where_of(workers: int, address: str | None) -> Where:
    """Where the cells are run: a process each of this machine's cores at most, or a cluster."""
    return Where(min(workers, os.cpu_count() or 1), address)


def beside(function: Function, workers: int, settings: Settings) -> Found | None:
    """A cell that others run beside says how many: its seconds are not those of a run."""
    found = function(settings)
    return found | {"beside": workers - 1} if found and workers > 1 else found


def deadline_in(minutes: float | None) -> float | None:
    return None if minutes is None else time.monotonic() + 60 * minutes


def cells_folder(folders: tuple[RunFolder, RunFolder]) -> Path:
    found = folders[0].path / "cells"
    if found.exists() and not found.is_dir():
        raise OptionError(f"--out must be a folder whose `cells` is a folder, too; {found} is a file.")
    return found


def stopped(done: int, cells: int) -> NoReturn:
    raise Stopped(
        f"Stopped by Ctrl-C: {done} of {cells} cells are finished and kept; the same command goes on from there."
    )


def end(name: str, message: str, summary: dict[str, Any], folders: tuple[RunFolder, RunFolder], json: bool) -> None:
    result = {"command": f"reproduce {name}", "status": "done", "message": message, **summary}
    folders[0].write_json("result.json", result)
    if json:
        typer.echo(to_json(result))
    else:
        typer.echo(message)
        typer.echo(f"page: {folders[1].path / f'{name}.md'}")
