"""What `bilevel fewshot` does: learn a representation under a checkpoint, evaluate it, embed images with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilevel import DataError, OptionError, ProblemError, Solution, Status
from bilevel._util.atomic_files import read_json
from bilevel._util.checks import in_range
from bilevel._util.random_state import seeded
from bilevel.applications.augmentation import crop_and_flip, crop_flip_and_erase
from bilevel.applications.few_shot import (
    TRAINING,
    Evaluation,
    TaskSampler,
    Training,
    Validation,
    adapt_and_evaluate,
    backbone,
    default_method,
    embed,
    feature_count,
    meta_train,
)
from bilevel.applications.few_shot.tasks import BACKBONES, SCALE
from bilevel.cli.fewshot_output import (
    EMBEDDINGS,
    FILES,
    UNSEEN,
    WEIGHTS,
    image_files,
    load_weights,
    page,
    same_classes,
    summary,
    write,
    write_embeddings,
)
from bilevel.cli.option_values import device_of, is_file, known, network, path_and_name
from bilevel.cli.progress import RunBar, stages, waiting
from bilevel.cli.run_folder import CONFIG, RESULT, RunFolder, folder_of, report_result, run_or_resume
from bilevel.data.class_images import NAMES, ClassSplits, ImageClasses, load_classes, read_like
from bilevel.data.image_folders import Reader, some_of

# How often, and on how many tasks, a run measures the accuracy on meta-validation classes.
VALIDATIONS, VALIDATION_TASKS = 20, 100
# The least number of steps between two measurements; a shorter run has one.
VALIDATE_EVERY = 50
# What torch says if there is too little.
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# The number of images on which the representation must be finite after training.
FEW = 50
# The samplers of training, validation (None if it has too few classes) and test.
Samplers = tuple[TaskSampler, TaskSampler | None, TaskSampler]
# The least side of images in pixels: both networks of the paper halve images four times.
LEAST_SIDE = 16


def run(asked: dict[str, Any], images: Path | None, out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Learn a representation, or continue a run, and show the result; embed images if there are any."""
    where = device_of(device)
    new = [] if images is None else image_files(images)
    data, name = asked["data"], asked["backbone"]
    in_range("--scale", asked["scale"], above=0)
    asked |= {"data": _absolute(data), "backbone": str(Path(name).absolute()) if is_file(name) else name}
    plan = asdict(TRAINING.get(name, Training()))
    asked |= {key: value for key, value in plan.items() if asked.get(key) is None}
    with waiting("reading images"):
        splits = load(asked)
    asked["classes"] = None if data == "omniglot" else _counts(splits)  # Omniglot's thousands are always split alike
    net = network_of(name, splits.train.shape, where, asked["seed"])
    try:
        feature_count(net, splits.train)
    except OptionError as error:
        raise OptionError(f"--backbone: {error}") from error
    samplers = samplers_of(splits, asked)
    folder = folder_of(out, "fewshot", data)

    def work(checkpoint: Path) -> tuple[dict[str, Any], str]:
        return _learn_and_evaluate(folder, checkpoint, net, splits, samplers, asked, where)

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    files = {"report": folder.path / "report.html"}
    if images is not None:
        load_weights(net, folder.path / WEIGHTS)
        files["embeddings"] = folder.path / EMBEDDINGS
        found = write_embeddings(net, images, new, result["shape"], data == "omniglot", files["embeddings"])
        message, notes = f"{result['message']} {found['message']}", [*result["notes"], *found["notes"]]
        result = {**result, **found, "message": message, "notes": notes}
    report_result(result, files, json=json)


# -- data, tasks, networks ---------------------------------------------------------------------------------------------


def _absolute(data: str) -> str:
    return str(Path(data).resolve()) if data not in NAMES and Path(data).is_dir() else data


