"""The hypergradient at (u, v) by exact multipliers: what the penalty method tends to as gamma grows (Lemma 3).

With s = grad_v g, the penalised objective F = f + <nu, s> + gamma/2 |s|^2 has, at v, the derivative

    grad_v F = f_v + g_vv w,    grad_u F = f_u + g_uv w,    w = nu + gamma s

The multipliers nu = -q - gamma s with g_vv q = f_v make grad_v F zero, for any gamma. Then grad_u F = f_u - g_uv q is
the formula of the hypergradient, and it is the hypergradient if s = 0. This is the implicit method (HOAG, Pedregosa
2016), reached from the penalty. Its objective is phi(u) = f(u, v*(u)), which we read as f - <q, s>: near the minimum
v* of g, the error of that is of second order in v - v*, and the error of f is of first order.

Newton steps (`lower_newton`) bring v near v*. They start at the v of the last accepted u. <q, s> is the effect of the
error of v on f, so it shows whether v is near enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.measures.lower_minimum import flatten, write
from bilevel.methods.penalty.lower_newton import LowerNewton
from bilevel.methods.penalty.lower_systems import Curvature, LowerSystems, Slope, joined
from bilevel.optim.linear_solvers import FlatError

# How often v is made more accurate if <q, s> is large, by default against this share of |f|.
AGAIN, CORRECTION = 4, 1e-2
# phi is not known if <q, s> is this many times too large, and larger than f.
WRONG = 100
# The attributes that a checkpoint keeps, and the attributes of the systems.
STATE = ("x", "base", "size_f_v", "adjoint_accuracy")
OF_SYSTEMS = ("inverse", "null_directions", "products_since_inverse", "top", "largest")


@dataclass
class Point:
    """f, g and their derivatives at one (u, v). `residual` is r (s if v is not projected), and w is nu + gamma r."""

    f: float
    g: float
    residual: Tensor
    w: Tensor
    grad_u: Tensor
    v: Tensor
    # |grad_v F|, and the largest known curvature of g.
    grad_v: float
    top: float

    @property
    def phi(self) -> float:
        """f at the minimum of g, which is f less <q, s> up to the square of the error of v."""
        return self.f + torch.dot(self.w, self.residual).item()

    @property
    def correction(self) -> float:
        """|f - phi|: to first order, the effect of the error of v on f."""
        return abs(torch.dot(self.w, self.residual).item())


class ExactMultipliers:
    """phi and its derivative, for a problem without data; moves u and v in place.

    Args:
        d: The problem's derivatives.
        curvature: Products with g_vv and a preconditioner, if the caller knows better ones than autograd.
    """

    def __init__(self, d: PenalisedObjective, curvature: Curvature | None = None) -> None:
        self.d, self.systems = d, LowerSystems(d, curvature)
        self.newton = LowerNewton(self.systems)
        # How accurately q is solved for: a residual relative to |f_v|.
        self.adjoint_accuracy = 1e-6
        # The largest |<q, s>| at the end of an evaluation, by u. None: a share of |f|.
        self.largest_correction: Callable[[Tensor], float] | None = None
        self.evaluations = 0
        self.x: Tensor | None = None
        self.size_f_v = 0.0
        # The v that evaluations start from; None: the present one.
        self.base: Tensor | None = None
        # Whether an evaluation met a g that certainly curves down.
        self.negative = False
        # f of the last evaluation; 0 if it did not come to f.
        self.f = 0.0

    @property
    def finite(self) -> bool:
        """Whether f and g were finite in the last evaluation."""
        return math.isfinite(self.f) and math.isfinite(self.newton.value)

    def restart(self) -> None:
        """Forget where v* was."""
        self.base = None
        self.newton.restart()

    def forget(self) -> None:
        """Forget the last q and the factor of g_vv."""
        self.x = None
        self.systems.forget_inverse()

    def __call__(self, u: Tensor) -> tuple[float, Tensor, Point | None]:
        """Write u to its leaves, move v to the minimum of g; return phi, phi' and the point.

        phi is infinite, and there is no point, if g_vv is not positive definite there.
        """
        write(u, self.d.u.leaves)
        if self.base is not None:
            write(self.base, self.d.v.leaves)
        held = flatten(self.d.v.leaves)
        found: Point | None = None
        self.f, self.systems.top = 0.0, 0.0
        accuracy = self.newton.accuracy
        try:
            before = math.inf
            for _ in range(AGAIN):
                point = found = self.at(self.newton.minimise())
                most = CORRECTION * abs(point.f) if self.largest_correction is None else self.largest_correction(u)
                if not most < point.correction <= 0.5 * before:
                    break
                before = point.correction
                self.newton.accuracy *= 0.01
            rounding = torch.finfo(point.v.dtype).eps * self.size_f_v * (1 + point.v.norm().item())
            if point.correction > max(WRONG * most, abs(point.f), WRONG * rounding):
                found = None  # v does not come near a minimum of g, as at a kink: phi means nothing
        except FlatError as error:
            self.negative = self.negative or error.negative
        finally:
            self.newton.accuracy = accuracy
        # A curvature whose square overflows is as bad as an infinite one.
        if found is None or not math.isfinite(
            found.f + found.grad_v + found.top * found.top + found.grad_u.norm().item()
        ):
            write(held, self.d.v.leaves)
            return math.inf, torch.full_like(u, math.nan), None
        return found.phi, found.grad_u, found

    def at(self, slope: Slope) -> Point:
        """Return the point at the present (u, v), given s there."""
        self.evaluations += 1
        d, count = self.d, len(self.d.v.leaves)
        f = d.upper(slope.batch[0])
        self.f = f.item()
        found = d.gradient(f, [*d.v.leaves, *d.u.leaves], retain=True)
        f_v, f_u = flatten(found[:count]), flatten(found[count:])
        derivative, product = self.systems.tangent(slope.flat), self.systems.product(slope)
        self.size_f_v = max(self.size_f_v, f_v.norm().item())
        q, self.x = self.systems.solve(slope, derivative, f_v, self.adjoint_accuracy, self.x, scale=self.size_f_v)
        bent = product(q)
        through = flatten(d.gradient(slope.graph, d.u.leaves, cotangent=self.systems.parts(q), retain=True))
        if derivative is None:
            w, left = -q, f_v - bent
        else:
            w = bent - q - f_v  # so that grad_v F, which is f_v + w - D w + g_vv D w then, is zero if D w = -q
            left = derivative(w) + q
        return Point(
            f=self.f,
            g=slope.value,
            residual=self.newton.residual(slope),
            w=w,
            grad_u=f_u - through,
            v=flatten(d.v.leaves),
            grad_v=left.norm().item(),
            top=max(self.systems.top, self.systems.largest),
        )

    def response(self, direction: Tensor) -> Tensor:
        """Return how v*(u) moves with u along a direction: -g_vv^-1 g_vu d, at a v near its minimum."""
        d, slope = self.d, self.newton.slope()
        # g_vu d is the derivative of <g_uv x, d> in x, for any x.
        x = [torch.zeros_like(part, requires_grad=True) for part in slope.graph]
        through = d.gradient(slope.graph, d.u.leaves, cotangent=x, keep_graph=True)
        parts = zip(torch.split(direction, [leaf.numel() for leaf in d.u.leaves]), d.u.leaves, strict=True)
        pull = joined(d.gradient(through, x, cotangent=[p.reshape(leaf.shape) for p, leaf in parts], retain=True))
        return self.systems.solve(slope, self.systems.tangent(slope.flat), -pull, 1e-2)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next evaluation depends on, in addition to u and v."""
        own = {name: getattr(self, name) for name in STATE} | {name: getattr(self.systems, name) for name in OF_SYSTEMS}
        return own | {"newton": self.newton.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
        for name in OF_SYSTEMS:
            setattr(self.systems, name, state.get(name, 0.0))
        self.newton.load_state_dict(state["newton"])
