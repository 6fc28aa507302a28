"""`bilevel tune`: one penalty for each feature, each layer or the whole model, tuned by gradient."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bilevel._util.parallel_map import one_thread
from bilevel.applications.tuning.tune_table import TunedTable, tune_table
from bilevel.cli.device import device_of
from bilevel.cli.options import DataArgument, JsonOption, LabelOption, ResumeOption, SeedOption
from bilevel.cli.progress import RunBar, StageBar
from bilevel.cli.run_state import begin, finished, folder_of, resumable
from bilevel.cli.telling import tell
from bilevel.cli.tune_output import FILES, show, summary, write
from bilevel.data import Labelled, load, load_numbers
from bilevel.errors import OptionError

FOLDS = 5
SMALL = 5_000_000
"""Numbers of the inputs up to which one thread is as fast as several."""


class Model(StrEnum):
    logistic = "logistic"
    ridge = "ridge"
    mlp = "mlp"


class Penalty(StrEnum):
    per_feature = "per-feature"
    per_layer = "per-layer"
    single = "single"


def command(
    data: DataArgument,
    model: Annotated[
        Model, typer.Option(help="What is tuned: logistic for classes, ridge for numbers, mlp for either.")
    ] = Model.logistic,
    penalty: Annotated[
        Penalty,
        typer.Option(help="What has a penalty of its own: each feature, each layer of an mlp, or all together."),
    ] = Penalty.per_feature,
    test: Annotated[
        str | None, typer.Option(help="A file or folder of the same form to measure the test loss on.")
    ] = None,
    label: LabelOption = None,
    numbers: Annotated[
        bool,
        typer.Option("--numbers", help="The labels are numbers to predict with an mlp; with ridge they always are."),
    ] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Folds that linear models are tuned on, all at once; as many as the rarest class has rows, at most.",
            show_default=str(FOLDS),
        ),
    ] = None,
    caution: Annotated[
        float | None,
        typer.Option(min=0, help="What it costs a feature's penalty to differ: 0 nothing; by default the rows decide."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Most steps of the tuning; by default 100, and 1,000 of an mlp.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run.", show_default="runs/tune-DATA")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one, but for linear models.")
    ] = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Tune the penalties of a model by gradient, on rows that are held out.

    The run folder has penalties.csv, the model, result.json, and report.html with a bar for each penalty, the path of
    the validation loss, and what a grid of single penalties would have given.
    """
    asked = {
        "command": "tune",
        "data": data,
        "model": str(model),
        "penalty": str(penalty),
        "test": test,
        "label": label,
        "numbers": numbers,
        "folds": folds or FOLDS,
        "caution": caution,
        "steps": steps,
        "seed": seed,
    }
    if numbers and model is Model.logistic:
        raise OptionError("--numbers is for --model ridge, whose labels are numbers anyway, and for mlp.")
    for option, value in (("--caution", caution), ("--folds", folds)):
        if model is Model.mlp and value is not None:
            raise OptionError(f"{option} is for linear models; leave it out with --model mlp.")
    if penalty is Penalty.single and caution is not None:
        raise OptionError("--caution is for penalties that differ; leave it out with --penalty single.")
    if numbers or model is Model.ridge:
        loaded = load_numbers(data, label=label, test=test)
    else:
        loaded = load(data, label=label, test=test)
    where = device_of("cpu" if device == "auto" and model is not Model.mlp else device)
    folder = folder_of(out, "tune", data)
    if resume and (done := finished(folder, asked)) is not None:
        print("note: this run is finished already.", file=sys.stderr)
        tell(done, show, json=json, report=folder.path / "report.html")
        return
    checkpoint = begin(folder, asked, resume, FILES)
    with resumable(checkpoint):
        found = _run(loaded, asked, where, checkpoint)
    result = summary(loaded, found, asked, where)
    write(folder, loaded, found, result)
    shutil.rmtree(checkpoint, ignore_errors=True)
    tell(result, show, json=json, report=folder.path / "report.html")


def _run(data: Labelled, asked: Mapping[str, Any], where: torch.device, checkpoint: Path) -> TunedTable:
    bar = StageBar()
    try:
        with one_thread() if where.type == "cpu" and data.x.numel() < SMALL else nullcontext():
            return tune_table(
                data,
                asked["model"],
                asked["penalty"],
                folds=asked["folds"],
                caution=asked["caution"],
                steps=asked["steps"],
                seed=asked["seed"],
                callbacks=[RunBar("tuning")],
                tell=bar.tell,
                device=where,
                checkpoint=checkpoint,
            )
    finally:
        bar.stop()
