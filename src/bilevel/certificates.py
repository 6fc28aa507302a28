"""How far the end of a run is from a solution, and on how much of the data that was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Above this relative error of the hypergradient, the solution shows a sentence about it.
LARGE = 0.1


@dataclass(frozen=True)
class DataShare:
    """How much of the data of an objective a certificate was measured on.

    Fields:
        batches: The number of batches.
        examples: The number of examples in them. None: not known.
        of: The number of batches of a whole pass. None: not known.

    >>> print(DataShare(64, 4096, 938))
    64 of 938 batches (4,096 examples, 7%)
    """

    batches: int
    examples: int | None
    of: int | None

    @property
    def whole(self) -> bool:
        """Whether these were all batches."""
        return self.of is not None and self.batches >= self.of

    def __str__(self) -> str:
        if self.whole:
            return "all the data"
        share = None if self.of is None else f"{self.batches / self.of:.0%}"
        details = [*([] if self.examples is None else [f"{self.examples:,} examples"]), *([share] if share else [])]
        start = f"the first {self.batches:,}" if self.of is None else f"{self.batches:,} of {self.of:,}"
        return f"{start} batches" + (f" ({', '.join(details)})" if details else "")


@dataclass(frozen=True)
class Certificate:
    """How far the end is from being a solution, measured after the run.

    With data, every number belongs to the objectives as means over batches, each weighted by its number of examples.
    `full_data` says whether these were all batches; `upper_data` and `lower_data` say how many they were.

    Fields:
        stationarity_u: |grad_u F| of the penalised objective with the final penalty weights; under `project_upper`,
            |u - P(u - grad_u F)|.
        stationarity_v: |grad_v F|, without the regularisation lam g.
        lower_residual: |grad_v g|; with `project_lower`, |v - P(v - grad_v g)|; with lower constraints, |grad_v L| of
            `bilevel.derivatives.lower_constraints`.
        violation: The largest violation of an upper-level constraint; 0 without constraints.
        scale: The size of grad f. |grad_v F| is judged against it, and |grad_u F| unless `scale_u` is given.
        lower_scale: The size that grad_v g has away from its zero; the residual is judged against it.
        violation_scale: The size of the constraint functions; the violation is judged against it. Default: 1.
        lower_minimiser: Whether a second minimisation of g, under its constraints, found nothing lower. None (default):
            it was not tried.
        lower_violation: The largest violation of a lower-level constraint, divided by the size of its gradient in v.
            Default: 0.
        complementarity: The largest |min(alpha / k, -c / |J_c|)| of a lower inequality, in the unit of v (see
            `bilevel.derivatives.lower_constraints`). Default: 0.
        lower_unit: 1 + |v|; the two fields before are judged against it. Default: 1.
        lower_gap: g(u, v) less the least g found by solving the lower problem again from `lower_starts` points. None
            (default): there are no lower constraints, or it was not tried (with data it is not).
        lower_starts: The number of these points. Default: 0.
        hypergradient_error: |grad_u F - hypergradient| / (|f_u| + |g_uv q|), with q solved by conjugate gradients. None
            (default): it was not requested, there is a `project_lower` or a lower constraint, or it is unknown.
        hypergradient_unknown: Why the conjugate gradients failed: g_vv is not positive definite, or too
            ill-conditioned for this precision or for their number of products. Default: empty, if they did not.
        hypergradient_batches: The number of batches of g in `hypergradient_error`. Default: 0, without data.
        damping: lam / gamma. While nu is zero, grad_u F tends to the hypergradient with g_vv + damping I. Default: 0.
        batches: The number of batches measured, of the objective with more of them. Default: 0, without data.
        full_data: Whether these were all batches. Default: True.
        upper_data, lower_data: How much of the data of f and of g was measured. Default: None, without data.
        scale_u: The size that |grad_u F| is judged against, in the unit of u. None (default): `scale`.
        upper: f at the end. Default: NaN, not known.
        tolerance: The run counts as converged if the relative measures are at most this. None (default): it never does.

    >>> Certificate(1e-9, 1e-9, 1e-10, 0.0, scale=1.0, lower_scale=1.0).passes(1e-6)
    True
    """

    stationarity_u: float
    stationarity_v: float
    lower_residual: float
    violation: float
    scale: float
    lower_scale: float
    violation_scale: float = 1.0
    lower_minimiser: bool | None = None
    lower_violation: float = 0.0
    complementarity: float = 0.0
    lower_unit: float = 1.0
    lower_gap: float | None = None
    lower_starts: int = 0
    hypergradient_error: float | None = None
    hypergradient_unknown: str = ""
    hypergradient_batches: int = 0
    damping: float = 0.0
    batches: int = 0
    full_data: bool = True
    upper_data: DataShare | None = None
    lower_data: DataShare | None = None
    scale_u: float | None = None
    upper: float = math.nan
    tolerance: float | None = None

    @property
    def stationarity(self) -> float:
        """|grad F| over u and v together."""
        return math.hypot(self.stationarity_u, self.stationarity_v)

    @property
    def relative_stationarity(self) -> float:
        """|grad F|, with the parts of u and v each relative to its scale."""
        scale_u = self.scale if self.scale_u is None else self.scale_u
        return math.hypot(self.stationarity_u / scale_u, self.stationarity_v / self.scale)

    def measured_on(self) -> str:
        """Return in words how much of the data was measured."""
        if self.full_data or self.upper_data is None or self.lower_data is None:
            return "all the data" if self.full_data else f"{self.batches:,} batches"
        return f"{self.upper_data} of f and {self.lower_data} of g"

    @property
    def worst(self) -> float:
        """The largest of the relative measures: what `solve` compares with its tolerance."""
        measures = (self.relative_stationarity, self.lower_residual / self.lower_scale, self.infeasibility)
        return math.nan if any(math.isnan(m) for m in measures) else max(measures)

    @property
    def infeasibility(self) -> float:
        """The largest violation at either level, complementarity included, each relative to its scale."""
        below = max(self.lower_violation, self.complementarity) / self.lower_unit
        return max(self.violation / self.violation_scale, below)

    @property
    def trusted(self) -> bool:
        """Whether the hypergradient is right: its error is small, or at least unknown at a v that minimises g."""
        if self.hypergradient_error is None:
            return not self.hypergradient_unknown or self.lower_minimiser is True
        return self.hypergradient_error <= LARGE

    def passes(self, tolerance: float) -> bool:
        return self.worst <= tolerance and self.lower_minimiser is not False
