"""Penalties of linear models, tuned on rows that are held out: one for all features, or one for each.

    w_k = argmin_w  sum over the rows outside fold k of l(x w, y)  +  1/2 sum_j alpha_j w_j^2
    alpha = argmin  mean over the folds' rows of l(x w_k, y)  +  caution / m  sum_j log(alpha_j / alpha_0)^2 / 2

All folds are one lower level: their weights are one tensor, and one product with the inputs serves all of them. A
held-out split is a single fold. First we tune alpha_0, one penalty for all features; the penalties of the features
start there. The last term keeps thousands of penalties from fitting the m held-out rows. With caution 1, a penalty that
is e times as large must save 1/2 in the sum of -log(likelihood) of the held-out rows, as under a normal prior with
deviation 1 (for the squared error, the loss of alpha_0 is the variance).

With little caution the validation loss has many minima: a feature that is silenced by mistake has a zero gradient and
stays silent. So we lower the caution from 1 in stages, and each stage starts from the end of the last one.

If few features matter, penalties without restraint do best. If all features matter a little, such penalties fit the
held-out rows, and a single penalty does better on new rows. By default the rows decide: we set a fifth of them apart
and tune the penalties on the rest, with a caution that falls from 1 to 0 in stages. We take the stage with the least
loss on the fifth if its gain over a single penalty exceeds the standard error of the gain, because the best of several
results on a few rows is often best by chance. If no fold has five rows (of a class), the caution is 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel import DataError, Problem
from bilevel.applications.tuning.fold_descent import FoldDescent, at_hand
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows
from bilevel.applications.tuning.implicit_descent import Phi, descend, objective
from bilevel.applications.tuning.ranges import Range

# The range of the single penalty, in units of the features' curvature.
LOW, HIGH = 1e-5, 1e4
# The range of each feature's penalty, in units of the single one.
BELOW, ABOVE = 1e-3, 1e4
# The cautions of the stages before a smaller one, and the factor on their tolerance.
STAGES, ROUGH = (1.0, 0.1, 0.01), 10.0
# The penalties of the grid from which the single one starts, if there is no closed form.
FEW = 5
# The single penalty is tuned to this share of the tolerance: it must not end above the value of any grid.
FINE = 1e-2
# The share of the rows that is set apart to decide the caution, and the least number of them.
SHARE, LEAST = 0.2, 2
Penalty = Literal["single", "per-feature"]
# Called with the stage, the steps done in it, and the validation loss.
OnProgress = Callable[[str, int, float], object]


@dataclass(frozen=True)
class LinearTuned:
    """The tuned penalties of a linear model, and the model trained on all rows with them.

    - `alpha`: the penalty of each feature, on sums over rows.
    - `weight` (outputs, d) and `bias` (outputs).
    - `single`, `single_loss`: the single penalty, from which the features' penalties start, and its validation loss.
    - `valid_loss`: the validation loss with `alpha`.
    - `path`: the validation loss plus the cost of the caution, at the start of each stage and after each of its steps.
    - `stages`: the caution of each stage and the penalties at its end.
    """

    alpha: Tensor
    weight: Tensor
    bias: Tensor
    single: float
    single_loss: float
    valid_loss: float
    path: list[float]
    stages: Sequence[tuple[float, Tensor]] = ()


def tune_linear(
    rows: Rows,
    *,
    penalty: Penalty = "per-feature",
    caution: float = 1.0,
    steps: int = 100,
    tolerance: float = 1e-4,
    seconds: float | None = None,
    on_progress: OnProgress = lambda *_: None,
    clock: Callable[[], float] = time.perf_counter,
    checkpoint: Path | None = None,
) -> LinearTuned:
    """Tune the penalties on the held-out rows, and train on all rows with them.

    - `penalty`: "per-feature" (default) or "single".
    - `caution`: the price of penalties that differ from the single one, default 1; 0 for none.
    - `steps`: the most steps of each stage, default 100.
    - `tolerance`: a stage ends if five steps lower the validation loss by less than this share of it, default 1e-4; ten
      times that if another caution follows.
    - `seconds`, by `clock`: the most seconds of all stages, default no limit.
    - `on_progress(stage, done, value)`: called after each step.
    - `checkpoint`: a folder to write to, and to resume from if it holds a state.

    >>> x = torch.randn(30, 4, dtype=torch.float64)
    >>> rows = Rows(x, x[:, 0], torch.arange(30) % 3, "squared")
    >>> tune_linear(rows, steps=5).alpha.shape
    torch.Size([4])
    """
    _check(rows)
    digest, end = "" if checkpoint is None else rows.digest(), clock() + (math.inf if seconds is None else seconds)
    levels, held_out = _Levels(rows), int((rows.fold >= 0).sum())
    path = list[float]()

    def run_stage(name: str, t: Tensor, span: Range, scale: Tensor, price: float, tolerance: float) -> Tensor:
        """Tune the penalties alpha = scale * span.value(t), with a price on their distance to `scale`; return alpha."""
        path.extend(
            descend(
                levels.phi(t, span, scale, price, tolerance),
                max_steps=steps,
                tolerance=tolerance,
                late=lambda: clock() >= end,
                on_progress=lambda done, value: on_progress(name, done, value),
                begin=levels.model.renew,
                checkpoint=checkpoint and checkpoint / name.replace(" ", "-"),
                task={"rows": digest, "stage": name, "tolerance": tolerance, "steps": steps},
            )
        )
        return scale * span.value(t.detach())

    unit, every = levels.unit, Range(LOW, HIGH)
    t = every.free(levels.first(unit)).requires_grad_()
    single = run_stage("one penalty", t, every, unit, 0.0, FINE * tolerance)
    alpha = single.expand(rows.x.shape[1]).clone()
    single_loss = loss = levels.loss(alpha)
    stages: list[tuple[float, Tensor]] = []
    if penalty == "per-feature" and len(alpha) > 1:
        each, size = Range(BELOW, ABOVE), 2 * loss if rows.loss == "squared" else 1.0
        u = each.free(torch.ones_like(alpha)).requires_grad_()
        for c in (*(c for c in STAGES if c > caution), caution):
            if clock() >= end:
                break
            name, rough = f"a penalty for each feature, caution {c:g}", 1.0 if c == caution else ROUGH
            alpha = run_stage(name, u, each, single, c * size / held_out, rough * tolerance)
            stages.append((c, alpha))
        loss = levels.loss(alpha)
    weight, bias = trained(rows, alpha)
    return LinearTuned(alpha, weight, bias, float(single), single_loss, loss, path, stages)


class _Levels:
    """Both levels for penalties: in closed form if there is one, else with the weights of the folds kept minimal."""

    def __init__(self, rows: Rows) -> None:
        self.model = FoldedModel(rows)
        self.folds = at_hand(rows)
        self.unit = self.model.curvature.mean() * self.model.counts.mean()

    def phi(self, t: Tensor, span: Range, scale: Tensor, price: float, tolerance: float) -> Phi:
        """Return the validation loss with the penalties scale * span.value(t), plus the price of their distances."""
        if self.folds is not None:
            return FoldDescent(self.folds, t, span, scale, price)
        model = self.model
        problem = Problem(
            lambda u, v, _: model.upper(v) + price * span.value(u).log().square().sum() / 2,
            lambda u, v, _: model.lower(scale * span.value(u), v),
        )
        return objective(problem, t, model.v, lambda: model.second(scale * span.value(t.detach())), tolerance)

    def first(self, unit: Tensor) -> Tensor:
        """Return the single penalty of a grid with the least validation loss, in these units."""
        if self.folds is not None:
            return unit.new_tensor([self.folds.best_single(LOW * float(unit), HIGH * float(unit))]) / unit
        values = torch.logspace(math.log10(HIGH), math.log10(LOW), FEW, dtype=unit.dtype, device=unit.device)
        losses = torch.stack([self._held_out(unit * value) for value in values])
        self._restart()
        return values[losses.nan_to_num(nan=math.inf).argmin()][None]

    def _held_out(self, penalty: Tensor) -> Tensor:
        """Return the validation loss with a single penalty, from the present weights on."""
        found = _solved(self.model, penalty.expand(len(self.model.center))).upper(self.model.v).detach()
        if not torch.isfinite(found):
            self._restart()
        return found

    @torch.no_grad()
    def _restart(self) -> None:
        """Forget the present weights, so that a run that resumes starts from the same state."""
        self.model.renew()
        for leaf in self.model.v.values():
            leaf.zero_()

    def loss(self, alpha: Tensor) -> float:
        """Return the validation loss of these penalties; without a closed form, of the present weights."""
        return self.folds.loss(alpha) if self.folds is not None else self.model.upper(self.model.v).item()


def tune_cautiously(
    rows: Rows,
    *,
    penalty: Penalty = "per-feature",
    caution: float | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[LinearTuned, float | None]:
    """Tune the penalties; with `caution=None` (default) the rows decide the caution.

    Returns the penalties and the caution, which is None for a single penalty. `seed` draws the rows that decide;
    `options` are passed to `tune_linear`.
    """
    if penalty == "single":
        return tune_linear(rows, penalty=penalty, checkpoint=checkpoint, **options), None
    if caution is not None:
        return tune_linear(rows, caution=caution, checkpoint=checkpoint, **options), caution
    everything, apart = checkpoint and checkpoint / "all", _apart(rows, seed)
    if int(apart.sum()) < LEAST:
        return tune_linear(rows, caution=1.0, checkpoint=everything, **options), 1.0
    rest, others = rows.select(~apart), rows.select(apart)
    found = tune_linear(rest, caution=0.0, checkpoint=checkpoint and checkpoint / "rest", **options)
    candidates = [(None, torch.full_like(found.alpha, found.single)), *found.stages]
    losses = {c: losses_of(others, *trained(rest, alpha)) for c, alpha in candidates}
    best = min(losses, key=lambda c: float(losses[c].mean()))
    if best is None or not beyond_chance(losses[None] - losses[best]):
        return tune_linear(rows, penalty="single", checkpoint=everything, **options), None
    return tune_linear(rows, caution=best, checkpoint=everything, **options), best


def beyond_chance(gains: Tensor) -> bool:
    """Return True if the mean of these numbers is above its standard error."""
    return bool(gains.mean() > gains.std() / len(gains) ** 0.5)


def losses_of(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the loss of a model on each row."""
    return rows.losses((rows.x @ weight.T + bias)[:, None, :])[:, 0]


