"""A labelled data set cleaned: denoising, what it is compared with, and what a user should know of it.

The accuracies are those on the test set. Where there is none, a fifth of the trusted set is held out from all training
and stands in for it, if it is large enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..callbacks import Callback
from ..data import Labelled, Pair, corrupt, split_test, split_trusted
from ..errors import DataError, OptionError
from ..method import Method
from ..precision import Precision
from ..training import Augment, fit, probabilities
from .denoising import Denoised, denoise

PER_CLASS = 10
"""Trusted examples of each class that are drawn where their number is not given."""
HELD_OUT, LEAST_TRUSTED = 0.2, 250
"""The share of the trusted set that stands in for a test set, and the size from which it does."""
AS_GOOD = 0.005
"""A difference in accuracy that is none."""
Noise = Literal["symmetric", "asymmetric"]
Tell = Callable[[str, int, int], None]
"""Told a stage, the steps done in it and the steps that it has."""


@dataclass(frozen=True)
class Prepared:
    """Data with a trusted set. `truth` holds the labels before `noise` made some of them wrong on purpose."""

    data: Labelled
    truth: Tensor | None = None
    held_out: bool = False
    """Whether `data.test` is a part of the trusted set."""
    notes: tuple[str, ...] = ()

    @property
    def trusted(self) -> Pair:
        assert self.data.trusted is not None
        return self.data.trusted


@dataclass(frozen=True)
class Cleaned:
    """What `clean` found. Accuracies are fractions of 1, by the name of what was trained."""

    denoised: Denoised
    accuracies: dict[str, float]
    auc: float | None
    """Of the quality as a sign of a right label, where the wrong ones are known; likewise F1 of the suspects."""
    f1: float | None
    notes: tuple[str, ...]


def prepare(
    data: Labelled, *, trusted: int | None = None, noise: float | None = None, kind: Noise = "symmetric", seed: int = 0
) -> Prepared:
    """Data ready for `clean`: rows drawn as trusted where the data has none, wrong labels on purpose, a held-out part.

    `trusted` rows are drawn before `noise` is made, so that their labels are those of the source.
    """
    notes = list(data.notes)
    if data.trusted is None:
        drawn = trusted or PER_CLASS * len(data.classes)
        data = split_trusted(data, drawn, seed)
        if noise is None:
            notes.append(
                f"The trusted set is {drawn} rows drawn from the data, whose labels are taken as right. Check them: a "
                "wrong label among them counts for many."
            )
    elif trusted is not None:
        raise OptionError(f"trusted={trusted} draws rows, but the data has {len(data.trusted[1])} trusted ones.")
    truth = None
    if noise is not None:
        truth = data.y
        data = replace(data, y=corrupt(data.y, noise, len(data.classes), seed, kind))
    held_out = False
    assert data.trusted is not None
    _refuse_missing(data)
    notes += _duplicates(data)
    if data.test is None:
        count = len(data.trusted[1])
        if count >= LEAST_TRUSTED:
            held_out = True
            whole = Labelled(data.name, data.kind, *data.trusted, data.classes, [""] * count)
            parted = split_test(whole, share=HELD_OUT, seed=seed)
            data = replace(data, trusted=(parted.x, parted.y), test=parted.test)
            notes.append(f"A fifth of the trusted set, {count - parted.count} rows, is held out to measure accuracies.")
        else:
            notes.append(
                f"Without a test set, and with {count} trusted rows, too few to hold a part of them out "
                f"({LEAST_TRUSTED}), no accuracy is measured."
            )
    return Prepared(data, truth, held_out, tuple(notes))


def _refuse_missing(data: Labelled) -> None:
    assert data.trusted is not None
    present, known = (set(labels.tolist()) for labels in (data.y, data.trusted[1]))
    if len(present) < 2:
        raise DataError(f"the data must have at least two classes; all its labels are {data.classes[present.pop()]!r}.")
    if missing := [data.classes[c] for c in sorted(present - known)]:
        names = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise DataError(
            f"the trusted set must have an example of every class; it has none of {names}. Add some, or leave these "
            "classes out of the data."
        )


def _duplicates(data: Labelled) -> list[str]:
    """A note on rows that are in the trusted set, too. They stay: the trusted set decides what they are worth."""
    assert data.trusted is not None
    x, y = data.trusted
    known = {row.numpy().tobytes(): int(label) for row, label in zip(x, y, strict=True)}
    twins = [(known.get(row.numpy().tobytes()), int(label)) for row, label in zip(data.x, data.y, strict=True)]
    found = [(a, b) for a, b in twins if a is not None]
    if not found:
        return []
    other = sum(a != b for a, b in found)
    return [f"{len(found)} rows are in the trusted set, too, {other} of them with another label; they stay in."]


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
    tell: Tell = lambda stage, done, total: None,
    precision: Precision | None = None,
) -> Cleaned:
    """Denoise, then train what the result is compared with, in as many steps as one round of `denoise`."""
    data, (x_trusted, y_trusted) = prepared.data, prepared.trusted
    first = copy.deepcopy(model)
    denoised = denoise(
        (data.x, data.y), prepared.trusted, model, method=method, steps=steps, augment=augment, seed=seed,
        checkpoint=checkpoint, resume=resume, callbacks=callbacks, precision=precision,
        watch=lambda done, total: tell("training", done, total),
    )  # fmt: skip
    accuracies: dict[str, float] = {}
    if data.test is not None:
        accuracies["denoised"] = accuracy(model, data.test)
        rivals = {
            "trusted set alone": (x_trusted, y_trusted),
            "labels as they are": (torch.cat([data.x, x_trusted]), torch.cat([data.y, y_trusted])),
        }
        if prepared.truth is not None:
            rivals["right labels"] = (rivals["labels as they are"][0], torch.cat([prepared.truth, y_trusted]))
        for name, (x, y) in rivals.items() if baselines else ():
            rival, total = copy.deepcopy(first), denoised.settings["final_steps"]
            fit(
                rival, x, y, steps=total, batch=denoised.settings["batch"], rate=denoised.settings["rate"],
                seed=seed + 1, augment=augment, precision=precision,
                checkpoint=checkpoint and checkpoint / name.replace(" ", "-"),
                watch=partial(_told, tell, f"comparing: {name}", total),
            )  # fmt: skip
            accuracies[name] = accuracy(rival, data.test)
    auc, f1 = _scores(prepared, denoised)
    return Cleaned(denoised, accuracies, auc, f1, _advice(prepared, accuracies))


def _scores(prepared: Prepared, found: Denoised) -> tuple[float | None, float | None]:
    if prepared.truth is None or not bool((wrong := (prepared.data.y != prepared.truth)).any()):
        return None, None
    from sklearn.metrics import f1_score, roc_auc_score  # here: it takes as long to import as torch

    auc = roc_auc_score(~wrong.numpy(), found.quality.numpy())
    return float(auc), float(f1_score(wrong.numpy(), found.suspect.numpy()))


def _told(tell: Tell, stage: str, total: int, done: int) -> None:
    tell(stage, done, total)


def accuracy(model: nn.Module, pair: Pair) -> float:
    x, y = pair
    return float((probabilities(model, x).argmax(1) == y).double().mean())


def _advice(prepared: Prepared, accuracies: dict[str, float]) -> tuple[str, ...]:
    ours, alone = accuracies.get("denoised"), accuracies.get("trusted set alone")
    if ours is None or alone is None or alone < ours - AS_GOOD:
        return ()
    return (
        f"Training on the trusted set alone is as good here ({100 * alone:.1f}% against {100 * ours:.1f}%): with "
        f"{len(prepared.trusted[1]):,} trusted rows there is no need to clean the others.",
    )


def pictures(x: Tensor) -> np.ndarray:
    """Images in [0, 1] as bytes: (n, height, width), in colour (n, height, width, 3)."""
    found = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return (found[..., 0] if found.shape[3] != 3 else found).numpy()
