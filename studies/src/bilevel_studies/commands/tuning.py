"""Tuning: penalties beside other ways, a network, a million hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel.cli.options import JsonOption
from bilevel.running.run_many import Found, Settings
from bilevel_studies.commands.shared import (
    MinutesOption,
    NoRunOption,
    OutOption,
    PageOption,
    RayOption,
    WorkersOption,
    deadline_in,
    folders_of,
    run_filed,
    where_of,
    words,
)


def tuning(
    parts: Annotated[
        str | None, typer.Option(help="linear, ridge, network, scale, curve, with commas. By default all.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="a9a, digits, text, with commas. By default all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 3,
    minutes: MinutesOption = None,
    workers: WorkersOption = 1,
    ray: RayOption = None,
    out: OutOption = Path("runs/tuning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Tuning: penalties of linear models beside other ways, a network, a million hyper-parameters (Eq. 2)."""
    from bilevel_studies.tuning import data as tuning_data
    from bilevel_studies.tuning import page as tuning_page
    from bilevel_studies.tuning import study

    cells = study.cells(words("--parts", parts, study.PARTS), words("--dataset", dataset, tuning_data.DATASETS), seeds)

    def write(found: Sequence[tuple[Settings, Found]], folder: Path) -> dict[str, Any]:
        """The page of all cells of these seeds, whatever part was run; results of other settings are left out."""
        kept = {frozenset(settings.items()): result for settings, result in found}
        shown = [cell.settings for cell in study.cells(seeds=seeds)]
        return tuning_page.write([(s, kept[key]) for s in shown if (key := frozenset(s.items())) in kept], folder)

    run_filed(
        "tuning",
        cells,
        study.run,
        write,
        folders_of(out, page),
        no_run=no_run,
        json=json,
        deadline=deadline_in(minutes),
        where=where_of(workers, ray),
    )