def load(asked: Mapping[str, Any], read: Reader | None = None) -> ClassSplits:
    """Read the classes of a run; its seed splits them if the data have no split."""
    splits = load_classes(asked["data"], seed=asked["seed"], read=read)
    rotate = asked["data"] == "omniglot" if asked["rotations"] is None else asked["rotations"]
    return splits.rotated() if rotate else splits


def _counts(splits: ClassSplits) -> dict[str, dict[str, int]]:
    """Return how many images each class of each part has."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: dict(zip(part.names, part.counts, strict=True)) for name, part in parts.items() if part is not None}


def samplers_of(splits: ClassSplits, asked: Mapping[str, Any]) -> Samplers:
    """Return the samplers of the tasks that the options ask for."""
    ways, shots, queries, train_ways = (asked[name] for name in ("ways", "shots", "queries", "train_ways"))
    learned = len(splits.train.names)
    if train_ways is not None and train_ways > learned:
        raise OptionError(
            f"--train-ways must be at most the number of classes to learn from, {learned}; got {train_ways}."
        )
    train = TaskSampler(splits.train, train_ways or ways, shots, queries, tasks=asked["meta_batch"])
    held = splits.validation
    valid = TaskSampler(held, ways, shots, queries) if held is not None and len(held.names) >= ways else None
    return train, valid, TaskSampler(splits.test, ways, shots, queries)


def network_of(name: str, shape: Sequence[int], where: torch.device, seed: int) -> nn.Module:
    """Return the network that --backbone names."""
    if is_file(name):
        return network(name, "--backbone", "make(shape)", (tuple(shape),), seed).to(where)
    known("--backbone", name, BACKBONES, ", or path.py:make")
    if min(shape[1:]) < LEAST_SIDE:
        raise OptionError(
            f"--backbone {name} halves images four times, so they need at least {LEAST_SIDE}x{LEAST_SIDE} pixels; "
            f"these have {shape[1]}x{shape[2]}. Enlarge them, or use your own network (path.py:make)."
        )
    with seeded(seed):
        return backbone(name, shape[0]).to(where)


# -- training ----------------------------------------------------------------------------------------------------------


def _learn_and_evaluate(
    folder: RunFolder,
    checkpoint: Path,
    net: nn.Module,
    splits: ClassSplits,
    samplers: Samplers,
    asked: Mapping[str, Any],
    where: torch.device,
) -> tuple[dict[str, Any], str]:
    """Return the result of a run and its page; write its other files."""
    train, valid, test = samplers
    began, steps = time.perf_counter(), asked["steps"]
    watch = (
        None
        if valid is None
        else Validation(
            net,
            valid,
            every=min(steps, max(VALIDATE_EVERY, steps // VALIDATIONS)),
            tasks=VALIDATION_TASKS,
            file=checkpoint / "accuracy.json",
            keep=True,
            seed=asked["seed"],
            scale=asked["scale"],
        )
    )
    solution = _learn(net, train, watch, checkpoint, asked, where)
    if solution.interrupted:
        raise KeyboardInterrupt
    best = watch.best.restore() if watch is not None and watch.best is not None else None
    if not bool(torch.isfinite(embed(net, splits.test.images[:FEW]).square().sum(1)).all()):
        raise ProblemError("the representation is not finite after training. Use a smaller --decay, or other images.")
    found = _evaluated(net, test, asked, "evaluating", scale=asked["scale"])
    means = _evaluated(net, test, asked, "evaluating class means", steps=0)
    rows = watch.rows if watch is not None else []
    result = _result(splits, samplers, solution, best, found, asked) | {
        "accuracy_of_means": means.accuracy,
        "seconds": round(time.perf_counter() - began, 2),
        "weights": sum(p.numel() for p in net.parameters()),
    }
    write(folder, net, solution.history, rows, result["message"])
    return result, page(net, (train, test), solution.history, rows, found, result, asked)


def _evaluated(net: nn.Module, test: TaskSampler, asked: Mapping[str, Any], label: str, **options: Any) -> Evaluation:
    with stages("images") as on_progress:
        counted = partial(on_progress, label)
        return adapt_and_evaluate(net, test, tasks=asked["tasks"], seed=asked["seed"], on_progress=counted, **options)


def _result(
    splits: ClassSplits,
    samplers: Samplers,
    solution: Solution,
    best: tuple[int, float] | None,
    found: Evaluation,
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of result.json.

    `best` has the step whose weights are kept, and its accuracy on meta-validation classes; None keeps the last step.
    """
    held = 0 if splits.validation is None else len(splits.validation.names)
    notes = list(splits.notes)
    if samplers[1] is None:
        notes.append(
            f"No accuracy on meta-validation classes was measured: there are {held}, fewer than a task needs. The last "
            "step is kept."
        )
    notes += same_classes(samplers[2])
    if solution.status is Status.DIVERGED:
        notes.append(f"The run diverged, and the representation is the last that was finite. {solution.message}")
    return summary(
        asked,
        found,
        method="penalty",
        data=splits.name,
        steps=solution.steps,
        kept_step=best[0] if best else solution.steps,
        meta_batch=asked["meta_batch"],
        shape=list(splits.train.shape),
        engine=solution.engine,
        validation_accuracy=best[1] if best else None,
        classes=[len(splits.train.names), held, len(splits.test.names)],
        notes=notes,
    )


