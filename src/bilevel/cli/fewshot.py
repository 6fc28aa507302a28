"""`bilevel fewshot`: learn one representation for many small tasks, try it on new classes, embed new images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel._util.optional import require
from bilevel.cli.options import (
    DeviceOption,
    JsonOption,
    ResumeOption,
    SeedOption,
    asked,
    options_given,
    refuse_options,
)
from bilevel.errors import OptionError

BACKBONES = "conv4, resnet"
DATA = "omniglot, cifar-fs, mini-imagenet, or a folder with a folder of images for each class"
OF_TRAINING = ("train_ways", "meta_batch", "steps", "decay", "scale", "rotations", "resume")
TASKS = ("ways", "shots", "queries", "tasks", "seed")


def command(
    context: typer.Context,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=f"{DATA}.", show_default=False)] = None,
    ways: Annotated[int, typer.Option(min=2, help="Classes of a task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Images of a class to learn from.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Images of a class to classify.")] = 15,
    train_ways: Annotated[
        int | None, typer.Option(min=2, help="Classes of a task in training; more can do better. By default --ways.")
    ] = None,
    backbone: Annotated[str, typer.Option(help=f"{BACKBONES}, or path.py:make with make(shape).")] = "conv4",
    meta_batch: Annotated[int, typer.Option(min=1, help="Tasks of a training step.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10_000,
    decay: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight decay of the representation (AdamW), for large networks and few images. By default 0 for "
            "conv4, 4 for resnet.",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="The factor on cosines; a large one on few images overfits. By default 10 for conv4, 20 for resnet."
        ),
    ] = None,
    rotations: Annotated[
        bool | None, typer.Option(help="Rotated images as further classes. By default only for Omniglot.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks of the evaluation.")] = 600,
    evaluate: Annotated[
        Path | None, typer.Option(help="The folder of a finished run: evaluate it again, or embed with it.")
    ] = None,
    embed: Annotated[
        Path | None,
        typer.Option(help="A folder of new images: write their embeddings, by the run of --evaluate or by a new one."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/fewshot-DATA.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Learn one representation for many small tasks.

    The classes of DATA are split: the representation is learned on tasks of some of them, and tried on tasks of others,
    each with its own classifier that sees a few images. The run folder has representation.safetensors, result.json and
    report.html. `--evaluate RUN` measures it again: on the run's test classes, by default with its --ways, --shots,
    --queries, --tasks and --seed, or on all classes of another folder DATA that shares none with the run. With
    `--embed FOLDER` it embeds new images. --backbone then says where your network's file is now.
    """
    if evaluate is not None:
        _use_finished_run(context, evaluate)
        return
    if data is None:
        also = "" if embed is None else " --embed also works without DATA, with --evaluate RUN."
        raise OptionError(f"DATA is needed: {DATA}.{also}")
    _require_extra()
    from bilevel.cli import fewshot_run

    fewshot_run.run(asked(context, "fewshot"), embed, out, device, resume, json)


def _use_finished_run(context: typer.Context, run: Path) -> None:
    """Embed images with a finished run, or evaluate it again with the options that the command line has."""
    params = context.params
    if params["embed"] is not None:
        refuse_options(context, ("data", *OF_TRAINING, *TASKS), "--evaluate and --embed, which need a run and images")
    else:
        refuse_options(context, (*OF_TRAINING, "out"), "--evaluate: the run is finished, and has a folder")
    _require_extra()
    from bilevel.cli import fewshot_run

    given = {name: params[name] for name in options_given(context, (*TASKS, "backbone"))}
    moved = given.pop("backbone", None)
    if params["embed"] is not None:
        fewshot_run.embed_with(run, params["embed"], moved, params["device"], params["out"], params["json"])
    else:
        fewshot_run.evaluate_again(run, params["data"], given, moved, params["device"], params["json"])


def _require_extra() -> None:
    require("PIL", extra="apps")
    require("sklearn", extra="apps")
