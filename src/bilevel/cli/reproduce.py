"""`bilevel reproduce`: the paper's studies, run again and written as pages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cells import Cell, Found, Settings, Store, run_cells
from ..errors import OptionError
from .bar import progress_bar
from .folder import Folder, to_json

app = typer.Typer(no_args_is_help=True, help="Run a study of the paper again and write what was found as a page.")

PageOption = Annotated[
    Path | None, typer.Option(help="The folder for the page and its figures. By default that of --out.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="A small version that ends within a minute.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@app.command("synthetic")
def synthetic(
    out: Annotated[Path, typer.Option(help="The folder for results; finished cells in it are not run again.")] = Path(
        "runs/synthetic"
    ),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")] = 2,
    json: JsonOption = False,
) -> None:
    """The four synthetic problems: GD, RMD, ApproxGrad and Penalty (Section 3.1, Appendices D.4 and E.1)."""
    from ..paper import synthetic as study
    from ..paper import synthetic_page, synthetic_runs
    from ..paper.results import Results

    scale = study.QUICK if quick else study.FULL
    cells = study.cells(scale)
    folders = _folders(out, page)
    run = _run("synthetic", cells, folders, synthetic_runs.run, min(workers, os.cpu_count() or 1))
    if run is not None:
        summary = synthetic_page.write(Results(scale, run), folders[1].path)
        held = sum(claim["holds"] for claim in summary["claims"])
        message = f"{held} of {len(summary['claims'])} claims of the paper hold."
        if quick:
            message = f"A quick run of {scale.steps} steps, which say nothing of the paper's claims."
        _end("synthetic", message, summary, folders, json)


@app.command("complexity")
def complexity(
    out: Annotated[Path, typer.Option(help="The folder for results; finished cells in it are not run again.")] = Path(
        "runs/complexity"
    ),
    page: PageOption = None,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Time and memory of one hypergradient against T, U and V, beside Table 1."""
    from ..paper import complexity as study
    from ..paper import complexity_page

    sizes = study.QUICK if quick else study.FULL
    cells = study.cells(sizes)
    folders = _folders(out, page)
    run = _run("complexity", cells, folders, study.run, 1)
    if run is not None:
        found = [(cell.settings, result) for cell in cells if (result := run.get(cell)) is not None]
        summary = complexity_page.write(sizes, found, folders[1].path)
        message = f"{summary['holds']} of {summary['decisive']} exponents agree with Table 1."
        summary |= {"seconds": round(run.session.seconds, 3), "resumed": run.session.kept > 0}
        _end("complexity", message, summary, folders, json)


def _folders(out: Path, page: Path | None) -> tuple[Folder, Folder]:
    """Those of the results and of the page: refused here, before anything is run."""
    return Folder(out), Folder(out if page is None else page, "--page")


def _run(
    name: str,
    cells: Sequence[Cell],
    folders: tuple[Folder, Folder],
    function: Callable[[Settings], Found | None],
    workers: int,
) -> Store | None:
    """Run what is not finished, with a bar. Where Ctrl-C came first, says so and ends the command."""
    cells_folder = folders[0].path / "cells"
    if cells_folder.exists() and not cells_folder.is_dir():
        raise OptionError(f"--out must be a folder whose `cells` is a folder, too; {cells_folder} is a file.")
    store = Store(cells_folder)
    done: list[str] = []
    with progress_bar() as bar:
        task = bar.add_task(name, total=len(cells))

        def tell(cell: Cell) -> None:
            done.append(cell.name)
            bar.advance(task)

        began = time.perf_counter()
        complete = run_cells(cells, store, function, workers=workers, tell=tell)
    if complete:
        folders[0].write_json("config.json", {"command": f"reproduce {name}", "cells": len(cells)})
        print(f"{len(cells)} cells, {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return store
    print(
        f"bilevel: Stopped by Ctrl-C: {len(done)} of {len(cells)} cells are finished and kept; the same command goes "
        "on from there.",
        file=sys.stderr,
    )
    raise typer.Exit(1)


def _end(name: str, message: str, summary: dict[str, Any], folders: tuple[Folder, Folder], json: bool) -> None:
    result = {"command": f"reproduce {name}", "status": "done", "message": message, **summary}
    folders[0].write_json("result.json", result)
    if json:
        typer.echo(to_json(result))
    else:
        typer.echo(message)
        typer.echo(f"page: {folders[1].path / f'{name}.md'}")
