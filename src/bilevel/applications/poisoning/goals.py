"""The goals of a poisoning attack: the points it begins with, their labels, how far they can go, and what is to happen.

untargeted     be wrong on everything: points from the training set with wrong labels
targeted       take one class for another: points of both classes, each with the other label
clean label    take one input for a class: points of that class with the right label, drawn to the input's features

The points stay in a box, and within a bound on the distance from their bases in the l2 or l-infinity norm. A projection
keeps the points in the box; an l-infinity bound makes the box smaller. An l2 bound is an inequality for methods with
multipliers, |u_i - b_i|^2 / epsilon^2 - 1 <= 0; for other methods a projection shortens the distance. `settled` makes
the returned points satisfy both exactly, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel import Box, DataError, OptionError
from bilevel._util.checks import ShortRepr, check_counts, in_range, one_of
from bilevel.applications.poisoning.victims import Features, mapped
from bilevel.data import Pair
from bilevel.problem import Projection

Norm = Literal["l2", "linf"]
SHARPER = 1.5
# The share by which a perturbation is shortened if rounding leaves it outside of its bound; doubled at each try.
SHRINK = 1e-6


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


@dataclass(frozen=True, repr=False)
class Goal(ShortRepr):
    """The start of an attack, and its objective on the examples (x, y); `untargeted` and other functions make it.

    Args:
        name: The kind of attack, for messages and reports.
        base: The inputs of the points before they move.
        labels: The labels of the points; they are fixed.
        rows: The rows of the bases in the set that they were drawn from.
        x: The inputs that the objective is taken on.
        y: The labels that the victim's scores on `x` are compared with.
        objective: A function (scores, labels) -> number that the attack lowers. Default: `cross_entropy`.
        collide: An input whose features attract the points. None (default): there is none.
        collision_weight: The weight of the distance of the features from it. Default: 1.
        squared: Whether this distance is squared, as in Section 3.4 of the paper (Eq. 12 has the distance). Default:
            True.

    >>> x, y = torch.rand(6, 4), torch.arange(6) % 2
    >>> Goal("by hand", base=x[:2], labels=1 - y[:2], rows=torch.arange(2), x=x[2:], y=y[2:]).points
    2
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
        return self.collision_weight * (square if self.squared else (square + 1e-12).sqrt()).mean()


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

    Args:
        train: Inputs and labels that the points are drawn from.
        validation: Inputs and labels that the victim should get wrong.
        points: The number of points.
        objective: A function (scores, labels) -> number that the attack lowers. Default: `failure`, the mean
            probability of the right class.
        classes: The number of classes. None (default): as many as the labels show.
        seed: The seed of the draw. Default: 0.

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
    """Return points of two classes, each with the other label, that make the victim take `source` for `wanted`.

    Args:
        train: Inputs and labels that the points are drawn from.
        validation: Inputs and labels; the objective is taken on the examples of `source` in it.
        points: The number of points, half of each class.
        source: The class that should be mistaken.
        wanted: The class that it should be mistaken for.
        objective: A function (scores, labels) -> number that the attack lowers. Default: `shortfall`, 1 minus the mean
            probability of the wanted class.
        seed: The seed of the draw. Default: 0.

    >>> x, y = torch.rand(40, 3), torch.arange(40) % 4
    >>> targeted((x[:30], y[:30]), (x[30:], y[30:]), points=4, source=1, wanted=2).labels
    tensor([2, 2, 1, 1])
    """
    x, y = train
    if source == wanted:
        raise OptionError(f"source and wanted must be two classes; both are {source}.")
    check_counts(points=points)
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

    Args:
        pool: Inputs and labels that the points are taken from.
        target: One input of another class, which the victim should take for `wanted`.
        wanted: The class of the points.
        points: The number of points. Default: 1.
        features: The map of inputs to features on which the victim acts. None (default): the inputs themselves.
        collision: The weight of the distance between the features of the points and of the target. Default: 1.
        squared: Whether this distance is squared. Default: True.
        device: The device of `features`. Default: "cpu".

    >>> x, y = torch.rand(20, 3), torch.arange(20) % 2
    >>> clean_label((x, y), torch.rand(3), wanted=1, points=2).labels
    tensor([1, 1])
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
    check_counts(points=points)
    if points > rows or (points == rows and not all_of_it):
        rule = "at most" if all_of_it else "below"
        raise OptionError(f"points must be {rule} the {rows} examples of {where} that they begin from; got {points}.")