def _learn(
    net: nn.Module,
    train: TaskSampler,
    watch: Validation | None,
    checkpoint: Path,
    asked: Mapping[str, Any],
    where: torch.device,
) -> Solution:
    _, height, width = train.classes.shape
    images = train.tasks * train.ways * (train.shots + train.queries)
    print(
        f"learning from {len(train.classes.images):,} images of {len(train.classes.names):,} classes, "
        f"{width}x{height}: {asked['steps']:,} steps of {images:,} images each",
        file=sys.stderr,
        flush=True,  # the first step can take long
    )
    colour, gpu = train.classes.shape[0] == 3, where.type == "cuda"
    augment = crop_flip_and_erase if asked["erase"] else crop_and_flip
    try:
        return meta_train(
            net,
            train,
            steps=asked["steps"],
            seed=asked["seed"],
            scale=asked["scale"],
            method=default_method(upper_rate=asked["rate"], decay=asked["decay"]),
            augment=augment if colour else None,
            callbacks=[*filter(None, [watch]), RunBar("learning", partial(_accuracy, watch))],
            checkpoint=checkpoint / "solve",
            resume=True,
            precision="bf16" if gpu else None,
            log_every=None if gpu else 1,  # on a CPU a step can take seconds, and nothing waits for a record
        )
    except (ProblemError, RuntimeError) as error:
        if not any(words in str(error).lower() for words in NO_MEMORY):
            raise
        raise ProblemError(
            f"a step of {asked['meta_batch']} tasks needs more memory than is available. Use a smaller --meta-batch."
        ) from error


def _accuracy(watch: Validation | None) -> str:
    """Return the last accuracy on meta-validation classes, for the label of the bar."""
    return f", validation {100 * watch.rows[-1]['accuracy']:.1f}%" if watch is not None and watch.rows else ""


# -- with a finished run -----------------------------------------------------------------------------------------------


