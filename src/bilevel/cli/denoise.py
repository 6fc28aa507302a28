"""`bilevel denoise` and its options. Importing this module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bilevel._util.checks import require
from bilevel.cli.commands import (
    DENOISE_METHODS,
    NETWORKS,
    DataArgument,
    DeviceOption,
    JsonOption,
    LabelOption,
    ResumeOption,
    SeedOption,
    asked,
    refuse_options,
)

# Options that --apply FILE does not use.
OF_DENOISING = (
    *("trusted", "pick_trusted", "test", "noise", "noise_kind"),
    *("model", "method", "steps", "baselines", "seed", "resume"),
)
# The value of --apply that takes all suggestions.
SUGGESTED = "suggested"

PickOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Choose this many rows whose labels are worth checking, and write a page to check them. Its decisions "
        "are a value for --trusted.",
    ),
]
ApplyOption = Annotated[
    Path | None,
    typer.Option(
        help="Decisions exported from a report, or issues.csv of a run: write the data without dropped rows, with "
        "new labels. `suggested`: at the end of the run, write cleaned data with all suggestions into its folder."
    ),
]


def command(
    context: typer.Context,
    data: DataArgument,
    trusted: Annotated[
        str | None,
        typer.Option(
            help="A file or folder in the format of DATA whose labels are right, decisions.csv of checked rows, or how "
            "many rows to draw as trusted. With --noise, and for digits, ten for each class by default; else a "
            "cross-validated estimate is made."
        ),
    ] = None,
    pick_trusted: PickOption = None,
    test: Annotated[
        str | None, typer.Option(help="A file or folder in the format of DATA to measure accuracies on.")
    ] = None,
    label: LabelOption = None,
    noise: Annotated[
        float | None, typer.Option(help="Make this share of the labels wrong on purpose, to see how many are found.")
    ] = None,
    noise_kind: Annotated[
        Literal["symmetric", "asymmetric"],
        typer.Option(help="The class of a wrong label of --noise: any other (symmetric) or the next one (asymmetric)."),
    ] = "symmetric",
    model: Annotated[str, typer.Option(help=f"{NETWORKS}, or path.py:make with make(shape, classes).")] = "auto",
    method: Annotated[str, typer.Option(help=f"{DENOISE_METHODS}.")] = "penalty",
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps of the bilevel run, and of each training before and after it; by default 12 passes over the "
            "data, and at least 600, or 1,200 with more than 2,000 rows.",
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Also train on the labels as they are and on the trusted rows only, to compare.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run, by default runs/denoise-DATA; with --apply, the cleaned data."),
    ] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    apply: ApplyOption = None,
    json: JsonOption = False,
) -> None:
    """Find the wrong labels of a data set with the help of a few right ones.

    Every training example gets an importance, learned so that a classifier trained with it does well on the trusted
    set. The run folder has issues.csv, the classifier, result.json, and report.html to review the suspects in. Export
    decisions there; `bilevel denoise DATA --apply decisions.csv --out cleaned.npz` writes the cleaned data.
    """
    require("sklearn", extra="apps")
    from bilevel.cli import denoise_run

    if apply is not None and str(apply) != SUGGESTED:
        refuse_options(context, OF_DENOISING, "--apply, which runs nothing")
        denoise_run.apply_to_data(data, apply, out, label, json)
    else:
        denoise_run.run(asked(context, "denoise"), out, device, resume, json, suggested=apply is not None)
