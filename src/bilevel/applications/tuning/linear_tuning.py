"""Penalties of linear models, tuned on rows that are held out: one for all features, or one for each.

    w_k = argmin_w  sum over the rows outside fold k of l(x w, y)  +  1/2 sum_j alpha_j w_j^2
    alpha = argmin  mean over the folds' rows of l(x w_k, y)  +  caution / m  sum_j log(alpha_j / alpha_0)^2 / 2

All folds are one lower level: their weights are one tensor, and one product with the inputs serves all of them. A
held-out split is a single fold. First we tune alpha_0, one penalty for all features; the penalties of the features
start there. The last term keeps thousands of penalties from fitting the m held-out rows. With caution 1, a penalty that
is e times as large must save 1/2 in the sum of -log(likelihood) of the held-out rows, as under a normal prior with
deviation 1 (for the squared error, the loss of alpha_0 is the variance).

With little caution the validation loss has many minima: a feature that is silenced by mistake has a zero gradient and
stays silent. So we lower the caution from 1 in stages, and each stage starts where the last one ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows
from bilevel.applications.tuning.hyperparameters import Range
from bilevel.applications.tuning.implicit_descent import Descended, ImplicitObjective, descend
from bilevel.errors import DataError
from bilevel.problem.problem import Problem

LOW, HIGH = 1e-5, 1e4
"""The range of the single penalty, in units of the features' curvature."""
BELOW, ABOVE = 1e-3, 1e4
"""The range of each feature's penalty, in units of the single one."""
WIDTH = 1.0
"""The expected deviation of the logarithms of the features' penalties."""
STAGES, ROUGH = (1.0, 0.1, 0.01), 10.0
"""The cautions of the stages before a smaller one, and the factor on their tolerance."""
START = 0.1
Watch = Callable[[str, int, float], object]
"""Called with the stage, the steps done in it, and the validation loss."""


@dataclass(frozen=True)
class LinearTuned:
    """The penalty of each feature, on sums over rows, and the model trained on all rows with these penalties."""

    alpha: Tensor
    weight: Tensor
    """(outputs, d)"""
    bias: Tensor
    single: float
    """The single penalty, where the features' penalties started."""
    single_loss: float
    """The validation loss of the single penalty."""
    valid_loss: float
    path: list[float]
    """The validation loss plus the price of the caution, after each step, those of the single penalty first."""
    seconds: list[float]
    converged: bool
    interrupted: bool = False
    stages: Sequence[tuple[float, Tensor]] = ()
    """The caution of each stage and the penalties at its end."""


