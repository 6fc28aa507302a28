"""Measures how far (u, v) is from a solution: see `Certificate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping, undisturbed
from bilevel._util.tensor_lists import broadcast_trials, norm
from bilevel.batches.sources import Sources
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices, violation
from bilevel.optim.linear_solvers import conjugate_gradients
from bilevel.problem.problem import Problem
from bilevel.results import Certificate

# The largest number of batches of each source for a certificate.
BATCHES = 64
# Up to this size of v, a certificate includes the error of the hypergradient by default: without data, and with data.
LARGEST, SMALL = 1_000_000, 1000
CG_ITERATIONS = 200
# How many numbers of each constraint are checked in their own units: the most violated ones.
CHECKED = 8
TINY = 1e-12
CURVES_DOWN = "g curves down in some direction of v, so v does not minimise it"


class Measurable(Protocol):
    """The part of a run's state that a certificate needs."""

    derivatives: PenalisedObjective
    tolerance: float | None

    def prices(self) -> Prices: ...
    def lam(self) -> Tensor: ...
    def scales(self) -> tuple[float, float, float, float]:
        """Return the scales of |grad_u F|, |grad_v F|, the lower residual and the violation."""

    @property
    def unit_step(self) -> float:
        """The length t of the gradient step by which |u - P(u - t grad_u F)| / t is measured."""

    def episode(self) -> list[Pair] | None:
        """Return the batches to which v belongs, if every step has a separate lower problem."""


