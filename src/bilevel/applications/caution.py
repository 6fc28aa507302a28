"""How far the penalties of features may go from a single one, decided on rows that the tuning does not see.

Where few features matter, penalties that are free to go anywhere do best; where all of them matter a little, they fit
the held-out rows, and a single penalty does better on others. Which of these a data set is, its rows tell: a fifth of
them is set apart, the penalties are tuned on the rest with caution 1 and with none, and the way with the least loss on
the fifth is taken. Where no fold has five rows (of a class), none can be spared, and the caution is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .folded_model import Rows
from .linear_tuning import LinearTuned, trained, tune_linear

SHARE = 0.2
CAUTIONS = (1.0, 0.0)


def tune_cautiously(rows: Rows, *, seed: int = 0, **options: Any) -> tuple[LinearTuned, float | None]:
    """Penalties tuned with the caution that the rows ask for, and that caution; None where a single penalty is best."""
    apart = _apart(rows, seed)
    if not bool(apart.any()):
        return tune_linear(rows, caution=CAUTIONS[0], **options), CAUTIONS[0]
    rest, others = rows.select(~apart), rows.select(apart)
    losses: dict[float | None, float] = {}
    for caution in CAUTIONS:
        found = tune_linear(rest, caution=caution, **options)
        if found.interrupted:
            raise KeyboardInterrupt
        if not losses:
            single = torch.full_like(found.alpha, found.single)
            losses[None] = loss_of(others, *trained(rest, single))
        losses[caution] = loss_of(others, found.weight, found.bias)
    best = min(losses, key=lambda caution: losses[caution])
    if best is None:
        return tune_linear(rows, penalty="single", **options), None
    return tune_linear(rows, caution=best, **options), best


def loss_of(rows: Rows, weight: Tensor, bias: Tensor) -> float:
    """The mean loss of a model on all of these rows."""
    with torch.no_grad():
        return rows.losses((rows.x @ weight.T + bias)[:, None, :]).mean().item()


def _apart(rows: Rows, seed: int) -> Tensor:
    """A mask of a fifth of the rows, of each fold its share, and of a class never the last ones."""
    draws = torch.rand(len(rows.y), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    apart = torch.zeros(len(rows.y), dtype=torch.bool)
    groups = rows.fold.long() * (rows.outputs + 1) + (rows.y.long() if rows.loss == "logistic" else 0)
    for group in torch.unique(groups):
        members = (groups == group).nonzero().squeeze(1)
        apart[members[draws[members].argsort()][: int(SHARE * len(members))]] = True
    return apart
