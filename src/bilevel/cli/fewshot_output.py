"""The folder of a few-shot run: its result, its representation, embeddings, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bilevel import __version__
from bilevel._util.atomic_files import whole
from bilevel._util.text import agreeing, counted
from bilevel.applications.few_shot.meta_train import Evaluation, TaskSampler, embed
from bilevel.cli.folder import Folder
from bilevel.data.class_images import ImageClasses, read_like
from bilevel.data.image_folders import SUFFIXES
from bilevel.errors import DataError, OptionError
from bilevel.report.figures import FIELD, accuracies, losses, plane, task_picture
from bilevel.report.page import Card, Report, Table, render
from bilevel.results import Solution

WEIGHTS = "representation.safetensors"
EMBEDDINGS = "embeddings.npz"
FILES = ("history.csv", "accuracy.csv", WEIGHTS, EMBEDDINGS, "evaluation.json", "result.json", "report.html")
SHOWN_TASKS, SHOWN_CLASSES, SHOWN_IMAGES = 3, 10, 15


UNSEEN = "on classes that were not seen"


def summary(asked: Mapping[str, Any], found: Evaluation, on: str = UNSEEN, **more: Any) -> dict[str, Any]:
    """The result of an evaluation `on` some classes as it is written and printed."""
    message = (
        f"{asked['ways']}-way {asked['shots']}-shot {on}: "
        f"{100 * found.accuracy:.2f}% ± {100 * found.interval:.2f} (95% interval, {len(found.accuracies):,} tasks)."
    )
    return {
        "command": "fewshot",
        "status": "done",
        "message": message,
        "seed": asked["seed"],
        "accuracy": found.accuracy,
        "interval": found.interval,
        "tasks": len(found.accuracies),
        "ways": asked["ways"],
        "shots": asked["shots"],
        "queries": asked["queries"],
        **more,
    }


def same_classes(test: TaskSampler) -> list[str]:
    """What is to be said of an interval over tasks where all have the same classes."""
    if test.ways < len(test.classes.names):
        return []
    return [
        f"All tasks are of the same {test.ways} classes, for there are no more: the interval is that of their images."
    ]


@dataclass(frozen=True)
class Trained:
    """A run that has ended, as its files and its page show it."""

    network: nn.Module
    solution: Solution
    rows: Sequence[Mapping[str, float]]
    """Accuracies on meta-validation classes"""
    found: Evaluation
    test: TaskSampler
    result: Mapping[str, Any]
    settings: Sequence[tuple[str, str]]


def write(folder: Folder, run: Trained) -> None:
    """Write all files, the result last."""
    history = run.solution.history
    folder.write_csv("history.csv", ("step", "seconds", "upper", "lower", "residual"), history.rows(0))
    folder.write_csv("accuracy.csv", ("step", "seconds", "accuracy", "interval"), run.rows)
    save_weights(run.network, folder.path / WEIGHTS, run.result)
    folder.write("report.html", render(_report(run)))
    folder.write_json("result.json", run.result)


def save_weights(network: nn.Module, path: Path, about: Mapping[str, Any]) -> None:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with whole(path) as temporary:
        save_file(state, str(temporary), metadata={"message": about["message"]})


def load_weights(network: nn.Module, path: Path) -> None:
    """Put the representation of a run into the network."""
    try:
        network.load_state_dict(load_file(str(path)))
    except FileNotFoundError:
        raise OptionError(f"--evaluate must name the folder of a finished run; {path} is not there.") from None
    except Exception as error:  # safetensors and torch raise several
        why = (str(error).strip().splitlines() or [""])[-1].strip()
        raise DataError(
            f"{path} does not fit the network: the file is damaged, or the network is not what it was ({why})."
        ) from None


@dataclass(frozen=True)
class Images:
    """The images below a folder."""

    folder: Path
    files: list[Path]


def image_files(folder: Path) -> Images:
    """The images to embed; refuses a folder without any."""
    if not folder.is_dir():
        raise OptionError(f"--embed must name a folder with images; {folder} is none.")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"{folder} has no image ({', '.join(SUFFIXES)}).")
    return Images(folder, files)


def write_embeddings(
    network: nn.Module, images: Images, shape: Sequence[int], omniglot: bool, out: Path
) -> dict[str, Any]:
    """Embed images; writes an .npz file with `features` and `files`. Characters are made as the set's were."""
    channels, height, width = shape
    read = read_like(shape, characters=omniglot)
    found, names, broken, fitted = [], [], [], 0
    for file in images.files:
        name = file.relative_to(images.folder).as_posix()
        try:
            pixels, changed = read(file)
        except Exception:  # decoders raise anything on a broken file
            broken.append(name)
            continue
        found.append(pixels)
        names.append(name)
        fitted += changed
    if not found:
        raise DataError(f"{images.folder}: none of {counted(len(images.files), 'image')} can be decoded.")
    stack = torch.from_numpy(np.stack(found))
    features = embed(network, stack[:, None] if channels == 1 else stack.permute(0, 3, 1, 2)).cpu().numpy()
    Folder(out.parent)
    with whole(out) as temporary, open(temporary, "wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, features=features, files=np.array(names))
    left = f"{counted(len(broken), 'image')} that {agreeing(len(broken), 'does', 'do')} not decode"
    notes = [f"Left out {left}, such as {broken[0]}."] if broken else []
    if fitted:
        was = agreeing(fitted, "was", "were")
        notes.append(f"{counted(fitted, 'image')} {was} brought to {width}x{height} pixels, as in training.")
    message = f"Embedded {counted(len(names), 'image')}, {counted(features.shape[1], 'feature')} each."
    return {
        "embeddings": str(out),
        "images": len(names),
        "features": features.shape[1],
        "message": message,
        "notes": notes,
    }


# -- the page ----------------------------------------------------------------------------------------------------------


def _report(run: Trained) -> Report:
    found, result, history = run.found, run.result, run.solution.history
    tasks = result["meta_batch"]
    curves = {"queries": [x / tasks for x in history["upper"]], "support": [x / tasks for x in history["lower"]]}
    cards = []
    if run.rows:
        figure = accuracies("accuracy", run.rows, label="Accuracy against step.")
        cards.append(Card("Accuracy on meta-validation classes", figure))
    cards.append(Card("Losses of a task", losses("losses", curves, history["step"], label="Losses against step.")))
    order = torch.argsort(found.accuracies, stable=True).tolist()
    shown = {order[len(order) // 2]: "A task in the middle"}
    for task in order[: SHOWN_TASKS - 1]:
        shown.setdefault(task, "One of the worst tasks")
    for task, which in shown.items():
        title = f"{which}: {100 * float(found.accuracies[task]):.0f}% right"
        names = ", ".join(run.test.classes.name_of(int(image)) for image in found.index[task][:, 0])
        note = (
            "Left: what a query is. Top: what it was taken for. Green fields are right, red ones wrong; a field shows "
            f"{FIELD**2} queries at most. In order: {names}."
        )
        cards.append(Card(title, _task(found, run.test, task, title), note=note))
    cards.append(_plane(run.network, run.test.classes))
    reference = 1 / result["ways"]
    table = Table(
        "Accuracy on classes that were not seen in training.",
        ("", "Accuracy", "95% interval"),
        [
            (
                "representation with trained classifiers",
                f"{100 * result['accuracy']:.2f}%",
                f"± {100 * result['interval']:.2f}",
            ),
            ("the same, class means alone", f"{100 * result['accuracy_of_means']:.2f}%", ""),
            ("guessing", f"{100 * reference:.2f}%", ""),
        ],
    )
    return Report(
        title=f"Few-shot learning on {result['data']}",
        outcome=result["message"],
        good=result["accuracy"] > reference,
        table=table,
        cards=cards,
        heading="What was learnt",
        settings=[*run.settings, ("bilevel", __version__), ("torch", torch.__version__)],
        notes=result["notes"],
    )


def _pictures(images: Tensor) -> NDArray[np.uint8]:
    """(..., channels, height, width) as (..., height, width[, 3])."""
    array = images.movedim(-3, -1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def _task(found: Evaluation, test: TaskSampler, task: int, label: str) -> Any:
    index = found.index[task]
    pictures = _pictures(test.classes.images[index])
    said = found.predictions[task].reshape(test.ways, test.queries).numpy()
    return task_picture(pictures[:, 0], pictures[:, test.shots :], said, label=label)


def _plane(network: nn.Module, classes: ImageClasses) -> Card:
    """The first classes of the test on the two main directions of their features."""
    from sklearn.decomposition import PCA  # it takes a second, which every command would wait for

    some = classes.select(range(min(SHOWN_CLASSES, len(classes.names))))
    rows, names = [], []
    for first, count, name in zip(some.firsts, some.counts, some.names, strict=True):
        kept = min(count, SHOWN_IMAGES)
        rows += list(range(first, first + kept))
        names += [name] * kept
    z = torch.nn.functional.normalize(embed(network, some.images[rows]), dim=1).cpu().double().numpy()
    points = PCA(min(2, *z.shape)).fit_transform(z)
    if points.shape[1] < 2:
        points = np.column_stack([points, np.zeros(len(points))])
    note = "Directions of the features, on their two main axes; classes of the test, which training has not seen."
    return Card("Unseen classes", plane("plane", points, names, label="Unseen classes in two dimensions."), note=note)


def show(result: Mapping[str, Any]) -> None:
    Console().print(result["message"], soft_wrap=True)