@dataclass
class _Tuning:
    """One tuning: its stages share the model, the start, the limits and the record."""

    rows: Rows
    steps: int
    tolerance: float
    seconds: float | None
    watch: Watch
    clock: Callable[[], float]
    checkpoint: Path | None
    path: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.digest = "" if self.checkpoint is None else self.rows.digest()
        self.began = self.clock()
        self.model = FoldedModel(self.rows)
        self.first = self.model.slope()

    @property
    def late(self) -> bool:
        return self.seconds is not None and self.clock() - self.began >= self.seconds

    def stage(
        self,
        name: str,
        alpha: Callable[[Tensor], Tensor],
        t: Tensor,
        price: Callable[[Tensor], Tensor | float],
        rough: float = 1.0,
    ) -> Descended:
        """Minimise the validation loss plus `price` over t, with the penalties alpha(t)."""
        model, tolerance, before = self.model, rough * self.tolerance, self.clock() - self.began
        problem = Problem(lambda u, v, _: model.upper(v) + price(u), lambda u, v, _: model.lower(alpha(u), v))
        found = descend(
            problem,
            t,
            model.v,
            max_steps=self.steps,
            tolerance=tolerance,
            seconds=None if self.seconds is None else max(0.0, self.seconds - before),
            watch=lambda done, value: self.watch(name, done, value),
            curvature=lambda: model.second(alpha(t.detach())),
            first=self.first,
            clock=self.clock,
            begin=model.renew,
            checkpoint=self.checkpoint and self.checkpoint / name.replace(" ", "-"),
            task={"rows": self.digest, "stage": name, "tolerance": tolerance, "steps": self.steps},
        )
        self.path += found.path
        self.times += [before + s for s in found.seconds]
        return found


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

    A stage ends if five steps have lowered the validation loss by less than `tolerance` of itself (ten times that if
    another caution follows), after `steps`, or after `seconds` in all. A `checkpoint` folder is written to, and resumed
    from if it holds a state.

    >>> x = torch.randn(30, 4, dtype=torch.float64)
    >>> rows = Rows(x, x[:, 0], torch.arange(30) % 3, "squared")
    >>> tune_linear(rows, steps=5).alpha.shape
    torch.Size([4])
    """
    _check(rows)
    run = _Tuning(rows, steps, tolerance, seconds, watch or (lambda *_: None), clock, checkpoint)
    model, held_out = run.model, int((rows.fold >= 0).sum())
    unit, every = model.curvature.mean() * model.counts.mean(), Range(LOW, HIGH)
    t = every.free(torch.full_like(model.center[:1], START)).requires_grad_()
    found = run.stage("one penalty", lambda t: unit * every.value(t), t, lambda t: 0.0)
    single = unit * every.value(t.detach())
    alpha = single.expand(rows.x.shape[1]).clone()
    single_loss = loss = model.upper(model.v).item()
    stages: list[tuple[float, Tensor]] = []
    if penalty == "per-feature" and len(alpha) > 1:
        each, size = Range(BELOW, ABOVE), 2 * loss if rows.loss == "squared" else 1.0
        u = each.free(torch.ones_like(model.center)).requires_grad_()

        def away(t: Tensor, caution: float) -> Tensor:
            """Return the price of penalties that differ from the single one."""
            return caution * size / held_out * (each.value(t).log() / WIDTH).square().sum() / 2

        for c in (*(c for c in STAGES if c > caution), caution):
            if found.interrupted or run.late:
                break
            name = f"a penalty for each feature, caution {c:g}"
            price = partial(away, caution=c)
            found = run.stage(name, lambda t: single * each.value(t), u, price, 1.0 if c == caution else ROUGH)
            alpha = single * each.value(u.detach())
            stages.append((c, alpha))
        loss = model.upper(model.v).item()
    weight, bias = trained(rows, alpha)
    return LinearTuned(
        alpha,
        weight,
        bias,
        single=float(single),
        single_loss=single_loss,
        valid_loss=loss,
        path=run.path,
        seconds=run.times,
        converged=found.converged,
        interrupted=found.interrupted,
        stages=stages,
    )


def trained(rows: Rows, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (outputs, d) and bias (outputs) of the model trained on all rows with these penalties."""
    model = _solved(FoldedModel(rows, held_out=False), alpha)
    weight = model.v["weight"][0].detach()
    return weight, model.v["bias"][0].detach() - weight @ model.center


def held_out_loss(rows: Rows, alpha: Tensor) -> float:
    """Return the validation loss of these penalties."""
    model = _solved(FoldedModel(rows), alpha)
    with torch.no_grad():
        return float(model.upper(model.v))


def _solved(model: FoldedModel, alpha: Tensor) -> FoldedModel:
    """Return the model with its weights at the minimum for these penalties."""
    problem = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(alpha, v))
    u = torch.zeros_like(alpha[:1]).requires_grad_()
    ImplicitObjective(problem, u, model.v, lambda: model.second(alpha)).solve_lower()
    return model


def _check(rows: Rows) -> None:
    for k in range(rows.folds):
        members = rows.fold == k
        if not bool(members.any()) or bool(members.all()):
            raise DataError(f"every fold must hold out some rows, and leave some; fold {k} has {int(members.sum())}.")
        missing = set(rows.y[members].tolist()) - set(rows.y[~members].tolist())
        if rows.loss == "logistic" and missing:
            raise DataError(
                f"every class must have rows outside each fold; class {missing.pop()} has all of its rows in fold {k}. "
                "Use fewer folds, or leave rare classes out."
            )
