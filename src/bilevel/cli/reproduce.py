"""`bilevel reproduce`: the paper's studies, run again and written as pages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..cells import Cell, Found, Settings, Store, run_cells
from ..errors import OptionError
from .bar import progress_bar
from .device import device_of
from .folder import Folder, to_json

if TYPE_CHECKING:
    import torch

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


@app.command("classical")
def classical(
    out: Annotated[Path, typer.Option(help="The folder for results; finished cells in it are not run again.")] = Path(
        "runs/classical"
    ),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")] = 2,
    json: JsonOption = False,
) -> None:
    """Classical small problems with constraints at both levels, beside their best known values."""
    from ..applications.classical import study
    from ..paper.denoising_store import FiledStore

    folders = _folders(out, page)
    store = FiledStore(_cells_folder(folders), folders[1].path / "classical.json")
    cells = study.cells(quick=quick)
    run = _run("classical", cells, folders, study.run_cell, min(workers, os.cpu_count() or 1), store)
    if run is not None:
        store.write()
        summary = study.write([(c.settings, found) for c in cells if (found := store.get(c))], folders[1].path)
        message = (
            f"{summary['solved']} of {summary['cases']} cases are solved; the slowest took {summary['slowest']} s."
        )
        _end("classical", message, summary, folders, json)


OutOption = Annotated[Path, typer.Option(help="The folder for results; finished cells in it are not run again.")]
DeviceOption = Annotated[str, typer.Option(help="`auto` (a GPU where there is one), `cpu` or `cuda`.")]
NoRunOption = Annotated[bool, typer.Option("--no-run", help="Write the page from what is there and run nothing.")]


@app.command("denoising")
def denoising(
    dataset: Annotated[
        str | None,
        typer.Option(help="Data sets of the table, with commas. By default all on a GPU, digits on a CPU."),
    ] = None,
    noise: Annotated[str | None, typer.Option(help="Shares of wrong labels, with commas: 0.25,0.5.")] = None,
    kind: Annotated[str | None, typer.Option(help="`symmetric` or `asymmetric`. By default both.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of the table, with commas: ours,oracle.")] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="table, hyper-cleaning, how-few, with commas. By default all, with --dataset the table."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each place of the table.")] = 5,
    passes: Annotated[int | None, typer.Option(min=1, help="The length of a run of cifar10-wrn.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="No cell is begun after these, and cifar10-wrn ends with them.")
    ] = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/denoising"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: Table 2, hyper-cleaning, and how few trusted examples are enough (Section 3.2, Appendix D.1)."""
    from ..options import one_of
    from ..paper import denoising as study
    from ..paper import denoising_cells, denoising_page, denoising_small

    all_parts = ("table", denoising_small.HYPER_CLEANING, denoising_small.HOW_FEW)
    where = device_of(device)
    names = _words("--dataset", dataset, denoising_cells.DATASETS)
    if dataset is None:
        names = list(denoising_cells.DATASETS) if where.type == "cuda" else ["digits"]
    one_of("--kind", kind, (study.SYMMETRIC, study.ASYMMETRIC), optional=True)
    wanted = ["table"] if parts is None and dataset is not None else _words("--parts", parts, all_parts)
    cells: list[Cell] = []
    if "table" in wanted:
        some = _words("--columns", columns, tuple(study.COLUMNS))
        cells += denoising_cells.cells(names, _shares(noise), kind, some, seeds, passes)
    cells += [cell for cell in denoising_small.cells() if cell.settings["part"] in wanted]
    _denoising("denoising", cells, where, minutes, out, page, no_run, json, denoising_page.write)


