"""`bilevel fewshot`: learn one representation for many small tasks, try it on classes never seen, embed new images."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from bilevel._util.checks import in_range
from bilevel.applications.augmentation import crop_and_flip, crop_flip_and_erase
from bilevel.applications.few_shot import (
    TRAINING,
    TaskSampler,
    Training,
    Validation,
    adapt_and_evaluate,
    default_method,
    embed,
    feature_count,
    meta_train,
)
from bilevel.applications.few_shot.classifier import BACKBONES
from bilevel.cli import python_file
from bilevel.cli.device import device_of
from bilevel.cli.fewshot_again import embed_only, evaluate_again, report, with_embeddings
from bilevel.cli.fewshot_asked import lasting, load, network_of, samplers_of
from bilevel.cli.fewshot_classes import classes_of, refuse_changed_classes
from bilevel.cli.fewshot_output import FILES, WEIGHTS, Trained, image_files, load_weights, same_classes, summary, write
from bilevel.cli.folder import Folder
from bilevel.cli.given import given, refuse
from bilevel.cli.options import DeviceOption, JsonOption, ResumeOption, SeedOption
from bilevel.cli.progress import RunBar, stage, waiting
from bilevel.cli.run_state import CHECKPOINT, begin, finished, folder_of, kept, resumable
from bilevel.data.class_images import ClassSplits
from bilevel.errors import OptionError, ProblemError
from bilevel.results import Status
from bilevel.running.callbacks import Run

WAYS, SHOTS, QUERIES = 5, 1, 15
VALIDATIONS, VALIDATION_TASKS = 20, 100
"""How often, and on how many tasks, the accuracy on meta-validation classes is measured in a run."""
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")
"""What torch says where there is too little."""
SOON, LONG = 20.0, 0.5
"""The seconds after which it is told how long a run takes, and the hours above which it is."""
SHORTER = "A smaller --meta-batch and fewer --steps take less."
FEW = 50
"""Images on which the representation has to be finite after training."""
VALIDATE_EVERY = 50
"""Steps at least between two of these, each of which takes as long as some steps; a shorter run has one."""


OF_TRAINING = (
    "train_ways",
    "train_shots",
    "meta_batch",
    "steps",
    "decay",
    "scale",
    "rotations",
    "lists",
    "resume",
)
"""What a finished run has by now."""
TASKS = ("ways", "shots", "queries", "tasks", "seed")


def command(
    context: typer.Context,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="omniglot, cifar-fs, mini-imagenet, or a folder with a folder of images for each class.",
            show_default=False,
        ),
    ] = None,
    ways: Annotated[int | None, typer.Option(min=2, help="Classes of a task.", show_default=str(WAYS))] = None,
    shots: Annotated[
        int | None, typer.Option(min=1, help="Images of a class to learn from.", show_default=str(SHOTS))
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Images of a class to be tried on.", show_default=str(QUERIES))
    ] = None,
    train_ways: Annotated[
        int | None,
        typer.Option(min=2, help="Classes of a task in training; more may do better. By default --ways."),
    ] = None,
    train_shots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images of a class to learn from in training; more may do better. By default --shots."
        ),
    ] = None,
    network: Annotated[
        str, typer.Option("--backbone", help=f"{', '.join(BACKBONES)}, or path.py:make with make(shape).")
    ] = "conv4",
    meta_batch: Annotated[int, typer.Option(min=1, help="Tasks of a training step.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10_000,
    decay: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight decay of the representation (AdamW), for large ones and few images.",
            show_default=", ".join(f"{name}: {plan.decay:g}" for name, plan in TRAINING.items()),
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="What cosines are multiplied by; a large one on few images overfits.",
            show_default=", ".join(f"{name}: {plan.scale:g}" for name, plan in TRAINING.items()),
        ),
    ] = None,
    rotations: Annotated[
        bool | None, typer.Option(help="Turned images as further classes. By default on Omniglot alone.")
    ] = None,
    lists: Annotated[
        Path | None,
        typer.Option(
            help="A folder, or a zip file, with train.csv, val.csv and test.csv, whose column label has the classes."
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=2, help="Tasks of the evaluation. With --evaluate as many as the run had by default.")
    ] = 600,
    evaluate: Annotated[
        Path | None, typer.Option(help="The folder of a finished run: evaluate it again, or embed with it.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--embed", help="A folder of new images: write their embeddings, by the run of --evaluate or by a new one."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run.", show_default="runs/fewshot-DATA")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Learn one representation for many small tasks.

    The classes of DATA are split: the representation is learnt on tasks of some of them, and tried on tasks of others,
    each with a classifier of its own that sees a few images. The run folder has representation.safetensors,
    result.json and report.html. `--evaluate RUN` measures it again, on its own tasks or on those of other --ways,
    --shots, --queries, --tasks and --seed, and of DATA, where it is now, or of other images; with `--embed FOLDER` it
    embeds new images, for which DATA need not be there any more. --backbone then says where your network's file is now.
    """
    where = device_of(device)
    new = None if images is None else image_files(images)
    if evaluate is not None:
        moved = network if given(context, ["network"]) else None
        if new is not None:
            alone = "--evaluate and --embed, which need the run and the images alone"
            if data is not None:
                raise OptionError(f"DATA must be left out with {alone}; got {data!r}.")
            refuse(context, (*OF_TRAINING, *TASKS), alone)
            embed_only(evaluate, new, moved, where, out, json)
        else:
            refuse(context, (*OF_TRAINING, "out"), "--evaluate: the run is finished, and has a folder")
            other = {name: context.params[name] for name in given(context, TASKS)}
            evaluate_again(evaluate, None if data is None else lasting(data), other, moved, where, json)
        return
    if data is None and new is not None:
        raise OptionError("--embed needs --evaluate RUN, a finished run to embed with, or DATA to learn from first.")
    if data is None:
        raise OptionError("DATA is needed: omniglot, cifar-fs, mini-imagenet, or a folder of class folders.")
    in_range("--scale", scale, above=0)
    plan = TRAINING.get(network, Training())
    asked = {
        "command": "fewshot",
        "data": lasting(data),
        "ways": ways or WAYS,
        "shots": shots or SHOTS,
        "queries": queries or QUERIES,
        "train_ways": train_ways,
        "train_shots": train_shots,
        "backbone": str(Path(network).absolute()) if python_file.is_file(network) else network,
        "meta_batch": meta_batch,
        "steps": steps,
        "rotations": rotations,
        **asdict(plan),
        "decay": plan.decay if decay is None else decay,
        "scale": plan.scale if scale is None else scale,
        "lists": None if lists is None else str(lists.absolute()),
        "tasks": tasks,
        "seed": seed,
    }
    with waiting("reading images"):
        splits = load(asked)
    asked["classes"] = classes_of(splits, data)
    net = network_of(network, splits.train.shape, where, seed)
    try:
        feature_count(net, splits.train)
    except OptionError as error:
        raise OptionError(f"--backbone: {error}") from error
    samplers = samplers_of(splits, asked)
    folder = folder_of(out, "fewshot", data)
    if resume and (done := finished(folder, asked)) is not None:
        print("note: this run is finished already.", file=sys.stderr)
        load_weights(net, folder.path / WEIGHTS)
        report(folder, with_embeddings(done, net, new, folder), json)
        return
    if resume and (folder.path / CHECKPOINT).exists():
        refuse_changed_classes(kept(folder, "config.json").get("classes"), asked["classes"], data)
    checkpoint = begin(folder, asked, resume, FILES)
    print(_begins(splits, samplers[0], steps), file=sys.stderr, flush=True)
    with resumable(checkpoint):
        result = _run(folder, checkpoint, net, splits, samplers, asked, where)
    shutil.rmtree(checkpoint, ignore_errors=True)
    report(folder, with_embeddings(result, net, new, folder), json)


