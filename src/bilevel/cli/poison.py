"""`bilevel poison`: how little poison breaks a model that is trained on a data set, and what it looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bilevel._util.optional import require
from bilevel.cli.options import (
    NETWORKS,
    DataArgument,
    DeviceOption,
    JsonOption,
    LabelOption,
    ResumeOption,
    SeedOption,
    asked,
)

AttackOption = Annotated[
    Literal["untargeted", "targeted", "clean-label"],
    typer.Option(
        help="The goal: less accuracy (untargeted), one class taken for another (targeted), or one test row taken for "
        "another class because of points whose labels are right (clean-label)."
    ),
]
AuditOption = Annotated[
    bool,
    typer.Option(
        "--audit",
        help="Look for the smallest share of poison (clean label: the smallest epsilon) that is enough, and test "
        "whether bilevel's own denoiser notices the points.",
    ),
]


def command(
    context: typer.Context,
    data: DataArgument,
    attack: AttackOption = "untargeted",
    points: Annotated[int | None, typer.Option(min=1, help="Poison points to add.")] = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="The same as a share of the training rows, without those of the test and validation parts. If neither "
            "is given: 0.03, or one point for clean-label."
        ),
    ] = None,
    target_class: Annotated[str | None, typer.Option(help="Targeted: the class that is to be mistaken.")] = None,
    as_class: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="The class that --target-class, or the row of --target, is to be taken for. For a row, by default the "
            "class of the nearest validation row of another class.",
        ),
    ] = None,
    target: Annotated[int | None, typer.Option(min=0, help="Clean label: a row of the test set, from 0.")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="The most that a point can change; without it there is no bound. l2: a length, of pixels in [0, 1]. "
            "linf: steps of 1/255 of a pixel. In tables, deviations of a column."
        ),
    ] = None,
    norm: Annotated[Literal["l2", "linf"], typer.Option(help="The norm that --epsilon bounds.")] = "l2",
    test: Annotated[str | None, typer.Option(help="A file or folder of the same form, which no attack sees.")] = None,
    label: LabelOption = None,
    rows: Annotated[int | None, typer.Option(min=10, help="Draw this many rows for training; all by default.")] = None,
    model: Annotated[
        str, typer.Option(help=f"The victim: {NETWORKS}, or path.py:make with make(shape, classes).")
    ] = "linear",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the attack.")] = 300,
    audit: AuditOption = False,
    cost: Annotated[
        float | None, typer.Option(help="Points of accuracy whose loss is enough for --audit; by default 5.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/poison-DATA.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Find out what a few poisoned training examples can do to a classifier, on your own data.

    The attack moves points that are added to the training set. Its effect is measured by training the victim from
    scratch on the clean rows and the points (a network under a clean-label attack: its last layer), on test rows that
    the attack never sees. The run folder has poison.npz, result.json and report.html. It is meant for audits of your
    own pipelines: see docs/poisoning-ethics.md.
    """
    require("sklearn", extra="apps")
    from bilevel.cli import poison_run

    options = asked(context, "poison")
    options["as"] = options.pop("as_class")
    poison_run.run(options, out, device, resume, json)
