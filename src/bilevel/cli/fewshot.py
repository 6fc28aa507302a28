"""`bilevel fewshot`: learn one representation for many small tasks, try it on classes never seen, embed new images."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ..applications.few_shot import TaskSampler, Validation, adapt_and_evaluate, backbone, default_method, meta_train
from ..applications.few_shot_classifier import BACKBONES
from ..augmentation import crop_and_flip
from ..callbacks import Progress, Run
from ..data.class_sets import load_classes
from ..data.image_classes import ClassSplits, ImageClasses
from ..errors import BilevelError, OptionError
from ..options import did_you_mean
from ..replay import seeded
from ..solution import Status
from . import python_file
from .device import device_of
from .fewshot_output import FILES, WEIGHTS, load_weights, show, summary, write, write_embeddings
from .folder import Folder, to_json
from .run_state import begin, finished, kept

VALIDATIONS, VALIDATION_TASKS = 20, 100
"""How often, and on how many tasks, the accuracy on meta-validation classes is measured in a run."""


def command(
    data: Annotated[
        str | None,
        typer.Argument(
            help="omniglot, cifar-fs, mini-imagenet, or a folder with a folder of images for each class.",
            show_default=False,
        ),
    ] = None,
    ways: Annotated[int, typer.Option(min=2, help="Classes of a task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Images of a class to learn from.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Images of a class to be tried on.")] = 15,
    train_ways: Annotated[
        int | None, typer.Option(min=2, help="Classes of a task in training; more make it better. By default --ways.")
    ] = None,
    network: Annotated[
        str, typer.Option("--backbone", help=f"{', '.join(BACKBONES)}, or path.py:make with make(shape).")
    ] = "conv4",
    meta_batch: Annotated[int, typer.Option(min=1, help="Tasks of an upper step.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Upper steps.")] = 10_000,
    rotations: Annotated[
        bool | None, typer.Option(help="Turned images as further classes. By default on Omniglot alone.")
    ] = None,
    lists: Annotated[
        Path | None, typer.Option(help="A folder with train.csv, val.csv and test.csv that name the classes.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks of the evaluation.")] = 600,
    evaluate: Annotated[
        Path | None, typer.Option(help="The folder of a finished run: evaluate it again, or embed with it.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--embed", help="A folder of new images: write their embeddings.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run.", show_default="runs/fewshot-DATA")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="What everything random is drawn from.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a run that was stopped.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Learn one representation for many small tasks.

    The classes of DATA are split: the representation is learnt on tasks of some of them, and tried on tasks of others,
    each with a classifier of its own that sees a few images. The run folder has representation.safetensors,
    result.json and report.html. `--evaluate RUN` measures it again, with `--embed FOLDER` it embeds new images.
    """
    where = device_of(device)
    if evaluate is not None:
        if data is not None:
            raise OptionError(f"DATA must be left out with --evaluate, whose run has its own; got {data!r}.")
        _again(evaluate, images, tasks, where, seed, out, json)
        return
    if data is None:
        raise OptionError("DATA is needed: omniglot, cifar-fs, mini-imagenet, or a folder of class folders.")
    asked = {
        "command": "fewshot", "data": data, "ways": ways, "shots": shots, "queries": queries, "train_ways": train_ways,
        "backbone": network, "meta_batch": meta_batch, "steps": steps, "rotations": rotations,
        "lists": None if lists is None else str(lists), "tasks": tasks, "seed": seed,
    }  # fmt: skip
    splits = _load(asked)
    net = _network(network, splits.train, where, seed)
    samplers = _samplers(splits, asked)
    folder = Folder(out or Path("runs") / f"fewshot-{Path(data).stem}")
    if resume and (done := finished(folder, asked)) is not None:
        print("note: this run is finished already.", file=sys.stderr)
        _tell(folder, done, json)
        return
    checkpoint = begin(folder, asked, resume, FILES)
    try:
        result = _run(folder, checkpoint, net, splits, samplers, asked, where)
    except BilevelError:
        shutil.rmtree(checkpoint, ignore_errors=True)  # to go on from it would end the same
        raise
    shutil.rmtree(checkpoint, ignore_errors=True)
    if images is not None:
        result |= _embedded(net, images, splits, folder)
    _tell(folder, result, json)


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
        watch = _Shown(
            net, valid, every=max(1, steps // VALIDATIONS), tasks=VALIDATION_TASKS, file=checkpoint / "accuracy.json",
            seed=seed,
        )  # fmt: skip
    bar = _Bar(watch)
    colour = splits.train.shape[0] == 3
    solution = meta_train(
        net, train, steps=steps, method=default_method(), augment=crop_and_flip if colour else None, seed=seed,
        callbacks=[*([watch] if watch is not None else []), bar], checkpoint=checkpoint / "solve", resume=True,
        precision="bf16" if where.type == "cuda" else None,
    )  # fmt: skip
    if solution.interrupted:
        print(
            f"bilevel: Stopped by Ctrl-C. The same command with --resume goes on from {folder.path}.", file=sys.stderr
        )
        raise typer.Exit(1)
    found = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed)
    means = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed, steps=0)
    rows = watch.rows if watch is not None else []
    notes = list(splits.notes)
    if solution.status is Status.DIVERGED:
        notes.append(f"The run diverged, and the representation is the last that was finite. {solution.message}")
    result = summary(
        asked, found, method="penalty", accuracy_of_means=means.accuracy, data=splits.name, steps=solution.steps,
        meta_batch=asked["meta_batch"], engine=solution.engine, seconds=round(time.perf_counter() - began, 2),
        validation_accuracy=rows[-1]["accuracy"] if rows else None, weights=sum(p.numel() for p in net.parameters()),
        classes=[len(train.classes.names), len(valid.classes.names) if valid else 0, len(test.classes.names)],
        notes=notes,
    )  # fmt: skip
    parts = " / ".join(f"{count:,}" for count in result["classes"])
    settings = [
        ("Tasks", f"{asked['ways']} ways, {asked['shots']} shots, {asked['queries']} queries"),
        ("Classes for training / validation / test", parts), ("Representation", asked["backbone"]),
        ("Weights", f"{result['weights']:,}"), ("Tasks of a step", str(asked["meta_batch"])),
        ("Steps", f"{result['steps']:,}"), ("Seed", str(seed)), ("Seconds", f"{result['seconds']:.1f}"),
    ]  # fmt: skip
    write(folder, net, solution, rows, found, test, result, settings)
    return result


