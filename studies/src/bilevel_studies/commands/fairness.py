"""Classifiers of a9a under constraints."""

from __future__ import annotations

from pathlib import Path

from bilevel.cli.options import JsonOption
from bilevel_studies.commands.shared import (
    MinutesOption,
    NoRunOption,
    OutOption,
    PageOption,
    QuickOption,
    RayOption,
    WorkersOption,
    deadline_in,
    folders_of,
    run_filed,
    where_of,
)


def fairness(
    out: OutOption = Path("runs/fairness"),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: WorkersOption = 1,
    ray: RayOption = None,
    minutes: MinutesOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """A bound on the parity gap of a classifier, and a network whose last layer lives on the simplex (a9a)."""
    from bilevel_studies.fairness import study

    run_filed(
        "fairness",
        study.cells(quick=quick),
        study.run_cell,
        study.write,
        folders_of(out, page),
        no_run=no_run,
        json=json,
        deadline=deadline_in(minutes),
        where=where_of(workers, ray),
    )
