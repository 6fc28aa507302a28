"""Problem and the variable types. This module never differentiates.

min_u f(u, v*)   subject to   equalities(u, v*) = 0,   inequalities(u, v*) <= 0,
    v* = argmin_v g(u, v)   subject to   lower_equalities(u, v) = 0,   lower_inequalities(u, v) <= 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bilevel.errors import ProblemError

Objective = Callable[[Any, Any, Any], Tensor]
"""(u, v, batch) -> Tensor. u and v arrive as they were passed to `solve`; batch is None without data."""
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A bilevel problem: two objectives, and optionally constraints, projections and episodes.

    `upper` (f) and `lower` (g) return one number each. Constraint functions return a tensor of any shape and receive
    the upper batch; `inequalities` mean <= 0. Those of the lower level are part of v's own problem, and with data
    functions of u and v alone: their batch is None. A projection maps a tensor to the nearest point of a convex set; it
    is applied to each tensor of the variable, or, given as a dict, to the tensors it names.

    `prepare(u, batches)` returns what depends on u alone for a pair (upper batch, lower batch); `upper`, `lower` and
    the constraints then receive that in place of their batch. `start_lower(v, prepared)` puts v in place at its start
    before each upper step.

    `trials=n` declares n problems in one: every tensor of u and v has a leading dimension n, and the objectives return
    n numbers, one a trial, which depend on that trial's part of u and v alone.
    """

    upper: Objective
    lower: Objective
    equalities: Sequence[Objective] = ()
    inequalities: Sequence[Objective] = ()
    lower_equalities: Sequence[Objective] = ()
    lower_inequalities: Sequence[Objective] = ()
    project_upper: Projection | Mapping[str, Projection] | None = None
    project_lower: Projection | Mapping[str, Projection] | None = None
    prepare: Callable[[Any, Any], Any] | None = None
    start_lower: Callable[[Any, Any], None] | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise ProblemError(f"{name} must be a function (u, v, batch) -> Tensor; got {getattr(self, name)!r}.")
        for name in ("equalities", "inequalities", "lower_equalities", "lower_inequalities"):
            value = getattr(self, name)
            if not callable(value) and not isinstance(value, (list, tuple)):
                raise ProblemError(f"{name} must be a function or a list of functions; got {value!r}.")
            functions = (value,) if callable(value) else tuple(value)
            for function in functions:
                if not callable(function):
                    raise ProblemError(f"{name} must hold functions (u, v, batch) -> Tensor; got {function!r}.")
            object.__setattr__(self, name, functions)
            if name.startswith("lower_") and functions and self.project_lower is not None:
                raise ProblemError(
                    f"{name} cannot be used with project_lower. State the set of v as lower inequalities, too."
                )
        if self.trials is not None:
            self._refuse_trials(self.trials)

    @property
    def constrained_below(self) -> bool:
        """Whether the lower level has constraints."""
        return bool(self.lower_equalities or self.lower_inequalities)

    def _refuse_trials(self, trials: object) -> None:
        if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
            raise ProblemError(f"trials must be a whole number of at least 1; got {trials!r}.")
        for name in (
            "equalities",
            "inequalities",
            "lower_equalities",
            "lower_inequalities",
            "project_upper",
            "project_lower",
            "prepare",
            "start_lower",
        ):
            if getattr(self, name):
                raise ProblemError(f"trials cannot be used with {name}. Leave trials out, and solve them one by one.")
