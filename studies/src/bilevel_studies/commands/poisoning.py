"""Poisoning: the tables on MNIST, and one clean-label point a target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bilevel._util.checks import one_of
from bilevel._util.parallel_map import Where
from bilevel.cli.options import DeviceOption, JsonOption, device_of
from bilevel_studies.commands.shared import (
    MinutesOption,
    NoRunOption,
    OutOption,
    PageOption,
    RayOption,
    SideOption,
    WorkersOption,
    beside,
    deadline_in,
    folders_of,
    run_filed,
    where_of,
    words,
)


def poisoning(
    parts: Annotated[
        str | None, typer.Option(help="choice, table, weight, table-6, effect-of-T, with commas. By default all.")
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="untargeted, targeted, with commas. By default both.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of the table, with commas: penalty,rmd.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each place.")] = 5,
    workers: WorkersOption = 1,
    ray: RayOption = None,
    minutes: MinutesOption = None,
    out: OutOption = Path("runs/poisoning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Poisoning MNIST: Table 5, Table 6, the effect of T and the points (Appendices D.2 and E.4)."""
    from bilevel_studies.poisoning import page as poisoning_page
    from bilevel_studies.poisoning import runs as poisoning_runs
    from bilevel_studies.poisoning import study

    wanted = words("--parts", parts, study.PARTS)
    kinds = words("--attacks", attacks, tuple(study.PAPER))
    some = words("--columns", columns, tuple(study.COLUMNS))
    run_filed(
        "poisoning",
        study.choice_cells(kinds, some) if study.CHOICE in wanted else [],
        poisoning_runs.run,
        poisoning_page.write,
        folders_of(out, page),
        no_run=no_run,
        json=json,
        deadline=deadline_in(minutes),
        where=where_of(workers, ray),
        then=lambda kept: study.cells(wanted, kinds, some, seeds, study.best(kept)),
    )


def clean_label(
    features: Annotated[
        str,
        typer.Option(help="inception (needs bilevel\\[inception]), efficientnet (bilevel\\[efficientnet]), or small."),
    ] = "inception",
    targets: Annotated[int | None, typer.Option(min=1, help="Test photographs; by default all.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Targets side by side in one tensor.")] = 32,
    choose: Annotated[
        int, typer.Option(min=0, help="Further photographs that the settings of Penalty are chosen on; 0: the paper's.")
    ] = 12,
    ray: RayOption = None,
    minutes: MinutesOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/clean-label"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """One clean-label poison point a target: the smallest distortion that flips it (Section 3.4, Figure 3)."""
    from bilevel_studies.poisoning import clean_label as study
    from bilevel_studies.poisoning import clean_label_page
    from bilevel_studies.poisoning.clean_label_features import FEATURES
    from bilevel_studies.poisoning.photographs import photos

    one_of("--features", features, tuple(FEATURES))
    where = device_of(device)
    folders = folders_of(out, page)
    rows: list[int] = [] if no_run else study.order(len(photos("test", 32)[1]))
    first, last = rows[: max(0, len(rows) - choose)], rows[max(0, len(rows) - choose) :]
    run_filed(
        "clean-label",
        study.choice_cells(features, last) if last else [],
        partial(study.run, device=where),
        clean_label_page.write,
        folders,
        no_run=no_run,
        json=json,
        deadline=deadline_in(minutes),
        where=Where(address=ray, gpus=where.type == "cuda"),
        then=lambda kept: study.cells(features, first[:targets], study.best(kept, features), chunk=chunk),
    )


def deep_victim(
    targets: Annotated[int, typer.Option(min=1, max=1000, help="Test images, drawn with a fixed seed.")] = 20,
    rows: Annotated[int, typer.Option(min=100, help="Images that the victim is trained on; the poison is 1%.")] = 5000,
    choose: Annotated[
        int, typer.Option(min=0, help="Further images that the tether of Penalty is chosen on; 0: the default.")
    ] = 2,
    workers: SideOption = 1,
    minutes: MinutesOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/deep-victim"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Clean-label poison against a network that is trained from scratch: beyond the paper."""
    from bilevel_studies.poisoning import deep_victim as study
    from bilevel_studies.poisoning import deep_victim_page

    function = partial(study.run, device=device_of(device))
    run_filed(
        "deep-victim",
        study.choice_cells(choose, rows=rows),
        partial(beside, function, workers),
        deep_victim_page.write,
        folders_of(out, page),
        no_run=no_run,
        json=json,
        deadline=deadline_in(minutes),
        where=where_of(workers, None),
        then=lambda kept: study.cells(targets, rows=rows, tether=study.best(kept, rows)),
    )