class _Shown(Validation):
    """Meta-validation accuracy, for the bar."""

    @property
    def last(self) -> str:
        return f"{100 * self.rows[-1]['accuracy']:.1f}%" if self.rows else "-"


class _Bar(Progress):
    """The usual bar, with the last accuracy on meta-validation classes in its name."""

    def __init__(self, watch: _Shown | None) -> None:
        super().__init__("learning")
        self.watch = watch

    def log(self, run: Run) -> bool | None:
        stop = super().log(run)
        if self._bar is not None and self.watch is not None:
            self._bar.update(self._task, description=f"learning, validation {self.watch.last}")
        return stop


# -- what was asked for ------------------------------------------------------------------------------------------------


def _load(asked: Mapping[str, Any]) -> ClassSplits:
    splits = load_classes(asked["data"], lists=asked["lists"], seed=asked["seed"])
    turned = asked["rotations"] if asked["rotations"] is not None else splits.name == "omniglot"
    return splits.rotated() if turned else splits


def _samplers(splits: ClassSplits, asked: Mapping[str, Any]) -> tuple[TaskSampler, TaskSampler | None, TaskSampler]:
    """Those of training, validation (None where it has too few classes) and test."""
    shots, queries, valid = asked["shots"], asked["queries"], splits.validation
    train = TaskSampler(splits.train, asked["train_ways"] or asked["ways"], shots, queries, tasks=asked["meta_batch"])
    enough = valid is not None and len(valid.names) >= asked["ways"]
    watched = TaskSampler(valid, asked["ways"], shots, queries) if valid is not None and enough else None
    return train, watched, TaskSampler(splits.test, asked["ways"], shots, queries)


def _network(name: str, classes: ImageClasses, where: torch.device, seed: int) -> nn.Module:
    if not python_file.is_file(name):
        if name not in BACKBONES:
            raise OptionError(
                f"--backbone has no {name!r}.{did_you_mean(name, BACKBONES)} It is one of {', '.join(BACKBONES)}, or "
                "path.py:make."
            )
        with seeded(seed):
            return backbone(name, classes.shape[0]).to(where)
    path, make = python_file.load(name, "--backbone must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"--backbone must name a function make(shape), as in {path.name}:make.")
    with seeded(seed):
        try:
            network = make(classes.shape)
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {python_file.told(error)}") from error
    if not isinstance(network, nn.Module):
        raise OptionError(f"make in {path} must return an nn.Module; got {type(network).__name__}.")
    return network.to(where)


def _again(
    run: Path, images: Path | None, tasks: int, where: torch.device, seed: int, out: Path | None, json: bool
) -> None:
    """Evaluate a finished run, or embed images with it."""
    folder = Folder(run, "--evaluate")
    asked = kept(folder, "config.json")
    if asked.get("command") != "fewshot":
        raise OptionError(f"--evaluate must name the folder of a run of `bilevel fewshot`; {run} has none.")
    splits = _load(asked)
    net = _network(asked["backbone"], splits.train, where, asked["seed"])
    load_weights(net, run / WEIGHTS)
    if images is not None:
        result = {"command": "fewshot --embed", "status": "done", **_embedded(net, images, splits, folder, out)}
        _tell(folder, result, json, page=False)
        return
    began = time.perf_counter()
    test = _samplers(splits, asked)[2]
    found = adapt_and_evaluate(net, test, tasks=tasks, seed=seed)
    result = summary(
        {**asked, "seed": seed}, found, data=splits.name, seconds=round(time.perf_counter() - began, 2), notes=[]
    )
    folder.write_json("evaluation.json", result)
    _tell(folder, result, json, page=False)


def _embedded(
    net: nn.Module, images: Path, splits: ClassSplits, folder: Folder, out: Path | None = None
) -> dict[str, Any]:
    target = out or folder.path / "embeddings.npz"
    if target.suffix != ".npz":
        raise OptionError(f"--out must be an .npz file with --embed; got {target}.")
    return write_embeddings(net, images, splits.train.shape, splits.name == "omniglot", target)


def _tell(folder: Folder, result: Mapping[str, Any], json: bool, *, page: bool = True) -> None:
    for note in result.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if json:
        typer.echo(to_json(result))
        return
    show(result)
    if page:
        typer.echo(f"report: {folder.path / 'report.html'}")
    elif "embeddings" in result:
        typer.echo(f"embeddings: {result['embeddings']}")
