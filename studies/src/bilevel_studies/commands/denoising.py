"""Denoising: the table, its smaller parts, and the two figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bilevel.cli.options import DeviceOption, JsonOption, device_of
from bilevel.errors import OptionError
from bilevel.running.run_many import Cell
from bilevel_studies.commands.shared import (
    MinutesOption,
    NoRunOption,
    OutOption,
    PageOption,
    SideOption,
    SittingOption,
    Write,
    beside,
    deadline_in,
    folders_of,
    run_filed,
    where_of,
    words,
)

if TYPE_CHECKING:
    import torch


def denoising(
    dataset: Annotated[
        str | None,
        typer.Option(help="Data sets of the table, with commas. By default all on a GPU, digits on a CPU."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="Shares of wrong labels, with commas: 0.25,0.5. By default 0.25 and 0.5 symmetric, 0.4 asymmetric."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="`symmetric` or `asymmetric`. By default both, of each share in --noise.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of the table, with commas: ours,oracle.")] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="table, hyper-cleaning, how-few, with commas. By default all, with --dataset the table."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each place of the table.")] = 5,
    passes: Annotated[int | None, typer.Option(min=1, help="The length of a run of cifar10-wrn.")] = None,
    workers: SideOption = 1,
    minutes: SittingOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/denoising"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: Table 2, hyper-cleaning, and how few trusted examples are enough (Section 3.2, Appendix D.1)."""
    from bilevel._util.checks import one_of
    from bilevel_studies.denoising import cells as denoising_cells
    from bilevel_studies.denoising import page as denoising_page
    from bilevel_studies.denoising import small as denoising_small
    from bilevel_studies.denoising import study

    all_parts = ("table", denoising_small.HYPER_CLEANING, denoising_small.HOW_FEW)
    where = device_of(device)
    names = words("--dataset", dataset, denoising_cells.DATASETS)
    if dataset is None:
        names = list(denoising_cells.DATASETS) if where.type == "cuda" else ["digits"]
    one_of("--kind", kind, (study.SYMMETRIC, study.ASYMMETRIC), optional=True)
    wanted = ["table"] if parts is None and dataset is not None else words("--parts", parts, all_parts)
    cells: list[Cell] = []
    if "table" in wanted:
        some = words("--columns", columns, tuple(study.COLUMNS))
        cells += denoising_cells.cells(names, _shares(noise), kind, some, seeds, passes)
    cells += [cell for cell in denoising_small.cells() if cell.settings["part"] in wanted]
    _run("denoising", cells, where, deadline_in(minutes), out, page, no_run, json, denoising_page.write, workers)


def denoising_speed(
    device: DeviceOption = "auto",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method.")] = 1,
    minutes: MinutesOption = None,
    out: OutOption = Path("runs/denoising-speed"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: accuracy against wall-clock time, Penalty and ApproxGrad (Figure 4(a)). An MLP where no GPU is."""
    from bilevel_studies.denoising import speed as study

    _figure_study(study.SPEED, device, seeds, minutes, out, page, no_run, json)


def denoising_steps(
    device: DeviceOption = "auto",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method and T.")] = 1,
    minutes: MinutesOption = None,
    out: OutOption = Path("runs/denoising-steps"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Denoising: the last accuracy and the time of an upper iteration against T (Figure 5(a)). An MLP without a GPU."""
    from bilevel_studies.denoising import speed as study

    _figure_study(study.STEPS, device, seeds, minutes, out, page, no_run, json)


def _figure_study(
    part: str, device: str, seeds: int, minutes: float | None, out: Path, page: Path | None, no_run: bool, json: bool
) -> None:
    from bilevel_studies.denoising import speed as study
    from bilevel_studies.denoising import speed_page as denoising_speed_page

    where = device_of(device)
    cells = study.cells(part, "cnn" if where.type == "cuda" else "mlp", seeds)
    writer = partial(denoising_speed_page.write, part)
    _run(f"denoising-{part}", cells, where, deadline_in(minutes), out, page, no_run, json, writer)


def _run(
    name: str,
    cells: Sequence[Cell],
    device: torch.device,
    deadline: float | None,
    out: Path,
    page: Path | None,
    no_run: bool,
    json: bool,
    write: Write,
    workers: int = 1,
) -> None:
    """Run the cells whose data are here."""
    from bilevel_studies.denoising import cells as denoising_cells

    def possible(cells: list[Cell]) -> list[Cell]:
        missing = denoising_cells.missing([cell.settings["dataset"] for cell in cells])
        for dataset, why in missing.items():
            print(f"bilevel: Nothing is run on {dataset}: {why}", file=sys.stderr)
        return [cell for cell in cells if cell.settings["dataset"] not in missing]

    folders = folders_of(out, page)
    checkpoints = folders[0].path / "checkpoints"
    function = partial(denoising_cells.run, device=device, checkpoints=checkpoints, deadline=deadline)
    run_filed(
        name,
        cells,
        partial(beside, function, workers),
        write,
        folders,
        no_run=no_run,
        json=json,
        deadline=deadline,
        where=where_of(workers, None),
        possible=possible,
        checkpoints=checkpoints,
    )


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