def _run(
    folder: Folder,
    checkpoint: Path,
    net: nn.Module,
    splits: ClassSplits,
    samplers: tuple[TaskSampler, TaskSampler | None, TaskSampler],
    asked: Mapping[str, Any],
    where: torch.device,
) -> dict[str, Any]:
    train, valid, test = samplers
    steps, seed, began = asked["steps"], asked["seed"], time.perf_counter()
    watch = None
    if valid is not None:
        every = min(steps, max(VALIDATE_EVERY, steps // VALIDATIONS))
        watch = _Shown(
            net,
            valid,
            every=every,
            tasks=VALIDATION_TASKS,
            file=checkpoint / "accuracy.json",
            keep=True,
            seed=seed,
            scale=asked["scale"],
        )
    bar = _Bar(watch)
    augment = crop_flip_and_erase if asked["erase"] else crop_and_flip
    colour = splits.train.shape[0] == 3
    try:
        solution = meta_train(
            net,
            train,
            steps=steps,
            seed=seed,
            scale=asked["scale"],
            method=default_method(upper_rate=asked["rate"], decay=asked["decay"]),
            augment=augment if colour else None,
            callbacks=[*([watch] if watch is not None else []), bar],
            checkpoint=checkpoint / "solve",
            resume=True,
            precision="bf16" if where.type == "cuda" else None,
            log_every=None if where.type == "cuda" else 1,  # a step may take seconds, and nothing waits for a record
        )
    except (ProblemError, RuntimeError) as error:
        if not any(words in str(error).lower() for words in NO_MEMORY):
            raise
        raise ProblemError(
            f"a step of {asked['meta_batch']} tasks needs more memory than there is. Give a smaller --meta-batch."
        ) from error
    if solution.interrupted:
        raise KeyboardInterrupt
    best = watch.best.restore() if watch is not None and watch.best is not None else None
    if not bool(torch.isfinite(embed(net, splits.test.images[:FEW]).square().sum(1)).all()):
        raise ProblemError("the representation is not finite after training. Give a smaller --decay, or other images.")
    with stage("evaluating", "images") as tell:
        found = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed, scale=asked["scale"], tell=tell)
    with stage("evaluating class means", "images") as tell:
        means = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed, steps=0, tell=tell)
    rows = watch.rows if watch is not None else []
    notes, held = list(splits.notes), len(splits.validation.names) if splits.validation is not None else 0
    if valid is None:
        notes.append(
            f"No accuracy on meta-validation classes: there are {held}, fewer than the ways of a task. The step that "
            "is kept is the last."
        )
    notes += same_classes(test)
    if solution.status is Status.DIVERGED:
        notes.append(f"The run diverged, and the representation is the last that was finite. {solution.message}")
    result = summary(
        asked,
        found,
        method="penalty",
        accuracy_of_means=means.accuracy,
        data=splits.name,
        steps=solution.steps,
        kept_step=best[0] if best else solution.steps,
        meta_batch=asked["meta_batch"],
        shape=list(splits.train.shape),
        engine=solution.engine,
        seconds=round(time.perf_counter() - began, 2),
        validation_accuracy=best[1] if best else None,
        weights=sum(p.numel() for p in net.parameters()),
        classes=[len(splits.train.names), held, len(splits.test.names)],
        notes=notes,
    )
    parts = " / ".join(f"{count:,}" for count in result["classes"])
    settings = [
        ("Ways / shots / queries of a task", f"{asked['ways']} / {asked['shots']} / {asked['queries']}"),
        *(
            [("Ways / shots in training", f"{train.ways} / {train.shots}")]
            * ((train.ways, train.shots) != (test.ways, test.shots))
        ),
        ("Classes for training / validation / test", parts),
        ("Representation", Path(asked["backbone"]).name),
        ("Weights", f"{result['weights']:,}"),
        ("Tasks of a step", str(asked["meta_batch"])),
        ("Rate / decay / scale of the cosines", f"{asked['rate']:g} / {asked['decay']:g} / {asked['scale']:g}"),
        ("Images in training", _changed(colour, asked["erase"])),
        ("Steps", f"{result['steps']:,}"),
        ("Kept", _kept(best)),
        ("Seed", str(seed)),
        ("Seconds", f"{result['seconds']:.1f}"),
    ]
    write(folder, Trained(net, solution, rows, found, test, result, settings))
    return result


