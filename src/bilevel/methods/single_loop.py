"""The run that `SOBA`, `SRBA` and `F2SA` share: v, the adjoint q and u move by steps of gradient descent.

    v descends g,     q descends <q, g_vv q> / 2 - <f_v, q>,     u descends f_u - g_uv q

The steps on v and q have the same rate rho, the steps on u another, and no step solves a linear system.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import factory, in_range, one_of
from bilevel.derivatives.penalised_objective import Curvature
from bilevel.derivatives.prices import Gradients
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.adjoint_run import AdjointRun
from bilevel.methods.base import RunContext
from bilevel.methods.options import DECAYS, Decay, MethodOptions, no_constraints, no_projection
from bilevel.optim.variable_optimizer import OptimizerFactory, VariableOptimizer, adam
from bilevel.problem import Variable

# Adam's first rate for u with decay="root". A coordinate, or a row at each visit, then moves by at most about this
# number times 2 sqrt(t) in t steps.
UPPER_RATE = 1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class SingleLoopOptions(MethodOptions):
    """The options that `SOBA`, `SRBA` and `F2SA` share."""

    lower_rate: float | None = None
    upper_rate: float | None = None
    decay: Decay = "root"
    lower_optimizer: OptimizerFactory | None = None
    upper_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        one_of("decay", self.decay, DECAYS)
        for name in ("lower", "upper"):
            rate, made = getattr(self, f"{name}_rate"), getattr(self, f"{name}_optimizer")
            in_range(f"{name}_rate", rate, above=0)
            factory(f"{name}_optimizer", made)
            if rate is not None and made is not None:
                raise OptionError(
                    f"{name}_rate is the rate of plain gradient steps, which {name}_optimizer replaces; got "
                    f"{name}_rate={rate!r} and both. Leave one out."
                )


class SingleLoopRun(AdjointRun):
    """A run with an adjoint that moves by gradient descent."""

    like_v = (*AdjointRun.like_v, "adjoint", "q")
    half = 1.0  # t^(-1/2)

    def __init__(
        self, options: SingleLoopOptions, context: RunContext, *, lower_steps: int = 0, curvature: Curvature = "auto"
    ) -> None:
        self.options, name = options, type(options).__name__
        no_constraints(name, context.problem)
        no_projection(name, context.problem)
        if context.problem.start_lower is not None:
            raise OptionError(
                f"{name} cannot use start_lower, as each of its steps starts from the last v. Use ApproxGrad."
            )
        super().__init__(context, lower_steps=lower_steps, curvature=curvature, decay=options.decay)
        measured = self._measured()
        q = {key: torch.zeros_like(leaf, requires_grad=True) for key, leaf in self.v.named()}
        self.q = list(q.values())
        made = options.lower_optimizer or partial(torch.optim.SGD, lr=options.lower_rate or self._shortest())
        self.lower = VariableOptimizer(self.v, made, "lower_optimizer")
        self.adjoint = VariableOptimizer(Variable(q, "v"), made, "lower_optimizer")
        self.upper = self._upper(measured)
        self._start(measured)
        self._ready()

    def _start(self, measured: BatchScales) -> None:
        """Make what a method needs in addition."""

    def _upper(self, measured: BatchScales) -> VariableOptimizer:
        """Return the optimizer of u: the user's, plain gradient steps of the user's rate, or Adam."""
        options = self.options
        if options.upper_rate is not None:
            if self.u.rows:
                raise OptionError(
                    f"upper_rate must be left out with Rows, which have their own Adam; got {options.upper_rate!r}. "
                    "Pass upper_optimizer=partial(torch.optim.Adam, lr=...)."
                )
            return VariableOptimizer(self.u, partial(torch.optim.SGD, lr=options.upper_rate), "upper_optimizer")
        if options.upper_optimizer is not None or options.decay != "root":
            return self._upper_descent(options.upper_optimizer, measured)
        rows = UPPER_RATE * measured.coverage**-0.5
        return VariableOptimizer(self.u, adam(self.u, UPPER_RATE), "upper_optimizer", row_rate=rows)

    def _move(self, found: Gradients, left: Tensor) -> Tensor:
        """Move v, q and u at once: by grad_v g, by g_vv q - f_v, and by f_u - g_uv q; return the record."""
        self.lower.step(found.slope, (), left)
        self.adjoint.step([-x for x in found.v], (), left)
        return self._move_u(found, left)

    # -- what the engines and solve ask --------------------------------------------------------------------------

    def _descents(self) -> dict[str, VariableOptimizer]:
        return super()._descents() | {"adjoint": self.adjoint}

    def _tensors(self) -> dict[str, Any]:
        return {"q": self.q}
