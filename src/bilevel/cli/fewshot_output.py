"""The folder of a few-shot run: its result, its representation, embeddings, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bilevel import History
from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import agreeing, counted
from bilevel.applications.few_shot import Evaluation, TaskSampler, embed
from bilevel.cli.run_folder import RunFolder, made_by
from bilevel.data.class_images import ImageClasses, read_like
from bilevel.data.image_folders import SUFFIXES, read_images
from bilevel.errors import DataError, OptionError, reason
from bilevel.report.figures import FIELD, accuracies, losses, plane, task_picture
from bilevel.report.page import Card, Report, Table, render

WEIGHTS = "representation.safetensors"
EMBEDDINGS = "embeddings.npz"
FILES = ("history.csv", "accuracy.csv", WEIGHTS, EMBEDDINGS, "evaluation.json", "result.json", "report.html")
SHOWN_TASKS, SHOWN_CLASSES, SHOWN_IMAGES = 3, 10, 15
UNSEEN = "on classes that were not seen"


# -- the result --------------------------------------------------------------------------------------------------------


def summary(asked: Mapping[str, Any], found: Evaluation, on: str = UNSEEN, **more: Any) -> dict[str, Any]:
    """Return the result of an evaluation `on` some classes."""
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
    """Return a note on the interval if all tasks have the same classes."""
    if test.ways < len(test.classes.names):
        return []
    return [f"All tasks have the same {test.ways} classes, as there are no more: the interval is for their images."]


def write(
    folder: RunFolder, network: nn.Module, history: History, rows: Sequence[Mapping[str, float]], message: str
) -> None:
    """Write the history, the accuracies on meta-validation classes (`rows`) and the representation of a run."""
    folder.write_csv("history.csv", ("step", "seconds", "upper", "lower", "residual"), history.rows(0))
    folder.write_csv("accuracy.csv", ("step", "seconds", "accuracy", "interval"), rows)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with atomic_write(folder.path / WEIGHTS) as temporary:
        save_file(state, str(temporary), metadata={"message": message})


def load_weights(network: nn.Module, path: Path) -> None:
    """Load the representation of a run into the network."""
    try:
        network.load_state_dict(load_file(str(path)))
    except Exception as error:  # safetensors and torch raise several
        raise DataError(
            f"{path} does not fit the network: the file is damaged, or the network has changed ({reason(error)})."
        ) from None


# -- embeddings --------------------------------------------------------------------------------------------------------


def image_files(folder: Path) -> list[Path]:
    """Return the images below a folder; refuse a folder without any."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise OptionError(f"--embed must name a folder with images ({', '.join(SUFFIXES)}); {folder} has none.")
    return files


