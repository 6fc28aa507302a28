"""Measures a problem without data: |f_zz|, |g_vv|, |g_uv| and |J_h|, by a few products with random vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import gradient, norm
from bilevel.derivatives.double_backward import missing_double_backward
from bilevel.derivatives.penalised_objective import PenalisedObjective

POWER_ITERATIONS = 10
SAMPLES = 3
TINY = 1e-12


@dataclass
class Scales:
    """The sizes of a problem without data.

    Fields:
        f: |f_zz|, or 1e-3 |f_z| / (1 + |u| + |v|) if that is larger, since a linear f has a slope but no curvature.
        g: |g_vv|.
        cross: A lower bound of |g_uv|: how strongly u moves the slope of g.
        jacobians: A lower bound of |J_h| for each constraint, exact for a constraint of one number.
        unit_u: The length of a move of u that changes as much as a move of v by 1, at least 1; the unit of grad_u F.
            min(sqrt(|f_zz| / |f_uu|), |g_vv| / |g_uv|, |J_h| / |J_h in u|). Default: 1.
    """

    f: float
    g: float
    cross: float
    jacobians: list[float]
    unit_u: float = 1.0


def lower_curvature(d: PenalisedObjective, generator: torch.Generator, batches: Sequence[Pair] | None = None) -> float:
    """Return |g_vv| at the present u and v, on these batches. Default: without data."""
    still = d.prepare([(None, None)], graph=False) if batches is None else batches
    return _power(lambda x: d.hessian_product(still, x, with_u=False), d.v.leaves, generator)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _power(
    product: Callable[[Sequence[Tensor]], list[Tensor]], like: Sequence[Tensor], generator: torch.Generator
) -> float:
    """Return the largest |eigenvalue| of a symmetric map."""
    x, size = [_random(t, generator) for t in like], 0.0
    for _ in range(POWER_ITERATIONS):
        length = norm(x)
        if not length.item() > 0:
            return 0.0
        x = product([t / length for t in x])
        size = norm(x).item()
    return size


def measure(d: PenalisedObjective, generator: torch.Generator) -> Scales:
    """Measure a problem without data at the present u and v."""
    leaves, count, split = [*d.u.leaves, *d.v.leaves], len(d.v.leaves), len(d.u.leaves)
    bend_g = lower_curvature(d, generator)
    cross = 0.0
    for _ in range(SAMPLES):
        x = [_random(leaf, generator) for leaf in d.v.leaves]
        product = d.hessian_product(d.prepare([(None, None)], graph=True), x, with_u=True)[count:]
        cross = max(cross, (norm(product) / norm(x)).item() * math.sqrt(max(1.0, d.v.size / d.u.size)))
    slope, reach = _upper_slope(d, leaves), 1 + norm(d.u.leaves).item() + norm(d.v.leaves).item()
    bend_f = _power(lambda x: _upper_product(d, leaves, x), leaves, generator)
    bend_f = max(bend_f, 1e-3 * norm(slope).item() / reach, TINY)
    still, own = [torch.zeros_like(leaf) for leaf in d.v.leaves], torch.Generator().manual_seed(0)
    bend_u = _power(lambda x: _upper_product(d, leaves, [*x, *still])[:split], d.u.leaves, own)
    bend_u = max(bend_u, 1e-3 * norm(slope[:split]).item() / reach)
    jacobians = [TINY] * (len(d.problem.equalities) + len(d.problem.inequalities))
    jacobians_u = [0.0] * len(jacobians)
    for _ in range(SAMPLES):
        for i in range(len(jacobians)):
            h = d.constraints(d.prepare([(None, None)], graph=True)[0][0])[i]
            w = _random(h, generator)
            pull = gradient(h, leaves, cotangent=[w])
            jacobians[i] = max(jacobians[i], (norm(pull) / norm([w])).item())
            jacobians_u[i] = max(jacobians_u[i], (norm(pull[:split]) / norm([w])).item())
    bend_g = max(bend_g, TINY)
    parts = [(bend_f**0.5, bend_u**0.5), (bend_g, cross), *zip(jacobians, jacobians_u, strict=True)]
    units = [whole / part for whole, part in parts if part > TINY]
    return Scales(bend_f, bend_g, cross, jacobians, max(1.0, min(units, default=1.0)))


def _upper_slope(d: PenalisedObjective, leaves: Sequence[Tensor]) -> list[Tensor]:
    return gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves)


def _upper_product(d: PenalisedObjective, leaves: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Return f_zz x; by a difference of gradients if an operator of f has no double backward."""
    try:
        first = gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves, keep_graph=True)
        return gradient(first, leaves, cotangent=list(x))
    except RuntimeError as error:
        if missing_double_backward(error) is None:
            raise
    step = math.sqrt(torch.finfo(leaves[0].dtype).eps) * (1 + norm(leaves).item())
    start = _upper_slope(d, leaves)
    with keeping(leaves):
        with torch.no_grad():
            for leaf, direction in zip(leaves, x, strict=True):
                leaf.add_(direction, alpha=step)
        end = _upper_slope(d, leaves)
    return [(b - a) / step for a, b in zip(start, end, strict=True)]
