"""Per-example variables: `Rows`, and the tape of the rows that an evaluation read.

A step that sees the rows of one batch costs O(batch): the rows are gathered as leaves, and the other rows are untouched
(see `bilevel.optim.variable_optimizer` for their moments).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import OptionError, VariableError

# For each Rows of u, the (index, gradient) pairs of the rows that were read; empty if none were.
Parts = list[list[tuple[Tensor, Tensor]]]


def together(*parts: Parts) -> Parts:
    """Return the pairs of the sum of several derivatives."""
    return [[pair for part in parts if part for pair in part[i]] for i in range(max(map(len, parts)))]


class Rows:
    """A variable with one row for each training example, read as `u[row]` in an objective.

    Args:
        n: The number of rows.
        init: The first values: a number, or a tensor whose first dimension is `n`. Default: 0.
        shape: The shape of one row, if `init` is a number. Default: (), one number for each row.
        dtype: The floating-point type; None: as `init`, or torch's default.
        device: The device of the values; None: as `init`, or torch's default device.

    Under torchrun every rank holds all rows and moves them by the same gradients.

    >>> u = Rows(4, init=0.5)
    >>> u[torch.tensor([0, 2])]
    tensor([0.5000, 0.5000])
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
            self.values: Tensor = init.detach().to(device=device, dtype=dtype, copy=True)
        else:
            self.values = torch.full((n, *shape), float(init), dtype=dtype, device=device)
        if not self.values.is_floating_point():
            raise VariableError(f"Rows holds real numbers; got dtype {self.values.dtype}. Pass dtype=torch.float32.")
        self._tape: list[tuple[Tensor, Tensor]] | None = None
        self._cursor: int | None = None

    def numel(self) -> int:
        """Return how many numbers all rows have."""
        return self.values.numel()

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return f"Rows({len(self)}, shape={tuple(self.values.shape[1:])}, dtype={self.values.dtype})"

    def __getitem__(self, index: Any) -> Tensor:
        """Return the rows at `index`: on a tape as a new leaf that the step differentiates, else as plain values."""
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
        """Record each later read as an (index, leaf) pair."""
        self._tape = []

    def tape(self) -> list[tuple[Tensor, Tensor]]:
        """Return the (index, leaf) pairs read so far."""
        return list(self._tape or ())

    def replay(self) -> None:
        """Make the next reads return the recorded leaves again, in order, to repeat an evaluation."""
        if self._tape is not None:
            self._cursor = 0

    def stop_tape(self) -> None:
        """Drop the tape and read rows as plain values again."""
        self._tape, self._cursor = None, None
