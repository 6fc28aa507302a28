"""The interface between `solve` and a method. A method is a frozen dataclass of options; a run's state changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel._util.nested import copy_state as copy_state
from bilevel.batches.sources import Sources
from bilevel.derivatives.mixed_precision import Precision
from bilevel.distributed.process_group import ProcessGroup
from bilevel.measures.certificate import Measurable
from bilevel.problem import Problem, Variable
from bilevel.results import Status

# The columns of `History` in the order of a step's record.
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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a method and the run around it both know.

    Fields that are not obvious:
        accumulate: The number of batches that every gradient is the mean of.
        precision: The precision in which the user's functions are evaluated: None (the dtype of u and v) or `bf16`
            (see `bilevel.derivatives.mixed_precision`).
        engine: The engine that runs the steps (see `bilevel.engines.engine`).
        start: The index of this start among several.
    """

    problem: Problem
    u: Variable
    v: Variable
    max_steps: int
    tolerance: float | None
    accumulate: int = 1
    precision: Precision | None = None
    engine: str = "auto"
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class RunContext(RunOptions):
    """All that a method knows about a run.

    Fields that are not obvious:
        generator: For random numbers of the method, on the host.
        ranks: The processes that share the batches; None if one process has all of them.
    """

    sources: Sources
    generator: torch.Generator
    ranks: ProcessGroup | None = None


class MethodState(Measurable, Protocol):
    """A run of a method.

    `draws` is the number of pairs of batches in a step. The certificate is compared with `tolerance`; if it is None,
    only the budget ends the run.
    """

    mode: str
    draws: int
    tolerance: float | None

    @property
    def engine(self) -> str:
        """The name of the engine that runs the steps."""

    def step(self, k: int) -> Tensor:
        """Move u and v in place; return the record, a tensor ordered as RECORD."""

    def ended(self) -> Status | None:
        """Return how the run ended, or None while it continues. This can read values on the host."""

    def finish(self) -> bool | None:
        """Give u and v their final values. Return whether v minimises g; None if that was not tested."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Method(Protocol):
    """A frozen dataclass of options. `init` starts a run; the state it returns takes the steps."""

    def describe(self) -> dict[str, str]:
        """Return the options that differ from the defaults, as text. A run that resumes compares them."""

    def init(self, context: RunContext) -> MethodState: ...