def loss_of(rows: Rows, weight: Tensor, bias: Tensor) -> float:
    """Return the mean loss of a model on these rows."""
    return losses_of(rows, weight, bias).mean().item()


def trained(rows: Rows, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (outputs, d) and bias (outputs) of the model trained on all rows with these penalties."""
    if (at_once := at_hand(rows, held_out=False)) is not None:
        return at_once.model(alpha)
    model = _solved(FoldedModel(rows, held_out=False), alpha)
    weight = model.v["weight"][0].detach()
    return weight, model.v["bias"][0].detach() - weight @ model.center


def held_out_loss(rows: Rows, alpha: Tensor) -> float:
    """Return the validation loss with these penalties."""
    if (folds := at_hand(rows)) is not None:
        return folds.loss(alpha)
    model = _solved(FoldedModel(rows), alpha)
    return model.upper(model.v).item()


def _solved(model: FoldedModel, alpha: Tensor) -> FoldedModel:
    """Return the model with its weights at the minimum for these penalties."""
    problem = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(alpha, v))
    u = torch.zeros_like(alpha[:1]).requires_grad_()
    objective(problem, u, model.v, lambda: model.second(alpha)).newton.minimise()
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


def _apart(rows: Rows, seed: int) -> Tensor:
    """Return a mask of a fifth of the rows of each fold and class, rounded down."""
    draws = torch.rand(len(rows.y), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    apart = torch.zeros(len(rows.y), dtype=torch.bool)
    groups = rows.fold.cpu().long() * (rows.outputs + 1) + (rows.y.cpu().long() if rows.loss == "logistic" else 0)
    for group in torch.unique(groups):
        members = (groups == group).nonzero().squeeze(1)
        apart[members[draws[members].argsort()][: int(SHARE * len(members))]] = True
    return apart.to(rows.x.device)
