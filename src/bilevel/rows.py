"""Per-example variables: `Rows`, and the optimizer that keeps its moments row by row.

A step that sees the rows of one batch costs O(batch): the rows are gathered as leaves, rows outside the batch are
untouched, and their moments too. With m, w the running means of a row's gradient and of its square, and t the number
of times that very row was visited, a visit moves the row by

    rate * (m / (1 - beta1^t)) / (sqrt(w / (1 - beta2^t)) + tiny)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError, VariableError

Parts = list[list[tuple[Tensor, Tensor]]]
"""For each Rows of u, the (index, gradient) pairs of the rows that were read; empty where none were."""


def together(*parts: Parts) -> Parts:
    """All pairs of all derivatives, whose sum they are the parts of."""
    count = max(len(part) for part in parts)
    return [[pair for part in parts if part for pair in part[i]] for i in range(count)]


class Rows:
    """A variable with one row for each training example: `u = Rows(len(dataset))`, read as `u[row]` in an objective.

    `init` is a number, or a tensor whose first dimension is `n`; `shape` is the shape of one row.
    """

    def __init__(
        self,
        n: int,
        *,
        init: float | Tensor = 0.0,
        shape: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if n < 1:
            raise OptionError(f"Rows needs at least one row; got n={n}.")
        if isinstance(init, Tensor):
            if init.shape[:1] != (n,):
                raise OptionError(f"init must have n={n} rows; got a tensor of shape {tuple(init.shape)}.")
            self.values = init.detach().to(device=device, dtype=dtype, copy=True)
        else:
            self.values = torch.full((n, *shape), float(init), dtype=dtype, device=device)
        if not self.values.is_floating_point():
            raise VariableError(f"Rows holds real numbers; got dtype {self.values.dtype}. Pass dtype=torch.float32.")
        self._tape: list[tuple[Tensor, Tensor]] | None = None
        self._cursor: int | None = None

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return f"Rows({len(self)}, shape={tuple(self.values.shape[1:])}, dtype={self.values.dtype})"

    def __getitem__(self, index: Any) -> Tensor:
        """The rows at `index`; while a gradient in u is wanted, as a leaf of its own that the step differentiates."""
        if self._tape is None:
            return self.values[index]
        if self._cursor is not None:
            self._cursor += 1
            return self._tape[self._cursor - 1][1]
        if not isinstance(index, Tensor) or index.dtype == torch.bool:
            index = torch.arange(len(self), device=self.values.device)[index]
        leaf = self.values[index].detach().requires_grad_()
        self._tape.append((index.reshape(-1) % len(self), leaf))
        return leaf

    def start_tape(self) -> None:
        """From here on, note which rows are read."""
        self._tape = []

    def tape(self) -> list[tuple[Tensor, Tensor]]:
        """The (index, leaf) pairs read so far."""
        return list(self._tape or ())

    def replay(self) -> None:
        """From here on, hand out the leaves on the tape again, in order: the same evaluation is done once more."""
        if self._tape is not None:
            self._cursor = 0

    def stop_tape(self) -> None:
        """Read rows as plain values again."""
        self._tape, self._cursor = None, None


class RowAdam:
    """Adam with moments and bias correction per row."""

    def __init__(self, rows: Rows, *, betas: tuple[float, float] = (0.9, 0.999), tiny: float = 1e-8) -> None:
        self.rows, self.betas, self.tiny = rows, betas, tiny
        values = rows.values
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)
        self.visits = torch.zeros(len(rows), dtype=torch.int32, device=values.device)
        self._sum = torch.zeros_like(values)

    @torch.no_grad()
    def joined(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One index of all rows in `parts`, and beside each entry the whole gradient of its row.

        A row that is named twice has the sum in both places, so that equal entries all compute, and all write, the same
        numbers: no sort, no host read, no dependence on the order of writing.
        """
        index = torch.cat([i for i, _ in parts])
        shape = self.rows.values.shape[1:]
        return index, self._summed(index, torch.cat([g.reshape(-1, *shape) for _, g in parts]))

    @torch.no_grad()
    def norm_square(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The squared norm of the gradient that `parts` add up to."""
        index, gradient = self.joined(parts)
        total: Tensor = (gradient * gradient / self._summed(index, torch.ones_like(gradient))).sum()
        return total

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
        return {"mean": self.mean, "square": self.square, "visits": self.visits}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.visits.copy_(state["visits"])
