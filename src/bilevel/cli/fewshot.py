"""`bilevel fewshot`: learn one representation for many small tasks, try it on classes never seen, embed new images."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ..applications.few_shot import (
    TaskSampler,
    Validation,
    adapt_and_evaluate,
    backbone,
    default_method,
    feature_count,
    meta_train,
)
from ..applications.few_shot_classifier import BACKBONES
from ..augmentation import crop_and_flip
from ..callbacks import Progress, Run
from ..data.class_sets import NAMES, load_classes
from ..data.image_classes import ClassSplits
from ..errors import BilevelError, OptionError
from ..options import did_you_mean
from ..replay import seeded
from ..solution import Status
from . import python_file
from .device import device_of
from .fewshot_output import (
    EMBEDDINGS,
    FILES,
    WEIGHTS,
    Images,
    image_files,
    load_weights,
    show,
    summary,
    write,
    write_embeddings,
)
from .folder import Folder, to_json
from .run_state import begin, finished, kept
from .stopped import Stopped

WAYS, SHOTS, QUERIES = 5, 1, 15
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
    ways: Annotated[int | None, typer.Option(min=2, help="Classes of a task.", show_default=str(WAYS))] = None,
    shots: Annotated[
        int | None, typer.Option(min=1, help="Images of a class to learn from.", show_default=str(SHOTS))
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Images of a class to be tried on.", show_default=str(QUERIES))
    ] = None,
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
    result.json and report.html. `--evaluate RUN` measures it again, on its own tasks or on those of other --ways,
    --shots and --queries; with `--embed FOLDER` it embeds new images, for which DATA need not be there any more.
    """
    where = device_of(device)
    new = None if images is None else image_files(images)
    if evaluate is not None:
        if data is not None:
            raise OptionError(f"DATA must be left out with --evaluate, whose run has its own; got {data!r}.")
        if new is not None:
            _embed_only(evaluate, new, where, out, json)
        else:
            given = {"ways": ways, "shots": shots, "queries": queries, "tasks": tasks, "seed": seed}
            _again(evaluate, {name: value for name, value in given.items() if value is not None}, where, json)
        return
    if data is None:
        raise OptionError("DATA is needed: omniglot, cifar-fs, mini-imagenet, or a folder of class folders.")
    asked = {
        "command": "fewshot", "data": _lasting(data), "ways": ways or WAYS,
        "shots": shots or SHOTS, "queries": queries or QUERIES, "train_ways": train_ways,
        "backbone": str(Path(network).absolute()) if python_file.is_file(network) else network,
        "meta_batch": meta_batch, "steps": steps, "rotations": rotations,
        "lists": None if lists is None else str(lists.absolute()), "tasks": tasks, "seed": seed,
    }  # fmt: skip
    splits = _load(asked)
    net = _network(network, splits.train.shape, where, seed)
    feature_count(net, splits.train)
    samplers = _samplers(splits, asked)
    folder = Folder(out or Path("runs") / f"fewshot-{Path(data).stem}")
    if resume and (done := finished(folder, asked)) is not None:
        print("note: this run is finished already.", file=sys.stderr)
        load_weights(net, folder.path / WEIGHTS)
        _tell(folder, _with_embeddings(done, net, new, folder), json)
        return
    checkpoint = begin(folder, asked, resume, FILES)
    try:
        result = _run(folder, checkpoint, net, splits, samplers, asked, where)
    except BilevelError:
        shutil.rmtree(checkpoint, ignore_errors=True)  # to go on from it would end the same
        raise
    shutil.rmtree(checkpoint, ignore_errors=True)
    _tell(folder, _with_embeddings(result, net, new, folder), json)


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
        raise Stopped(f"Stopped by Ctrl-C. The same command with --resume goes on from {folder.path}.")
    found = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed)
    means = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=seed, steps=0)
    rows = watch.rows if watch is not None else []
    notes, held = list(splits.notes), len(splits.validation.names) if splits.validation is not None else 0
    if valid is None:
        notes.append(f"No accuracy on meta-validation classes: there are {held}, fewer than the ways of a task.")
    if solution.status is Status.DIVERGED:
        notes.append(f"The run diverged, and the representation is the last that was finite. {solution.message}")
    result = summary(
        asked, found, method="penalty", accuracy_of_means=means.accuracy, data=splits.name, steps=solution.steps,
        meta_batch=asked["meta_batch"], shape=list(splits.train.shape), engine=solution.engine,
        seconds=round(time.perf_counter() - began, 2),
        validation_accuracy=rows[-1]["accuracy"] if rows else None, weights=sum(p.numel() for p in net.parameters()),
        classes=[len(splits.train.names), held, len(splits.test.names)], notes=notes,
    )  # fmt: skip
    parts = " / ".join(f"{count:,}" for count in result["classes"])
    settings = [
        ("Ways / shots / queries of a task", f"{asked['ways']} / {asked['shots']} / {asked['queries']}"),
        ("Classes for training / validation / test", parts), ("Representation", Path(asked["backbone"]).name),
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


def _lasting(data: str) -> str:
    """What names the data from any folder."""
    return str(Path(data).absolute()) if data not in NAMES and Path(data).is_dir() else data


def _load(asked: Mapping[str, Any]) -> ClassSplits:
    splits = load_classes(asked["data"], lists=asked["lists"], seed=asked["seed"])
    turned = asked["rotations"] if asked["rotations"] is not None else asked["data"] == "omniglot"
    return splits.rotated() if turned else splits


def _samplers(splits: ClassSplits, asked: Mapping[str, Any]) -> tuple[TaskSampler, TaskSampler | None, TaskSampler]:
    """Those of training, validation (None where it has too few classes) and test."""
    shots, queries, valid = asked["shots"], asked["queries"], splits.validation
    train = TaskSampler(splits.train, asked["train_ways"] or asked["ways"], shots, queries, tasks=asked["meta_batch"])
    watched = None
    if valid is not None and len(valid.names) >= asked["ways"]:
        watched = TaskSampler(valid, asked["ways"], shots, queries)
    return train, watched, TaskSampler(splits.test, asked["ways"], shots, queries)


def _network(name: str, shape: Sequence[int], where: torch.device, seed: int) -> nn.Module:
    if not python_file.is_file(name):
        if name not in BACKBONES:
            raise OptionError(
                f"--backbone has no {name!r}.{did_you_mean(name, BACKBONES)} It is one of {', '.join(BACKBONES)}, or "
                "path.py:make."
            )
        with seeded(seed):
            return backbone(name, shape[0]).to(where)
    path, make = python_file.load(name, "--backbone must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"--backbone must name a function make(shape), as in {path.name}:make.")
    with seeded(seed):
        try:
            network = make(tuple(shape))
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {python_file.told(error)}") from error
    if not isinstance(network, nn.Module):
        raise OptionError(f"make in {path} must return an nn.Module; got {type(network).__name__}.")
    return network.to(where)


# -- what is done with a run -------------------------------------------------------------------------------------------


def _again(run: Path, given: Mapping[str, Any], where: torch.device, json: bool) -> None:
    """Evaluate a finished run on the tasks that it was made for, or as given."""
    folder, asked, _ = _opened(run)
    splits = _load(asked)  # by the seed of the run: another splits the classes otherwise
    net = _network(asked["backbone"], splits.train.shape, where, asked["seed"])
    load_weights(net, run / WEIGHTS)
    asked |= given
    began = time.perf_counter()
    test = TaskSampler(splits.test, asked["ways"], asked["shots"], asked["queries"])
    found = adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=asked["seed"])
    result = summary(asked, found, data=splits.name, seconds=round(time.perf_counter() - began, 2), notes=[])
    folder.write_json("evaluation.json", result)
    _tell(folder, result, json, page=False)


def _embed_only(run: Path, images: Images, where: torch.device, out: Path | None, json: bool) -> None:
    folder, asked, result = _opened(run)
    net = _network(asked["backbone"], result["shape"], where, asked["seed"])
    load_weights(net, run / WEIGHTS)
    target = out or folder.path / EMBEDDINGS
    if target.suffix != ".npz":
        raise OptionError(f"--out must be an .npz file with --embed; got {target}.")
    found = write_embeddings(net, images, result["shape"], asked["data"] == "omniglot", target)
    _tell(folder, {"command": "fewshot --embed", "status": "done", **found}, json, page=False)


def _opened(run: Path) -> tuple[Folder, dict[str, Any], dict[str, Any]]:
    """The folder of a finished run, what was asked of it, and its result."""
    if not run.is_dir():
        raise OptionError(f"--evaluate must name the folder of a run of `bilevel fewshot`; there is no folder {run}.")
    folder = Folder(run, "--evaluate")
    asked, result = kept(folder, "config.json"), kept(folder, "result.json")
    if asked.get("command") != "fewshot":
        raise OptionError(f"--evaluate must name the folder of a run of `bilevel fewshot`; {run} has none.")
    if "shape" not in result:
        raise OptionError(f"--evaluate must name the folder of a finished run; {run} has no result.json of one.")
    return folder, asked, result


def _with_embeddings(
    result: Mapping[str, Any], net: nn.Module, images: Images | None, folder: Folder
) -> Mapping[str, Any]:
    """The result of a run, and where the embeddings of new images are, if there are any."""
    if images is None:
        return result
    inverted = kept(folder, "config.json").get("data") == "omniglot"
    found = write_embeddings(net, images, result["shape"], inverted, folder.path / EMBEDDINGS)
    message, notes = f"{result['message']} {found['message']}", [*result["notes"], *found["notes"]]
    return {**result, **found, "message": message, "notes": notes}


def _tell(folder: Folder, result: Mapping[str, Any], json: bool, *, page: bool = True) -> None:
    for note in result.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if json:
        typer.echo(to_json(result))
        return
    show(result)
    if page:
        typer.echo(f"report: {folder.path / 'report.html'}")
    if "embeddings" in result:
        typer.echo(f"embeddings: {result['embeddings']}")
