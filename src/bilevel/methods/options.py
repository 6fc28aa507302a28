"""Options that several methods share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from bilevel._util.checks import brief, check_counts, factory, in_range, one_of
from bilevel.errors import OptionError
from bilevel.methods.base import RunContext
from bilevel.optim.variable_optimizer import OptimizerFactory
from bilevel.problem import Problem

# How learning rates can fall (see `bilevel.methods.pacing`).
Decay = Literal["root", "linear", "constant"]
DECAYS = ("constant", "linear", "root")


@dataclass(frozen=True, kw_only=True, repr=False)
class MethodOptions:
    """The options of a method: a frozen dataclass whose `repr` shows only what differs from the defaults."""

    def __repr__(self) -> str:
        public = {name: value for name, value in self._changed().items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={_code(value)}' for name, value in public.items())})"

    def describe(self) -> dict[str, str]:
        """Return the options that differ from the defaults, as text. A run that resumes compares them."""
        return {name.lstrip("_"): _text(value) for name, value in self._changed().items()}

    def _changed(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True, kw_only=True, repr=False)
class StepOptions(MethodOptions):
    """Options that all methods except `Penalty` share. Each class lists and explains its options."""

    lower_steps: int = 5
    warm_up: float | None = None
    decay: Decay = "linear"
    lower_batches: Literal["fresh", "shared"] = "fresh"
    upper_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        check_counts(lower_steps=self.lower_steps)
        in_range("warm_up", self.warm_up, least=0, below=1)
        one_of("decay", self.decay, DECAYS)
        one_of("lower_batches", self.lower_batches, ("fresh", "shared"))
        factory("upper_optimizer", self.upper_optimizer)

    def steps(self, problem: Problem) -> dict[str, Any]:
        """Return the arguments of `MinibatchRun` that these options set. Refuse constraints on u and v."""
        no_constraints(type(self).__name__, problem)
        warm_up = default_warm_up(problem, self.decay) if self.warm_up is None else self.warm_up
        return {
            "lower_steps": self.lower_steps,
            "shared": self.lower_batches == "shared",
            "warm_up": warm_up,
            "decay": self.decay,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerOptions(StepOptions):
    """Options of the methods that move v with a torch optimizer."""

    lower_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        factory("lower_optimizer", self.lower_optimizer)


def default_warm_up(problem: Problem, decay: str) -> float | None:
    """Return the share of the steps in which only v moves; None: until v is trained roughly."""
    if problem.start_lower is not None:
        return 0.0
    return 0.1 if decay == "linear" else None


def check_batch_run(context: RunContext, warm_up: float) -> None:
    """Refuse what no run of lower and upper steps on batches can do."""
    problem = context.problem
    if problem.constrained_below:
        raise OptionError(
            "lower_equalities and lower_inequalities need Penalty(), which penalises the lower KKT "
            "conditions. Use it, or project_lower if v lives in a set with a known projection (Box, Ball, Simplex)."
        )
    if problem.prepare is not None and context.u.rows:
        raise OptionError("u cannot hold Rows if the problem has prepare. Use a tensor with one row for each example.")
    if warm_up and problem.start_lower is not None:
        raise OptionError(f"warm_up must be 0 with start_lower, which resets v in every step; got {warm_up}.")
    if context.accumulate > 1 and problem.start_lower is not None:
        raise OptionError(
            f"accumulate must be 1 with start_lower, which receives one episode; got {context.accumulate}. Put "
            "several tasks into one batch."
        )


def no_constraints(method: str, problem: Problem) -> None:
    """Refuse constraints of the upper level."""
    if problem.equalities or problem.inequalities:
        raise OptionError(
            f"{method} has no multipliers for equalities and inequalities. Use Penalty, or project_upper if u lives in "
            "a set with a known projection."
        )


def no_projection(method: str, problem: Problem) -> None:
    """Refuse `project_lower`: on the border of its set grad_v g is not zero, so the implicit derivative differs."""
    if problem.project_lower is not None:
        raise OptionError(f"{method} differentiates through grad_v g = 0, which project_lower changes. Use Penalty.")


def _text(value: Any) -> str:
    """Return an option as a checkpoint writes it."""
    if isinstance(value, partial):
        options = ", ".join(f"{key}={_text(item)}" for key, item in sorted(value.keywords.items()))
        return f"{_text(value.func)}({options})"
    return str(getattr(value, "__qualname__", type(value).__qualname__ if callable(value) else value))


def _code(value: Any) -> str:
    """Return an option as a user would write it, or its type and size if it is long."""
    if isinstance(value, partial):
        options = "".join(f", {key}={_code(item)}" for key, item in value.keywords.items())
        return f"partial({_text(value.func)}{options})"
    return _text(value) if callable(value) else brief(value)
