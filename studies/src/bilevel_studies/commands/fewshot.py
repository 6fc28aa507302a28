"""Few-shot learning: the table on Omniglot and CIFAR-FS, and its figures."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.options import DeviceOption, JsonOption, device_of, refuse_options
from bilevel.errors import OptionError
from bilevel_studies.commands.shared import (
    NoRunOption,
    OutOption,
    PageOption,
    QuickOption,
    SideOption,
    SittingOption,
    beside,
    deadline_in,
    folders_of,
    run_filed,
    where_of,
    words,
)

SLOW = "note: a cell takes hours on a CPU. --quick shows that all of it runs; --minutes ends a sitting, and keeps it."


def fewshot(
    context: typer.Context,
    parts: Annotated[
        str | None,
        typer.Option(help="table, effect-of-T, time, choices, with commas. By default all but the last."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="omniglot, cifar-fs, with commas. By default both.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="penalty, prototypes, cosines, approx-grad, paper, rmd, with commas. By default all."),
    ] = None,
    backbones: Annotated[str | None, typer.Option(help="conv4, resnet, with commas. By default both.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each place of the table.")] = 1,
    quick: QuickOption = False,
    workers: SideOption = 1,
    minutes: SittingOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("runs/few-shot"),
    page: PageOption = None,
    no_run: NoRunOption = False,
    json: JsonOption = False,
) -> None:
    """Few-shot learning: Table 3, accuracy against time and the effect of T (Section 3.3, Figures 4(b) and 5(b)).

    A cell takes a minute or two on an H200, and hours on a CPU. --quick is for Omniglot and takes none of the options
    that choose cells.
    """
    from bilevel_studies.few_shot import page as few_shot_page
    from bilevel_studies.few_shot import runs as few_shot_runs
    from bilevel_studies.few_shot import study

    if quick:
        refuse_options(
            context, ("parts", "dataset", "methods", "backbones", "seeds"), "--quick, which has cells of its own"
        )
    usual = ",".join((study.TABLE, study.EFFECT) + ((study.TIME,) if workers == 1 else ()))
    wanted = words("--parts", parts or usual, study.PARTS)
    if study.TIME in wanted and workers > 1:
        raise OptionError("--parts time measures what a step takes by itself; leave --workers out.")
    cells = study.cells(
        wanted,
        words("--dataset", dataset, study.DATASETS),
        words("--methods", methods, tuple(study.METHODS)),
        seeds,
        words("--backbones", backbones, ("conv4", "resnet")),
    )
    if quick:
        cells = study.small_cells()
    where, folders, deadline = device_of(device), folders_of(out, page), deadline_in(minutes)
    if where.type == "cpu" and not (quick or no_run):
        print(SLOW, file=sys.stderr, flush=True)
    checkpoints = folders[0].path / "checkpoints"
    function = partial(few_shot_runs.run, device=where, folder=checkpoints, deadline=deadline)
    run_filed(
        "few-shot",
        cells,
        partial(beside, function, workers),
        few_shot_page.write,
        folders,
        no_run=no_run,
        json=json,
        deadline=deadline,
        where=where_of(workers, None),
        checkpoints=checkpoints,
    )
