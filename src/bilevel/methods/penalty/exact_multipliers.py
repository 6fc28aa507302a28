"""The hypergradient at (u, v) by exact multipliers: what the penalty method tends to as gamma grows (Lemma 3).

With s = grad_v g, the penalised objective F = f + <nu, s> + gamma/2 |s|^2 has, at v, the derivative

    grad_v F = f_v + g_vv w,    grad_u F = f_u + g_uv w,    w = nu + gamma s

The multipliers nu = -q - gamma s with g_vv q = f_v make grad_v F zero, for any gamma. Then grad_u F = f_u - g_uv q is
the formula of the hypergradient, and it is the hypergradient if s = 0. This is the implicit method (HOAG, Pedregosa
2016), reached from the penalty. Its objective is phi(u) = f(u, v*(u)), which we read as f - <q, s>: near the minimum
v* of g, the error of that is of second order in v - v*, and the error of f is of first order.

v is brought near v* by Newton steps, which start at the v of the last accepted u. A step m takes the residual s to s';
what it leaves to go is about |m| |s'| / |s|, and the steps end when that is small next to the way that v* has come
since the first u. Sizes of s would say less: if u scales a penalty, the curvature of g changes by powers of ten. Then
<q, s>, the effect of the error of v on f, tells whether v is near enough.

A step, and q, are solved by conjugate gradients on products with g_vv. For a small v we also factorise g_vv now and
then: when the products since the last time have cost as much. The old factor then serves as the preconditioner.

If v is projected, D is the derivative of its projection P at v - s (for a box: 1 in the free coordinates, 0 at the
bounds). Only moves D x are possible, so q = D x with (D - D^2 + D g_vv D) x = D f_v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.measures.lower_minimum import flatten, minimise, write
from bilevel.optim.linear_solvers import FlatError, Map, StaleError, solve_flat

# Returns, at the present u and v, the product with g_vv and a map near its inverse, which preconditions.
Curvature = Callable[[], tuple[Map, Map]]
# The most Newton steps for one minimum of g, and the most products for one linear system.
NEWTON, PRODUCTS = 30, 500
# How often v is made more accurate if <q, s> is large, by default against this share of |f|.
AGAIN, CORRECTION = 4, 1e-2
# How often projected gradient steps take over in one minimum.
PATIENCE = 3
HALVINGS = 30
# A v of at most so many numbers has g_vv factorised.
DENSE = 1000
# A factor of g_vv has a diagonal that is larger by this share. A direction is flat if its curvature is smaller than
# that of the factor by `FLAT`.
RAISE = {torch.float64: 1e-10, torch.float32: 1e-5}
FLAT = 1e-3
# How many columns of g_vv are computed at a time.
COLUMNS = 64
# Differences of g below this many units in the last place are rounding errors.
ROUNDING = 10
TINY = 1e-300

# The attributes that a checkpoint keeps.
STATE = (
    "x",
    "base",
    "origin",
    "reach",
    "allowed",
    "factor",
    "since",
    "top",
    "size_f_v",
    "lower_accuracy",
    "adjoint_accuracy",
)


def _joined(gradients: list[Tensor]) -> Tensor:
    """Return gradients as one vector; unlike `flatten`, without a copy of a single one."""
    return gradients[0].reshape(-1) if len(gradients) == 1 else flatten(gradients)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Factorise in one thread: on a busy machine, waking others takes longer than a small matrix."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@dataclass
class Slope:
    """g, s = grad_v g and its graph at one v."""

    value: float
    flat: Tensor
    graph: list[Tensor]
    batch: Any


@dataclass
class Point:
    """f, g and their derivatives at one (u, v). `residual` is r (s if v is not projected), and w is nu + gamma r."""

    f: float
    g: float
    residual: Tensor
    w: Tensor
    grad_u: Tensor
    v: Tensor
    # |grad_v F|, and the largest curvature of g that the conjugate gradients met.
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


class Newton(NamedTuple):
    """The length of a Newton step, and the shares of the residual that it left: in all, and by the bend of s alone."""

    length: float = math.inf
    left: float = 1.0
    bent: float = 0.1

    def rough(self, enough: float) -> float:
        """Return how accurate the equations of a step have to be if it is like this one. More would be in vain."""
        return min(0.1, 0.3 * max(enough / self.length if self.length > 0 else 1.0, self.bent))

    def next(self) -> Newton:
        """Return what to expect of the step after this one."""
        return Newton(self.length * self.left, self.left, self.bent * self.left)


class ExactMultipliers:
    """phi and its derivative, for a problem without data; moves u and v in place.

    Args:
        d: The problem's derivatives.
        curvature: Products with g_vv and a preconditioner, if the caller knows better ones than autograd.
    """

    def __init__(self, d: PenalisedObjective, curvature: Curvature | None = None) -> None:
        self.d, self.curvature = d, curvature
        # How near v comes to v*, relative to the way of v*, and q to its solution, as a residual relative to |f_v|.
        self.lower_accuracy, self.adjoint_accuracy = 1e-7, 1e-6
        # The largest |<q, s>| at the end of an evaluation. None: a share of |f|.
        self.allowed: float | None = None
        self.evaluations = self.newton_steps = self.products = 0
        self.x: Tensor | None = None
        self.factor: Tensor | None = None
        self.since = 0
        # The largest |f_v| met, and the largest curvature of g at the last u.
        self.size_f_v = 0.0
        self.top = 0.0
        self.restart()
        # Whether the last evaluation met a g_vv that is not positive definite, and its f and g.
        self.flat = False
        self.last = (0.0, 0.0)

    def restart(self) -> None:
        """Forget where v* was."""
        # The v that evaluations start from (None: the present one), and the first v*.
        self.base: Tensor | None = None
        self.origin: Tensor | None = None
        # The longest way of v* from the first one, and the first Newton step of the last evaluation.
        self.reach = 0.0
        self.first = Newton()

    # -- phi -----------------------------------------------------------------------------------------------------

    def __call__(self, u: Tensor) -> tuple[float, Tensor, Point | None]:
        """Write u to its leaves, move v to the minimum of g; return phi, phi' and the point.

        phi is infinite, and there is no point, if g_vv is not positive definite there.
        """
        write(u, self.d.u.leaves)
        if self.base is not None:
            write(self.base, self.d.v.leaves)
        held = flatten(self.d.v.leaves)
        self.flat, found, self.top = False, None, 0.0
        accuracy = self.lower_accuracy
        try:
            for _ in range(AGAIN):
                found = self.at(self.minimise())
                if not found.correction > (CORRECTION * abs(found.f) if self.allowed is None else self.allowed):
                    break
                self.lower_accuracy *= 0.01
        except FlatError:
            self.flat = True
        finally:
            self.lower_accuracy = accuracy
        if found is None or not (math.isfinite(found.f) and bool(torch.isfinite(found.grad_u).all())):
            write(held, self.d.v.leaves)
            return math.inf, torch.full_like(u, math.nan), None
        return found.phi, found.grad_u, found

    def at(self, slope: Slope) -> Point:
        """Return the point at the present (u, v), given s there."""
        self.evaluations += 1
        d, count = self.d, len(self.d.v.leaves)
        f = d.upper(slope.batch[0])
        found = d.gradient(f, [*d.v.leaves, *d.u.leaves], retain=True)
        f_v, f_u = flatten(found[:count]), flatten(found[count:])
        keep = self._tangent(slope.flat)
        product = self._product(slope)
        q, self.x = self._solve(slope, product, keep, f_v, self.adjoint_accuracy, self.x)
        bent = product(q)
        through = flatten(d.gradient(slope.graph, d.u.leaves, cotangent=self.parts(q), retain=True))
        if keep is None:
            w, left = -q, f_v - bent
        else:
            w = bent - q - f_v  # so that grad_v F, which is f_v + w - D w + g_vv D w then, is zero if D w = -q
            left = keep(w) + q
        self.last = (f.item(), slope.value)
        self.size_f_v = max(self.size_f_v, f_v.norm().item())
        return Point(
            f=f.item(),
            g=slope.value,
            residual=self._residual(slope),
            w=w,
            grad_u=f_u - through,
            v=flatten(d.v.leaves),
            grad_v=left.norm().item(),
            top=self.top,
        )

    def response(self, direction: Tensor) -> Tensor:
        """Return how v*(u) moves with u along a direction: -g_vv^-1 g_vu d, at a v near its minimum."""
        d, slope = self.d, self._slope()
        # g_vu d is the derivative of <g_uv x, d> in x, for any x.
        x = [torch.zeros_like(part, requires_grad=True) for part in slope.graph]
        through = d.gradient(slope.graph, d.u.leaves, cotangent=x, keep_graph=True)
        parts = zip(torch.split(direction, [leaf.numel() for leaf in d.u.leaves]), d.u.leaves, strict=True)
        pull = _joined(d.gradient(through, x, cotangent=[p.reshape(leaf.shape) for p, leaf in parts], retain=True))
        return self._solve(slope, self._product(slope), self._tangent(slope.flat), -pull, 1e-2)[0]

    def minimise(self) -> Slope:
        """Move v to the minimum of g at the present u; return s there."""
        slope, start = self._slope(), flatten(self.d.v.leaves)
        if self.origin is None:
            self.reach = start.norm().item()
        advance = self._advance_projected if self.d.v.projected else self._advance
        expected, patience, least = self.first, PATIENCE, ROUNDING * torch.finfo(start.dtype).eps
        for k in range(NEWTON):
            size = self._residual(slope).norm().item()
            if not math.isfinite(size):
                raise FlatError
            if size <= TINY:
                break
            self.newton_steps += 1
            enough = max(self.lower_accuracy * self.reach, least * flatten(self.d.v.leaves).norm().item(), TINY)
            moved, slope, took = advance(slope, expected.rough(enough))
            if not took:
                if not self.d.v.projected:  # rounding hides any progress
                    break
                patience -= 1
                if patience < 0:
                    break
                continue
            v = flatten(self.d.v.leaves)
            self.reach = max(self.reach, (v - (start if self.origin is None else self.origin)).norm().item())
            if k == 0:
                self.first = moved
            expected = moved.next()
            if expected.length <= enough:
                break
        if self.origin is None:
            self.origin, self.reach = flatten(self.d.v.leaves), 0.0
        return slope

    def _advance(self, slope: Slope, rough: float) -> tuple[Newton, Slope, bool]:
        """Take a Newton step on g; return what it was like, s at its end, and whether it lowered g."""
        product, start = self._product(slope), flatten(self.d.v.leaves)
        move, _ = self._solve(slope, product, None, -slope.flat, rough, scale=start.norm().item())
        fall, before, length = torch.dot(slope.flat, move).item(), slope.flat.norm().item(), move.norm().item()
        # If rounding hides the fall of g, |s| has to halve.
        noise = ROUNDING * torch.finfo(start.dtype).eps * abs(slope.value)
        share = 1.0
        for _ in range(HALVINGS):
            write(start + share * move, self.d.v.leaves)
            trial = self._slope()
            if -fall <= noise:
                better = trial.flat.norm().item() <= 0.5 * before
                break
            if better := trial.value <= slope.value + 1e-4 * share * fall + noise:
                break
            share /= 2
        if not better:
            write(start, self.d.v.leaves)
            return Newton(), self._slope(), False
        left = trial.flat.norm().item() / before
        return Newton(share * length, min(left, 1.0), max(left - rough, 0.0)), trial, True

    def state_dict(self) -> dict[str, Any]:
        """Return what the next evaluation depends on, besides u and v."""
        return {name: getattr(self, name) for name in STATE} | {"first": list(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
        self.first = Newton(*state["first"])

    # -- the lower minimum -----------------------------------------------------------------------------------------

    def _slope(self) -> Slope:
        """Evaluate g and s at the present u and v."""
        d = self.d
        batch = d.prepare([(None, None)], graph=True)[0]
        g = d.lower(batch[1])
        graph = d.gradient(g, d.v.leaves, keep_graph=True)
        self.last = (0.0, g.item())
        return Slope(self.last[1], _joined(graph).detach(), graph, batch)

    def _advance_projected(self, slope: Slope, rough: float) -> tuple[Newton, Slope, bool]:
        """Take a Newton step on r = v - P(v - s) = 0; return what it was like, s at its end, and whether |r| halved.

        The step is -r + D x with (D - D^2 + D g_vv D) x = D (g_vv r - r). If |r| does not halve, projected gradient
        steps take over for a while.
        """
        d = self.d
        start, r = flatten(d.v.leaves), self._residual(slope)
        keep, product = self._tangent(slope.flat), self._product(slope)
        move, _ = self._solve(slope, product, keep, product(r) - r, 1e-6)
        write(start - r + move, d.v.leaves)
        d.v.project()
        trial = self._slope()
        left = (self._residual(trial).norm() / r.norm()).item()
        if left <= 0.5:
            return Newton((flatten(d.v.leaves) - start).norm().item(), left), trial, True
        write(start, d.v.leaves)
        minimise(d, self.lower_accuracy)
        return Newton(), self._slope(), False

    def _residual(self, slope: Slope) -> Tensor:
        return _joined(self.d.residual(self.parts(slope.flat)))

    # -- linear systems --------------------------------------------------------------------------------------------

    def _solve(
        self,
        slope: Slope,
        product: Map,
        keep: Map | None,
        target: Tensor,
        accuracy: float,
        start: Tensor | None = None,
        scale: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return D x and x with (D - D^2 + D g_vv D) x = D target; D is the identity if `keep` is None.

        For the other arguments, see `solve_flat`.
        """
        near, patience = None, math.inf
        dense = self.curvature is None and keep is None and target.numel() <= DENSE
        if self.curvature is not None:
            product, near = self.curvature()
        elif dense:
            near, patience = self._near_inverse(slope)

        def system(x: Tensor) -> Tensor:
            self.products += 1
            self.since += 1
            if keep is None:
                return product(x)
            on = keep(x)
            return keep(product(on)) + on - keep(on)

        b = target if keep is None else keep(target)
        # A caller who knows the products also knows that g is convex.
        least = 1e-3 if self.curvature is None else math.inf
        solve = partial(
            solve_flat,
            system,
            b,
            steps=PRODUCTS,
            accuracy=accuracy,
            start=start,
            top=self.top,
            scale=scale,
            least=least,
        )
        try:
            x, self.top = solve(precondition=near, patience=patience, flat=FLAT if dense else 0.0)
        except StaleError:
            x, self.top = solve(precondition=self._inverse(slope), flat=FLAT)
        return (x if keep is None else keep(x)), x

    def _near_inverse(self, slope: Slope) -> tuple[Map | None, float]:
        """Return the inverse of an earlier g_vv and the products that it is worth, or the inverse of this one.

        This one is factorised if the products since the last time have cost as much.
        """
        n = slope.flat.numel()
        # Up to COLUMNS products are one batched backward pass, which costs less than half of them.
        cost = min(n / 2, 8.0) if n <= COLUMNS else float(n)
        if self.since >= 2 * cost or self.factor is None:
            return self._inverse(slope), math.inf
        return self._solver(self.factor), cost

    def _inverse(self, slope: Slope) -> Map | None:
        """Return the inverse of g_vv, None if it has a negative curvature.

        Conjugate gradients solve singular systems, too. So the diagonal is raised a little.
        """
        self.since = 0
        matrix = self._matrix(slope)
        matrix.diagonal().mul_(1 + RAISE[matrix.dtype])
        with _one_thread():
            factor, failed = torch.linalg.cholesky_ex(matrix)
        self.factor = None if failed.item() else factor
        return None if self.factor is None else self._solver(self.factor)

    def _solver(self, factor: Tensor) -> Map:
        def solve(r: Tensor) -> Tensor:
            with _one_thread():
                return torch.cholesky_solve(r[:, None], factor)[:, 0]

        return solve

    def _matrix(self, slope: Slope) -> Tensor:
        """Return g_vv."""
        n = slope.flat.numel()
        unit = torch.eye(n, dtype=slope.flat.dtype, device=slope.flat.device)
        product, rows = self._product(slope), []
        for chunk in torch.split(unit, COLUMNS):
            try:
                parts = [
                    p.reshape(-1, *leaf.shape) for p, leaf in zip(self._split(chunk), self.d.v.leaves, strict=True)
                ]
                found = torch.autograd.grad(
                    slope.graph, self.d.v.leaves, parts, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
                rows.append(
                    torch.cat(
                        [
                            p.new_zeros(p.shape).flatten(1) if x is None else x.flatten(1)
                            for x, p in zip(found, parts, strict=True)
                        ],
                        1,
                    )
                )
            except RuntimeError:  # an operator that cannot be batched
                rows.append(torch.stack([product(row) for row in chunk]))
        matrix = torch.cat(rows)
        return (matrix + matrix.T) / 2

    def _product(self, slope: Slope) -> Map:
        """Return the product with g_vv."""
        d = self.d
        return lambda x: _joined(d.gradient(slope.graph, d.v.leaves, cotangent=self.parts(x), retain=True))

    def _tangent(self, slope: Tensor) -> Map | None:
        """Return the product with D, the derivative of the projection of v at v - s; None without a projection."""
        d = self.d
        if not d.v.projected:
            return None
        points = [(v - s).detach().requires_grad_() for v, s in zip(d.v.leaves, self.parts(slope), strict=True)]
        with torch.enable_grad():
            moved = d.v.project_leaves(points)
        return lambda x: flatten(d.gradient(moved, points, cotangent=self.parts(x), retain=True))

    def _split(self, matrix: Tensor) -> list[Tensor]:
        sizes = [leaf.numel() for leaf in self.d.v.leaves]
        return [matrix] if len(sizes) == 1 else list(torch.split(matrix, sizes, -1))

    def parts(self, vector: Tensor) -> list[Tensor]:
        return [part.reshape(leaf.shape) for part, leaf in zip(self._split(vector), self.d.v.leaves, strict=True)]
