"""Training-data poisoning: points that, added to a training set, make what is trained on it fail as the attacker wants.

    min_u f(v*)    subject to    v* = argmin_v g(v; X and u),    u in its set                     (Eqs. 5, 11 and 12)

The labels of the points are fixed; u is their inputs. The lower variable starts from the victim as trained on clean
data, at w. Of a network, g has many minimisers, and the one that serves f best gives the target what is wanted with no
help of the points, off the way that training takes: the points would have nothing to learn. So v is tethered. g has
mu/2 |v - w|^2 more, which is to further training from w what a limited number of steps is (Ali, Kolter and Tibshirani,
*A continuous-time view of early stopping for least squares*, AISTATS 2019). A victim that is trained from scratch is
not trained from w: what the points do to it is measured, not implied.

What an attack is worth is measured by `evaluate`, which trains the victim anew on clean data and poison; the attack's
own lower variable is no evidence. `poisoning_goals` has what attacks are after, `bounds` where u lives.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bilevel._util.checks import in_range
from bilevel.applications.denoising.examples import Examples, examples
from bilevel.applications.poisoning.bounds import Bound, Within, norms
from bilevel.applications.poisoning.goals import Goal
from bilevel.applications.poisoning.victims import Features, Loss, Recipe, decayed, mapped, row_losses, trained
from bilevel.applications.poisoning.whitened_victim import Whitened, whitened
from bilevel.applications.training import probabilities
from bilevel.data import Pair
from bilevel.errors import DataError, OptionError, ProblemError
from bilevel.methods.base import Method
from bilevel.methods.penalty import Penalty
from bilevel.problem.problem import Problem
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback
from bilevel.running.solve import solve

Price = Callable[[nn.Module, Tensor | None], Tensor | float]
FULL = 5000
"""Training examples up to which every step is on all of them."""
BATCH = 200
STEPS = 500
RATE, LOWER_RATE = 0.03, 0.01
"""Of the points, as a share of the room that they have, and of a whitened victim."""
TETHER = 0.03
"""mu for networks. Far less leaves v too free, tenfold it the points are told little more than the first slope."""


@dataclass(frozen=True)
class Poison:
    """The points that an attack made, and how far they are from where they began."""

    x: Tensor
    labels: Tensor
    base: Tensor
    rows: Tensor
    """Where the bases stood in the set that they were drawn from."""
    l2: Tensor
    linf: Tensor
    solution: Solution | None
    """None of points that no run made, as those of label flipping."""
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> Pair:
        """Inputs and labels, to be added to a training set."""
        return self.x, self.labels


@dataclass(frozen=True)
class Evaluation:
    """A victim trained from scratch, and how it does on a test set. Shares of 1."""

    model: nn.Module
    accuracy: float
    by_class: dict[int, float]
    """Of each class that the test set has."""
    predicted: Tensor

    def share(self, test: Pair, source: int, wanted: int) -> float:
        """How many test examples of one class are given the other."""
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
    """Move the points of `goal` so that a victim trained on `train` and them serves it.

    `model` is the victim at its first weights, on any device, and stays as it is; it acts on `features(x)` where there
    is a map. `recipe` says how the victim trains, `loss` what on. `box` bounds every input from below and above,
    `bound` what may be changed of a base. `batch=None` takes all data in every step up to 5,000 examples, and batches
    of 200 above. A softmax regression is attacked in whitened coordinates (see
    `bilevel.applications.poisoning.whitened_victim`),
    unless `whiten` is False.
    `tether` is mu, the price of the way from the victim as trained on clean data; None is 0 for a victim that is
    whitened or trained to the minimum by L-BFGS, and 0.03 for all others.
    `method=None` is `default_method`. `checkpoint` names a folder that a stopped run goes on from with `resume=True`.
    """
    began = time.perf_counter()
    recipe = recipe or Recipe()
    in_range("steps", steps, least=1, whole=True)
    in_range("batch", batch, least=1, whole=True)
    in_range("tether", tether, least=0)
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    x, y = examples(train, "train", dtype)
    if x.shape[1:] != goal.base.shape[1:]:
        raise DataError(
            f"train and the goal must have inputs of one shape; got {tuple(x.shape[1:])} and "
            f"{tuple(goal.base.shape[1:])}."
        )
    collide = None if goal.collide is None else goal.collide.to(dtype)
    goal = replace(goal, base=goal.base.to(dtype), x=goal.x.to(dtype), collide=collide)
    base = goal.base.to(device)
    within = Within(base, _on(box[0], device, dtype), _on(box[1], device, dtype), bound)
    x, y = mapped(features, x, device), y.to(device)
    v: nn.Module = trained(model, x, y, recipe, loss=loss)
    if whiten:
        v = whitened(v, x, recipe.decay) or v
    v.train()
    if tether is None:
        tether = 0.0 if isinstance(v, Whitened) or recipe.optimizer == "lbfgs" else TETHER
    method = method or default_method(within, isinstance(v, Whitened))
    multipliers = isinstance(method, Penalty)
    if batch is None and len(y) > FULL:
        batch = BATCH
    aim = mapped(features, goal.x, device)
    if isinstance(v, Whitened):
        x, aim = v.mapped(x), v.mapped(aim)
    price = partial(_price, [p.detach().clone() for p in v.parameters()], tether, recipe.decay)
    problem = _problem(goal, (x, y), (aim, goal.y.to(device)), features, loss, price, within, multipliers)
    u = base.clone().requires_grad_()
    solution = solve(
        problem,
        method,
        u,
        v,
        _loaders((aim, goal.y), (x, y), batch),
        max_steps=steps,
        seed=seed,
        hypergradient=False,
        callbacks=callbacks,
        checkpoint=checkpoint,
        resume=resume,
    )
    if solution.interrupted:
        raise KeyboardInterrupt
    if solution.status is Status.DIVERGED:
        raise ProblemError(
            f"the attack diverged after {solution.steps} steps. {solution.message} Use another method or smaller rates."
        )
    settings = {
        "steps": steps,
        "batch": batch,
        "seed": seed,
        "recipe": recipe.describe(),
        "whitened": isinstance(v, Whitened),
        "tether": tether,
        "epsilon": bound and bound.epsilon,
        "norm": bound and bound.norm,
        "method": type(method).__name__,
        "options": method.describe(),
    }
    return made(goal, within.settled(u).cpu(), solution, time.perf_counter() - began, settings)


def default_method(within: Within, linear: bool) -> Penalty:
    """The penalty method from a victim that is trained already, so without warm-up.

    The rate of the points is 3% of the width of their box, and less where a bound leaves less room. In whitened
    coordinates the rate of the victim is known, too. The price of a point's bound is its share of the objective.
    """
    adam = partial(torch.optim.Adam, lr=within.room * RATE)
    lower = partial(torch.optim.Adam, lr=LOWER_RATE) if linear else None
    return Penalty(
        mode="stochastic",
        warm_up=0.0,
        upper_optimizer=adam,
        lower_optimizer=lower,
        lower_batches="shared",
        gamma_h=1 / len(within.base),
    )


def unmoved(goal: Goal) -> Poison:
    """The bases of a goal with its labels, as they are: label flipping."""
    return made(goal, goal.base, None, 0.0, {})


def made(goal: Goal, x: Tensor, solution: Solution | None, seconds: float, settings: dict[str, Any]) -> Poison:
    """Points with how far they are from where they began."""
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
    """Train the victim from `model`'s weights on `train` and the poison, and measure it on a test set.

    `poison=None` is the victim on clean data. `test` must hold nothing that the attack has seen.
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
    price: Price,
    within: Within,
    multipliers: bool,
) -> Problem:
    """Eq. 5 on full data, where `batch` is None, or over pairs (x, y) of upper and lower batches."""
    rows, points = len(train[1]), goal.points
    device = train[1].device
    labels = goal.labels.to(device)
    collide = None if goal.collide is None else mapped(features, goal.collide, device)

    def points_and(u: Tensor, batch: Any, level: int, whole: Pair) -> tuple[Tensor, Pair]:
        """The features of the points, and the examples of a level: those of the batch, or all."""
        if features is None:
            return u, whole if batch is None else batch
        z, pair = batch
        return z, whole if pair is None else pair[level]

    kept: list[Tensor] = []

    def prepare(map_: Features, u: Tensor, pair: Any) -> Any:
        """The features of the points. The certificate asks for those of the same points many times over."""
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
        return (rows * loss(scores, y).mean() + loss(of_points, labels).sum()) / (rows + points) + price(v, weight)

    return Problem(
        upper,
        lower,
        project_upper=within.projection(multipliers),
        inequalities=within.inequalities(multipliers),
        prepare=None if features is None else partial(prepare, features),
    )


