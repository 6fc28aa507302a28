"""The classical problems with constraints at both levels."""

from __future__ import annotations

from pathlib import Path

from bilevel.cli.options import JsonOption
from bilevel_studies.commands.shared import (
    NoRunOption,
    OutOption,
    PageOption,
    QuickOption,
    RayOption,
    WorkersOption,
    folders_of,
    run_filed,
    where_of,
)


def classical(
    out: OutOption = Path("runs/classical"),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: WorkersOption = 2,
    ray: RayOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Classical small problems with constraints at both levels, beside their best known values."""
    from bilevel_studies.classical import study

    run_filed(
        "classical",
        study.cells(quick=quick),
        study.run_cell,
        study.write,
        folders_of(out, page),
        no_run=no_run,
        json=json,
        where=where_of(workers, ray),
    )
