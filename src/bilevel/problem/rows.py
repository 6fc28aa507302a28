"""Per-example variables: `Rows`, and the optimizer that keeps its moments row by row.

A step that sees the rows of one batch costs O(batch): the rows are gathered as leaves, rows outside the batch are
untouched, and their moments too. With m, w the running means of a row's gradient and of its square, and t the number
of times that very row was visited, a visit moves the row by

    rate * (m / (1 - beta1^t)) / (sqrt(w / (1 - beta2^t)) + tiny)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel.errors import OptionError, RankError, VariableError

OWNED_FROM = 2**20
"""Numbers in a Rows from which ranks own its rows, unless it says otherwise."""

Parts = list[list[tuple[Tensor, Tensor]]]
"""For each Rows of u, the (index, gradient) pairs of the rows that were read; empty where none were."""


def together(*parts: Parts) -> Parts:
    """All pairs of all derivatives, whose sum they are the parts of."""
    count = max(len(part) for part in parts)
    return [[pair for part in parts if part for pair in part[i]] for i in range(count)]


class Home(Protocol):
    """A rank's own rows, where ranks own them: see `bilevel.distributed.shared_rows`."""

    count: int
    """The rows of all ranks."""
    held: Tensor
    """The rows of this rank, and one more that stands for all others."""
    kept: Tensor
    """The rows of this rank."""

    def read(self, index: Tensor) -> Tensor:
        """The rows at `index`, whoever owns them. All ranks call it together."""
        ...

    def placed(self, index: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Where in `held` each row is, and its gradient; of rows of other ranks, the last place and zero."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def whole(self, like: Tensor | None) -> Tensor:
        """All rows, on every rank; in `like`, where it is given."""
        ...


class Rows:
    """A variable with one row for each training example: `u = Rows(len(dataset))`, read as `u[row]` in an objective.

    `init` is a number, or a tensor whose first dimension is `n`; `shape` is the shape of one row. Under torchrun each
    rank of a run has a block of the rows, with their moments, alone where they are `owned` (docs/distributed.md); None:
    from a million numbers on.
    """

    def __init__(
        self,
        n: int,
        *,
        init: float | Tensor = 0.0,
        shape: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        owned: bool | None = None,
    ) -> None:
        if n < 1:
            raise OptionError(f"Rows needs at least one row; got n={n}.")
        if owned not in (None, True, False):
            raise OptionError(f"owned must be True, False or None; got {owned!r}.")
        if isinstance(init, Tensor):
            if init.shape[:1] != (n,):
                raise OptionError(f"init must have n={n} rows; got a tensor of shape {tuple(init.shape)}.")
            values = init.detach().to(device=device, dtype=dtype, copy=True)
        else:
            values = torch.full((n, *shape), float(init), dtype=dtype, device=device)
        self._values: Tensor | None = values
        self._home: Home | None = None
        self._lent: weakref.ref[Tensor] | None = None
        self.owned = values.numel() >= OWNED_FROM if owned is None else owned
        if not self.values.is_floating_point():
            raise VariableError(f"Rows holds real numbers; got dtype {self.values.dtype}. Pass dtype=torch.float32.")
        self._tape: list[tuple[Tensor, Tensor]] | None = None
        self._cursor: int | None = None

    @property
    def values(self) -> Tensor:
        """All rows."""
        if self._values is None:
            raise RankError(
                "the rows of u are with their ranks while solve runs, and whole again at its end; of a run that failed "
                "they are in its checkpoint. Rows(..., owned=False) keeps them whole."
            )
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self._values = values

    @property
    def kept(self) -> Tensor:
        """What this process keeps of the rows: all, or its own."""
        return self.values if self._home is None else self._home.kept

    @property
    def held(self) -> Tensor:
        """What this process moves: all rows, or those of its `Home`."""
        return self.values if self._home is None else self._home.held

    @property
    def home(self) -> Home | None:
        return self._home

    def numel(self) -> int:
        """How many numbers all rows have."""
        return len(self) * math.prod(self.kept.shape[1:])

    def __len__(self) -> int:
        return self.values.shape[0] if self._home is None else self._home.count

    def __repr__(self) -> str:
        return f"Rows({len(self)}, shape={tuple(self.kept.shape[1:])}, dtype={self.kept.dtype})"

    # -- where ranks own the rows ------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return self._values is not None

    def settle(self, home: Home | None) -> None:
        """Read and move the rows of `home` from here on. The whole is kept until `let_go`."""
        self._home = home

    def let_go(self) -> None:
        """Keep no rows but those of the home."""
        if self._home is not None and self._values is not None:
            self._lent, self._values = weakref.ref(self._values), None

    def gather(self) -> Home | None:
        """Have all rows again, in the tensor that they were in where anyone still holds it; returns the home."""
        home, self._home = self._home, None
        if home is not None:
            lent = None if self._lent is None else self._lent()
            self._values, self._lent = home.whole(lent if self._values is None else self._values), None
        return home

    # -- reading -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """The rows at `index`; while a gradient in u is wanted, as a leaf of its own that the step differentiates."""
        if self._tape is None and self._home is None:
            return self.values[index]
        if self._tape is not None and self._cursor is not None:
            self._cursor += 1
            return self._tape[self._cursor - 1][1]
        if not isinstance(index, Tensor) or index.dtype == torch.bool:
            index = torch.arange(len(self), device=self.kept.device)[index]
        found = self.values[index] if self._home is None else self._home.read(index)
        if self._tape is None:
            return found
        leaf = found.detach().requires_grad_()
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
