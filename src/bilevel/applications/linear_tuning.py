"""Penalties of linear models, tuned on rows that are held out: one for all features, or one for each.

    w_k = argmin_w  sum over the rows outside fold k of l(x w, y)  +  1/2 sum_j alpha_j w_j^2
    alpha = argmin  mean over the folds' rows of l(x w_k, y)  +  caution / m  sum_j log(alpha_j / alpha_0)^2 / 2

All folds are one lower level: their weights are one tensor, and a product with the inputs serves them all. A held-out
split is one fold. alpha_0, one penalty for all features, is tuned first, and the features' start at it. The last term
keeps thousands of them from fitting the m held-out rows: with caution 1 a penalty that is e times as large must save
1/2 in the sum of the held-out rows' -log(likelihood), as under a normal prior of deviation 1 (of the squared error:
with that of alpha_0 as the variance).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from ..errors import DataError
from ..lower_level import flatten
from ..problem import Problem
from ..vectors import gradient
from .nested import Descended, Map, Nested, descend
from .ranges import Range

Loss = Literal["squared", "logistic"]
CURVATURES = {"squared": 1.0, "logistic": 0.25}
"""The curvature of a loss in a score: that of the squared error exactly, of the logistic loss at the most."""
LOW, HIGH = 1e-5, 1e4
"""The range of the single penalty, in units of the features' curvature."""
BELOW, ABOVE = 0.01, 1e4
"""The range of each feature's penalty, in units of the single one."""
WIDTH = 1.0
"""The deviation of the logarithms of the features' penalties that is expected."""
DENSE = 4e9
"""Products of numbers that the inverse of a second derivative may take."""
START = 0.1
Watch = Callable[[str, int, float], object]
"""Told the stage, the steps done in it, and the validation loss."""


@dataclass(frozen=True)
class Rows:
    """Inputs (n, d), targets, and the fold of each row; rows of fold -1 are held out of none."""

    x: Tensor
    y: Tensor
    """Numbers, or indices of classes."""
    fold: Tensor
    loss: Loss
    outputs: int = 1
    """Scores of a row: one for each class from three classes on."""

    @property
    def folds(self) -> int:
        return int(self.fold.max()) + 1

    def select(self, mask: Tensor) -> Rows:
        return Rows(self.x[mask], self.y[mask], self.fold[mask], self.loss, self.outputs)

    def chances(self, scores: Tensor) -> Tensor:
        """The probabilities of the classes that have a score."""
        return torch.sigmoid(scores) if self.outputs == 1 else scores.softmax(-1)

    def losses(self, scores: Tensor) -> Tensor:
        """Of scores (n, folds, outputs): (n, folds)."""
        if self.loss == "squared":
            return (scores[..., 0] - self.y[:, None]) ** 2 / 2
        if self.outputs == 1:
            return softplus((1 - 2 * self.y[:, None]) * scores[..., 0])
        target = self.y[:, None].expand(scores.shape[:2])
        return cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(scores.shape[:2])


@dataclass(frozen=True)
class LinearTuned:
    """The penalty of each feature, as sums over rows have it, and the model trained on all rows with them."""

    alpha: Tensor
    weight: Tensor
    """(outputs, d)"""
    bias: Tensor
    single: float
    """The single penalty that the features' began with; the one itself where only that was tuned."""
    single_loss: float
    """The validation loss of the single penalty."""
    valid_loss: float
    path: list[float]
    """The validation loss after each step, those of the single penalty first."""
    seconds: list[float]
    single_steps: int
    converged: bool
    interrupted: bool = False