def write_embeddings(
    network: nn.Module, folder: Path, files: Sequence[Path], shape: Sequence[int], omniglot: bool, out: Path
) -> dict[str, Any]:
    """Embed the images of a folder; write an .npz file with `features` and `files`.

    `omniglot`: the images are characters, which are read like the characters of that set.
    """
    pixels, kept, broken, resized = read_images(files, read_like(shape, characters=omniglot), folder)
    features = embed(network, pixels).cpu().numpy()
    names = [file.relative_to(folder).as_posix() for file in kept]
    RunFolder(out.parent)
    with atomic_write(out) as temporary, open(temporary, "wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, features=features, files=np.array(names))
    notes = []
    if broken:
        do = agreeing(len(broken), "does", "do")
        notes.append(f"Left out {counted(len(broken), 'image')} that {do} not decode, such as {broken[0]}.")
    if resized:
        were = agreeing(resized, "was", "were")
        notes.append(f"{counted(resized, 'image')} {were} resized to {shape[2]}x{shape[1]} pixels, as in training.")
    return {
        "embeddings": str(out),
        "images": len(names),
        "features": features.shape[1],
        "message": f"Embedded {counted(len(names), 'image')}, {counted(features.shape[1], 'feature')} each.",
        "notes": notes,
    }


# -- the page ----------------------------------------------------------------------------------------------------------


def page(
    network: nn.Module,
    samplers: tuple[TaskSampler, TaskSampler],
    history: History,
    rows: Sequence[Mapping[str, float]],
    found: Evaluation,
    result: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> str:
    """Return the page of a run. `samplers` draw the tasks of training and test; `rows` are as in `write`."""
    (train, test), tasks = samplers, result["meta_batch"]
    curves = {"queries": [x / tasks for x in history["upper"]], "support": [x / tasks for x in history["lower"]]}
    cards = [
        Card("Losses of a task", losses("losses", curves, history["step"], label="Losses against step.")),
        *_task_cards(found, test),
        _plane(network, test.classes),
    ]
    if rows:
        figure = accuracies("accuracy", rows, label="Accuracy against step.")
        cards.insert(0, Card("Accuracy on meta-validation classes", figure))
    accuracy, interval, guess = result["accuracy"], result["interval"], 1 / result["ways"]
    table = Table(
        "Accuracy on classes that were not seen in training.",
        ("", "Accuracy", "95% interval"),
        [
            ("representation with trained classifiers", f"{100 * accuracy:.2f}%", f"± {100 * interval:.2f}"),
            ("the same, only class means", f"{100 * result['accuracy_of_means']:.2f}%", ""),
            ("guessing", f"{100 * guess:.2f}%", ""),
        ],
    )
    return render(
        Report(
            title=f"Few-shot learning on {result['data']}",
            outcome=result["message"],
            good=accuracy > guess,
            table=table,
            cards=cards,
            heading="What was learned",
            settings=_settings(train, result, asked),
            notes=result["notes"],
        )
    )


def _settings(train: TaskSampler, result: Mapping[str, Any], asked: Mapping[str, Any]) -> list[tuple[str, str]]:
    changed = f"shifted, mirrored{', a square erased' if asked['erase'] else ''}"
    kept = f"step {result['kept_step']:,}, the best on meta-validation classes"
    return [
        ("Ways / shots / queries of a task", f"{asked['ways']} / {asked['shots']} / {asked['queries']}"),
        ("Ways in training", str(train.ways)),
        ("Classes for training / validation / test", " / ".join(f"{count:,}" for count in result["classes"])),
        ("Representation", Path(asked["backbone"]).name),
        ("Weights", f"{result['weights']:,}"),
        ("Tasks of a step", str(asked["meta_batch"])),
        ("Rate / decay / scale of the cosines", f"{asked['rate']:g} / {asked['decay']:g} / {asked['scale']:g}"),
        ("Images in training", changed if train.classes.shape[0] == 3 else "as they are"),
        ("Steps", f"{result['steps']:,}"),
        ("Kept", "the last step" if result["validation_accuracy"] is None else kept),
        *made_by(result),
    ]


def _task_cards(found: Evaluation, test: TaskSampler) -> list[Card]:
    """Return pictures of a task in the middle and of the worst ones."""
    order = torch.argsort(found.accuracies, stable=True).tolist()
    shown = {order[len(order) // 2]: "A task in the middle"}
    for task in order[: SHOWN_TASKS - 1]:
        shown.setdefault(task, "One of the worst tasks")
    cards = []
    for task, which in shown.items():
        title = f"{which}: {100 * float(found.accuracies[task]):.0f}% right"
        index = found.index[task]
        names = ", ".join(test.classes.name_of(int(image)) for image in index[:, 0])
        note = (
            "Rows: the class of a query. Columns: the class that it was given. Green fields are right, red ones wrong; "
            f"a field shows {FIELD**2} queries at most. In order: {names}."
        )
        pictures = test.classes.images[index].movedim(-3, -1).numpy()
        pictures = pictures[..., 0] if pictures.shape[-1] == 1 else pictures
        predicted = found.predictions[task].reshape(test.ways, test.queries).numpy()
        figure = task_picture(pictures[:, 0], pictures[:, test.shots :], predicted, label=title)
        cards.append(Card(title, figure, note=note))
    return cards


def _plane(network: nn.Module, classes: ImageClasses) -> Card:
    """Draw the first classes of the test on the two main directions of their features."""
    from sklearn.decomposition import PCA

    some = classes.select(range(min(SHOWN_CLASSES, len(classes.names))))
    shown = [
        (row, name)
        for first, count, name in zip(some.firsts, some.counts, some.names, strict=True)
        for row in range(first, first + min(count, SHOWN_IMAGES))
    ]
    rows, names = [row for row, _ in shown], [name for _, name in shown]
    z = torch.nn.functional.normalize(embed(network, some.images[rows]), dim=1).cpu().double().numpy()
    points = PCA(min(2, *z.shape)).fit_transform(z)
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    note = "Features on their two main axes. The classes are of the test, and training has not seen them."
    return Card("Unseen classes", plane("plane", points, names, label="Unseen classes in two dimensions."), note=note)
