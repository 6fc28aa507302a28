"""The goals of a poisoning attack: the points it begins with, the labels they keep, and what the victim should do.

untargeted     be wrong on everything: points from the training set with wrong labels
targeted       take one class for another: points of both classes, each with the other label
clean label    take one input for a class: points of that class with the right label, drawn to the input's features
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
    """Return the mean probability of the right class, for an untargeted attack to lower. Between 0 and 1.

    Scores are multiplied by 1.5, so that the attack cares more about which class is first than about how far ahead.
    """
    return (SHARPER * scores).softmax(1).gather(1, labels[:, None]).mean()


def shortfall(scores: Tensor, labels: Tensor) -> Tensor:
    """Return 1 minus the mean probability of the wanted class, for a targeted attack to lower. Between 0 and 1."""
    return 1 - scores.softmax(1).gather(1, labels[:, None]).mean()


def raised_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return minus the cross-entropy, for an attack that raises it (Eq. 11). It is not bounded below."""
    return -cross_entropy(scores, labels)


@dataclass(frozen=True)
class Goal:
    """The start of an attack, and its objective on the examples (x, y).

    - `base`: the points before they move; `rows`: their rows in the set that they were drawn from.
    - `labels`: of the points; they are fixed.
    - `objective`: compares the victim's scores on `x` with `y`; default the cross-entropy.
    - `collide`: an input whose features attract the points, if given; `collision_weight` (1) weighs the distance.
    - `squared`: whether this distance is squared (True, Section 3.4) or not (Eq. 12).
    """

    name: str
    base: Tensor
    labels: Tensor
    rows: Tensor
    x: Tensor
    y: Tensor
    objective: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    collide: Tensor | None = None
    collision_weight: float = 1.0
    squared: bool = True

    @property
    def points(self) -> int:
        return len(self.labels)

    def collision(self, z: Tensor, wanted: Tensor) -> Tensor:
        """Return the weighted distance of the points' features z from the wanted ones, as a mean over the points."""
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
    """Return points from the training set, each with a random wrong label, that should fail all of the validation set.

    `points` is their number; `classes` the number of classes, by default from the labels; `seed` draws the points.

    >>> untargeted((torch.rand(20, 3), torch.arange(20) % 2), (torch.rand(5, 3), torch.ones(5).long()), 4).points
    4
    """
    x, y = train
    _refuse(points, len(y), "the training set")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(y), generator=generator)[:points]
    count = 1 + int(torch.cat([y, validation[1]]).max()) if classes is None else classes
    if count < 2:
        raise DataError("an attack needs at least two classes; the labels have one.")
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
    """Return points of both classes, each with the other label, that make the victim take `source` for `wanted`.

    `objective` (default `shortfall`) is taken on the examples of `source` in the validation set; `seed` draws the
    points.
    """
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
    """Return the points of class `wanted` whose features are nearest to the target's, with their own label (Eq. 12).

    - `pool`: the set that the points are taken from. `target`: one input of another class.
    - `points` (1): their number.
    - `features`: a map on `device` ("cpu"), default the inputs themselves.
    - `collision` (1): the weight of the distance of the features, which is `squared` (True) or not.
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


def _refuse(points: int, rows: int, where: str, *, all_of_it: bool = False) -> None:
    in_range("points", points, least=1, whole=True)
    if points > rows or (points == rows and not all_of_it):
        rule = "at most" if all_of_it else "below"
        raise OptionError(f"points must be {rule} the {rows} examples of {where} that they begin from; got {points}.")