class FoldedModel:
    """The lower level: the weights of all folds, and a bias each that is not penalised, on centred inputs."""

    def __init__(self, rows: Rows, held_out: bool = True) -> None:
        self.rows = rows
        folds, dtype = rows.folds if held_out else 1, rows.x.dtype
        inside = torch.ones(len(rows.y), 1, dtype=torch.bool)
        if held_out:
            inside = rows.fold[:, None] != torch.arange(folds)
        self.counts = inside.sum(0).to(dtype)
        self.inside = inside.to(dtype) / self.counts
        out = (~inside).to(dtype)
        self.out = out / out.sum() if held_out else out
        self.center = rows.x.mean(0)
        self.x = rows.x - self.center
        self.curvature = CURVATURES[rows.loss] * self.x.square().mean(0)
        self.v = {
            "weight": torch.zeros(folds, rows.outputs, rows.x.shape[1], dtype=dtype, requires_grad=True),
            "bias": torch.zeros(folds, rows.outputs, dtype=dtype, requires_grad=True),
        }

    def scores(self, v: dict[str, Tensor]) -> Tensor:
        """(n, folds, outputs)"""
        w = v["weight"]
        return (self.x @ w.flatten(0, 1).T).view(len(self.x), *w.shape[:2]) + v["bias"]

    def lower(self, alpha: Tensor, v: dict[str, Tensor]) -> Tensor:
        """The mean loss of each fold's training rows and its penalty, summed over the folds."""
        penalty = (alpha * v["weight"].square() / self.counts[:, None, None]).sum() / 2
        return (self.inside * self.rows.losses(self.scores(v))).sum() + penalty

    def upper(self, v: dict[str, Tensor]) -> Tensor:
        """The mean loss of the rows that the folds hold out."""
        return (self.out * self.rows.losses(self.scores(v))).sum()

    def slope(self) -> float:
        """|grad_v g| at the present v, of g without penalties: at v = 0 they have no part in it."""
        g = self.lower(torch.zeros(self.x.shape[1], dtype=self.x.dtype), self.v)
        return float(flatten(gradient(g, list(self.v.values()))).norm())

    @torch.no_grad()
    def second(self, alpha: Tensor) -> tuple[Map, Map]:
        """The product with the lower level's second derivative at the present v, and a map near its inverse.

        That is output by output exact where it takes no more than `DENSE` products of numbers, else of the diagonal.
        """
        w, x = self.v["weight"], self.x
        p = None if self.rows.loss == "squared" else self.rows.chances(self.scores(self.v))
        bend = self.inside[..., None].expand(-1, -1, w.shape[1])  # (n, folds, outputs)
        bend = bend if p is None else bend * p * (1 - p)
        top = bend.sum(0)
        ridge = (alpha / self.counts[:, None]).unsqueeze(1)  # (folds, 1, d)
        factor, diagonal = None, torch.ones(())
        if bend[0].numel() * x.shape[1] ** 2 * (len(x) + x.shape[1] / 3) <= DENSE:
            blocks = torch.stack([x.T @ (b[:, None] * x) for b in bend.flatten(1).T]).view(*w.shape, x.shape[1])
            blocks += torch.diag_embed(ridge.expand(w.shape))
            factor, failed = torch.linalg.cholesky_ex(blocks)
            factor = None if bool(failed.any()) else factor
        if factor is None:
            diagonal = (bend.flatten(1).T @ x.square()).view(w.shape) + ridge
            diagonal = diagonal.clamp(min=1e-12 * float(diagonal.max()))

        def product(vector: Tensor) -> Tensor:
            first, last = torch.split(vector, [w.numel(), top.numel()])
            part = first.view(w.shape)
            moved = (x @ part.flatten(0, 1).T).view(bend.shape) + last.view(top.shape)
            pull = bend * moved
            if p is not None and w.shape[1] > 1:
                pull = self.inside[..., None] * p * (moved - (p * moved).sum(-1, keepdim=True))
            bent = (pull.flatten(1).T @ x).view(w.shape) + ridge * part
            return torch.cat([bent.flatten(), pull.sum(0).flatten()])

        def near(vector: Tensor) -> Tensor:
            first, last = torch.split(vector, [w.numel(), top.numel()])
            part = first.view(w.shape)
            part = part / diagonal if factor is None else torch.cholesky_solve(part[..., None], factor)[..., 0]
            return torch.cat([part.flatten(), last / top.flatten().clamp(min=1e-12)])

        return product, near


