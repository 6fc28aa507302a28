"""How much the penalties of features can differ, decided on rows that the tuning does not see.

If few features matter, penalties without restraint do best. If all features matter a little, such penalties fit the
held-out rows, and a single penalty does better on new rows. The rows decide: we set a fifth of them apart and tune the
penalties on the rest, with a caution that falls from 1 to 0 in stages. We take the stage with the least loss on the
fifth if its gain over a single penalty exceeds the standard error of the gain, because the best of several ways on a
few rows is often best by chance. If no fold has five rows (of a class), none can be set apart, and the caution is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel.applications.tuning.folded_linear_model import Rows
from bilevel.applications.tuning.linear_tuning import LinearTuned, trained, tune_linear

SHARE = 0.2
USUAL, LEAST = 1.0, 2
"""The caution if too few rows can be set apart, and the least number of rows."""


def tune_cautiously(
    rows: Rows, *, seed: int = 0, checkpoint: Path | None = None, **options: Any
) -> tuple[LinearTuned, float | None]:
    """Tune the penalties with the caution that the rows ask for.

    Returns the penalties and the caution, which is None if a single penalty is best. `seed` draws the rows set apart;
    `options` are passed to `tune_linear`.
    """

    def tuned(rows: Rows, name: str, **ways: Any) -> LinearTuned:
        found = tune_linear(rows, checkpoint=checkpoint and checkpoint / name, **ways, **options)
        if found.interrupted:
            raise KeyboardInterrupt
        return found

    apart = _apart(rows, seed)
    if int(apart.sum()) < LEAST:
        return tuned(rows, "all", caution=USUAL), USUAL
    rest, others = rows.select(~apart), rows.select(apart)
    found = tuned(rest, "rest", caution=0.0)
    ways = [(None, torch.full_like(found.alpha, found.single)), *found.stages]
    losses = {caution: losses_of(others, *trained(rest, alpha)) for caution, alpha in ways}
    best = min(losses, key=lambda caution: float(losses[caution].mean()))
    if best is None or not beyond_chance(losses[None] - losses[best]):
        return tuned(rows, "all", penalty="single"), None
    return tuned(rows, "all", caution=best), best


def beyond_chance(gains: Tensor) -> bool:
    """Tell whether the mean of these numbers is above its standard error."""
    return bool(gains.mean() > gains.std() / len(gains) ** 0.5)


def loss_of(rows: Rows, weight: Tensor, bias: Tensor) -> float:
    """Return the mean loss of a model on these rows."""
    return losses_of(rows, weight, bias).mean().item()


def losses_of(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the loss of a model on each of these rows."""
    with torch.no_grad():
        return rows.losses((rows.x @ weight.T + bias)[:, None, :])[:, 0]


def _apart(rows: Rows, seed: int) -> Tensor:
    """Return a mask of a fifth of the rows of each fold and class, rounded down."""
    draws = torch.rand(len(rows.y), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    apart = torch.zeros(len(rows.y), dtype=torch.bool)
    groups = rows.fold.cpu().long() * (rows.outputs + 1) + (rows.y.cpu().long() if rows.loss == "logistic" else 0)
    for group in torch.unique(groups):
        members = (groups == group).nonzero().squeeze(1)
        apart[members[draws[members].argsort()][: int(SHARE * len(members))]] = True
    return apart.to(rows.x.device)
