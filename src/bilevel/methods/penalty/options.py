"""The options of the penalty method, and their defaults in each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self

from bilevel._util.checks import factory, in_range, one_of, true_or_false
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.errors import OptionError
from bilevel.methods.options import MethodOptions
from bilevel.optim.variable_optimizer import OptimizerFactory
from bilevel.problem import Problem

Mode = Literal["deterministic", "stochastic"]
# A number, or one for each of the problem's trials.
PenaltyWeight = float | Sequence[float]

# With tracked multipliers.
TRACKED: dict[str, Any] = {
    "cotangent": "tracked",
    "lower_steps": 0,
    "joint": True,
    "decay": "root",
    "lower_batches": "fresh",
}
# With the penalty weights gamma and lam.
STOCHASTIC: dict[str, Any] = {
    "lower_steps": 0,
    "joint": True,
    "gamma_factor": 1.1,
    "lam_factor": 0.9,
    "epsilon_factor": 0.9,
    "nu": 0.0,
    "multipliers": True,
    "_average_residual": True,
    "advances": 20,
    "decay": "linear",
    "lower_batches": "fresh",
    "cotangent": "same",
}
# The options that tracked multipliers do not use.
WEIGHTS = {
    *(set(STOCHASTIC) - set(TRACKED) - {"warm_up"}),
    *("gamma", "gamma_h", "lam", "epsilon", "advance_every", "rate_power"),
}
# If the step on u does not move v, other steps must.
IN_TURN: dict[str, Any] = {"lower_steps": 5}
# `start_lower` resets v in every iteration: v must reach its minimum in each, and a warm-up has no effect.
EPISODES: dict[str, Any] = {"lower_steps": 5, "joint": False, "warm_up": 0.0}
STOCHASTIC_ONLY = {
    *STOCHASTIC,
    "warm_up",
    "rate_power",
    "lam",
    "epsilon",
    "advance_every",
    "upper_optimizer",
    "lower_optimizer",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class PenaltyOptions(MethodOptions):
    """The fields of `Penalty`, and their checks. The docstring of `Penalty` explains them."""

    mode: Mode | None = None
    curvature: Curvature = "auto"
    gamma: PenaltyWeight | None = None
    gamma_h: float | None = None
    lower_steps: int | None = None
    joint: bool | None = None
    lam: PenaltyWeight | None = None
    epsilon: PenaltyWeight | None = None
    nu: float | None = None
    multipliers: bool | None = None
    gamma_factor: float | None = None
    lam_factor: float | None = None
    epsilon_factor: float | None = None
    advances: int | None = None
    advance_every: int | None = None
    warm_up: float | None = None
    decay: Literal["root", "linear", "constant"] | None = None
    rate_power: float | None = None
    upper_optimizer: OptimizerFactory | None = None
    lower_optimizer: OptimizerFactory | None = None
    lower_batches: Literal["fresh", "shared"] | None = None
    cotangent: Literal["tracked", "same", "running"] | None = None
    _average_residual: bool | None = None
    # Whether nu moves by the mean of grad_v g since the last advance, and not by the last one, as in `algorithm_2`.

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("deterministic", "stochastic"), optional=True)
        one_of("curvature", self.curvature, ("auto", "exact", "gram", "difference"))
        one_of("decay", self.decay, ("root", "linear", "constant"), optional=True)
        one_of("lower_batches", self.lower_batches, ("fresh", "shared"), optional=True)
        one_of("cotangent", self.cotangent, ("tracked", "same", "running"), optional=True)
        in_range("advance_every", self.advance_every, least=1, whole=True)
        in_range("lower_steps", self.lower_steps, least=0, whole=True)
        if self.lower_steps == 0 and self.joint is False:
            raise OptionError("lower_steps must be at least 1 with joint=False, or v never moves; got 0.")
        in_range("advances", self.advances, least=0, whole=True)
        for name in ("gamma", "gamma_h", "lam", "epsilon", "rate_power"):
            value = getattr(self, name)
            many = isinstance(value, (list, tuple)) and name in ("gamma", "lam", "epsilon")
            for number in value if many else (value,):
                in_range(name, number, least=0)
        in_range("gamma_factor", self.gamma_factor, least=1)
        in_range("nu", self.nu)
        for name in ("joint", "multipliers"):
            true_or_false(name, getattr(self, name), optional=True)
        for name in ("lam_factor", "epsilon_factor"):
            in_range(name, getattr(self, name), least=0, most=1)
        in_range("warm_up", self.warm_up, least=0, below=1)
        for name in ("upper_optimizer", "lower_optimizer"):
            factory(name, getattr(self, name))

    def tracks(self, problem: Problem) -> bool:
        """Return whether the multipliers are tracked: by request, or if neither problem nor options need the weights.

        Raise an error if they are requested and cannot be.
        """
        if self.cotangent is not None and self.cotangent != "tracked":
            return False
        needs = [
            name
            for name in ("equalities", "inequalities", "project_lower", "start_lower", "trials")
            if getattr(problem, name)
        ]
        needs += ["lower constraints"] * problem.constrained_below + ["curvature='gram'"] * (self.curvature == "gram")
        needs += sorted(name.lstrip("_") for name in WEIGHTS if getattr(self, name) is not None)
        if self.cotangent == "tracked" and needs:
            raise OptionError(f"cotangent='tracked' cannot be used with {needs[0]}. Use cotangent='running' or 'same'.")
        return not needs

    def for_batches(self, own: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return these options with None replaced by `own`, or by the defaults of the stochastic mode."""
        spends = (
            self.decay or STOCHASTIC["decay"]
        ) == "linear"  # a known number of steps, and the warm-up a tenth of it
        defaults = {**STOCHASTIC, **({"warm_up": 0.1} if spends else {}), **own}
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, mode="stochastic", **missing)

    def for_tracking(self) -> Self:
        """Return these options with None replaced by the defaults of tracked multipliers."""
        missing = {name: value for name, value in TRACKED.items() if getattr(self, name) is None}
        if self.joint is False and self.lower_steps is None:
            missing["lower_steps"] = IN_TURN["lower_steps"]
        return replace(self, mode="stochastic", **missing)

    def refuse_without_batches(self) -> None:
        """Refuse the options that the deterministic mode does not use."""
        for name in sorted(STOCHASTIC_ONLY):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name.lstrip('_')} is not used in deterministic mode; got {getattr(self, name)!r}. Leave it out, "
                    "or pass mode='stochastic'."
                )
        for name in ("gamma", "gamma_h"):
            if getattr(self, name) == 0:
                raise OptionError(f"{name} must be positive in deterministic mode; got 0. Leave it out.")
        if isinstance(self.gamma, (list, tuple)):
            raise OptionError(f"gamma must be one number in deterministic mode; got {self.gamma!r}.")
        if self.curvature == "gram":
            raise OptionError(
                "curvature='gram' is not used in deterministic mode. Leave it out, or pass mode='stochastic'."
            )
