"""Wrong labels without a trusted set: an estimate by cross-validation, as confident learning makes it.

Each example gets probabilities p from a network that was not trained on it. Class j is confident for an example if p_j
is at least the mean of p_j over the examples labelled j. We count the examples labelled i whose most probable confident
class is j. Scaled to the number of labels i, the count says how many labels i should be j. These are the examples with
the largest p_j - p_i.

The network learns the wrong labels of the other parts: mistakes that follow a rule stay hidden. A few checked rows show
them, and `rows_to_check` says which rows to check.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from bilevel._util.checks import ShortRepr, check_counts, in_range, require
from bilevel._util.random_state import derived
from bilevel.applications.denoising.denoise import OnProgress, size_and_steps
from bilevel.applications.training import Augment, fit, probabilities
from bilevel.data import Labelled, Pair
from bilevel.derivatives.mixed_precision import Precision
from bilevel.errors import DataError

FOLDS = 5
# The learning rate of all trainings.
RATE = 1e-3


@dataclass(frozen=True, repr=False)
class Estimate(ShortRepr):
    """What cross-validation says about each label, in the order of the examples; `cross_validate` returns it.

    Fields:
        probabilities: The probability of each class, from a network that was not trained on the example.
        quality: The probability of the given label: review the examples with the lowest first.
        suspect: Whether each label is considered wrong.
        suggested: The most probable class.
        confidence: The probability of this class.

    >>> x, y = torch.randn(80, 2), torch.arange(80) % 2
    >>> cross_validate((x, y), nn.Linear(2, 2), steps=5).quality.shape
    torch.Size([80])
    """

    probabilities: Tensor
    quality: Tensor
    suspect: Tensor
    suggested: Tensor
    confidence: Tensor

    @property
    def noise_rate(self) -> float:
        """The share of suspects, an estimate of the share of wrong labels."""
        return float(self.suspect.double().mean())


def cross_validate(
    pair: Pair,
    model: nn.Module,
    *,
    steps: int | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    precision: Precision | None = None,
) -> Estimate:
    """Estimate which labels are wrong without a trusted set, then train `model` in place without the suspects.

    Args:
        pair: Inputs, and labels as class indices.
        model: A network with one score for each class.
        steps: The number of steps of each of the six trainings. None (default): as in `denoise`.
        augment: A function that changes a batch of inputs at random. None (default): inputs stay as they are.
        seed: The seed of all random draws. Default: 0.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        on_progress: A function that is called as `on_progress(stage, done, total)`. By default nothing is called.
        precision: "bf16" runs the network under bfloat16 autocast. None (default): its own precision.

    >>> x, y = torch.randn(80, 2), torch.arange(80) % 2
    >>> 0 <= cross_validate((x, y), nn.Linear(2, 2), steps=5).noise_rate <= 1
    True
    """
    x, y = pair
    if len(y) < 2 * FOLDS:
        raise DataError(f"cross-validation needs at least {2 * FOLDS} examples; got {len(y)}.")
    check_counts(steps=steps)
    size, total = size_and_steps(len(y), None, steps)
    first = copy.deepcopy(model)

    def train(network: nn.Module, rows: Tensor, stage: str) -> None:
        folder = checkpoint and checkpoint / stage.replace(" ", "-")
        options = {"steps": total, "batch": size, "rate": RATE, "augment": augment, "precision": precision}
        fit(
            network,
            x[rows],
            y[rows],
            seed=derived(seed, stage),
            checkpoint=folder,
            on_progress=lambda done: on_progress(stage, done, total),
            **options,  # type: ignore[arg-type]
        )

    parts, each = folds(y, seed), []
    for k in range(FOLDS):
        network = copy.deepcopy(first)
        train(network, (parts != k).nonzero().squeeze(1), f"part {k + 1} of {FOLDS}")
        each.append(probabilities(network, x[parts == k], precision=precision, augment=augment, seed=seed))
    found = torch.zeros(len(y), each[0].shape[1])
    for k, held in enumerate(each):
        found[parts == k] = held
    suspect = confident_mistakes(found, y)
    train(model, (~suspect).nonzero().squeeze(1), "without the suspects")
    confidence, suggested = found.max(1)
    return Estimate(found, found[torch.arange(len(y)), y], suspect, suggested, confidence)


def folds(y: Tensor, seed: int) -> Tensor:
    """Return the part of each example, from 0, drawn so that each part has each class in proportion."""
    random, part = np.random.default_rng(seed), np.zeros(len(y), dtype=np.int64)
    order = np.concatenate([random.permutation(np.flatnonzero(y.numpy() == c)) for c in np.unique(y.numpy())])
    part[order] = np.arange(len(y)) % FOLDS
    return torch.from_numpy(part)


def confident_mistakes(found: Tensor, y: Tensor) -> Tensor:
    """Return which labels are wrong, given probabilities from networks that were not trained on the examples."""
    classes = found.shape[1]
    given = one_hot(y, classes).to(found)
    counts = given.sum(0)
    levels = (given.T @ found).diagonal() / counts.clamp(min=1)
    sure = found >= torch.where(counts > 0, levels, torch.inf)
    guess = found.where(sure, found.new_zeros(())).argmax(1)
    joint = torch.zeros(classes, classes).to(found)
    some = sure.any(1)
    joint.index_put_((y[some], guess[some]), found.new_ones(int(some.sum())), accumulate=True)
    share = joint / joint.sum(1, keepdim=True).clamp(min=1)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    for i in range(classes):
        rows = (y == i).nonzero().squeeze(1)
        for j in range(classes):
            most = round(float(share[i, j]) * len(rows))
            if i != j and most:
                margins = found[rows, j] - found[rows, i]
                wrong[rows[margins.argsort(descending=True, stable=True)[:most]]] = True
    return wrong & (found.argmax(1) != y)


def rows_to_check(data: Labelled, estimate: Estimate, count: int, seed: int = 0) -> np.ndarray:
    """Return the rows whose labels are most worth checking: for every class and cluster, doubtful and typical ones.

    Args:
        data: The data without a trusted set.
        estimate: What `cross_validate` returned for it.
        count: The number of rows.
        seed: The seed of the clusters. Default: 0.

    >>> from bilevel.data import load
    >>> digits = load("digits")
    >>> found = cross_validate((digits.x, digits.y), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), steps=5)
    >>> len(rows_to_check(digits, found, 40))
    40
    """
    in_range("count", count, least=len(data.classes), below=data.count, whole=True)
    cluster = require("sklearn.cluster", "apps")
    x, likely, quality = data.x.flatten(1).numpy(), estimate.suggested.numpy(), estimate.quality.numpy()
    present, sizes = np.unique(likely, return_counts=True)
    picked: list[int] = []
    for c, size, left in zip(present, sizes, range(len(present), 0, -1), strict=True):
        rows, quota = np.flatnonzero(likely == c), min(size, (count - len(picked)) // left)
        if quota == 0:
            continue
        labels = cluster.KMeans(quota, n_init=1, random_state=seed).fit_predict(x[rows])
        for k in np.unique(labels):
            members = rows[labels == k]
            best = members[quality[members].argmin() if k % 2 else quality[members].argmax()]
            picked.append(int(best))
    rest = np.setdiff1d(np.argsort(quality, kind="stable"), picked, assume_unique=True)
    return np.sort(np.array([*picked, *rest[: count - len(picked)]], dtype=np.int64))
