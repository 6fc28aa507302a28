"""What the engines and `solve` ask of a run on minibatches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import norm
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.engines._torch_private import pytree
from bilevel.engines.engine import Engines
from bilevel.measures.certificate import SMALL
from bilevel.measures.lower_minimum import lower_point
from bilevel.methods.base import RunContext
from bilevel.optim.variable_optimizer import VariableOptimizer
from bilevel.problem import Problem, Variable


class RunAnswers(ABC):
    """The answers of a run, whose attributes `MinibatchRun` sets."""

    # Whether a step takes second derivatives.
    curved = True
    unit_step = 1.0
    context: RunContext
    problem: Problem
    u: Variable
    v: Variable
    derivatives: PenalisedObjective
    engines: Engines
    lower: VariableOptimizer
    upper: VariableOptimizer
    last: list[Pair] | None
    tolerance: float | None
    _scale_values: tuple[float, float, float]

    @abstractmethod
    def _descents(self) -> dict[str, VariableOptimizer]:
        """Return the optimizers by their names in the state."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that changes in a run, except u and v."""

    # -- what the engines ask --------------------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self.derivatives.shared:
            return "ranks average gradients within a step, which a recorded step cannot do."
        if self.curved and self.derivatives.curvature == "difference":
            return "curvature='difference' resets the random generators within a step."
        if self.context.accumulate > 1:
            return f"accumulate={self.context.accumulate} resets the random generators within a step."
        for name, descent in (("lower_optimizer", self.lower), ("upper_optimizer", self.upper)):
            if not descent.recordable:
                return f"{name} is {type(descent.optimizer).__name__}, whose first state is not zero. Use Adam or SGD."
        if self.problem.start_lower is not None and not self.lower.restarts_in_place:
            return f"start_lower needs a new {type(self.lower.optimizer).__name__} each time; use Adam."
        return ""

    def live(self) -> list[Tensor]:
        held = pytree.tree_leaves(self.state_dict())
        return [*self.u.tensors().values(), *self.v.tensors().values(), *(t for t in held if isinstance(t, Tensor))]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [d.optimizer for d in self._descents().values() if d.optimizer is not None]

    # -- what solve asks -----------------------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        return self.engines.name

    def finish(self) -> bool | None:
        """Without data, test whether v minimises g. If v is large, this needs a tolerance."""
        if self.context.sources or self.problem.start_lower is not None:
            return None
        if self.tolerance is None and self.v.size > SMALL:
            return None
        d = self.derivatives
        direction = [torch.randn_like(leaf) for leaf in self.v.leaves]
        unit = [x / norm(direction) for x in direction]
        curvature = norm(d.hessian_product(d.prepare([(None, None)], graph=False), unit, with_u=False)).item()
        return lower_point(d, self.context.generator, self.tolerance or 1e-6, curvature) is None

    def scales(self) -> tuple[float, float, float, float]:
        return self._scale_values[0], *self._scale_values

    def episode(self) -> list[Pair] | None:
        return self.last if self.problem.start_lower is not None else None

    @abstractmethod
    def prices(self) -> Prices:
        """Return `Prices` for the certificate: nu + gamma s is minus the adjoint q."""

    def _adjoint_prices(self, q: Sequence[Tensor]) -> Prices:
        """Return `Prices` of a method that estimates the adjoint q and has no gamma."""
        return Prices(gamma=torch.zeros((), dtype=self.v.dtype, device=self.v.device), nu=[-x for x in q])

    def lam(self) -> Tensor:
        return torch.zeros((), dtype=self.v.dtype, device=self.v.device)
