"""The sizes of a problem without data: |f_zz|, |g_vv|, |g_uv| and |J_h|, from a few products with random vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import gradient, norm
from bilevel.derivatives.double_backward import missing_double_backward
from bilevel.derivatives.penalised_objective import Derivatives

POWER_ITERATIONS = 10
SAMPLES = 3
TINY = 1e-12


@dataclass
class Scales:
    f: float
    """|f_zz|, or 1e-3 |f_z| / (1 + |u| + |v|) if larger, since a linear f has a slope but no curvature."""
    g: float
    """|g_vv|"""
    cross: float
    """|g_uv|: how strongly u moves the slope of g; a lower bound"""
    jacobians: list[float]
    """|J_h| of each constraint; a lower bound, exact for a constraint of one number"""


def lower_curvature(d: Derivatives, generator: torch.Generator, batches: Sequence[Pair] | None = None) -> float:
    """Return |g_vv| at the present u and v, on these batches if there are data."""
    still = d.prepare([(None, None)], graph=False) if batches is None else batches
    return _power(lambda x: d.hessian_product(still, x, with_u=False), d.v.leaves, generator)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _power(
    product: Callable[[Sequence[Tensor]], list[Tensor]], like: Sequence[Tensor], generator: torch.Generator
) -> float:
    """The largest |eigenvalue| of a symmetric map."""
    x, size = [_random(t, generator) for t in like], 0.0
    for _ in range(POWER_ITERATIONS):
        length = norm(x)
        if not length.item() > 0:
            return 0.0
        x = product([t / length for t in x])
        size = norm(x).item()
    return size


def measure(d: Derivatives, generator: torch.Generator) -> Scales:
    """Measure a problem without data at the present u and v."""

    def random(like: Tensor) -> Tensor:
        return _random(like, generator)

    leaves, count = [*d.u.leaves, *d.v.leaves], len(d.v.leaves)
    bend_g = lower_curvature(d, generator)
    cross = 0.0
    for _ in range(SAMPLES):
        x = [random(leaf) for leaf in d.v.leaves]
        product = d.hessian_product(d.prepare([(None, None)], graph=True), x, with_u=True)[count:]
        cross = max(cross, (norm(product) / norm(x)).item() * math.sqrt(max(1.0, d.v.size / d.u.size)))
    slope = norm(_upper_slope(d, leaves)).item()
    bend_f = _power(lambda x: _upper_product(d, leaves, x), leaves, generator)
    bend_f = max(bend_f, 1e-3 * slope / (1 + norm(d.u.leaves).item() + norm(d.v.leaves).item()), TINY)
    jacobians = [TINY] * (len(d.problem.equalities) + len(d.problem.inequalities))
    for _ in range(SAMPLES):
        for i in range(len(jacobians)):
            h = d.constraints(d.prepare([(None, None)], graph=True)[0][0])[i]
            w = random(h)
            size = norm(gradient(h, leaves, cotangent=[w])) / norm([w])
            jacobians[i] = max(jacobians[i], size.item())
    return Scales(bend_f, max(bend_g, TINY), cross, jacobians)


def _upper_slope(d: Derivatives, leaves: Sequence[Tensor]) -> list[Tensor]:
    return gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves)


def _upper_product(d: Derivatives, leaves: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """f_zz x; by a difference of gradients where f has no second derivative."""
    try:
        first = gradient(d.upper(d.prepare([(None, None)], graph=True)[0][0]), leaves, keep_graph=True)
        return gradient(first, leaves, cotangent=list(x))
    except RuntimeError as error:
        if missing_double_backward(error) is None:
            raise
    step = math.sqrt(torch.finfo(leaves[0].dtype).eps) * (1 + norm(leaves).item())
    held = [leaf.detach().clone() for leaf in leaves]
    start = _upper_slope(d, leaves)
    with torch.no_grad():
        for leaf, direction in zip(leaves, x, strict=True):
            leaf.add_(direction, alpha=step)
    end = _upper_slope(d, leaves)
    with torch.no_grad():
        for leaf, value in zip(leaves, held, strict=True):
            leaf.copy_(value)
    return [(b - a) / step for a, b in zip(start, end, strict=True)]
