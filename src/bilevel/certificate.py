"""Measures how far (u, v) is from a solution: see `Certificate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .autodiff import Derivatives
from .batches import Pair
from .method import State
from .prices import violation
from .problem import Problem
from .replay import keeping, random_state, set_random_state
from .solution import Certificate
from .sources import Sources
from .vectors import dot, gradient, norm, spread

BATCHES = 64
"""Most batches of each source that a certificate is measured on."""
SMALL = 1000
"""Largest size of v for which the hypergradient is solved for without being asked."""
CG_ITERATIONS = 200


def certify(
    state: State, sources: Sources, *, minimiser: bool | None, hypergradient: bool | None
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    """Measure the present point of a run, and the multipliers there. Variables, buffers and generators stay."""
    d = state.derivatives
    drawn = random_state(d.v.device)
    counts = d.lower_evaluations, d.upper_evaluations
    d.u.make_dense()
    try:
        with keeping(d.v.buffers() + d.u.buffers()):
            return _measure(state, sources, minimiser, hypergradient)
    finally:
        d.u.release()
        set_random_state(drawn, d.v.device)
        d.lower_evaluations, d.upper_evaluations = counts


def _measure(
    state: State, sources: Sources, minimiser: bool | None, hypergradient: bool | None
) -> tuple[Certificate, dict[str, list[Tensor]]]:
    d, problem = state.derivatives, state.derivatives.problem
    upper, lower, full = _batches(state, sources, problem)
    _, slope = d.slope([pair for make in lower for pair in make(False)])
    residual = d.residual(slope)
    values = _mean([d.constraints(pair[0]) for make in upper for pair in make(False)])
    pulls = d.constraint_cotangents(values, state.prices())
    # L = f + <mu + gamma_h h, h>: what the hypergradient is of, once the constraints have their price.
    leaves = [*d.v.leaves, *d.u.leaves]
    lagrangian = []
    for make in upper:
        for pair in make(True):
            outputs = [d.upper(pair[0]), *d.constraints(pair[0])]
            lagrangian.append(gradient(outputs, leaves, cotangent=[None, *pulls]))
    slopes = _mean(lagrangian)
    direct, pull = d.cotangent(slope, state.prices())
    curved = _product(d, lower, pull)
    total = [a + b for a, b in zip(slopes, curved, strict=True)]
    count = len(d.v.leaves)
    if direct is not None:
        total[:count] = [a + b for a, b in zip(total[:count], direct, strict=True)]
    slope_u = total[count:]
    error = None
    if not d.v.projected and (hypergradient or (hypergradient is None and d.v.size <= SMALL)):
        error = _hypergradient_error(d, lower, slopes, slope_u)
    if d.u.projected:
        moved = d.u.project_leaves([x.detach() - y for x, y in zip(d.u.leaves, slope_u, strict=True)])
        slope_u = [x.detach() - y for x, y in zip(d.u.leaves, moved, strict=True)]
    equal = len(problem.equalities)
    scale, lower_scale, violation_scale = state.scales()
    prices = state.prices()
    certificate = Certificate(
        stationarity_u=norm(slope_u).item(), stationarity_v=norm(total[:count]).item(),
        lower_residual=norm(residual).item(), violation=violation(values, equal).item() if values else 0.0,
        scale=scale, lower_scale=lower_scale, violation_scale=violation_scale,
        lower_minimiser=minimiser, hypergradient_error=error,
        damping=_damping(state.lam(), prices.gamma),
        batches=max(len(upper), len(lower)) if sources else 0, full_data=full,
    )  # fmt: skip
    paid = [n + spread(prices.gamma, r) * r for n, r in zip(prices.nu, residual, strict=True)]
    return certificate, {"nu": paid, "equalities": pulls[:equal], "inequalities": pulls[equal:]}


def _damping(lam: Tensor, gamma: Tensor) -> float:
    """lam / gamma, the mean over trials."""
    if not bool(lam.any()):
        return 0.0
    return float((lam / gamma).mean()) if bool(gamma.all()) else math.inf


_Maker = Callable[[bool], list[Pair]]
"""The batch (True: with the graph of `prepare`), as a list of one pair. Made anew for each backward."""


def _batches(state: State, sources: Sources, problem: Problem) -> tuple[list[_Maker], list[_Maker], bool]:
    """What to average the upper and the lower objective over."""

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


def _product(d: Derivatives, lower: Sequence[_Maker], direction: Sequence[Tensor]) -> list[Tensor]:
    """g_vv x followed by g_uv x."""
    total: list[Tensor] | None = None
    for make in lower:
        part = d.hessian_product(make(True), direction, with_u=True)
        total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
    return [t / len(lower) for t in total or []]


def _hypergradient_error(
    d: Derivatives, lower: Sequence[_Maker], slopes: Sequence[Tensor], found: Sequence[Tensor]
) -> float | None:
    """Solve g_vv q = f_v by conjugate gradients and compare f_u - g_uv q with grad_u F."""
    count = len(d.v.leaves)
    target = list(slopes[:count])
    q = [torch.zeros_like(t) for t in target]
    r, p = list(target), list(target)
    square = dot(r, r).item()
    goal = square * (1e-10 if d.v.dtype == torch.float64 else 1e-4) ** 2
    for _ in range(min(CG_ITERATIONS, 2 * d.v.size)):
        if square <= goal:
            break
        hp = _product(d, lower, p)[:count]
        bend = dot(p, hp).item()
        if not bend > 1e-14 * dot(p, p).item():
            break
        a = square / bend
        q = [x + a * y for x, y in zip(q, p, strict=True)]
        r = [x - a * y for x, y in zip(r, hp, strict=True)]
        new = dot(r, r).item()
        p = [x + new / square * y for x, y in zip(r, p, strict=True)]
        square = new
    if square > max(goal, dot(target, target).item() * 1e-6):
        return None
    through = _product(d, lower, q)[count:]
    exact = [a - b for a, b in zip(slopes[count:], through, strict=True)]
    size = norm(slopes[count:]).item() + norm(through).item()
    return norm([a - b for a, b in zip(found, exact, strict=True)]).item() / size if size > 0 else None
