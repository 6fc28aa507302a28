"""Adam with moments and bias correction row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel.problem.rows import Rows


class RowAdam:
    """Adam with moments and bias correction per row."""

    def __init__(self, rows: Rows, *, betas: tuple[float, float] = (0.9, 0.999), tiny: float = 1e-8) -> None:
        self.rows, self.betas, self.tiny = rows, betas, tiny
        values = rows.held
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)
        self.visits = torch.zeros(len(values), dtype=torch.int32, device=values.device)
        self._sum = torch.zeros_like(values)

    @torch.no_grad()
    def joined(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One index of all rows in `parts`, and beside each entry the whole gradient of its row.

        A row that is named twice has the sum in both places, so that equal entries all compute, and all write, the same
        numbers: no sort, no host read, no dependence on the order of writing.
        """
        index = torch.cat([i for i, _ in parts])
        gradient = torch.cat([g.reshape(-1, *self.mean.shape[1:]) for _, g in parts])
        if self.rows.home is not None:
            index, gradient = self.rows.home.placed(index, gradient)
        return index, self._summed(index, gradient)

    @torch.no_grad()
    def norm_square(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The squared norm of the gradient that `parts` add up to."""
        index, gradient = self.joined(parts)
        total: Tensor = (gradient * gradient / self._summed(index, torch.ones_like(gradient))).sum()
        return total if self.rows.home is None else self.rows.home.total(total)

    @torch.no_grad()
    def length(self, index: Tensor, gradient: Tensor) -> Tensor:
        """The root mean square of what `joined` made of the gradients; a row that is named twice counts once."""
        share = 1 / self._summed(index, torch.ones_like(gradient))
        if self.rows.home is not None:  # the last place stands for the rows of other ranks
            own = (index < len(self.rows.kept)).reshape(-1, *[1] * (share.dim() - 1))
            share = torch.where(own, share, 0)
        sums = torch.stack([(gradient * gradient * share).sum(), share.sum()])
        square, count = sums if self.rows.home is None else self.rows.home.total(sums)
        found: Tensor = (square / count).sqrt()
        return found

    def _summed(self, index: Tensor, values: Tensor) -> Tensor:
        """For each entry, the sum of the values of its row; the scratch is zero before and after."""
        self._sum.index_add_(0, index, values)
        found = self._sum[index]
        self._sum.index_fill_(0, index, 0.0)
        return found

    def step(self, index: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Move the rows at `index`; a row named twice is visited once, with the sum of its gradients."""
        self.move(*self.joined([(index, gradient)]), rate)

    @torch.no_grad()
    def move(self, index: Tensor, g: Tensor, rate: Tensor) -> None:
        """The same, with what `joined` made of the gradients."""
        values = self.rows.held
        b1, b2 = self.betas
        mean = torch.lerp(g, self.mean[index], b1)
        square = torch.lerp(g * g, self.square[index], b2)
        visits = self.visits[index] + 1
        t = visits.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
        move = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt_() + self.tiny)
        self.mean[index], self.square[index], self.visits[index] = mean, square, visits
        values[index] = values[index] - rate * move

    def state_dict(self) -> dict[str, Tensor]:
        """The moments and the visits, of this rank's own rows where ranks own them."""
        state = {"mean": self.mean, "square": self.square, "visits": self.visits}
        return state if self.rows.home is None else {name: t[:-1] for name, t in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])
