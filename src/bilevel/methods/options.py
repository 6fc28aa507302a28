"""Options of the methods: checks that name the option, and those that all step-wise methods share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from bilevel._util.checks import factory, in_range, one_of
from bilevel.errors import OptionError
from bilevel.optim.variable_optimizer import OptimizerFactory
from bilevel.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the other methods than `Penalty` share. Each adds its own."""

    lower_steps: int = 5
    """Steps on v before each step on u (T in the paper)."""
    warm_up: float | None = None
    """The share of `max_steps` in which v alone moves. None: a tenth; 0 with `start_lower`."""
    decay: Literal["linear", "constant"] = "linear"
    """Whether the learning rates fall linearly to zero over `max_steps`."""
    lower_batches: Literal["fresh", "shared"] = "fresh"
    """`fresh`: a new pair of batches for every lower step; `shared`: one pair for the whole upper step."""
    upper_optimizer: OptimizerFactory | None = None
    """`partial(torch.optim.Adam, lr=...)` or any factory; None: Adam whose rate lets a coordinate travel by 5."""

    def __post_init__(self) -> None:
        in_range("lower_steps", self.lower_steps, least=1, whole=True)
        in_range("warm_up", self.warm_up, least=0, below=1)
        one_of("decay", self.decay, ("linear", "constant"))
        one_of("lower_batches", self.lower_batches, ("fresh", "shared"))
        factory("upper_optimizer", self.upper_optimizer)

    def describe(self) -> dict[str, str]:
        """The options that were given, as text: what a checkpoint is compared by."""
        return described(self)

    def steps(self, problem: Problem) -> dict[str, Any]:
        """What `bilevel.methods.minibatch_run.Steps` is told of them."""
        warm_up = (0.0 if problem.start_lower is not None else 0.1) if self.warm_up is None else self.warm_up
        return {
            "lower_steps": self.lower_steps,
            "shared": self.lower_batches == "shared",
            "warm_up": warm_up,
            "falling": self.decay == "linear",
        }


def described(options: Any) -> dict[str, str]:
    """The options of a dataclass that are not the defaults, as text."""
    given = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    if isinstance(value, partial):
        options = ", ".join(f"{key}={_text(item)}" for key, item in sorted(value.keywords.items()))
        return f"{_text(value.func)}({options})"
    return str(getattr(value, "__qualname__", type(value).__qualname__ if callable(value) else value))


def no_constraints(method: str, problem: Problem) -> None:
    """Refuse upper-level constraints, which need multipliers."""
    if problem.equalities or problem.inequalities:
        raise OptionError(
            f"{method} has no multipliers for equalities and inequalities. Use Penalty, or project_upper where u lives "
            "in a set with a known projection."
        )


def no_projection(method: str, problem: Problem) -> None:
    """Refuse `project_lower`: on the border of the set grad_v g is not zero, and the implicit derivative is another."""
    if problem.project_lower is not None:
        raise OptionError(f"{method} differentiates through grad_v g = 0, which project_lower changes. Use Penalty.")
