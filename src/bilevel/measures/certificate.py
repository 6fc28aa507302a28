"""Measures how far (u, v) is from a solution: see `Certificate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping, undisturbed
from bilevel._util.tensor_lists import broadcast_trials, norm
from bilevel.batches.sources import Sources
from bilevel.certificates import Certificate
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices, violation
from bilevel.measures.certificate_batches import BATCHES, Allowed, Batches, choose
from bilevel.optim.linear_solvers import conjugate_gradients

# Up to this size of v, a certificate includes the error of the hypergradient by default: without data, and with data.
LARGEST, SMALL = 1_000_000, 1000
CG_ITERATIONS = 200
# Fewer products are not worth a try.
FEW_PRODUCTS = 20
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
    state: Measurable, sources: Sources, *, minimiser: bool | None, hypergradient: bool | None, allowed: Allowed
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    """Return the certificate and the multipliers of a run's present point. All variables, buffers and generators stay.

    Arguments:
        state: The state of the run.
        sources: The data of the run.
        minimiser: Whether v minimises g; None if that was not tested.
        hypergradient: Whether to measure the error of the hypergradient. None: only if v is small, or if it is cheap.
        allowed: How many evaluations it can take on data.
    """
    d = state.derivatives
    counts = d.lower_evaluations, d.upper_evaluations
    d.u.make_dense()
    try:
        with undisturbed(d.v.device, d.v.buffers() + d.u.buffers()):
            return _measure(state, sources, minimiser, hypergradient, allowed)
    finally:
        d.u.release()
        d.lower_evaluations, d.upper_evaluations = counts


def _measure(
    state: Measurable, sources: Sources, minimiser: bool | None, hypergradient: bool | None, allowed: Allowed
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    d, problem = state.derivatives, state.derivatives.problem
    upper, lower = choose(d, sources, state.episode(), allowed)
    prices = state.prices()
    point = _point(d, upper, lower, prices)
    count = len(d.v.leaves)
    scale_u, scale, lower_scale, violation_scale = state.scales()
    least = (state.tolerance or 0.0) * scale_u
    error, unknown, on = None, "", 0
    if not d.v.projected and d.kkt is None and hypergradient is not False:
        steps, (f, g) = _products(d, (upper, lower), bool(sources), hypergradient, allowed)
        if steps:
            sample = point if g is lower else _point(d, f, g, prices)
            error, unknown = _hypergradient_error(d, g, sample, least, steps)
            on = g.count if sources else 0
        if unknown and sources and not hypergradient and d.v.size > SMALL:
            unknown = ""  # g of a network nearly always curves down somewhere
    slope_u = point.total[count:]
    if d.u.projected:
        rate = state.unit_step
        moved = d.u.project_leaves([x.detach() - rate * y for x, y in zip(d.u.leaves, slope_u, strict=True)])
        slope_u = [(x.detach() - y) / rate for x, y in zip(d.u.leaves, moved, strict=True)]
    own = d.kkt.own(point.values, point.pulls) if d.kkt else (point.values, point.pulls, len(problem.equalities))
    if own[0] and not sources:
        violation_scale = _violation_unit(d, own[2])
    shares = (upper.share(), lower.share()) if sources else (None, None)
    certificate = Certificate(
        stationarity_u=norm(slope_u).item(),
        stationarity_v=d.size(point.total[:count]).item(),
        lower_residual=d.size(point.residual).item(),
        violation=violation(own[0], own[2]).item() if own[0] else 0.0,
        scale=scale,
        lower_scale=lower_scale,
        violation_scale=violation_scale,
        scale_u=scale_u,
        lower_minimiser=False if unknown == CURVES_DOWN else minimiser,
        hypergradient_error=error,
        hypergradient_unknown=unknown,
        hypergradient_batches=on,
        damping=_damping(state.lam(), prices.gamma),
        upper=point.f,
        tolerance=state.tolerance,
        batches=max(upper.count, lower.count) if sources else 0,
        full_data=all(share.whole for share in shares if share),
        upper_data=shares[0],
        lower_data=shares[1],
        **(d.kkt.measures(d.prepare([(None, None)], graph=False)[0][1]) if d.kkt else {}),
    )
    paid = [n + broadcast_trials(prices.gamma, r) * r for n, r in zip(prices.nu, point.residual, strict=True)]
    multipliers = {"nu": paid, "equalities": own[1][: own[2]], "inequalities": own[1][own[2] :]}
    return certificate, multipliers | (d.kkt.multipliers() if d.kkt else {})


class _Point(NamedTuple):
    """The derivatives at a point, as means over batches.

    Fields that are not obvious:
        values, pulls: h, and mu + gamma_h h.
        slopes: The gradient of f + <mu + gamma_h h, h> in v and u.
        pull: The cotangent nu + gamma r of s.
        total: The gradient of F in v and u.
    """

    f: float
    residual: list[Tensor]
    values: list[Tensor]
    pulls: list[Tensor]
    slopes: list[Tensor]
    pull: list[Tensor]
    total: list[Tensor]


def _point(d: PenalisedObjective, upper: Batches, lower: Batches, prices: Prices) -> _Point:
    """Return the derivatives of the mean objectives."""
    slope = lower.mean(lambda batch: d.slope(batch)[1])
    values: list[Tensor] = []
    if d.problem.equalities or d.problem.inequalities:
        values = d.mean_over_ranks(upper.mean(lambda batch: d.constraints(batch[0][0])))
    pulls = d.constraint_cotangents(values, prices)

    def first_order(batch: list[Pair]) -> list[Tensor]:
        outputs = [d.upper(batch[0][0]), *d.constraints(batch[0][0])]
        found = d.gradient(outputs, [*d.v.leaves, *d.u.leaves], cotangent=[None, *pulls])
        return [outputs[0].detach().sum(), *found]

    f, *slopes = upper.mean(first_order, graph=True)
    slopes = d.mean_dense_over_ranks(slopes)
    direct, pull = d.cotangent(slope, prices)
    total = [a + b for a, b in zip(slopes, _product(d, lower, pull), strict=True)]
    if direct is not None:
        total[: len(direct)] = [a + b for a, b in zip(total, direct, strict=False)]
    return _Point(d.mean_over_ranks([f])[0].item(), d.residual(slope), values, pulls, slopes, pull, total)


def _products(
    d: PenalisedObjective, on: tuple[Batches, Batches], data: bool, asked: bool | None, allowed: Allowed
) -> tuple[int, tuple[Batches, Batches]]:
    """Return how many products the conjugate gradients can take, none if 0, and the batches of f and g for them."""
    small = d.v.size <= (SMALL if data else LARGEST)
    needed, batches = min(CG_ITERATIONS, 2 * d.v.size), on[1].count
    if asked or not data:
        return (needed if asked or small else 0), on
    if allowed.quick:
        return 0, on
    each = batches * (2 if d.curvature == "difference" else 1)
    left = int(allowed.lower / each) - 2
    if small and left < needed and batches > BATCHES:
        return needed, (on[0].first(BATCHES), on[1].first(BATCHES))
    if small:
        return needed, on
    return (min(left, needed) if left >= FEW_PRODUCTS else 0), on


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
    """Return q from g_vv q = f_v at the present point, on the first batches of the data."""
    d = state.derivatives
    with keeping(d.v.buffers() + d.u.buffers()):
        upper, lower = choose(d, sources, state.episode(), Allowed.sample())
        f_v = upper.mean(lambda batch: d.direct(batch).v)
        return _solved(d, lower, f_v)[0]


def _solved(
    d: PenalisedObjective,
    lower: Batches,
    target: Sequence[Tensor],
    steps: int = CG_ITERATIONS,
    start: list[Tensor] | None = None,
) -> tuple[list[Tensor], float, float]:
    """Solve g_vv q = target; return q, the largest relative residual of a trial, and the least curvature met.

    The curvature is relative to the largest one. It takes at most `steps` products; `start` is a q that can be near
    the solution.
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
        steps=min(steps, 2 * d.v.size),
        accuracy=1e-10 if d.v.dtype == torch.float64 else 1e-4,
        flat=1e-14,
    )
    size = d.dot(target, target)
    relative = torch.where(size > 0, square / torch.where(size > 0, size, 1.0), 0.0)
    met = torch.stack(bends) if bends else target[0].new_ones(1)
    return q, float(relative.max().sqrt()), float(met.min() / met.abs().max())


