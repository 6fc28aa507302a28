"""The penalty method: a price on the slope of the lower objective (Mehra and Hamm, ACML 2021).

`Penalty` holds the options of both modes; `stepwise` and `lagrangian` run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch

from bilevel._util.checks import factory, in_range, one_of, true_or_false
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.errors import OptionError
from bilevel.methods.base import Setting, State
from bilevel.methods.options import described
from bilevel.methods.penalty.augmented_lagrangian import Lagrangian
from bilevel.methods.penalty.constrained_lagrangian import Constrained
from bilevel.methods.penalty.constrained_minibatch import ConstrainedSteps
from bilevel.methods.penalty.minibatch import Stepwise
from bilevel.optim.variable_optimizer import OptimizerFactory

Mode = Literal["deterministic", "stochastic"]
Price = float | Sequence[float]
"""A number, or one for each of the problem's trials."""

STOCHASTIC: dict[str, Any] = {
    "lower_steps": 0,
    "joint": True,
    "gamma_factor": 1.1,
    "lam_factor": 0.9,
    "epsilon_factor": 0.9,
    "nu": 0.0,
    "multipliers": True,
    "average_residual": True,
    "advances": 20,
    "warm_up": 0.1,
    "decay": "linear",
    "lower_batches": "fresh",
    "cotangent": "same",
}
IN_TURN: dict[str, Any] = {"lower_steps": 5}
"""Where the step on u leaves v alone, others have to move it."""
EPISODES: dict[str, Any] = {"lower_steps": 5, "joint": False, "warm_up": 0.0}
"""With `start_lower`, v starts anew in every iteration: it has to get to its minimum there, and cannot be warmed up."""
DETERMINISTIC: dict[str, Any] = {"memory": 100, "inner_steps": 50}
OWN = {
    "deterministic": {*DETERMINISTIC},
    "stochastic": {
        *STOCHASTIC,
        "rate_power",
        "lam",
        "epsilon",
        "advance_every",
        "smoothing",
        "upper_optimizer",
        "lower_optimizer",
    },
}
"""The options that one mode alone uses. `gamma`, `gamma_h`, `curvature` and `reading` are not among them."""


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Options of the penalty method. With none given, it takes its scales from the problem.

    Without data the mode is `"deterministic"` (augmented Lagrangian, L-BFGS over u and v together), with data
    `"stochastic"` (T steps on v, then one on u and v together). An option left at None is filled in by the mode; one
    that the mode in force does not use is refused.
    """

    mode: Mode | None = None
    curvature: Curvature = "auto"
    """How second derivatives of g are taken.

    `exact`: by a second backward. `gram`: the same, with all linear layers that allow it in Gram form (see
    `bilevel.derivatives.gram`). `difference`: first order only. `auto`: exact, in Gram form where that is cheaper,
    with differences
    to fall back on.
    """
    gamma: Price | None = None
    """The first price of |grad_v g|^2 / 2. None: from the sizes of f and g at the end of the warm-up. This, lam and
    epsilon may be one number for each trial."""
    gamma_h: float | None = None
    """The first price of every upper-level constraint. None: from the sizes of f and h at the start."""

    reading: Literal["optimistic", "pessimistic"] = "optimistic"
    """Which f counts where the lower problem has several solutions: the least of theirs, or the largest over those that
    are found (see `bilevel.running.pessimistic`). The latter is for problems without data."""

    lower_steps: int | None = None
    """Steps on v alone before each step on u (T in the paper). None: none, as that step moves v, too; 5 where it does
    not."""
    joint: bool | None = None
    """Whether the step on u moves v, too: its gradient is at hand."""
    lam: Price | None = None
    """The first weight of g in v's step, which keeps v at a minimum of g. None: from the sizes of f and g."""
    epsilon: Price | None = None
    """The first tolerance: the schedule advances when the penalised gradient is smaller. None: never."""
    nu: float | None = None
    """The first value of every multiplier of grad_v g = 0."""
    multipliers: bool | None = None
    """Whether nu moves when the schedule advances."""
    average_residual: bool | None = None
    """Whether nu moves by the mean of grad_v g since the last advance, rather than by that of the last batch."""
    gamma_factor: float | None = None
    """c_gamma: what gamma is multiplied by at an advance."""
    lam_factor: float | None = None
    epsilon_factor: float | None = None
    smoothing: float | None = None
    """The memory (0 to 1) of a running mean of the gradient whose norm is compared with epsilon, too."""
    advances: int | None = None
    """How many times the schedule advances after the warm-up at the least; 0: on the tolerance alone."""
    advance_every: int | None = None
    """The same as a number of upper steps; it takes precedence over `advances`."""
    warm_up: float | None = None
    """The share of `max_steps` in which v alone descends f + lam g, first order, without constraints."""
    decay: Literal["linear", "constant"] | None = None
    """Whether the learning rates fall linearly to zero over `max_steps`."""
    rate_power: float | None = None
    """Learning rates are divided by (gamma / its first value) to this power. None: 1 for SGD, 0 for all others."""
    upper_optimizer: OptimizerFactory | None = None
    """`partial(torch.optim.Adam, lr=...)` or any factory; None: Adam whose rate lets a coordinate travel by 5."""
    lower_optimizer: OptimizerFactory | None = None
    """None: Adam whose first step takes away 6% of f + lam g to first order, at a rate between 1e-4 and 3e-2."""
    lower_batches: Literal["fresh", "shared"] | None = None
    """`fresh`: a new pair of batches for every lower step; `shared`: one pair for the whole upper step."""
    cotangent: Literal["same", "running", "other"] | None = None
    """Which grad_v g multiplies the curvature: of the same batch, a running mean, or of another batch."""

    memory: int | None = None
    """Pairs that L-BFGS keeps."""
    inner_steps: int | None = None
    """L-BFGS iterations before the multipliers move even if the tolerance was not met."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("deterministic", "stochastic"), optional=True)
        one_of("curvature", self.curvature, ("auto", "exact", "gram", "difference"))
        one_of("reading", self.reading, ("optimistic", "pessimistic"))
        one_of("decay", self.decay, ("linear", "constant"), optional=True)
        one_of("lower_batches", self.lower_batches, ("fresh", "shared"), optional=True)
        one_of("cotangent", self.cotangent, ("same", "running", "other"), optional=True)
        for name in ("advance_every", "memory", "inner_steps"):
            in_range(name, getattr(self, name), least=1, whole=True)
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
        for name in ("joint", "multipliers", "average_residual"):
            true_or_false(name, getattr(self, name), optional=True)
        for name in ("lam_factor", "epsilon_factor"):
            in_range(name, getattr(self, name), least=0, most=1)
        for name in ("warm_up", "smoothing"):
            in_range(name, getattr(self, name), least=0, below=1)
        for name in ("upper_optimizer", "lower_optimizer"):
            factory(name, getattr(self, name))

    @classmethod
    def algorithm_1(
        cls,
        *,
        lower_steps: int = 10,
        gamma: Price = 1.0,
        epsilon: Price = 1.0,
        upper_rate: float = 1e-3,
        lower_rate: float = 1e-4,
        **options: Any,
    ) -> Penalty:
        """The paper's Algorithm 1 with the constants of its synthetic problems (Appendix E.1), and Adam."""
        base: dict[str, Any] = {
            "mode": "stochastic",
            "lower_steps": lower_steps,
            "joint": False,
            "gamma": gamma,
            "epsilon": epsilon,
            "lam": 0.0,
            "nu": 0.0,
            "multipliers": False,
            "average_residual": False,
            "gamma_factor": 1.1,
            "lam_factor": 0.9,
            "epsilon_factor": 0.9,
            "advances": 0,
            "warm_up": 0.0,
            "decay": "constant",
            "rate_power": 0.0,
            "lower_batches": "shared",
            "cotangent": "same",
            "upper_optimizer": partial(torch.optim.Adam, lr=upper_rate),
            "lower_optimizer": partial(torch.optim.Adam, lr=lower_rate),
        }
        return cls(**(base | options))

    @classmethod
    def algorithm_2(cls, *, lam: Price = 10.0, nu: float = 0.0, **options: Any) -> Penalty:
        """The paper's Algorithm 2: Algorithm 1 with the regularisation lam g and the multipliers nu."""
        return cls.algorithm_1(**({"lam": lam, "nu": nu, "multipliers": True} | options))

    def filled(self, mode: Mode, own: Mapping[str, Any] = MappingProxyType({})) -> Penalty:
        """These options with `own`, then the mode's, in place of None; refuses those that the mode does not use."""
        other = "stochastic" if mode == "deterministic" else "deterministic"
        for name in sorted(OWN[other]):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name} is not used in {mode} mode; got {getattr(self, name)!r}. Leave it out, or pass "
                    f"mode={other!r}."
                )
        defaults = {**(STOCHASTIC if mode == "stochastic" else DETERMINISTIC), **own}
        for name in ("gamma", "gamma_h"):
            if mode == "deterministic" and getattr(self, name) == 0:
                raise OptionError(f"{name} must be positive in deterministic mode; got 0. Leave it out.")
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, mode=mode, **missing)

    def init(self, setting: Setting) -> State:
        mode = self.mode or ("stochastic" if setting.sources else "deterministic")
        if mode == "deterministic":
            if setting.sources:
                raise OptionError(
                    "mode='deterministic' needs objectives without data; got data. Close over the full data in upper "
                    "and lower and pass data=None."
                )
            if isinstance(self.gamma, (list, tuple)):
                raise OptionError(f"gamma must be one number in deterministic mode; got {self.gamma!r}.")
            if setting.problem.trials is not None:
                raise OptionError("mode='deterministic' solves one problem at a time. Pass mode='stochastic'.")
            if self.curvature == "gram":
                raise OptionError(
                    "curvature='gram' is not used in deterministic mode. Leave it out, or pass mode='stochastic'."
                )
            run = Constrained if setting.problem.constrained_below else Lagrangian
            return run(self.filled(mode), setting)
        if self.reading != "optimistic":
            raise OptionError(f"reading is not used in stochastic mode; got {self.reading!r}. Leave it out.")
        own = EPISODES if setting.problem.start_lower is not None else IN_TURN if self.joint is False else {}
        filled = self.filled(mode, own)
        if self.curvature == "gram":
            _refuse_gram(filled, setting)
        return (ConstrainedSteps if setting.problem.constrained_below else Stepwise)(filled, setting)

    def describe(self) -> dict[str, str]:
        """The options that were given, as text: what a checkpoint is compared by."""
        return described(self)


def _refuse_gram(options: Penalty, setting: Setting) -> None:
    """Refuse curvature='gram' where the cotangent of the second backward is not nu + gamma s of one batch."""
    for obstacle, name, needed in (
        (options.cotangent != "same", f"cotangent={options.cotangent!r}", "cotangent='same'"),
        (setting.accumulate > 1, f"accumulate={setting.accumulate}", "accumulate=1"),
        (setting.precision is not None, f"precision={setting.precision!r}", "precision=None"),
        (setting.problem.project_lower is not None, "project_lower", ""),
    ):
        if obstacle:
            fix = f"{needed}, or " if needed else ""
            raise OptionError(f"curvature='gram' cannot be used with {name}. Use {fix}curvature='auto'.")
