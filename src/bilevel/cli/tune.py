"""`bilevel tune`: one penalty for each feature, each layer or the whole model, tuned by gradient."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..applications.tuned_table import TunedTable, tune_table
from ..callbacks import Progress
from ..data import Labelled, load, load_numbers
from ..errors import OptionError
from ..workers import one_thread
from .bar import progress_bar
from .folder import Folder, to_json
from .run_state import write_config
from .stopped import Stopped
from .tune_output import FILES, show, summary, write

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
    data: Annotated[
        str,
        typer.Argument(
            help="digits, mnist, fashion-mnist, cifar10, svhn; or a .npz, .csv or .parquet file, or a folder of images "
            "in class folders.",
            show_default=False,
        ),
    ],
    model: Annotated[Model, typer.Option(help="What is tuned; ridge and mlp also predict numbers.")] = Model.logistic,
    penalty: Annotated[Penalty, typer.Option(help="What has a penalty of its own.")] = Penalty.per_feature,
    test: Annotated[
        str | None, typer.Option(help="A file or folder of the same form to measure the test loss on.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the labels, in a table.")] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="With mlp: the labels are numbers to predict.")] = False,
    folds: Annotated[int, typer.Option(min=2, help="Folds that linear models are tuned on, all at once.")] = 5,
    caution: Annotated[
        float | None,
        typer.Option(min=0, help="What it costs a feature's penalty to differ: 0 nothing; by default the rows decide."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Most steps of the tuning; by default 100, and 1,000 of an mlp.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run.", show_default="runs/tune-DATA")] = None,
    seed: Annotated[int, typer.Option(min=0, help="What everything random is drawn from.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Tune the penalties of a model by gradient, on rows that are held out.

    The run folder has penalties.csv, the model, result.json, and report.html with a bar for each penalty, the path of
    the validation loss, and what a grid of single penalties would have given.
    """
    asked = {
        "command": "tune", "data": data, "model": str(model), "penalty": str(penalty), "test": test, "label": label,
        "numbers": numbers, "folds": folds, "caution": caution, "steps": steps, "seed": seed,
    }  # fmt: skip
    if numbers and model is Model.logistic:
        raise OptionError("--numbers is for --model ridge, whose labels are numbers anyway, and for mlp.")
    if model is Model.mlp and caution is not None:
        raise OptionError("--caution is for linear models; leave it out with --model mlp.")
    if numbers or model is Model.ridge:
        loaded = load_numbers(data, label=label, test=test)
    else:
        loaded = load(data, label=label, test=test)
    folder = Folder(out or Path("runs") / f"tune-{Path(data).stem}")
    for name in FILES:  # of an earlier run: a folder holds the files of one
        (folder.path / name).unlink(missing_ok=True)
    write_config(folder, asked)
    try:
        found = _run(loaded, asked)
    except KeyboardInterrupt:
        raise Stopped("Stopped by Ctrl-C. Nothing but config.json was written.") from None
    result = summary(loaded, found, asked)
    page = write(folder, loaded, found, result)
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if json:
        typer.echo(to_json(result))
    else:
        show(result)
        typer.echo(f"report: {page}")


def _run(data: Labelled, asked: dict[str, Any]) -> TunedTable:
    bar, tasks = progress_bar(), {}

    def tell(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            bar.start()
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done)

    try:
        with one_thread() if data.x.numel() < SMALL else nullcontext():
            return tune_table(
                data, asked["model"], asked["penalty"], folds=asked["folds"], caution=asked["caution"],
                steps=asked["steps"], seed=asked["seed"], callbacks=[Progress("tuning")], tell=tell,
            )  # fmt: skip
    finally:
        bar.stop()
