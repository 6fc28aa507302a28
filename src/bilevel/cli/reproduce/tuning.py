"""Tuning: penalties beside other ways, a network, a million hyper-parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cells import Store
from ...wording import counted
from ..arguments import JsonOption
from .shared import (
    NoRunOption,
    OutOption,
    PageOption,
    RayOption,
    WorkersOption,
    cells_folder,
    end,
    folders_of,
    run,
    where_of,
    words,
)


def tuning(
    parts: Annotated[
        str | None, typer.Option(help="linear, ridge, network, scale, curve, with commas. By default all.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="a9a, digits, text, with commas. By default all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 3,
    workers: WorkersOption = 1,
    ray: RayOption = None,
    out: OutOption = Path("runs/tuning"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Tuning: penalties of linear models beside other ways, a network, a million hyper-parameters (Eq. 2)."""
    from ...paper import tuning as study
    from ...paper import tuning_data, tuning_page

    wanted = words("--parts", parts, study.PARTS)
    cells = study.cells(wanted, words("--dataset", dataset, tuning_data.DATASETS), seeds)
    folders = folders_of(out, page)
    store = Store(cells_folder(folders)) if no_run else run("tuning", cells, folders, study.run, where_of(workers, ray))
    found = [(c.settings, result) for c in study.cells(seeds=seeds) if (result := store.get(c)) is not None]
    summary = tuning_page.write(found, folders[1].path)
    end("tuning", f"The page shows {counted(len(found), 'cell')}.", summary, folders, json)