def _begins(splits: ClassSplits, train: TaskSampler, steps: int) -> str:
    """What is begun: the first step may take long, and what comes before it."""
    _, height, width = splits.train.shape
    images = train.tasks * train.ways * (train.shots + train.queries)
    return (
        f"learning from {len(splits.train.images):,} images of {len(splits.train.names):,} classes, {width}x{height}: "
        f"{steps:,} steps of {images:,} images each"
    )


def _changed(colour: bool, erase: bool) -> str:
    """How images are changed at random."""
    return f"shifted, mirrored{', a square erased' if erase else ''}" if colour else "as they are"


def _kept(best: tuple[int, float] | None) -> str:
    return "the last step" if best is None else f"step {best[0]:,}, the best on meta-validation classes"


class _Shown(Validation):
    """Meta-validation accuracy, for the bar."""

    @property
    def last(self) -> str:
        return f", validation {100 * self.rows[-1]['accuracy']:.1f}%" if self.rows else ""


class _Bar(RunBar):
    """The usual bar, with the last accuracy on meta-validation classes in its name."""

    def __init__(self, watch: _Shown | None) -> None:
        super().__init__("learning")
        self.watch, self.told = watch, False

    def log(self, run: Run) -> bool | None:
        hours = run.seconds / max(1, run.step) * run.max_steps / 3600
        if not self.told and run.seconds >= SOON:
            self.told = True
            if hours > LONG:
                time_taken = f"{hours:,.0f} hours" if hours > 2 else f"{60 * hours:.0f} minutes"
                text = f"note: {run.max_steps:,} such steps take about {time_taken} here. {SHORTER}"
                if self._bar is None:
                    print(text, file=sys.stderr, flush=True)
                else:
                    self._bar.console.print(text)
        self.label = "learning" if self.watch is None else f"learning{self.watch.last}"
        return super().log(run)
