"""Clean a labelled data set: denoising, what it is compared with, and notes for the user.

Accuracies are measured on the test set. Without one, a fifth of the trusted set is held out from all training and
replaces it, if the trusted set is large enough.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from bilevel import Callback, DataError, OptionError
from bilevel._util.checks import ShortRepr, agreeing, counted, first_of, in_range, require
from bilevel._util.random_state import derived
from bilevel.applications.denoising.denoise import Denoised, OnProgress, denoise
from bilevel.applications.training import Augment, accuracy, fit
from bilevel.data import Labelled, Pair, corrupt, split_test, split_trusted
from bilevel.derivatives.mixed_precision import Precision
from bilevel.methods.base import Method

# The default number of trusted examples of each class.
PER_CLASS = 10
# The share of the trusted set that replaces a test set, and the least rows for this, in all and of each class.
HELD_OUT, LEAST_TRUSTED, LEAST_OF_CLASS = 0.2, 250, 5
# The largest difference in accuracy that counts as no difference, on any number of rows.
AS_GOOD = 0.005
Noise = Literal["symmetric", "asymmetric"]


@dataclass(frozen=True, repr=False)
class Prepared(ShortRepr):
    """Data with a trusted set, ready for `clean`; `prepare` makes it.

    Args:
        data: The data, with trusted rows.
        truth: The labels before some were made wrong on purpose. None (default): not known.
        held_out: Whether `data.test` is a part of the trusted set. Default: False.
        notes: Sentences for the user about the data. Default: none.
        drawn: The numbers of the rows that were drawn as trusted. Default: none.

    >>> from bilevel.data import load, split_trusted
    >>> len(Prepared(split_trusted(load("digits"), 50, seed=0)).trusted[1])
    50
    """

    data: Labelled
    truth: Tensor | None = None
    held_out: bool = False
    notes: tuple[str, ...] = ()
    drawn: tuple[int, ...] = ()

    @property
    def trusted(self) -> Pair:
        return self.data.part("trusted")


@dataclass(frozen=True, repr=False)
class Cleaned(ShortRepr):
    """The result of `clean`: which labels are wrong, and how well it helps to know this.

    Fields:
        denoised: What was learned about each row, with the classifier: the result of `denoise`.
        accuracies: Accuracies on the test set, as fractions of 1, by the name of the training. Empty without a test
            set.
        auc: The AUC of the quality as a sign of a right label. None if the wrong labels are not known.
        f1: The F1 score of the suspects. None if the wrong labels are not known.
        notes: Sentences for the user, such as a simpler training that does as well.

    >>> from bilevel.data import load
    >>> prepared = prepare(load("digits"), trusted=100, noise=0.2)
    >>> found = clean(prepared, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), steps=5, baselines=False)
    >>> found.denoised.suspect.shape, 0 <= found.auc <= 1
    (torch.Size([1297]), True)
    """

    denoised: Denoised
    accuracies: dict[str, float]
    auc: float | None
    f1: float | None
    notes: tuple[str, ...]


def prepare(
    data: Labelled, *, trusted: int | None = None, noise: float | None = None, kind: Noise = "symmetric", seed: int = 0
) -> Prepared:
    """Return data ready for `clean`: with trusted rows, wrong labels on purpose, and a test set or a held-out part.

    Args:
        data: The data, as `load` reads them.
        trusted: The number of rows to draw as trusted if the data has none. They are drawn before `noise`, so their
            labels are the original ones. None (default): 10 for each class.
        noise: The share of labels to make wrong on purpose, to measure how many are found. None (default): none.
        kind: How labels become wrong: "symmetric" (default), any other class, or "asymmetric", the next class.
        seed: The seed of all draws. Default: 0.

    >>> from bilevel.data import load
    >>> prepared = prepare(load("digits"), trusted=200, noise=0.3)
    >>> prepared.data.count, float((prepared.data.y != prepared.truth).double().mean().round(decimals=2))
    (1197, 0.3)
    """
    in_range("noise", noise, least=0, below=1)
    rows: tuple[int, ...] = ()
    notes, truth, unmeasured = list(data.notes), None, data.test is None
    if data.trusted is None:
        count = trusted or PER_CLASS * len(data.classes)
        if count >= data.count:
            raise OptionError(f"trusted must be below the {data.count} rows of {data.name}; got {count}.")
        before, data = data, split_trusted(data, count, seed)
        rows = tuple(sorted(set(before.positions.tolist()) - set(data.positions.tolist())))
        if noise is None:
            notes.append(
                f"The trusted set is {counted(len(rows), 'row')} drawn from the data, whose labels are taken as right. "
                "Check them (`trusted_rows` in result.json): a wrong label among them counts for many."
            )
        if gone := sorted(set(data.part("trusted")[1].tolist()) - set(data.y.tolist())):
            notes.append(
                f"All rows labelled {first_of((data.classes[c] for c in gone), 10)} are drawn as trusted, so none is "
                "left to clean: check whether this is a class at all."
            )
    elif trusted is not None:
        raise OptionError(f"trusted={trusted} draws rows, but the data has {len(data.trusted[1])} trusted ones.")
    if noise is not None:
        truth = data.y
        data = replace(data, y=corrupt(data.y, noise, len(data.classes), seed, kind))
    _check_classes(data)
    notes += _duplicates(data)
    data, more = _held_out(data, seed) if unmeasured else _untrained(data)
    notes += more
    if data.test is not None:
        kept, more = _apart(data.x, data.part("test"), "in the test set or the held-out part")
        if more:
            data, truth = data.select(np.flatnonzero(kept.numpy())), truth if truth is None else truth[kept]
            _check_classes(data, len(kept) - data.count)
        notes += more
    return Prepared(data, truth, unmeasured and data.test is not None, tuple(notes), rows)


def _held_out(data: Labelled, seed: int) -> tuple[Labelled, list[str]]:
    """Move a fifth of the trusted set into the test set if that is possible; return the data and notes."""
    kept, unmeasured = data.part("trusted"), "No accuracy is measured: the data has no test set, and "
    count, least = len(kept[1]), int(torch.bincount(kept[1])[torch.unique(data.y)].min())
    if count < LEAST_TRUSTED or least < LEAST_OF_CLASS:
        note = (
            f"the trusted set, with {counted(count, 'row')} and {least} of its rarest class, is too small to hold a "
            f"part out: that needs {LEAST_TRUSTED} rows, and {LEAST_OF_CLASS} of each class."
        )
        return data, [unmeasured + note]
    whole = Labelled(data.name, data.kind, *kept, data.classes, [""] * count)
    parted = split_test(whole, share=HELD_OUT, seed=seed)
    try:
        data, notes = _untrained(replace(data, trusted=(parted.x, parted.y), test=parted.test), "held-out part")
    except DataError:
        return data, [unmeasured + "no part of the trusted set can be held out: its rows are also in the rest of it."]
    part = counted(count - parted.count, "row")
    return data, [f"A fifth of the trusted set, {part}, is held out to measure accuracies.", *notes]


def _check_classes(data: Labelled, out: int = 0) -> None:
    """Refuse data from which nothing can be learned; `out` rows were left out because they are in the test set."""
    if not data.count:
        raise DataError(
            "the data must have rows that are not in the test set or the held-out part; all its "
            f"{counted(out, 'row')} are. Use another test set."
        )
    present, known = (set(labels.tolist()) for labels in (data.y, data.part("trusted")[1]))
    if len(present) < 2:
        without = f"without the {counted(out, 'row')} in the test set or the held-out part, " if out else ""
        raise DataError(
            f"the data must have at least two classes; {without}all its labels are {data.classes[present.pop()]!r}."
        )
    if missing := [data.classes[c] for c in sorted(present - known)]:
        names = first_of(missing, 10)
        raise DataError(
            f"the trusted set must have an example of every class; it has none of {names}. Add some, or leave these "
            "classes out of the data."
        )


def _duplicates(data: Labelled) -> list[str]:
    """Return a note on rows that are also in the trusted set. They stay: the trusted set decides their importance."""
    twins = _twins(data.x, data.part("trusted"))
    other = [twin != label for twin, label in zip(twins, data.y.tolist(), strict=True) if twin is not None]
    if not other:
        return []
    stay = agreeing(len(other), "it stays in", "they stay in")
    return [f"{_also(len(other), 'in the trusted set')}, {sum(other)} of them with another label; {stay}."]


def _untrained(data: Labelled, name: str = "test set") -> tuple[Labelled, list[str]]:
    """Remove the test rows that are in the trusted set, which is trained on; `name` is the name of the test part."""
    x, y = data.part("test")
    kept, notes = _apart(x, data.part("trusted"), "in the trusted set, which is trained on", f" of the {name}")
    if notes and not bool(kept.any()):
        raise DataError(
            f"the {name} must have rows that are not in the trusted set; all its {counted(len(y), 'row')} are. Use "
            "another one, or none."
        )
    return replace(data, test=(x[kept], y[kept])), notes


def _apart(x: Tensor, pair: Pair, place: str, part: str = "") -> tuple[Tensor, list[str]]:
    """Return which rows of x are not in the pair, and a note on the other rows."""
    kept = torch.tensor([twin is None for twin in _twins(x, pair)], dtype=torch.bool)
    out = int((~kept).sum())
    return kept, [f"{_also(out, place, part)}; {agreeing(out, 'it is left out', 'they are left out')}."] * bool(out)


def _also(count: int, place: str, part: str = "") -> str:
    return f"{counted(count, 'row')}{part} {agreeing(count, 'is', 'are')} also {place}"


def _twins(x: Tensor, pair: Pair) -> list[int | None]:
    """Return, for each row of x, the label of the same row in the pair, or None."""
    known = {row.numpy().tobytes(): int(label) for row, label in zip(*pair, strict=True)}
    return [known.get(row.numpy().tobytes()) for row in x]


def clean(
    prepared: Prepared,
    model: nn.Module,
    *,
    method: Method | None = None,
    steps: int | None = None,
    augment: Augment | None = None,
    baselines: bool = True,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    on_progress: OnProgress = lambda stage, done, total: None,
    precision: Precision | None = None,
) -> Cleaned:
    """Denoise, then train the classifiers that the result is compared with, in as many steps as a round of `denoise`.

    Args:
        prepared: The data, from `prepare`.
        model: A network with one score for each class. It is trained in place, and becomes the denoised classifier.
        method: The method of the bilevel run. None (default): `Penalty(cotangent="same", decay="linear")`.
        steps: The number of steps of the bilevel run and of each training. None (default): 12 passes over the rows, and
            at least 600, or 1,200 with more than 2,000 rows.
        augment: A function that changes a batch of inputs at random, such as
            `bilevel.applications.augmentation.crop_and_flip`. None (default): inputs stay as they are.
        baselines: Whether to train the classifiers to compare with. Default: True.
        seed: The seed of all random draws. Default: 0.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        resume: Whether to resume from the state in `checkpoint`. Default: False.
        callbacks: Callbacks of the bilevel run, such as `[Progress()]`. Default: none.
        on_progress: A function that is called in all trainings as `on_progress(stage, done, total)`, with the steps
            done. By default nothing is called.
        precision: "bf16" runs the network under bfloat16 autocast. None (default): its own precision.

    >>> from bilevel.data import load
    >>> prepared = prepare(load("digits"), trusted=100, noise=0.2)
    >>> found = clean(prepared, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), steps=5)
    >>> sorted(found.accuracies)
    ['denoised', 'labels as they are', 'right labels', 'trusted set only']
    """
    data = prepared.data
    first = copy.deepcopy(model)
    denoised = denoise(
        (data.x, data.y),
        prepared.trusted,
        model,
        method=method,
        steps=steps,
        augment=augment,
        seed=seed,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=callbacks,
        precision=precision,
        on_progress=lambda stage, done, total: on_progress(f"training: {stage}", done, total),
    )
    total = denoised.settings["final_steps"]

    def measured(name: str, x: Tensor, y: Tensor) -> float:
        rival = copy.deepcopy(first)
        fit(
            rival,
            x,
            y,
            steps=total,
            batch=denoised.settings["batch"],
            rate=denoised.settings["rate"],
            seed=derived(seed, "rivals"),
            augment=augment,
            precision=precision,
            checkpoint=checkpoint and checkpoint / name.replace(" ", "-"),
            on_progress=lambda done: on_progress(f"comparing: {name}", done, total),
        )
        return accuracy(rival, data.part("test"))

    accuracies: dict[str, float] = {}
    if data.test is not None:
        accuracies["denoised"] = accuracy(model, data.test)
        accuracies |= {name: measured(name, *pair) for name, pair in (_rivals(prepared) if baselines else ())}
    auc, f1 = _scores(prepared, denoised)
    return Cleaned(denoised, accuracies, auc, f1, _advice(prepared, accuracies))


def _rivals(prepared: Prepared) -> Iterator[tuple[str, Pair]]:
    """Yield what `clean` compares with, by name."""
    data, (x, y) = prepared.data, prepared.trusted
    yield "trusted set only", (x, y)
    inputs = torch.cat([data.x, x])
    yield "labels as they are", (inputs, torch.cat([data.y, y]))
    if prepared.truth is not None:
        yield "right labels", (inputs, torch.cat([prepared.truth, y]))


def _scores(prepared: Prepared, found: Denoised) -> tuple[float | None, float | None]:
    if prepared.truth is None or not bool((wrong := (prepared.data.y != prepared.truth)).any()):
        return None, None
    metrics = require("sklearn.metrics", "apps")
    auc = metrics.roc_auc_score(~wrong.numpy(), found.quality.numpy())
    return float(auc), float(metrics.f1_score(wrong.numpy(), found.suspect.numpy()))


def _advice(prepared: Prepared, accuracies: dict[str, float]) -> tuple[str, ...]:
    """Return a note for each way of training that does as well as denoising, as far as the measured rows show."""
    if "denoised" not in accuracies:
        return ()
    ours, count = accuracies["denoised"], len(prepared.data.part("test")[1])
    ways = {
        "labels as they are": "the labels as they are",
        "trusted set only": f"only the {counted(len(prepared.trusted[1]), 'trusted row')}",
    }
    rows = f"{counted(count, 'row')} of the {'held-out part' if prepared.held_out else 'test set'}"
    found = [
        f"For a classifier, training on {text} is as good or better, as far as the {rows} show: "
        f"{100 * theirs:.1f}% against {100 * ours:.1f}%."
        for name, text in ways.items()
        if (theirs := accuracies.get(name)) is not None and theirs >= ours - _margin(ours, theirs, count)
    ]
    return (*found, "The suspects can still be worth a look.") if found else ()


def _margin(a: float, b: float, count: int) -> float:
    """Return the largest difference in accuracy that counts as none: its standard error on `count` rows, or AS_GOOD."""
    return max(AS_GOOD, math.sqrt((a * (1 - a) + b * (1 - b)) / count))


def as_bytes(x: Tensor) -> np.ndarray:
    """Return images in [0, 1] as bytes: (n, height, width), or (n, height, width, channels)."""
    return channels_last(_bytes(x))


def is_bytes(x: Tensor) -> bool:
    """Return whether bytes can represent the inputs; others, such as sixteenths, would be rounded."""
    return bool(torch.equal(_bytes(x).float() / 255, x))


def channels_last(x: Tensor) -> np.ndarray:
    """Return images as an array: (n, height, width), or (n, height, width, channels)."""
    found = x.permute(0, 2, 3, 1)
    return (found[..., 0] if found.shape[3] == 1 else found).numpy()


def _bytes(x: Tensor) -> Tensor:
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def thumbnails(x: Tensor, rows: Tensor, side: int) -> np.ndarray:
    """Return pictures of some rows of images, in grey or colour, with no side longer than `side`."""
    channels = 3 if x.shape[1] >= 3 else 1
    scale = min(1.0, side / max(x.shape[2:]))
    size = [max(1, round(scale * length)) for length in x.shape[2:]]
    small = (interpolate(x[part, :channels], size=size, mode="area") for part in torch.split(rows, 256))
    return np.concatenate([as_bytes(part) for part in small])
