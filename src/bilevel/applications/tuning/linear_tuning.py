"""Penalties of linear models, tuned on rows that are held out: one for all features, or one for each.

    w_k = argmin_w  sum over the rows outside fold k of l(x w, y)  +  1/2 sum_j alpha_j w_j^2
    alpha = argmin  mean over the folds' rows of l(x w_k, y)  +  caution / m  sum_j log(alpha_j / alpha_0)^2 / 2

All folds are one lower level: their weights are one tensor, and a product with the inputs serves them all. A held-out
split is one fold. alpha_0, one penalty for all features, is tuned first, and the features' start at it. The last term
keeps thousands of them from fitting the m held-out rows: with caution 1 a penalty that is e times as large must save
1/2 in the sum of the held-out rows' -log(likelihood), as under a normal prior of deviation 1 (of the squared error:
with that of alpha_0 as the variance).

With little caution the validation loss has many minima: a feature that is silenced by mistake has no slope that would
bring it back. A small caution is therefore come to from 1 in stages, each of which begins where the last one ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows
from bilevel.applications.tuning.implicit_descent import Descended, Place, descend
from bilevel.applications.tuning.nested import Nested
from bilevel.applications.tuning.ranges import Range
from bilevel.errors import DataError
from bilevel.problem.problem import Problem

LOW, HIGH = 1e-5, 1e4
"""The range of the single penalty, in units of the features' curvature."""
BELOW, ABOVE = 1e-3, 1e4
"""The range of each feature's penalty, in units of the single one."""
WIDTH = 1.0
"""The deviation of the logarithms of the features' penalties that is expected."""
STAGES, ROUGH = (1.0, 0.1, 0.01), 10.0
"""The cautions that a smaller one is come to by, and how much rougher they are solved."""
START = 0.1
Watch = Callable[[str, int, float], object]
"""Told the stage, the steps done in it, and the validation loss."""


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
    """The validation loss and the price of the caution after each step, those of the single penalty first."""
    seconds: list[float]
    single_steps: int
    converged: bool
    interrupted: bool = False
    stages: Sequence[tuple[float, Tensor]] = ()
    """The cautions that the last one was come to by, itself included, and the penalties of each."""


def tune_linear(
    rows: Rows,
    *,
    penalty: Literal["single", "per-feature"] = "per-feature",
    caution: float = 1.0,
    steps: int = 100,
    tolerance: float = 1e-4,
    seconds: float | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
    checkpoint: Path | None = None,
) -> LinearTuned:
    """Tune the penalties on the held-out rows, and train on all rows with them.

    A stage ends where five steps have lowered the validation loss by less than `tolerance` of itself (ten times that,
    where another caution comes after it), after `steps`, or where all have taken `seconds`. A `checkpoint` folder is
    written to, and gone on from where it holds a state.
    """
    _refuse(rows)
    digest = "" if checkpoint is None else rows.digest()
    began = clock()
    model, d, held_out = FoldedModel(rows), rows.x.shape[1], int((rows.fold >= 0).sum())
    first = model.slope()

    def stage(
        name: str, alpha: Callable[[Tensor], Tensor], t: Tensor, price: Callable[[Tensor], Any], tolerance: float
    ) -> Descended:
        problem = Problem(lambda u, v, _: model.upper(v) + price(u), lambda u, v, _: model.lower(alpha(u), v))
        task = {"rows": digest, "stage": name, "tolerance": tolerance, "steps": steps}
        return descend(
            problem,
            t,
            model.v,
            max_steps=steps,
            tolerance=tolerance,
            seconds=None if seconds is None else max(0.0, seconds - (clock() - began)),
            watch=watch and (lambda done, value: watch(name, done, value)),
            curvature=lambda: model.second(alpha(t.detach())),
            first=first,
            clock=clock,
            begin=model.renew,
            place=None if checkpoint is None else Place(checkpoint / name.replace(" ", "-"), task),
        )

    unit, every = model.curvature.mean() * model.counts.mean(), Range(LOW, HIGH)
    t = every.free(torch.full_like(model.center[:1], START)).requires_grad_()
    found = stage("one penalty", lambda t: unit * every.value(t), t, lambda t: 0.0, tolerance)
    single = unit * every.value(t.detach())
    alpha, path, times, count = single.expand(d).clone(), found.path, found.seconds, len(found.path)
    single_loss = loss = model.upper(model.v).item()
    stages: list[tuple[float, Tensor]] = []
    if penalty == "per-feature" and d > 1:
        each, size = Range(BELOW, ABOVE), 2 * loss if rows.loss == "squared" else 1.0
        u = each.free(torch.ones_like(model.center)).requires_grad_()
        cautions = [*(c for c in STAGES if c > caution), caution]
        for c in cautions:
            if found.interrupted or (seconds is not None and clock() - began >= seconds):
                break

            def price(t: Tensor, c: float = c) -> Tensor:
                """What moving away from the single penalty costs."""
                return c * size / held_out * (each.value(t).log() / WIDTH).square().sum() / 2

            before, rough = clock() - began, 1.0 if c == caution else ROUGH
            name = f"a penalty for each feature, caution {c:g}"
            found = stage(name, lambda t: single * each.value(t), u, price, rough * tolerance)
            path, times = path + found.path, times + [before + s for s in found.seconds]
            alpha = single * each.value(u.detach())
            stages.append((c, alpha))
        loss = model.upper(model.v).item()
    weight, bias = trained(rows, alpha)
    return LinearTuned(
        alpha=alpha,
        weight=weight,
        bias=bias,
        single=float(single),
        single_loss=single_loss,
        valid_loss=loss,
        path=path,
        seconds=times,
        single_steps=count,
        converged=found.converged,
        interrupted=found.interrupted,
        stages=stages,
    )


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
    u = torch.zeros_like(alpha[:1]).requires_grad_()
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
