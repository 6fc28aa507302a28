"""What every run without data has: the derivatives, the tolerance, and v at its start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.nested import Pair
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.errors import OptionError
from bilevel.measures.lower_minimum import flatten
from bilevel.methods.base import RunContext
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.results import Status


def default_tolerance(dtypes: Sequence[torch.dtype], digits: float, places: float) -> float:
    """Return the relative accuracy that a certificate can reach in the least precise dtype."""
    return max(digits, places * max(torch.finfo(dtype).eps for dtype in dtypes))


class RunWithoutData:
    """The part of a deterministic run that does not depend on its algorithm."""

    mode = "deterministic"
    engine = "eager"
    draws = 0
    # The default tolerance in float64; in float32 it is this number of units in the last place.
    digits, places = 1e-9, 1e3

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        self.options, self.context = options, context
        self.problem, self.u, self.v = context.problem, context.u, context.v
        self.u.make_dense()
        self.derivatives = PenalisedObjective(self.problem, self.u, self.v, options.curvature)
        self.leaves = [*self.u.leaves, *self.v.leaves]
        self.split = sum(leaf.numel() for leaf in self.u.leaves)
        dtype = max((leaf.dtype for leaf in self.leaves), key=lambda dtype: torch.finfo(dtype).eps)
        self.coarse = str(dtype).removeprefix("torch.")
        if torch.finfo(dtype).eps > 1e-4:
            raise OptionError(
                f"u and v must be float32 or float64 in deterministic mode; got {self.coarse}. Use .double()."
            )
        self.tolerance: float | None = context.tolerance or default_tolerance([dtype], self.digits, self.places)
        # The v that the run begins with: g is minimised from there again at the end.
        self.first_v = flatten(self.v.leaves)
        self.status: Status | None = None
        self.restarts = 0
        self.minimiser: bool | None = None

    def warn_of_precision(self) -> None:
        """Warn if the default tolerance is for a precision below float64."""
        if self.context.tolerance is None and self.coarse != "float64":
            warn_user(
                f"u or v is {self.coarse}: without data the run ends at a relative tolerance of {self.tolerance:.0e}, "
                "which that precision can reach. Use float64 for more digits."
            )

    def start_lower(self) -> None:
        """Put v at the start that the problem gives."""
        if self.problem.start_lower is not None:
            with torch.no_grad():
                self.problem.start_lower(self.v.value, self._batches(graph=False)[0][0])

    def _batches(self, *, graph: bool) -> list[Pair]:
        return self.derivatives.prepare([(None, None)], graph=graph)

    def ended(self) -> Status | None:
        return self.status

    def episode(self) -> list[Pair] | None:
        return None

    @property
    def unit_step(self) -> float:
        """The length of the gradient step that measures how far u is from stationary on its set."""
        return 1.0

    def lam(self) -> Tensor:
        return torch.zeros((), dtype=self.v.dtype, device=self.v.device)
