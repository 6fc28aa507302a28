"""How far the penalties of features may go from a single one, decided on rows that the tuning does not see.

Where few features matter, penalties that are free to go anywhere do best; where all of them matter a little, they fit
the held-out rows, and a single penalty does better on others. Which of these a data set is, its rows tell: a fifth of
them is set apart, the penalties are tuned on the rest with a caution that falls from 1 to none in stages, and what the
stage with the least loss on the fifth had is taken, if it gains more over a single penalty than the standard error of
that gain: of several ways, one does best on a few rows by chance. Where no fold has five rows (of a class), none can be
spared, and the caution is 1.
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
"""The caution where no rows can decide, and how many it takes."""


def tune_cautiously(
    rows: Rows, *, seed: int = 0, checkpoint: Path | None = None, **options: Any
) -> tuple[LinearTuned, float | None]:
    """Penalties tuned with the caution that the rows ask for, and that caution; None where a single penalty is best."""

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
    """Whether the mean of these numbers is above its standard error."""
    return bool(gains.mean() > gains.std() / len(gains) ** 0.5)


def loss_of(rows: Rows, weight: Tensor, bias: Tensor) -> float:
    """The mean loss of a model on all of these rows."""
    return losses_of(rows, weight, bias).mean().item()


def losses_of(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """The loss of a model on each of these rows."""
    with torch.no_grad():
        return rows.losses((rows.x @ weight.T + bias)[:, None, :])[:, 0]


def _apart(rows: Rows, seed: int) -> Tensor:
    """A mask of a fifth of the rows, of each fold its share, and of a class never the last ones."""
    draws = torch.rand(len(rows.y), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    apart = torch.zeros(len(rows.y), dtype=torch.bool)
    groups = rows.fold.cpu().long() * (rows.outputs + 1) + (rows.y.cpu().long() if rows.loss == "logistic" else 0)
    for group in torch.unique(groups):
        members = (groups == group).nonzero().squeeze(1)
        apart[members[draws[members].argsort()][: int(SHARE * len(members))]] = True
    return apart.to(rows.x.device)