@app.command("denoising-speed")
def denoising_speed(
    device: DeviceOption = "auto",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method.")] = 1,
    out: OutOption = Path("runs/denoising-speed"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: accuracy against wall-clock time, Penalty and ApproxGrad (Figure 4(a)). An MLP where no GPU is."""
    from ..paper import denoising_speed as study

    _figure_study(study.SPEED, device, seeds, out, page, no_run, json)


@app.command("denoising-steps")
def denoising_steps(
    device: DeviceOption = "auto",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method and T.")] = 1,
    out: OutOption = Path("runs/denoising-steps"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: the last accuracy and the time of an upper iteration against T (Figure 5(a)). An MLP without a GPU."""
    from ..paper import denoising_speed as study

    _figure_study(study.STEPS, device, seeds, out, page, no_run, json)


@app.command("poisoning")
def poisoning(
    parts: Annotated[
        str | None, typer.Option(help="table, weight, table-6, effect-of-T, with commas. By default all.")
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="untargeted, targeted, with commas. By default both.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of the table, with commas: penalty,rmd.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each place.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")] = 1,
    out: OutOption = Path("runs/poisoning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Poisoning MNIST: Table 5, Table 6, the effect of T and the points (Appendices D.2 and E.4)."""
    from ..paper import poisoning as study
    from ..paper import poisoning_page, poisoning_runs
    from ..paper.denoising_store import FiledStore

    some = [name for name in study.COLUMNS if columns is not None or name != "algorithm-2"]
    cells = study.cells(
        _words("--parts", parts, study.PARTS), _words("--attacks", attacks, tuple(study.PAPER)),
        some if columns is None else _words("--columns", columns, tuple(study.COLUMNS)), seeds,
    )  # fmt: skip
    folders = _folders(out, page)
    store = FiledStore(_cells_folder(folders), folders[1].path / "poisoning.json")
    left = [] if no_run else [cell for cell in cells if store.get(cell) is None]
    done: list[Cell] = []
    with progress_bar() as bar:
        task = bar.add_task("poisoning", total=len(left))

        def tell(cell: Cell) -> None:
            done.append(cell)
            bar.advance(task)

        complete = run_cells(left, store, poisoning_runs.run, workers=workers, tell=tell)
    if not complete:
        _stopped(len(done), len(left))
    store.write()
    summary = poisoning_page.write(store.all(), folders[1].path)
    message = f"{len(done)} cells were run; the page shows {summary['cells']}."
    _end("poisoning", message, summary, folders, json)


@app.command("clean-label")
def clean_label(
    features: Annotated[
        str, typer.Option(help="inception (needs bilevel[inception]), or small for a CPU.")
    ] = "inception",
    targets: Annotated[int, typer.Option(min=1, help="Test photographs, drawn with a fixed seed.")] = 20,
    minutes: Annotated[float | None, typer.Option(min=0, help="No cell is begun after these.")] = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/clean-label"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """One clean-label poison point a target: the smallest distortion that flips it (Section 3.4, Figure 3)."""
    import torch

    from ..options import one_of
    from ..paper import clean_label as study
    from ..paper import clean_label_page
    from ..paper.clean_label_features import FEATURES
    from ..paper.denoising_store import FiledStore, run_ranked

    one_of("--features", features, tuple(FEATURES))
    where = device_of(device)
    folders = _folders(out, page)
    store = FiledStore(_cells_folder(folders), folders[1].path / "clean-label.json")
    left: list[Cell] = []
    if not no_run:
        count = len(study.photos("test", 32)[1])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:targets].tolist()
        left = [cell for cell in study.cells(features, order) if store.get(cell) is None]
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    done: list[Cell] = []
    with progress_bar() as bar:
        task = bar.add_task("clean-label", total=len(left))

        def tell(cell: Cell) -> None:
            done.append(cell)
            bar.advance(task)

        complete = run_ranked(left, store, partial(study.run, device=where), deadline=deadline, tell=tell)
    if not complete:
        _stopped(len(done), len(left))
    store.write()
    summary = clean_label_page.write(store.all(), folders[1].path)
    message = f"{len(done)} cells were run; the page shows {summary['cells']}."
    _end("clean-label", message, summary, folders, json)


@app.command("tuning")
def tuning(
    parts: Annotated[str | None, typer.Option(help="linear, network, scale, with commas. By default all.")] = None,
    dataset: Annotated[str | None, typer.Option(help="a9a, digits, text, with commas. By default all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")] = 1,
    out: OutOption = Path("runs/tuning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Tuning: penalties of logistic regression beside other ways, a network, a million hyper-parameters (Eq. 2)."""
    from ..paper import tuning as study
    from ..paper import tuning_data, tuning_page

    wanted = _words("--parts", parts, study.PARTS)
    cells = study.cells(wanted, _words("--dataset", dataset, tuning_data.DATASETS), seeds)
    folders = _folders(out, page)
    if no_run:
        run: Store | None = Store(_cells_folder(folders))
    else:
        run = _run("tuning", cells, folders, study.run, min(workers, os.cpu_count() or 1))
    if run is not None:
        found = [(cell.settings, result) for cell in study.cells(seeds=seeds) if (result := run.get(cell)) is not None]
        summary = tuning_page.write(found, folders[1].path)
        _end("tuning", f"The page shows {len(found)} cells.", summary, folders, json)


def _figure_study(part: str, device: str, seeds: int, out: Path, page: Path | None, no_run: bool, json: bool) -> None:
    from ..paper import denoising_speed as study
    from ..paper import denoising_speed_page

    where = device_of(device)
    cells = study.cells(part, "cnn" if where.type == "cuda" else "mlp", seeds)
    writer = partial(denoising_speed_page.write, part)
    _denoising(f"denoising-{part}", cells, where, None, out, page, no_run, json, writer)


def _denoising(
    name: str,
    cells: Sequence[Cell],
    device: torch.device,
    minutes: float | None,
    out: Path,
    page: Path | None,
    no_run: bool,
    json: bool,
    write: Callable[[Sequence[tuple[Settings, Found]], Path], dict[str, Any]],
) -> None:
    """Run the cells that are not there, the most worth first, and write the page from all that are."""
    from ..paper import denoising_cells
    from ..paper.denoising_store import FiledStore, run_ranked

    folders = _folders(out, page)
    store = FiledStore(_cells_folder(folders), folders[1].path / f"{name}.json")
    left = [] if no_run else [cell for cell in cells if store.get(cell) is None]
    for dataset, why in denoising_cells.missing([cell.settings["dataset"] for cell in left]).items():
        print(f"bilevel: Nothing is run on {dataset}: {why}", file=sys.stderr)
        left = [cell for cell in left if cell.settings["dataset"] != dataset]
    began = time.monotonic()
    deadline = None if minutes is None else began + 60 * minutes
    done: list[Cell] = []
    with progress_bar() as bar:
        task = bar.add_task(name, total=len(left))

        def tell(cell: Cell) -> None:
            done.append(cell)
            bar.advance(task)

        run = partial(
            denoising_cells.run, device=device, checkpoints=folders[0].path / "checkpoints", deadline=deadline
        )
        complete = run_ranked(left, store, run, deadline=deadline, tell=tell)
    if not complete:
        _stopped(len(done), len(left))
    store.write()
    summary = write(store.all(), folders[1].path)
    message = f"{len(done)} cells were run in {time.monotonic() - began:.0f} s; the page shows {summary['cells']}."
    _end(name, message, summary, folders, json)


def _words(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    """The words of a list with commas, each one of those allowed; all of them where there is none."""
    from ..options import one_of

    found = list(allowed) if text is None else [word.strip() for word in text.split(",")]
    for word in found:
        one_of(option, word, tuple(allowed))
    return found


def _shares(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--noise must be shares of 1 with commas between them, such as 0.25,0.5; got {text}."
        ) from None
    for share in found:
        if not 0 < share < 1:
            raise OptionError(f"--noise must be above 0 and below 1; got {share:g}.")
    return found


def _folders(out: Path, page: Path | None) -> tuple[Folder, Folder]:
    """Those of the results and of the page: refused here, before anything is run."""
    return Folder(out), Folder(out if page is None else page, "--page")


def _run(
    name: str,
    cells: Sequence[Cell],
    folders: tuple[Folder, Folder],
    function: Callable[[Settings], Found | None],
    workers: int,
    store: Store | None = None,
) -> Store | None:
    """Run what is not finished, with a bar. Where Ctrl-C came first, says so and ends the command."""
    store = Store(_cells_folder(folders)) if store is None else store
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
    return _stopped(len(done), len(cells))


def _cells_folder(folders: tuple[Folder, Folder]) -> Path:
    found = folders[0].path / "cells"
    if found.exists() and not found.is_dir():
        raise OptionError(f"--out must be a folder whose `cells` is a folder, too; {found} is a file.")
    return found


def _stopped(done: int, cells: int) -> NoReturn:
    print(
        f"bilevel: Stopped by Ctrl-C: {done} of {cells} cells are finished and kept; the same command goes on from "
        "there.",
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