def tune_linear(
    rows: Rows, *, penalty: Literal["single", "per-feature"] = "per-feature", caution: float = 1.0, steps: int = 100,
    tolerance: float = 1e-4, seconds: float | None = None, watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LinearTuned:  # fmt: skip
    """Tune the penalties on the held-out rows, and train on all rows with them.

    A stage ends where five steps have lowered the validation loss by less than `tolerance` of itself, after `steps`, or
    where all have taken `seconds`.
    """
    _refuse(rows)
    began = clock()
    model, d, held_out = FoldedModel(rows), rows.x.shape[1], int((rows.fold >= 0).sum())
    first = model.slope()

    def stage(name: str, alpha: Callable[[Tensor], Tensor], t: Tensor, price: Callable[[Tensor], Any]) -> Descended:
        problem = Problem(lambda u, v, _: model.upper(v) + price(u), lambda u, v, _: model.lower(alpha(u), v))
        return descend(
            problem, t, model.v, max_steps=steps, tolerance=tolerance,
            seconds=None if seconds is None else max(0.0, seconds - (clock() - began)),
            watch=watch and (lambda done, value: watch(name, done, value)),
            curvature=lambda: model.second(alpha(t.detach())), first=first, clock=clock,
        )  # fmt: skip

    unit, every = model.curvature.mean() * model.counts.mean(), Range(LOW, HIGH)
    t = every.free(torch.tensor([START], dtype=rows.x.dtype)).requires_grad_()
    found = stage("one penalty", lambda t: unit * every.value(t), t, lambda t: 0.0)
    single = unit * every.value(t.detach())
    alpha, path, times, count = single.expand(d).clone(), found.path, found.seconds, len(found.path)
    single_loss = loss = model.upper(model.v).item()
    if penalty == "per-feature" and not found.interrupted and d > 1:
        each, size = Range(BELOW, ABOVE), 2 * loss if rows.loss == "squared" else 1.0

        def price(t: Tensor) -> Tensor:
            """What moving away from the single penalty costs."""
            return caution * size / held_out * (each.value(t).log() / WIDTH).square().sum() / 2

        u = each.free(torch.ones(d, dtype=rows.x.dtype)).requires_grad_()
        before = clock() - began
        found = stage("a penalty for each feature", lambda t: single * each.value(t), u, price)
        alpha, loss = single * each.value(u.detach()), model.upper(model.v).item()
        path, times = path + found.path, times + [before + s for s in found.seconds]
    weight, bias = trained(rows, alpha)
    return LinearTuned(
        alpha=alpha, weight=weight, bias=bias, single=float(single), single_loss=single_loss, valid_loss=loss,
        path=path, seconds=times, single_steps=count, converged=found.converged, interrupted=found.interrupted,
    )  # fmt: skip


def trained(rows: Rows, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (outputs, d) and bias (outputs) of the model with these penalties, on all rows."""
    model = FoldedModel(rows, held_out=False)
    _solve(model, alpha)
    with torch.no_grad():
        weight = model.v["weight"][0].detach()
        return weight, model.v["bias"][0].detach() - weight @ model.center


def held_out_loss(rows: Rows, alpha: Tensor) -> float:
    """The validation loss of these penalties."""
    model = FoldedModel(rows)
    _solve(model, alpha)
    with torch.no_grad():
        return float(model.upper(model.v))


def _solve(model: FoldedModel, alpha: Tensor) -> None:
    problem = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(alpha, v))
    u = torch.zeros(1, dtype=alpha.dtype, requires_grad=True)
    Nested(problem, u, model.v, lambda: model.second(alpha)).solve_lower()


def _refuse(rows: Rows) -> None:
    for k in range(rows.folds):
        members = rows.fold == k
        if not bool(members.any()) or bool(members.all()):
            raise DataError(f"every fold must hold out some rows, and leave some; fold {k} has {int(members.sum())}.")
        if rows.loss == "logistic":
            missing = set(rows.y[members].tolist()) - set(rows.y[~members].tolist())
            if missing:
                raise DataError(
                    f"every class must have rows outside each fold; class {missing.pop()} has all of its rows in fold "
                    f"{k}. Use fewer folds, or leave rare classes out."
                )