def evaluate_again(
    run: Path, data: str | None, given: Mapping[str, Any], moved: str | None, device: str, json: bool
) -> None:
    """Evaluate a finished run on its own tasks or on other ones (`given`), and on other data if they are named."""
    folder, asked, made, net = _opened(run, moved, device)
    trained_on, began = asked["data"], time.perf_counter()
    data = trained_on if data is None else _absolute(data)
    elsewhere = data != trained_on
    if not elsewhere and data not in NAMES and not Path(data).is_dir():
        raise DataError(
            f"the data of the run, {data}, does not exist; `bilevel fewshot DATA --evaluate {run}` reads it from "
            "another folder."
        )
    # Another seed than the seed of the run would split the classes in another way.
    splits = load(asked | {"data": data}, read_like(made["shape"], characters=trained_on == "omniglot"))
    classes, other = classes_for_test(asked.get("classes"), splits, elsewhere=elsewhere)
    if list(splits.train.shape) != made["shape"]:
        now, then = ("x".join(map(str, shape)) for shape in (splits.train.shape, made["shape"]))
        raise OptionError(f"the images must be of the shape that the run was trained on, {then}; they are {now}.")
    asked |= given
    test = TaskSampler(classes, asked["ways"], asked["shots"], asked["queries"])
    found = _evaluated(net, test, asked, "evaluating", scale=asked.get("scale", SCALE))
    result = summary(
        asked,
        found,
        on=f"on classes of {splits.name}" if other else UNSEEN,
        command="fewshot --evaluate",
        data=splits.name,
        seconds=round(time.perf_counter() - began, 2),
        notes=[*([f"The run was trained on {trained_on}."] * elsewhere), *splits.notes, *same_classes(test)],
    )
    report_result(result, {"evaluation": folder.write_json("evaluation.json", result)}, json=json)


def classes_for_test(
    before: Mapping[str, Any] | None, splits: ClassSplits, *, elsewhere: bool
) -> tuple[ImageClasses, bool]:
    """Return the classes to evaluate a run on, and whether they are other ones than its own test classes.

    `before` has the classes of the run, or is None for Omniglot, which is always split alike; `elsewhere`: whether
    the run was trained on other data. The classes are the run's test classes if all of them are present. If the
    data shares no class with the run, they are all classes, or the test classes if the data has a split. Other data is
    refused.
    """
    if before is None:
        return (splits.joined() if splits.drawn and elsewhere else splits.test), elsewhere
    learned = {name for part in before.values() for name in part}
    now = {name for part in _counts(splits).values() for name in part}
    missing = sorted(before["test"].keys() - now)
    if not missing:
        return splits.joined().named(list(before["test"])), False
    if not learned & now:
        return (splits.joined() if splits.drawn else splits.test), True
    raise DataError(
        f"{splits.name} shares classes with the run, but lacks {some_of(missing)} of its test classes. Restore "
        "them, or use data that shares no class with the run."
    )


def embed_with(run: Path, images: Path, moved: str | None, device: str, out: Path | None, json: bool) -> None:
    """Embed images with a finished run."""
    files = image_files(images)
    folder, asked, result, net = _opened(run, moved, device)
    target = out or folder.path / EMBEDDINGS
    if target.suffix != ".npz":
        raise OptionError(f"--out must be an .npz file with --embed; got {target}.")
    found = write_embeddings(net, images, files, result["shape"], asked["data"] == "omniglot", target)
    report_result({"command": "fewshot --embed", "status": "done", **found}, {"embeddings": target}, json=json)


def _opened(run: Path, moved: str | None, device: str) -> tuple[RunFolder, dict[str, Any], dict[str, Any], nn.Module]:
    """Return the folder of a finished run, its options, its result and its network.

    `moved` is the present place of the network's file, if it has one.
    """
    rule = "--evaluate must name the folder of a finished run of `bilevel fewshot`"
    if not run.is_dir():
        raise OptionError(f"{rule}; there is no folder {run}.")
    folder = RunFolder(run, "--evaluate")
    asked, result = read_json(run / CONFIG), read_json(run / RESULT)
    if "shape" not in result or asked.get("command") != "fewshot":
        raise OptionError(f"{rule}; {run} is not one. To continue a stopped run, repeat its command with --resume.")
    asked["backbone"] = moved or asked["backbone"]
    if is_file(asked["backbone"]):
        path_and_name(asked["backbone"], "--backbone path.py:make must say where the run's network is now")
    net = network_of(asked["backbone"], result["shape"], device_of(device), asked["seed"])
    load_weights(net, run / WEIGHTS)
    return folder, asked, result, net
