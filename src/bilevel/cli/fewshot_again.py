"""What is done with the folder of a finished few-shot run: another evaluation, and embeddings of new images."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilevel.applications.few_shot.classifier import SCALE
from bilevel.applications.few_shot.meta_train import TaskSampler, adapt_and_evaluate
from bilevel.cli import python_file
from bilevel.cli.fewshot_asked import load, network_of
from bilevel.cli.fewshot_classes import unseen
from bilevel.cli.fewshot_output import (
    EMBEDDINGS,
    UNSEEN,
    WEIGHTS,
    Images,
    load_weights,
    same_classes,
    show,
    summary,
    write_embeddings,
)
from bilevel.cli.folder import Folder
from bilevel.cli.progress import stage
from bilevel.cli.run_state import kept
from bilevel.cli.telling import tell
from bilevel.data.class_images import NAMES, read_like
from bilevel.errors import DataError, OptionError


def evaluate_again(
    run: Path, data: str | None, given: Mapping[str, Any], network: str | None, where: torch.device, json: bool
) -> None:
    """Evaluate a finished run on the tasks that it was made for, or as given, and on other data if these are named."""
    folder, asked, made = _opened(run, network)
    other = data not in (None, asked["data"])
    notes = [f"The run was trained on {asked['data']}."] * other
    if data is None and asked["data"] not in NAMES and not Path(asked["data"]).is_dir():
        raise DataError(
            f"the data of the run, {asked['data']}, are not there; `bilevel fewshot DATA --evaluate {run}` takes them "
            "from where they are now."
        )
    read = read_like(made["shape"], characters=asked["data"] == "omniglot")
    asked |= {} if data is None else {"data": data}
    splits = load(asked, read)  # by the seed of the run: another splits the classes otherwise
    classes, changed = unseen(asked.get("classes"), splits, asked["data"], other=other)
    strange = other and not set(classes.names) <= (asked.get("classes") or {}).get("test", {}).keys()
    if list(splits.train.shape) != made["shape"]:
        now, then = ("x".join(map(str, shape)) for shape in (splits.train.shape, made["shape"]))
        raise OptionError(f"the images must be of the shape that the run was trained on, {then}; they are {now}.")
    net = network_of(asked["backbone"], splits.train.shape, where, asked["seed"])
    load_weights(net, run / WEIGHTS)
    asked |= given
    began = time.perf_counter()
    test = TaskSampler(classes, asked["ways"], asked["shots"], asked["queries"])
    with stage("evaluating", "images") as count:
        found = adapt_and_evaluate(
            net, test, tasks=asked["tasks"], seed=asked["seed"], scale=asked.get("scale", SCALE), tell=count
        )
    result = summary(
        asked,
        found,
        on=f"on classes of {splits.name}" if strange else UNSEEN,
        command="fewshot --evaluate",
        data=splits.name,
        seconds=round(time.perf_counter() - began, 2),
        notes=[*notes, *splits.notes, *changed, *same_classes(test)],
    )
    folder.write_json("evaluation.json", result)
    tell(result, show, json=json, evaluation=folder.path / "evaluation.json")


def embed_only(
    run: Path, images: Images, network: str | None, where: torch.device, out: Path | None, json: bool
) -> None:
    folder, asked, result = _opened(run, network)
    net = network_of(asked["backbone"], result["shape"], where, asked["seed"])
    load_weights(net, run / WEIGHTS)
    target = out or folder.path / EMBEDDINGS
    if target.suffix != ".npz":
        raise OptionError(f"--out must be an .npz file with --embed; got {target}.")
    found = write_embeddings(net, images, result["shape"], asked["data"] == "omniglot", target)
    report(folder, {"command": "fewshot --embed", "status": "done", **found}, json, page=False)


def _opened(run: Path, network: str | None) -> tuple[Folder, dict[str, Any], dict[str, Any]]:
    """The folder of a finished run, what was asked of it, and its result; `network` is where its file is now."""
    if not run.is_dir():
        raise OptionError(f"--evaluate must name the folder of a run of `bilevel fewshot`; there is no folder {run}.")
    folder = Folder(run, "--evaluate")
    asked, result = kept(folder, "config.json"), kept(folder, "result.json")
    if asked.get("command") != "fewshot":
        there = f"has one of `bilevel {asked['command']}`" if asked.get("command") else "has none"
        raise OptionError(f"--evaluate must name the folder of a run of `bilevel fewshot`; {run} {there}.")
    if "shape" not in result:
        raise OptionError(
            f"--evaluate must name the folder of a finished run; that in {run} was stopped, and the command that began "
            "it goes on with --resume."
        )
    asked |= {} if network is None else {"backbone": network}
    if python_file.is_file(asked["backbone"]):
        python_file.parts(asked["backbone"], "--backbone path.py:make must say where the run's network is now")
    return folder, asked, result


def with_embeddings(
    result: Mapping[str, Any], net: nn.Module, images: Images | None, folder: Folder
) -> Mapping[str, Any]:
    """The result of a run, and where the embeddings of new images are, if there are any."""
    if images is None:
        return result
    omniglot = kept(folder, "config.json").get("data") == "omniglot"
    found = write_embeddings(net, images, result["shape"], omniglot, folder.path / EMBEDDINGS)
    message, notes = f"{result['message']} {found['message']}", [*result["notes"], *found["notes"]]
    return {**result, **found, "message": message, "notes": notes}


def report(folder: Folder, result: Mapping[str, Any], json: bool, *, page: bool = True) -> None:
    """Tell the result of a run, and where its page and its embeddings are."""
    files = {"report": folder.path / "report.html"} if page else {}
    if "embeddings" in result:
        files["embeddings"] = result["embeddings"]
    tell(result, show, json=json, **files)
