"""`Problem`: the functions of a bilevel problem.

min_u f(u, v*)   subject to   equalities(u, v*) = 0,   inequalities(u, v*) <= 0,
    v* = argmin_v g(u, v)   subject to   lower_equalities(u, v) = 0,   lower_inequalities(u, v) <= 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bilevel._util.checks import ShortRepr
from bilevel.errors import ProblemError

# (u, v, batch) -> Tensor. u and v arrive as they were passed to `solve`; batch is None without data.
Objective = Callable[[Any, Any, Any], Tensor]
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Problem(ShortRepr):
    """A bilevel problem: two objectives, and optionally constraints, projections and episodes.

    Every function is called as `function(u, v, batch)`, with u and v as they were passed to `solve`. `batch` is None
    without data.

    Args:
        upper: f, the objective of the upper level; returns one number.
        lower: g, the objective of the lower level; returns one number.
        equalities: A function or a list of functions h with h(u, v) = 0 at the upper level. They return tensors of any
            shape and receive the upper batch. Default: none.
        inequalities: The same for h(u, v) <= 0. Default: none.
        lower_equalities: A function or a list of functions d with d(u, v) = 0 at the lower level. With data, their
            batch is None. Default: none.
        lower_inequalities: The same for c(u, v) <= 0. Default: none.
        project_upper: A function that maps a tensor to the nearest point of a convex set, such as `Box(0, 1)`. It is
            applied to each tensor of u; a dict applies one to each tensor that it names. None (default): u is free.
        project_lower: The same for v. None (default): v is free.
        prepare: `prepare(u, batches)` returns the part that depends only on u, for a pair (upper batch, lower batch).
            The other functions then receive its result in place of their batch. It runs once in each upper step. Use
            it for costly work that f and g share. None (default): they receive the batches.
        start_lower: `start_lower(v, prepared)` sets v to its start before each upper step, for v that belong to one
            batch only. None (default): v continues from the step before.
        trials: Declares n independent problems in one: every tensor of u and v has a leading dimension n, and the
            objectives return n numbers, one for each trial. None (default): one problem.

    Example:
        >>> import torch
        >>> from bilevel import Problem
        >>> problem = Problem(
        ...     upper=lambda u, v, batch: (v - 1).square().sum(),
        ...     lower=lambda u, v, batch: (v - u).square().sum(),
        ...     inequalities=lambda u, v, batch: u - 2,
        ... )
        >>> len(problem.inequalities)
        1
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

    if TYPE_CHECKING:  # a single function is accepted for a list; the fields hold tuples

        def __init__(
            self,
            upper: Objective,
            lower: Objective,
            equalities: Objective | Sequence[Objective] = (),
            inequalities: Objective | Sequence[Objective] = (),
            lower_equalities: Objective | Sequence[Objective] = (),
            lower_inequalities: Objective | Sequence[Objective] = (),
            project_upper: Projection | Mapping[str, Projection] | None = None,
            project_lower: Projection | Mapping[str, Projection] | None = None,
            prepare: Callable[[Any, Any], Any] | None = None,
            start_lower: Callable[[Any, Any], None] | None = None,
            trials: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise ProblemError(f"{name} must be a function (u, v, batch) -> Tensor; got {getattr(self, name)!r}.")
        for name in ("equalities", "inequalities", "lower_equalities", "lower_inequalities"):
            value = getattr(self, name)
            functions = (value,) if callable(value) else value
            if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
                raise ProblemError(
                    f"{name} must be a function (u, v, batch) -> Tensor or a list of such functions; got {value!r}."
                )
            object.__setattr__(self, name, tuple(functions))
            if name.startswith("lower_") and functions and self.project_lower is not None:
                raise ProblemError(
                    f"{name} cannot be used with project_lower. State the set of v as lower inequalities as well."
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
