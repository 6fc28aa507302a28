"""What a poisoning attack is after: where its points begin, the labels they keep, and what the victim is to do.

untargeted     wrong on everything: points from the training set with wrong labels
targeted       one class taken for another: points of both with each other's label
clean label    one input taken for a class: points of that class, rightly labelled, drawn to the input's features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel._util.checks import in_range
from bilevel.applications.poisoning.victims import Features, mapped
from bilevel.data import Pair
from bilevel.errors import DataError, OptionError

SHARPER = 1.5


def failure(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean probability of the right class, with scores made sharper by half: what an untargeted attack brings down.

    Between 0 and 1. Sharper scores have the attack care more for which class is first than for how far it is ahead.
    """
    return _given(SHARPER * scores, labels)


def shortfall(scores: Tensor, labels: Tensor) -> Tensor:
    """One less the mean probability of the wanted class: what a targeted attack brings down. Between 0 and 1."""
    return 1 - _given(scores, labels)


def _given(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.softmax(1).gather(1, labels[:, None]).mean()


def raised_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy, to be raised (Eq. 11). It has no least value."""
    return -cross_entropy(scores, labels)


@dataclass(frozen=True)
class Goal:
    """The start of an attack, and the examples that its objective is the loss of."""

    name: str
    base: Tensor
    labels: Tensor
    """Of the points; fixed."""
    rows: Tensor
    """Where the bases stood in the set that they were drawn from."""
    x: Tensor
    y: Tensor
    """What `objective` compares the victim's scores on x with."""
    objective: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    collide: Tensor | None = None
    """The input whose features the points are drawn to."""
    collision_weight: float = 1.0
    squared: bool = True
    """Whether the distance of the features is squared (Section 3.4) or not (Eq. 12)."""

    @property
    def points(self) -> int:
        return len(self.labels)

    def collision(self, z: Tensor, wanted: Tensor) -> Tensor:
        """The weighted distance of the points' features from the wanted ones, as a mean over the points."""
        square = ((z - wanted) ** 2).flatten(1).sum(1)
        apart = square if self.squared else (square + 1e-12).sqrt()
        return self.collision_weight * apart.mean()


def untargeted(
    train: Pair,
    validation: Pair,
    points: int,
    *,
    objective: Callable[[Tensor, Tensor], Tensor] = failure,
    classes: int | None = None,
    seed: int = 0,
) -> Goal:
    """Points from the training set, each with a wrong label drawn at random, against all of the validation set."""
    x, y = train
    _refuse(points, len(y), "the training set")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(y), generator=generator)[:points]
    count = _classes(classes, y, validation[1])
    labels = (y[rows] + torch.randint(1, count, (points,), generator=generator)) % count
    return Goal("untargeted", x[rows].clone(), labels, rows, *validation, objective)


def targeted(
    train: Pair,
    validation: Pair,
    points: int,
    *,
    source: int,
    wanted: int,
    objective: Callable[[Tensor, Tensor], Tensor] = shortfall,
    seed: int = 0,
) -> Goal:
    """Points of both classes with each other's label, so that examples of `source` are taken for `wanted`."""
    x, y = train
    if source == wanted:
        raise OptionError(f"source and wanted must be two classes; both are {source}.")
    in_range("points", points, least=1, whole=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for label, count in ((source, points - points // 2), (wanted, points // 2)):
        mine = torch.nonzero(y == label).squeeze(1)
        if len(mine) < count:
            raise DataError(
                f"the training set must have {count} examples of class {label} to begin from; it has {len(mine)}."
            )
        drawn.append(mine[torch.randperm(len(mine), generator=generator)[:count]])
    rows = torch.cat(drawn)
    labels = torch.where(y[rows] == source, wanted, source)
    aim = validation[0][validation[1] == source]
    if not len(aim):
        raise DataError(f"the validation set must have examples of class {source}; it has none.")
    return Goal("targeted", x[rows].clone(), labels, rows, aim, torch.full((len(aim),), wanted), objective)


def clean_label(
    pool: Pair,
    target: Tensor,
    wanted: int,
    *,
    points: int = 1,
    features: Features | None = None,
    collision: float = 1.0,
    squared: bool = True,
    device: torch.device | str = "cpu",
) -> Goal:
    """Points of class `wanted` whose features are nearest to the target's, with their own label (Eq. 12).

    `pool` is what the bases are taken from; the target is one input of another class.
    """
    x, y = pool
    in_range("collision", collision, least=0)
    if target.shape != x.shape[1:]:
        raise DataError(f"the target must be one input of shape {tuple(x.shape[1:])}; got {tuple(target.shape)}.")
    mine = torch.nonzero(y == wanted).squeeze(1)
    _refuse(points, len(mine), f"class {wanted} of the pool", all_of_it=True)
    where = torch.device(device)
    apart = mapped(features, x[mine], where).flatten(1) - mapped(features, target[None].to(x), where).flatten(1)
    rows = mine[apart.norm(dim=1).argsort()[:points].cpu()]
    return Goal(
        "clean-label",
        x[rows].clone(),
        y[rows].clone(),
        rows,
        target[None].clone(),
        torch.tensor([wanted]),
        collide=target[None].clone(),
        collision_weight=collision,
        squared=squared,
    )


def _classes(given: int | None, *labels: Tensor) -> int:
    count = 1 + int(max(int(y.max()) for y in labels)) if given is None else given
    if count < 2:
        raise DataError("an attack needs at least two classes; the labels have one.")
    return count


def _refuse(points: int, rows: int, where: str, *, all_of_it: bool = False) -> None:
    in_range("points", points, least=1, whole=True)
    if points > rows or (points == rows and not all_of_it):
        rule = "at most" if all_of_it else "below"
        raise OptionError(f"points must be {rule} the {rows} examples of {where}, where they begin; got {points}.")
