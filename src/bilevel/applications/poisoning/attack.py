"""Training-data poisoning: points added to a training set that make the trained model fail as the attacker wants.

    min_u f(v*)    subject to    v* = argmin_v g(v; X and u),    u in its set                     (Eqs. 5, 11 and 12)

The labels of the points are fixed; u is their inputs. The lower variable starts at w, the weights of the victim trained
on clean data. For a network, g has many minimisers. The one with the best f gives the target the wanted class without
any help of the points, far from where training ends up, so the points would learn nothing. We therefore tether v: g has
the extra term mu/2 |v - w|^2, which acts on further training from w like a limited number of steps (Ali, Kolter and
Tibshirani, *A continuous-time view of early stopping for least squares*, AISTATS 2019). A victim that is trained from
scratch does not start at w, so the effect of the points on it must be measured.

`evaluate` measures it: it trains the victim from scratch on clean data and poison. The lower variable of the attack
proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import Callback, DataError, Penalty, Problem, Solution, solve
from bilevel._util.checks import ShortRepr, check_counts, in_range
from bilevel.applications.denoising.examples import Examples, examples
from bilevel.applications.poisoning.goals import Bound, Goal, Within, norms
from bilevel.applications.poisoning.victims import (
    Features,
    Loss,
    Recipe,
    Whitened,
    decayed,
    mapped,
    row_losses,
    trained,
    whitened,
)
from bilevel.applications.training import loader, probabilities, refuse_end
from bilevel.data import Pair
from bilevel.methods.base import Method

Regulariser = Callable[[nn.Module, Tensor | None], Tensor | float]
# With at most this many training examples, every step uses all of them.
FULL = 5000
BATCH = 200
STEPS = 500
# Learning rates: of the points, as a share of the room that they have, and of a whitened victim.
RATE, LOWER_RATE = 0.03, 0.01
# mu for networks. Much less leaves v too free; with ten times as much, the points see little more than grad g at w.
TETHER = 0.03


@dataclass(frozen=True, repr=False)
class Poison(ShortRepr):
    """The points of an attack, and how far they are from where they began. `attack` returns it.

    Fields:
        x: The inputs of the points.
        labels: Their labels.
        base: The inputs before they moved.
        rows: The rows of the bases in the set that they were drawn from.
        l2: The Euclidean distance of each point from its base.
        linf: The largest change of one number of each point.
        solution: The `Solution` of the bilevel run. None: the points were not moved, as in label flipping.
        seconds: The time of the attack.
        settings: The options that were used. Default: empty.

    >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
    >>> goal = untargeted((x[:40], y[:40]), (x[40:], y[40:]), points=2)
    >>> poison = attack(goal, (x[:40], y[:40]), nn.Linear(4, 2), recipe=Recipe(optimizer="lbfgs", decay=0.01), steps=5)
    >>> poison.l2.shape
    torch.Size([2])
    """

    x: Tensor
    labels: Tensor
    base: Tensor
    rows: Tensor
    l2: Tensor
    linf: Tensor
    solution: Solution | None
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> Pair:
        """Inputs and labels, to add to a training set."""
        return self.x, self.labels


@dataclass(frozen=True, repr=False)
class Evaluation(ShortRepr):
    """A victim trained from scratch, and its accuracy on a test set. `evaluate` returns it.

    Fields:
        model: The trained victim.
        accuracy: The share of the test examples that it gets right.
        by_class: This share for each class.
        predicted: The class that it predicts for each test example.

    >>> found = Evaluation(nn.Linear(4, 2), 0.5, {0: 0.0, 1: 1.0}, torch.tensor([1, 1]))
    >>> found.share((torch.rand(2, 4), torch.tensor([0, 1])), source=0, wanted=1)  # every 0 is taken for 1
    1.0
    """

    model: nn.Module
    accuracy: float
    by_class: dict[int, float]
    predicted: Tensor

    def share(self, test: Pair, source: int, wanted: int) -> float:
        """Return the share of the test examples of class `source` that are predicted as `wanted`."""
        mine = test[1] == source
        if not bool(mine.any()):
            raise DataError(f"the test set must have examples of class {source}; it has none.")
        return float((self.predicted[mine] == wanted).double().mean())


def attack(
    goal: Goal,
    train: Examples,
    model: nn.Module,
    *,
    recipe: Recipe | None = None,
    features: Features | None = None,
    loss: Loss = row_losses,
    method: Method | None = None,
    box: tuple[float | Tensor | None, float | Tensor | None] = (0.0, 1.0),
    bound: Bound | None = None,
    steps: int = STEPS,
    batch: int | None = None,
    whiten: bool = True,
    tether: float | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Poison:
    """Move the points of `goal` so that a victim trained on `train` and the points achieves the goal.

    Args:
        goal: The points and the objective, made by `untargeted`, `targeted` or `clean_label`.
        train: The clean training set: (inputs, labels), or a Dataset of pairs.
        model: The victim with its first weights, on any device; it does not change.
        recipe: How the victim is trained. None (default): `Recipe()`, 1,000 steps of Adam.
        features: A map of the inputs that is not trained; the victim acts on its output. None (default): the inputs.
        loss: The training loss, a function (scores, labels) -> one number for each row. Default: `row_losses`, the
            cross-entropy.
        method: The method of the bilevel run. None (default): a `Penalty` for a victim that is already trained.
        box: The least and the largest input; None for no limit. Default: (0, 1).
        bound: How far a point can be from its base, a `Bound`. None (default): anywhere in the box.
        steps: The number of steps. Default: 500.
        batch: The number of examples in a batch. None (default): 200, or all data in every step with at most 5,000
            examples.
        whiten: Whether a softmax regression is attacked in whitened coordinates (see `Whitened` in
            `bilevel.applications.poisoning.victims`). Default: True.
        tether: mu, the penalty weight of the distance from the victim trained on clean data. None (default): 0 for a
            victim that is whitened or trained by L-BFGS, and 0.03 for others.
        seed: The seed of all random draws. Default: 0.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        resume: Whether to resume from the state in `checkpoint`. Default: False.
        callbacks: Callbacks of the run, such as `[Progress()]`. Default: none.

    >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
    >>> goal = untargeted((x[:40], y[:40]), (x[40:], y[40:]), points=2)
    >>> attack(goal, (x[:40], y[:40]), nn.Linear(4, 2), recipe=Recipe(optimizer="lbfgs", decay=0.01), steps=5).x.shape
    torch.Size([2, 4])
    """
    began = time.perf_counter()
    recipe = recipe or Recipe()
    check_counts(steps=steps, batch=batch)
    in_range("tether", tether, least=0)
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    x, y = examples(train, "train", dtype)
    goal = _converted(goal, x, dtype)
    low, high = (edge.to(device, dtype) if isinstance(edge, Tensor) else edge for edge in box)
    within = Within(goal.base.to(device), low, high, bound)
    x, y, aim = mapped(features, x, device), y.to(device), mapped(features, goal.x, device)
    v: nn.Module = trained(model, x, y, recipe, loss=loss)
    linear = whitened(v, x, recipe.decay) if whiten else None
    if linear is not None:
        v, x, aim = linear, linear.mapped(x), linear.mapped(aim)
    v.train()
    if tether is None:
        tether = 0.0 if linear is not None or recipe.optimizer == "lbfgs" else TETHER
    method = method or default_method(within, linear is not None)
    batch = BATCH if batch is None and len(y) > FULL else batch
    regulariser = partial(_regularisation, [p.detach().clone() for p in v.parameters()], tether, recipe.decay)
    pair = aim, goal.y.to(device)
    problem = _problem(goal, (x, y), pair, features, loss, regulariser, within, isinstance(method, Penalty))
    u = within.base.clone().requires_grad_()
    data = None if batch is None else (loader(pair, batch), loader((x, y), batch))
    options: dict[str, Any] = {"max_steps": steps, "seed": seed, "callbacks": callbacks, "hypergradient": False}
    solution = solve(problem, method, u, v, data, checkpoint=checkpoint, resume=resume, **options)
    refuse_end(solution, "attack", f". {solution.message} Use another method or smaller rates.")
    settings = {
        "steps": steps,
        "batch": batch,
        "seed": seed,
        "recipe": recipe.describe(),
        "whitened": linear is not None,
        "tether": tether,
        "method": type(method).__name__,
        "options": method.describe(),
        "epsilon": bound and bound.epsilon,
        "norm": bound and bound.norm,
    }
    return made(goal, within.settled(u).cpu(), solution, time.perf_counter() - began, settings)


def _converted(goal: Goal, x: Tensor, dtype: torch.dtype) -> Goal:
    """Return the goal in this dtype; refuse inputs of another shape than x."""
    if x.shape[1:] != goal.base.shape[1:]:
        raise DataError(
            f"train and the goal must have inputs of one shape; got {tuple(x.shape[1:])} and "
            f"{tuple(goal.base.shape[1:])}."
        )
    collide = None if goal.collide is None else goal.collide.to(dtype)
    return replace(goal, base=goal.base.to(dtype), x=goal.x.to(dtype), collide=collide)


def default_method(within: Within, linear: bool) -> Penalty:
    """Return the penalty method for a victim that is already trained, so without warm-up.

    The rate of the points is 3% of the width of their box, or of the room that a bound leaves. In whitened coordinates
    the rate of the victim is known as well. The penalty weight of a point's bound is its share of the objective.
    """
    return Penalty(
        mode="stochastic",
        warm_up=0.0,
        cotangent="same",
        decay="linear",
        upper_optimizer=partial(torch.optim.Adam, lr=within.room * RATE),
        lower_optimizer=partial(torch.optim.Adam, lr=LOWER_RATE) if linear else None,
        lower_batches="shared",
        gamma_h=1 / len(within.base),
    )


def unmoved(goal: Goal) -> Poison:
    """Return the points of a goal as they begin, which is label flipping."""
    return made(goal, goal.base, None, 0.0, {})


def made(goal: Goal, x: Tensor, solution: Solution | None, seconds: float, settings: dict[str, Any]) -> Poison:
    """Return points with their distances from where they began."""
    return Poison(
        x=x,
        labels=goal.labels,
        base=goal.base,
        rows=goal.rows,
        l2=norms(x, goal.base, "l2"),
        linf=norms(x, goal.base, "linf"),
        solution=solution,
        seconds=seconds,
        settings=settings,
    )


def evaluate(
    poison: Poison | Pair | None,
    train: Examples,
    test: Examples,
    model: nn.Module,
    *,
    recipe: Recipe | None = None,
    features: Features | None = None,
    loss: Loss = row_losses,
) -> Evaluation:
    """Train the victim from `model`'s weights on `train` and the poison, and measure it on `test`.

    Args:
        poison: The points, a `Poison` or (inputs, labels). None: the victim is trained on clean data.
        train: The clean training set: (inputs, labels), or a Dataset of pairs.
        test: Examples of the same form, which the attack has not seen.
        model: The victim with its first weights; it does not change.
        recipe: How the victim is trained. None (default): `Recipe()`, 1,000 steps of Adam.
        features: A map of the inputs that is not trained; the victim acts on its output. None (default): the inputs.
        loss: The training loss, a function (scores, labels) -> one number for each row. Default: `row_losses`, the
            cross-entropy.

    >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
    >>> found = evaluate(None, (x[:40], y[:40]), (x[40:], y[40:]), nn.Linear(4, 2), recipe=Recipe(optimizer="lbfgs"))
    >>> 0 <= found.accuracy <= 1
    True
    """
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    x, y = examples(train, "train", dtype)
    x_test, y_test = examples(test, "test", dtype)
    if not len(y_test):
        raise DataError("test must have at least one example; got none.")
    if poison is not None:
        more, labels = poison.pair if isinstance(poison, Poison) else poison
        x, y = torch.cat([x, more.to(x)]), torch.cat([y, labels.to(y)])
    found = trained(model, mapped(features, x, device), y, recipe or Recipe(), loss=loss)
    predicted = probabilities(found, mapped(features, x_test, device)).argmax(1)
    right = (predicted == y_test).double()
    by_class = {int(c): float(right[y_test == c].mean()) for c in torch.unique(y_test)}
    return Evaluation(found, float(right.mean()), by_class, predicted)


# -- the problem -------------------------------------------------------------------------------------------------------


def _problem(
    goal: Goal,
    train: Pair,
    aim: Pair,
    features: Features | None,
    loss: Loss,
    regulariser: Regulariser,
    within: Within,
    multipliers: bool,
) -> Problem:
    """Return Eq. 5 on all data (if `batch` is None), or on pairs (x, y) of upper and lower batches."""
    rows, points = len(train[1]), goal.points
    device = train[1].device
    labels = goal.labels.to(device)
    collide = None if goal.collide is None else mapped(features, goal.collide, device)

    def points_and(u: Tensor, batch: Any, level: int, whole: Pair) -> tuple[Tensor, Pair]:
        """Return the features of the points, and the examples of a level: of the batch, or all."""
        if features is None:
            return u, whole if batch is None else batch
        z, pair = batch
        return z, whole if pair is None else pair[level]

    kept: list[Tensor] = []

    def prepare(map_: Features, u: Tensor, pair: Any) -> Any:
        """Return the features of the points; the certificate asks many times for the features of the same points."""
        if torch.is_grad_enabled():
            return map_(u), pair
        if not kept or not torch.equal(kept[0], u):
            kept[:] = [u.detach().clone(), map_(u)]
        return kept[1], pair

    def upper(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        z, (x, y) = points_and(u, batch, 0, aim)
        value = goal.objective(v.on_mapped(x) if isinstance(v, Whitened) else v(x), y)
        return value if collide is None else value + goal.collision(z, collide)

    def lower(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        z, (x, y) = points_and(u, batch, 1, train)
        if isinstance(v, Whitened):
            scores, of_points, weight = v.together(x, z)
        else:
            # One pass, as in training: batch normalisation takes its moments from both.
            scores, of_points = v(torch.cat([x, z])).split([len(x), len(z)])
            weight = None
        rest = regulariser(v, weight)
        return (rows * loss(scores, y).mean() + loss(of_points, labels).sum()) / (rows + points) + rest

    return Problem(
        upper,
        lower,
        project_upper=within.projection(multipliers),
        inequalities=within.inequalities(multipliers),
        prepare=None if features is None else partial(prepare, features),
    )


def _regularisation(
    start: Sequence[Tensor], tether: float, decay: float, v: nn.Module, weight: Tensor | None
) -> Tensor | float:
    """Return the other terms of g: the decay (of `weight` if it is known) and the tether to `start`."""
    penalty = decayed(v, decay, weight)
    if tether:
        apart = (p - w for p, w in zip(v.parameters(), start, strict=True))
        penalty = penalty + tether / 2 * torch.stack([torch.sum(d * d) for d in apart]).sum()
    return penalty
