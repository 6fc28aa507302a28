"""The classical problems with constraints at both levels."""

from __future__ import annotations

from pathlib import Path

from .shared import (
    JsonOption,
    OutOption,
    PageOption,
    QuickOption,
    RayOption,
    WorkersOption,
    cells_folder,
    end,
    folders_of,
    run,
    where_of,
)


def classical(
    out: OutOption = Path("runs/classical"),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: WorkersOption = 2,
    ray: RayOption = None,
    json: JsonOption = False,
) -> None:
    """Classical small problems with constraints at both levels, beside their best known values."""
    from ...paper import classical as study
    from ...paper.filed import FiledStore

    folders = folders_of(out, page)
    store = FiledStore(cells_folder(folders), folders[1].path / "classical.json")
    cells = study.cells(quick=quick)
    complete = run("classical", cells, folders, study.run_cell, where_of(workers, ray), store)
    if complete is not None:
        store.write()
        summary = study.write([(c.settings, found) for c in cells if (found := store.get(c))], folders[1].path)
        message = (
            f"{summary['solved']} of {summary['cases']} cases are solved; the slowest took {summary['slowest']} s."
        )
        end("classical", message, summary, folders, json)