def certify(
    state: Measurable, sources: Sources, *, minimiser: bool | None, hypergradient: bool | None
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    """Return the certificate and the multipliers of a run's present point. All variables, buffers and generators stay.

    Arguments:
        state: The state of the run.
        sources: The data of the run.
        minimiser: Whether v minimises g; None if that was not tested.
        hypergradient: Whether to measure the error of the hypergradient. None: only if v is small.
    """
    d = state.derivatives
    counts = d.lower_evaluations, d.upper_evaluations
    d.u.make_dense()
    try:
        with undisturbed(d.v.device, d.v.buffers() + d.u.buffers()):
            return _measure(state, sources, minimiser, hypergradient)
    finally:
        d.u.release()
        d.lower_evaluations, d.upper_evaluations = counts


def _measure(
    state: Measurable, sources: Sources, minimiser: bool | None, hypergradient: bool | None
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    d, problem = state.derivatives, state.derivatives.problem
    upper, lower, full = _batches(state, sources, problem)
    _, slope = d.slope([pair for make in lower for pair in make(False)])
    residual = d.residual(slope)
    values = d.mean_over_ranks(_mean([d.constraints(pair[0]) for make in upper for pair in make(False)]))
    pulls = d.constraint_cotangents(values, state.prices())
    f, slopes = _lagrangian(d, upper, pulls)
    direct, pull = d.cotangent(slope, state.prices())
    curved = _product(d, lower, pull)
    total = [a + b for a, b in zip(slopes, curved, strict=True)]
    count = len(d.v.leaves)
    if direct is not None:
        total[:count] = [a + b for a, b in zip(total[:count], direct, strict=True)]
    slope_u = total[count:]
    scale_u, scale, lower_scale, violation_scale = state.scales()
    error, unknown = None, ""
    small = d.v.size <= (SMALL if sources else LARGEST)
    if not d.v.projected and d.kkt is None and (hypergradient or (hypergradient is None and small)):
        least = (state.tolerance or 0.0) * scale_u
        error, unknown = _hypergradient_error(d, lower, slopes, slope_u, [-x for x in pull], least)
    if d.u.projected:
        rate = state.unit_step
        moved = d.u.project_leaves([x.detach() - rate * y for x, y in zip(d.u.leaves, slope_u, strict=True)])
        slope_u = [(x.detach() - y) / rate for x, y in zip(d.u.leaves, moved, strict=True)]
    equal = len(problem.equalities)
    own = d.kkt.own(values, pulls) if d.kkt else (values, pulls, equal)
    prices = state.prices()
    if own[0] and not sources:
        violation_scale = _violation_unit(d, own[2])
    certificate = Certificate(
        stationarity_u=norm(slope_u).item(),
        stationarity_v=d.size(total[:count]).item(),
        lower_residual=d.size(residual).item(),
        violation=violation(own[0], own[2]).item() if own[0] else 0.0,
        scale=scale,
        lower_scale=lower_scale,
        violation_scale=violation_scale,
        scale_u=scale_u,
        lower_minimiser=False if unknown == CURVES_DOWN else minimiser,
        hypergradient_error=error,
        hypergradient_unknown=unknown,
        damping=_damping(state.lam(), prices.gamma),
        upper=f,
        tolerance=state.tolerance,
        batches=max(len(upper), len(lower)) if sources else 0,
        full_data=full,
        **(d.kkt.measures(d.prepare([(None, None)], graph=False)[0][1]) if d.kkt else {}),
    )
    paid = [n + broadcast_trials(prices.gamma, r) * r for n, r in zip(prices.nu, residual, strict=True)]
    multipliers = {"nu": paid, "equalities": own[1][: own[2]], "inequalities": own[1][own[2] :]}
    return certificate, multipliers | (d.kkt.multipliers() if d.kkt else {})


def _lagrangian(d: PenalisedObjective, upper: Sequence[_Maker], pulls: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """Return f, and the gradient of L = f + <mu + gamma_h h, h> in v and u."""
    slopes, values = [], []
    for pair in (pair for make in upper for pair in make(True)):
        outputs = [d.upper(pair[0]), *d.constraints(pair[0])]
        values.append(outputs[0].detach().sum())
        slopes.append(d.gradient(outputs, [*d.v.leaves, *d.u.leaves], cotangent=[None, *pulls]))
    f = d.mean_over_ranks([torch.stack(values).mean()])[0]
    return f.item(), d.mean_dense_over_ranks(_mean(slopes))


def _violation_unit(d: PenalisedObjective, equalities: int) -> float:
    """Return the unit of the violation: the numbers h that are violated most, each in its own unit, decide.

    The unit of a number is |h_u| (1 + |u|) + |h_v| (1 + |v|): how much it changes as u and v do, at the present point.
    """
    values = d.constraints(d.prepare([(None, None)], graph=True)[0][0])
    own, u = (values, d.u) if d.kkt is None else (d.kkt.own(values, values)[0], d.kkt.plain_u)
    reach_u, reach_v = 1 + norm(u.leaves).item(), 1 + norm(d.v.leaves).item()
    worst, largest, least = 0.0, 0.0, math.inf
    for i, value in enumerate(own):
        h = value.reshape(-1)
        outside = h.detach().abs() if i < equalities else h.detach().clamp(min=0)
        for k in torch.topk(outside, min(CHECKED, len(h))).indices:
            slope_u, slope_v = (d.gradient(h[k], x.leaves, retain=True) for x in (u, d.v))
            unit = max(norm(slope_u).item() * reach_u + norm(slope_v).item() * reach_v, TINY)
            size = outside[k].item()
            worst, largest, least = max(worst, size / unit), max(largest, size), min(least, unit)
    return largest / worst if worst > 0 else least


def _damping(lam: Tensor, gamma: Tensor) -> float:
    """Return lam / gamma, the mean over trials."""
    if not bool(lam.any()):
        return 0.0
    return float((lam / gamma).mean()) if bool(gamma.all()) else math.inf


def adjoint(state: Measurable, sources: Sources) -> list[Tensor]:
    """Return q from g_vv q = f_v at the present point, on the batches of a certificate."""
    d = state.derivatives
    with keeping(d.v.buffers() + d.u.buffers()):
        upper, lower, _ = _batches(state, sources, d.problem)
        f_v = _mean([d.direct(make(False)).v for make in upper])
        return _solved(d, lower, f_v)[0]


def _solved(
    d: PenalisedObjective, lower: Sequence[_Maker], target: Sequence[Tensor], start: list[Tensor] | None = None
) -> tuple[list[Tensor], float, float]:
    """Solve g_vv q = target; return q, the largest relative residual of a trial, and the least curvature met.

    The curvature is relative to the largest one. `start` is a q that can be near the solution.
    """
    count = len(d.v.leaves)
    bends: list[Tensor] = []

    def product(p: list[Tensor]) -> list[Tensor]:
        bent = _product(d, lower, p)[:count]
        bends.append((d.dot(p, bent) / d.dot(p, p)).min())
        return bent

    near = None
    if start is not None:
        near = (start, [a - b for a, b in zip(target, product(start), strict=True)])
    q, square = conjugate_gradients(
        product,
        target,
        d.dot,
        start=near,
        steps=min(CG_ITERATIONS, 2 * d.v.size),
        accuracy=1e-10 if d.v.dtype == torch.float64 else 1e-4,
        flat=1e-14,
    )
    size = d.dot(target, target)
    relative = torch.where(size > 0, square / torch.where(size > 0, size, 1.0), 0.0)
    met = torch.stack(bends) if bends else target[0].new_ones(1)
    return q, float(relative.max().sqrt()), float(met.min() / met.abs().max())


# Makes a batch for one backward pass, as a list of one pair; True: with the graph of `prepare`.
_Maker = Callable[[bool], list[Pair]]


def _batches(state: Measurable, sources: Sources, problem: Problem) -> tuple[list[_Maker], list[_Maker], bool]:
    """Return the batches for the upper and for the lower objective, and whether they are all the data."""

    def maker(pair: Pair) -> _Maker:
        return lambda graph: state.derivatives.prepare([pair], graph=graph)

    if (episode := state.episode()) is not None:
        makers = [maker(pair) for pair in episode]
        return makers, makers, False
    upper, lower, full = sources.sample(BATCHES)
    if problem.prepare is not None:
        count = max(len(upper), len(lower))
        pairs = itertools.islice(zip(itertools.cycle(upper), itertools.cycle(lower), strict=False), count)
        makers = [maker(pair) for pair in pairs]
        return makers, makers, full
    return [maker((x, None)) for x in upper], [maker((None, x)) for x in lower], full


def _mean(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack([x.detach() for x in items]).mean(0) for items in zip(*lists, strict=True)]


def _product(d: PenalisedObjective, lower: Sequence[_Maker], direction: Sequence[Tensor]) -> list[Tensor]:
    """Return g_vv x, followed by g_uv x."""
    parts = (d.hessian_product(make(True), direction, with_u=True) for make in lower)
    total = reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], parts)
    return [t / len(lower) for t in total]


def _hypergradient_error(
    d: PenalisedObjective,
    lower: Sequence[_Maker],
    slopes: Sequence[Tensor],
    found: Sequence[Tensor],
    estimate: list[Tensor],
    least: float,
) -> tuple[float | None, str]:
    """Return the relative error of grad_u F against f_u - g_uv q, or why it is unknown.

    If q is not found from zero, the search starts again from the run's `estimate` of it, which is often near. `least`
    is the size of f_u and g_uv q below which their difference is zero for all purposes.
    """
    count = len(d.v.leaves)
    q, left, bend = _solved(d, lower, slopes[:count])
    if not left <= 1e-3 and bend > 0:
        q, left, bend = _solved(d, lower, slopes[:count], estimate)
    if not left <= 1e-3:
        if bend < -(torch.finfo(d.v.dtype).eps ** 0.5):
            return None, CURVES_DOWN
        if bend <= 0:
            return None, "g does not curve in some direction of v"
        return None, f"conjugate gradients did not solve g_vv q = f_v in {min(CG_ITERATIONS, 2 * d.v.size)} products"
    through = _product(d, lower, q)[count:]
    exact = [a - b for a, b in zip(slopes[count:], through, strict=True)]
    size = max(norm(slopes[count:]).item() + norm(through).item(), least)
    return (norm([a - b for a, b in zip(found, exact, strict=True)]).item() / size if size > 0 else None), ""