@dataclass(frozen=True)
class Bound:
    """A bound on the distance of each point from its start b_i, |u_i - b_i| <= epsilon.

    Args:
        epsilon: The largest distance, in the unit of the inputs.
        norm: "l2" (default), the Euclidean distance, or "linf", the largest change of one number.

    >>> Bound(0.5, "linf")
    Bound(epsilon=0.5, norm='linf')
    """

    epsilon: float
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        in_range("epsilon", self.epsilon, above=0)
        one_of("norm", self.norm, ("l2", "linf"))

    def inequality(self, u: Tensor, base: Tensor) -> Tensor:
        """Return one number for each point, which is not positive if the point is within the l2 bound."""
        return ((u - base) ** 2).flatten(1).sum(1) / self.epsilon**2 - 1


def norms(u: Tensor, base: Tensor, norm: Norm) -> Tensor:
    """Return the distance of each point from its base, in double precision."""
    apart = (u.detach().double() - base.double()).flatten(1)
    return apart.norm(dim=1) if norm == "l2" else apart.abs().amax(1)


@dataclass(frozen=True)
class Within:
    """The set of the poison points: a box around all inputs, and a bound around each base."""

    base: Tensor
    low: float | Tensor | None = 0.0
    high: float | Tensor | None = 1.0
    bound: Bound | None = None

    def __post_init__(self) -> None:
        if not torch.equal(self._box()(self.base), self.base):
            raise DataError(
                f"the base points must lie in the box from {_text(self.low)} to {_text(self.high)}; they go from "
                f"{float(self.base.min()):.4g} to {float(self.base.max()):.4g}. Scale the inputs, or pass another box."
            )

    def _box(self) -> Projection:
        return (lambda u: u) if self.low is None and self.high is None else Box(self.low, self.high)

    @property
    def room(self) -> float:
        """How far one number of an input can move: the width of the box, or less if the bound leaves less."""
        width = 1.0
        if self.low is not None and self.high is not None:
            width = float(torch.as_tensor(self.high - self.low, dtype=torch.float64).mean())
        if self.bound is None:
            return width
        # All numbers of a point share the l2 bound; three times their equal share leaves room for unequal moves.
        share = 2.0 if self.bound.norm == "linf" else 3.0 / self.base[0].numel() ** 0.5
        return min(width, share * self.bound.epsilon)

    def projection(self, multipliers: bool) -> Projection | None:
        """Return the projection after a step, or None; without multipliers it also keeps the l2 bound."""
        box, bound, base = self._box(), self.bound, self.base
        if bound is not None and bound.norm == "linf":
            return Box(box(base - bound.epsilon), box(base + bound.epsilon))
        if bound is not None and not multipliers:
            return lambda u: drawn_back(box(u), base, bound.epsilon)
        return None if self.low is None and self.high is None else box

    def inequalities(self, multipliers: bool) -> tuple[Any, ...]:
        """Return the constraints of the problem that are not in the projection."""
        if self.bound is None or self.bound.norm == "linf" or not multipliers:
            return ()
        bound, base = self.bound, self.base
        return (lambda u, v, batch: bound.inequality(u, base),)

    @torch.no_grad()
    def settled(self, u: Tensor) -> Tensor:
        """Return points that satisfy the box and the bound exactly."""
        projection = self.projection(multipliers=False)
        u = u.detach() if projection is None else projection(u.detach())
        if self.bound is None:
            return u
        for k in range(20):
            far = norms(u, self.base, self.bound.norm) > self.bound.epsilon
            if not bool(far.any()):
                return u
            u[far] = self.base[far] + (u[far] - self.base[far]) * (1 - SHRINK * 2**k)
            u = self._box()(u)
        raise OptionError(
            f"epsilon must be large enough for the precision of the inputs; got {self.bound.epsilon} with inputs of "
            f"size {float(self.base.abs().max()):.3g} in {str(u.dtype).removeprefix('torch.')}."
        )


def drawn_back(u: Tensor, base: Tensor, epsilon: float | Tensor) -> Tensor:
    """Return the points, each moved on the straight line towards its base until it is within `epsilon`.

    `epsilon` is one number, or one for each point. A box that holds a point and its base also holds the result.
    """
    apart = u - base
    size = (apart * apart).flatten(1).sum(1).sqrt()
    factor = torch.where(size > epsilon, epsilon / size, torch.ones_like(size))
    return base + apart * factor.reshape(-1, *[1] * (u.ndim - 1))


def _text(edge: float | Tensor | None) -> str:
    if edge is None:
        return "no end"
    return f"{float(edge):g}" if not isinstance(edge, Tensor) or edge.numel() == 1 else "a tensor of edges"