def _price(start: Sequence[Tensor], tether: float, decay: float, v: nn.Module, weight: Tensor | None) -> Tensor | float:
    """What g has beside the losses: decay, of a weight that is at hand or of the model's, and the tether to `start`."""
    price = decayed(v, decay) if weight is None else decay / 2 * torch.sum(weight * weight)
    if tether:
        apart = (p - w for p, w in zip(v.parameters(), start, strict=True))
        price = price + tether / 2 * torch.stack([torch.sum(d * d) for d in apart]).sum()
    return price


def _loaders(aim: Pair, train: Pair, batch: int | None) -> tuple[DataLoader[Any], DataLoader[Any]] | None:
    if batch is None:
        return None
    upper, lower = (TensorDataset(x.cpu(), y.cpu()) for x, y in (aim, train))
    return (
        DataLoader(upper, min(batch, len(upper)), shuffle=True, drop_last=True),
        DataLoader(lower, min(batch, len(lower)), shuffle=True, drop_last=True),
    )


def _on(edge: float | Tensor | None, device: torch.device, dtype: torch.dtype) -> float | Tensor | None:
    return edge.to(device, dtype) if isinstance(edge, Tensor) else edge


def smallest(values: Sequence[float], flips: Callable[[float], bool]) -> float | None:
    """The smallest of some rising values for which `flips` holds, by bisection; None where it fails for the largest.

    `flips` is asked for the largest first, and then for about log2 of the rest. It should hold above where it holds.
    """
    ordered = list(values)
    if not ordered or any(b <= a for a, b in pairwise(ordered)):
        raise OptionError(f"values must rise, and be one at least; got {ordered}.")
    if not flips(ordered[-1]):
        return None
    return ordered[bisect_left(ordered, True, hi=len(ordered) - 1, key=flips)]
