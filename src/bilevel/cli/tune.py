"""`bilevel tune`: one penalty for each feature, each layer or the whole model, tuned by gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bilevel._util.optional import require
from bilevel.cli.options import DataArgument, JsonOption, LabelOption, ResumeOption, SeedOption, asked


def command(
    context: typer.Context,
    data: DataArgument,
    model: Annotated[
        Literal["logistic", "ridge", "mlp"],
        typer.Option(help="The model to tune: logistic for classes, ridge for numbers, mlp for either."),
    ] = "logistic",
    penalty: Annotated[
        Literal["per-feature", "per-layer", "single"],
        typer.Option(help="One penalty for each feature, for each layer of an mlp, or for all weights."),
    ] = "per-feature",
    test: Annotated[
        str | None, typer.Option(help="A file or folder of the same form to measure the test loss on.")
    ] = None,
    label: LabelOption = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="The labels are numbers to predict by an mlp; for ridge they always are.")
    ] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Folds that linear models are tuned on, all at once; at most as many as the rarest class has rows. By "
            "default 5.",
        ),
    ] = None,
    caution: Annotated[
        float | None,
        typer.Option(min=0, help="The cost of penalties that differ; 0 is no cost. By default the rows decide."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Most steps of the tuning; by default 100, and 1,000 of an mlp.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/tune-DATA.")] = None,
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one, and the CPU for linear models."),
    ] = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Tune the penalties of a model by gradient, on rows that are held out.

    The run folder has penalties.csv, the model, result.json, and report.html with a bar for each penalty, the path of
    the validation loss, and the losses of a grid of single penalties.
    """
    require("sklearn", extra="apps")
    from bilevel.cli import tune_run

    tune_run.run(asked(context, "tune"), out, device, resume, json)
