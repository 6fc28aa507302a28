"""Adam with moments and bias correction row by row.

With m, w the running means of a row's gradient and of its square, and t the number of times that this row was visited,
a visit moves the row by

    rate * (m / (1 - beta1^t)) / (sqrt(w / (1 - beta2^t)) + tiny)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel.problem.rows import Rows


class RowAdam:
    """Adam with moments and bias correction per row."""

    def __init__(self, rows: Rows, *, betas: tuple[float, float] = (0.9, 0.999), tiny: float = 1e-8) -> None:
        self.rows, self.betas, self.tiny = rows, betas, tiny
        values = rows.values
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)
        self.visits = torch.zeros(len(values), dtype=torch.int32, device=values.device)
        self._sum = torch.zeros_like(values)

    @torch.no_grad()
    def joined(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return one index of all rows in `parts`, and for each entry the whole gradient of its row.

        A row that is named twice has the sum in both places. Equal entries then compute and write the same numbers:
        no sort, no host read, no dependence on the order of writing.
        """
        index = torch.cat([i for i, _ in parts])
        gradient = torch.cat([g.reshape(-1, *self.mean.shape[1:]) for _, g in parts])
        return index, self._summed(index, gradient)

    @torch.no_grad()
    def norm_square(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the squared norm of the sum of the gradients in `parts`."""
        index, gradient = self.joined(parts)
        total: Tensor = (gradient * gradient / self._summed(index, torch.ones_like(gradient))).sum()
        return total

    @torch.no_grad()
    def length(self, index: Tensor, gradient: Tensor) -> Tensor:
        """Return the root mean square of the gradients of `joined`; a row that is named twice counts once."""
        share = 1 / self._summed(index, torch.ones_like(gradient))
        found: Tensor = ((gradient * gradient * share).sum() / share.sum()).sqrt()
        return found

    def _summed(self, index: Tensor, values: Tensor) -> Tensor:
        """Return for each entry the sum of the values of its row. The scratch tensor is zero before and after."""
        self._sum.index_add_(0, index, values)
        found = self._sum[index]
        self._sum.index_fill_(0, index, 0.0)
        return found

    def step(self, index: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Move the rows at `index`. A row that is named twice is visited once, with the sum of its gradients."""
        self.move(*self.joined([(index, gradient)]), rate)

    @torch.no_grad()
    def move(self, index: Tensor, g: Tensor, rate: Tensor) -> None:
        """Move the rows by the index and gradients that `joined` returned."""
        values = self.rows.values
        b1, b2 = self.betas
        mean = torch.lerp(g, self.mean[index], b1)
        square = torch.lerp(g * g, self.square[index], b2)
        visits = self.visits[index] + 1
        t = visits.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
        move = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt_() + self.tiny)
        self.mean[index], self.square[index], self.visits[index] = mean, square, visits
        values[index] = values[index] - rate * move

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments and the visits of all rows."""
        return {"mean": self.mean, "square": self.square, "visits": self.visits}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])
