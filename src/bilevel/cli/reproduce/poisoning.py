"""Poisoning: the tables on MNIST, and one clean-label point a target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...cells import Cell
from ...options import one_of
from ..device import device_of
from .shared import (
    DeviceOption,
    JsonOption,
    MinutesOption,
    NoRunOption,
    OutOption,
    PageOption,
    WorkersOption,
    deadline_in,
    folders_of,
    run_filed,
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
    minutes: MinutesOption = None,
    out: OutOption = Path("runs/poisoning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Poisoning MNIST: Table 5, Table 6, the effect of T and the points (Appendices D.2 and E.4)."""
    from ...paper import poisoning as study
    from ...paper import poisoning_page, poisoning_runs

    wanted = words("--parts", parts, study.PARTS)
    kinds = words("--attacks", attacks, tuple(study.PAPER))
    some = words("--columns", columns, tuple(study.COLUMNS))
    run_filed(
        "poisoning", study.choice_cells(kinds) if study.CHOICE in wanted else [], poisoning_runs.run,
        poisoning_page.write, folders_of(out, page), no_run=no_run, json=json, deadline=deadline_in(minutes),
        workers=workers, then=lambda kept: study.cells(wanted, kinds, some, seeds, study.best(kept)),
    )  # fmt: skip


def clean_label(
    features: Annotated[
        str, typer.Option(help="inception (needs bilevel[inception]), or small for a CPU.")
    ] = "inception",
    targets: Annotated[int, typer.Option(min=1, help="Test photographs, drawn with a fixed seed.")] = 20,
    minutes: MinutesOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/clean-label"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """One clean-label poison point a target: the smallest distortion that flips it (Section 3.4, Figure 3)."""
    import torch

    from ...paper import clean_label as study
    from ...paper import clean_label_page
    from ...paper.clean_label_features import FEATURES

    one_of("--features", features, tuple(FEATURES))
    where = device_of(device)
    folders = folders_of(out, page)
    cells: list[Cell] = []
    if not no_run:
        count = len(study.photos("test", 32)[1])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:targets].tolist()
        cells = study.cells(features, order)
    run_filed(
        "clean-label", cells, partial(study.run, device=where), clean_label_page.write, folders, no_run=no_run,
        json=json, deadline=deadline_in(minutes),
    )  # fmt: skip
