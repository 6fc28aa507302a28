"""The penalty method: a penalty on the slope of the lower objective (Mehra and Hamm, ACML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bilevel.errors import OptionError
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.penalty.constrained_lagrangian import ConstrainedLagrangianRun
from bilevel.methods.penalty.constrained_minibatch import ConstrainedMinibatchRun
from bilevel.methods.penalty.deterministic import DeterministicRun
from bilevel.methods.penalty.minibatch import PenaltyMinibatchRun
from bilevel.methods.penalty.options import EPISODES, IN_TURN, PenaltyOptions, PenaltyWeight
from bilevel.methods.penalty.tracked import TrackedRun


@dataclass(frozen=True, kw_only=True, repr=False)
class Penalty(PenaltyOptions):
    """Penalty method: descends f plus a penalty on grad_v g, with multipliers.

    Without options, it takes its scales from the problem. Without data it runs in `"deterministic"` mode: v stays at
    the minimum of g and L-BFGS moves u, or, if g_vv is singular, L-BFGS moves u and v together. With data it runs in
    `"stochastic"` mode. There v descends g only, as in plain training, the multipliers of grad_v g = 0 are tracked, and
    u follows the hypergradient, without bias and without a horizon (`cotangent="tracked"`). The mode fills in the
    options that are None, and refuses options that it does not use.

    Options of both modes:
        mode: "deterministic" or "stochastic". Default: "stochastic" with data, "deterministic" without.
        curvature: How to take second derivatives of g. "exact": by a second backward pass. "gram": the same, with
            every linear layer that allows it in Gram form. "difference": by finite differences, first order only.
            "auto" (default): exact, in Gram form if that is cheaper, by differences if an operator has no double
            backward.
        gamma: First penalty weight of |grad_v g|^2 / 2. Default: from the sizes of f and g at the end of the warm-up.
            A list has one number for each trial.
        gamma_h: First penalty weight of every upper-level constraint. Default: from the sizes of f and of the
            constraints.

    Options of the stochastic mode:
        cotangent: What multiplies the curvature g_uv. "tracked": the multipliers, which take a step in each step of u.
            "same": grad_v g of the same batch times gamma, with v on f + lam g; biased by the variance of grad_v g.
            "running": a running mean of grad_v g, with less bias. Default: "tracked"; "same" if an option of the
            penalty weights is given, or with constraints, `project_lower`, `start_lower` or trials.
        lower_steps: More steps on v before each step on u (T in the paper). Default: 0 if `joint`, otherwise 5.
        joint: Whether the step on u also moves v. Its gradient in v costs nothing more. Default: True; False with
            `start_lower`.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v. Default: Adam, whose first step
            reduces g (or f + lam g) by 6% to first order, with a rate between 1e-4 and 3e-2.
        upper_optimizer: Factory for u. Default: Adam, with a rate at which the minimum of g moves by 0.3% a step; if
            the cotangent is not tracked, with a rate that lets each coordinate move by 5, or, without decay="linear",
            with a first step of 0.03 or less.
        lower_batches: "fresh" (default): a new pair of batches for every lower step. "shared": one pair for the
            lower steps and the upper step.
        warm_up: Share of `max_steps` in which u stays. Default: until gradients of successive batches no longer
            agree; 0.1 if the cotangent is not tracked and decay="linear", 0 with `start_lower`.
        decay: "root": nothing depends on `max_steps`; learning rates fall like the root of the number of steps.
            "linear": they fall to zero over `max_steps`. "constant": they stay. Default: "root"; "linear" if the
            cotangent is not tracked.

    Options of the penalty weights, if the cotangent is not tracked:
        lam: First weight of g in the steps on v, which keeps v at a minimum of g. Default: from the sizes of f and g. A
            list has one number for each trial.
        rate_power: Divides the learning rates by (gamma / its first value) to this power. Default: 1 for SGD, else 0.
        advances: How often the schedule advances after the warm-up, at least, with decay="linear". Otherwise after 10
            steps on u, and after intervals that grow by a fifth. Default: 20. 0: only by `epsilon`.
        advance_every: Upper steps between two advances. It overrides `advances`. Default: none.
        epsilon: First tolerance: the schedule also advances if the penalised gradient is smaller. Default: no
            tolerance. A list has one number for each trial.
        gamma_factor: Factor on gamma at each advance, at least 1. Default: 1.1.
        lam_factor: Factor on lam at each advance, at most 1. Default: 0.9.
        epsilon_factor: Factor on epsilon at each advance, at most 1. Default: 0.9.
        multipliers: Whether the multipliers nu of grad_v g = 0 move at each advance. Default: True.
        nu: First value of every multiplier. Default: 0.

    >>> Penalty(lower_steps=2, warm_up=0.2)
    Penalty(lower_steps=2, warm_up=0.2)
    """

    @classmethod
    def algorithm_1(
        cls,
        *,
        lower_steps: int = 10,
        gamma: PenaltyWeight = 1.0,
        epsilon: PenaltyWeight = 1.0,
        upper_rate: float = 1e-3,
        lower_rate: float = 1e-4,
        **options: Any,
    ) -> Penalty:
        """Return the paper's Algorithm 1 with Adam and the constants of its synthetic problems (Appendix E.1).

        `upper_rate` and `lower_rate` are Adam's learning rates; `options` are further options of `Penalty`.
        """
        base: dict[str, Any] = {
            "mode": "stochastic",
            "lower_steps": lower_steps,
            "joint": False,
            "gamma": gamma,
            "epsilon": epsilon,
            "lam": 0.0,
            "nu": 0.0,
            "multipliers": False,
            "_average_residual": False,
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
    def algorithm_2(cls, *, lam: PenaltyWeight = 10.0, nu: float = 0.0, **options: Any) -> Penalty:
        """Return the paper's Algorithm 2: `algorithm_1` with the regularisation lam g and the multipliers nu."""
        return cls.algorithm_1(**({"lam": lam, "nu": nu, "multipliers": True} | options))

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        problem = context.problem
        mode = self.mode or ("stochastic" if context.sources else "deterministic")
        if mode == "deterministic":
            if context.sources:
                raise OptionError(
                    "mode='deterministic' needs objectives without data; got data. Use the full data inside upper and "
                    "lower, and pass data=None."
                )
            self.refuse_without_batches()
            if problem.trials is not None:
                raise OptionError("mode='deterministic' solves one problem at a time. Pass mode='stochastic'.")
            if context.engine not in ("auto", "eager"):
                raise OptionError(
                    f"engine={context.engine!r} is not used in deterministic mode, whose line search reads values. "
                    "Leave it out, or pass mode='stochastic'."
                )
            if context.precision is not None:
                raise OptionError(
                    f"precision must be None in deterministic mode, which works to the last digits; got "
                    f"{context.precision!r}. Leave it out, or pass mode='stochastic'."
                )
            if not problem.constrained_below:
                return DeterministicRun(self, context)
            run = ConstrainedLagrangianRun(self, context)
            run.begin()
            return run
        if self.tracks(problem):
            return TrackedRun(self.for_tracking(), context)
        own = EPISODES if problem.start_lower is not None else IN_TURN if self.joint is False else {}
        filled = self.for_batches(own)
        if self.curvature == "gram":
            _refuse_gram(filled, context)
        return (ConstrainedMinibatchRun if problem.constrained_below else PenaltyMinibatchRun)(filled, context)


def _refuse_gram(options: Penalty, context: RunContext) -> None:
    """Refuse curvature='gram' if the cotangent of the second backward is not nu + gamma s of one batch."""
    for obstacle, name, needed in (
        (options.cotangent != "same", f"cotangent={options.cotangent!r}", "cotangent='same'"),
        (context.accumulate > 1, f"accumulate={context.accumulate}", "accumulate=1"),
        (context.precision is not None, f"precision={context.precision!r}", "precision=None"),
        (context.problem.project_lower is not None, "project_lower", ""),
    ):
        if obstacle:
            fix = f"{needed}, or " if needed else ""
            raise OptionError(f"curvature='gram' cannot be used with {name}. Use {fix}curvature='auto'.")