def _product(d: PenalisedObjective, lower: Batches, direction: Sequence[Tensor]) -> list[Tensor]:
    """Return g_vv x, followed by g_uv x."""
    return lower.mean(lambda batch: d.hessian_product(batch, direction, with_u=True), graph=True)


def _hypergradient_error(
    d: PenalisedObjective, lower: Batches, point: _Point, least: float, steps: int
) -> tuple[float | None, str]:
    """Return the relative error of grad_u F against f_u - g_uv q, or why it is unknown.

    If q is not found from zero, the search starts again from the run's estimate of it, which is often near. `least` is
    the size of f_u and g_uv q below which their difference is zero for all purposes. `steps` is the number of products.
    """
    count = len(d.v.leaves)
    q, left, bend = _solved(d, lower, point.slopes[:count], steps)
    if not left <= 1e-3 and bend > 0:
        q, left, bend = _solved(d, lower, point.slopes[:count], steps, [-x for x in point.pull])
    if not left <= 1e-3:
        if bend < -(torch.finfo(d.v.dtype).eps ** 0.5):
            return None, CURVES_DOWN
        if bend <= 0:
            return None, "g does not curve in some direction of v"
        return None, f"conjugate gradients did not solve g_vv q = f_v in {steps} products"
    through = _product(d, lower, q)[count:]
    exact = [a - b for a, b in zip(point.slopes[count:], through, strict=True)]
    size = max(norm(point.slopes[count:]).item() + norm(through).item(), least)
    error = norm([a - b for a, b in zip(point.total[count:], exact, strict=True)]).item()
    return (error / size if size > 0 else None), ""
