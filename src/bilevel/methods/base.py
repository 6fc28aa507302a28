"""What `solve` and a method agree on. A method is a frozen dataclass of options; what changes lives in its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel.batches.sources import Sources
from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.penalised_objective import Derivatives
from bilevel.derivatives.prices import Prices
from bilevel.distributed.process_group import ProcessGroup
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable
from bilevel.results import Status

RECORD = (
    "upper",
    "lower",
    "grad_u",
    "grad_v",
    "residual",
    "violation",
    "gamma",
    "lam",
    "epsilon",
    "upper_rate",
    "lower_rate",
    "advanced",
)
"""The columns of `History` that a step fills, in the order of its record."""


@dataclass(frozen=True)
class RunContext:
    """Everything a method needs to know of a run."""

    problem: Problem
    u: Variable
    v: Variable
    sources: Sources
    max_steps: int
    tolerance: float | None
    accumulate: int
    generator: torch.Generator
    """For the method's own draws, on the host."""
    precision: Precision | None = None
    """What the user's functions are evaluated in: None, that of the variables, or `bf16` (see
    `bilevel.derivatives.mixed_precision`)."""
    engine: str = "auto"
    """What runs the steps: see `bilevel.engines.engine`."""
    start: int = 0
    """Which of several starts this is."""
    ranks: ProcessGroup | None = None
    """The processes that share the batches; None where one has them all."""


class MethodState(Protocol):
    """A run of a method. `step` moves u and v in place and returns its record, a tensor ordered as RECORD."""

    mode: str
    draws: int
    """Pairs of batches that a step takes."""
    derivatives: Derivatives
    tolerance: float | None
    """What the certificate is compared with; None where only the budget ends the run."""

    @property
    def engine(self) -> str:
        """What runs the steps by now."""
        ...

    def step(self, k: int) -> Tensor: ...
    def ended(self) -> Status | None:
        """How the run ended by the method's own judgement; None while it goes on. May read values on the host."""
        ...

    def finish(self) -> bool | None:
        """Leave u and v as they are returned; True, False or None: v minimises g, does not, was not tried."""
        ...

    def scales(self) -> tuple[float, float, float, float]:
        """The sizes that |grad_u F|, |grad_v F|, the lower residual and the violation are judged against."""
        ...

    def episode(self) -> list[Pair] | None:
        """The batches that v belongs to, where each step has a lower problem of its own."""
        ...

    def prices(self) -> Prices: ...
    def lam(self) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Method(Protocol):
    """A frozen dataclass of options. `init` starts a run; the state it returns takes the steps."""

    def describe(self) -> dict[str, str]:
        """The options that were given, as text: what a checkpoint is compared by."""
        ...

    def init(self, context: RunContext) -> MethodState: ...
