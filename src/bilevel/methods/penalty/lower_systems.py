"""Linear systems with g_vv: conjugate gradients on products, with an inverse of g_vv as preconditioner if v is small.

g_vv is inverted again after products worth one inversion. Until then, the old inverse preconditions. A small v moves by
the old inverse without any products, as long as that is quick.

g_vv can be zero in some directions that f does not see either, such as a constant that is added to the biases of all
classes. We leave such directions out, because rounding errors along them would grow without limit. If f or g has a
slope along one of them, g_vv q = f_v has no solution, and `FlatError` is raised.

If v is projected, D is the derivative of its projection P at v - s. For a box, D is 1 in the free coordinates and 0 at
the bounds. Only moves D x are possible, so the systems are (D - D^2 + D g_vv D) x = D b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.measures.lower_minimum import flatten
from bilevel.optim.linear_solvers import NEGATIVE, TINIEST, FlatError, Map, StaleError, solve_flat

# Returns, at the present u and v, the product with g_vv and a map near its inverse, which preconditions.
Curvature = Callable[[], tuple[Map, Map]]
# The most products for one linear system.
PRODUCTS = 500
# A v of at most so many numbers has g_vv factorised.
DENSE = 1000
# The diagonal of g_vv, scaled to 1, is raised by this for a factor. A direction is flat if its curvature is below
# `FLAT` times the curvature of the factor.
RAISE = {torch.float64: 1e-10, torch.float32: 1e-5}
FLAT = 1e-3
# Rounding errors of s, in units in the last place of |g_vv| (1 + |v|).
ROUNDING = 100
# A curvature below `ZERO` units in the last place of |g_vv| is zero. At most so many directions are left out for that.
ZERO, DIRECTIONS = 10, 8
# How many rows of a derivative are computed side by side, if no tensor in the graph of g is larger than this. A larger
# one does not fit into the caches so many times, and rows are quicker one after another.
COLUMNS, SIDE_BY_SIDE = 64, 2**17


def joined(gradients: list[Tensor]) -> Tensor:
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


def _null_space(matrix: Tensor, factor: Tensor, raised: float) -> Tensor | None:
    """Return directions, as columns, in which A is zero; None if there are none.

    `factor` is the factor of A + t for a small number t. If A x is zero, (A + t)^-1 t x is x, and else it is small.
    """
    left = factor.diagonal() ** 2 / raised
    if not (left < 1e3).any():
        return None
    found = torch.zeros(len(matrix), min(DIRECTIONS, len(matrix))).to(matrix)
    found[torch.argsort(left)[: found.shape[1]], torch.arange(found.shape[1])] = 1.0
    for _ in range(3):
        found = torch.linalg.qr(torch.cholesky_solve(raised * found, factor)).Q
    values, turn = torch.linalg.eigh(found.T @ matrix @ found)
    flat = values.abs() <= ZERO * torch.finfo(matrix.dtype).eps * matrix.norm()
    return (found @ turn)[:, flat].contiguous() if flat.any() else None


def _rows(outputs: list[Tensor], inputs: list[Tensor], matrix: Tensor) -> Tensor:
    """Return the product of each row of a matrix with the derivative of `outputs` in `inputs`, side by side."""
    count = len(matrix)
    lead = [count] if count > 1 else []
    parts = torch.split(matrix, [out.numel() for out in outputs], 1)
    found = torch.autograd.grad(
        outputs,
        inputs,
        [part.reshape(*lead, *out.shape) for part, out in zip(parts, outputs, strict=True)],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=count > 1,
    )
    return torch.cat(
        [
            matrix.new_zeros(count, x.numel()) if d is None else d.reshape(count, -1)
            for d, x in zip(found, inputs, strict=True)
        ],
        1,
    )


@dataclass
class Slope:
    """g, s = grad_v g and its graph at one v."""

    value: float
    flat: Tensor
    graph: list[Tensor]
    batch: Any


class LowerSystems:
    """Solves systems with g_vv at the present (u, v), for a problem without data.

    Args:
        d: The problem's derivatives.
        curvature: Products with g_vv and a preconditioner, if the caller knows better ones than autograd.
    """

    def __init__(self, d: PenalisedObjective, curvature: Curvature | None = None) -> None:
        self.d, self.curvature = d, curvature
        self.products = 0
        # The inverse of an earlier g_vv, the directions in which that g_vv is zero, and the products since.
        self.inverse: Tensor | None = None
        self.null_directions: Tensor | None = None
        self.products_since_inverse = 0
        # s at the v of the inverse.
        self.factorised: Tensor | None = None
        # The largest curvature of g that was met at the last u, and the largest diagonal element of the last g_vv.
        self.top = self.largest = 0.0
        # Whether the rows of a derivative are computed side by side; None until the graph of g is known.
        self.batched: bool | None = None

    @contextmanager
    def measuring_graph(self) -> Iterator[None]:
        """Choose how rows are computed by the largest tensor in the graph of g that is built inside."""
        if self.batched is not None:
            yield
            return
        largest = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, tensor.numel())
            return tensor.detach()  # the tensor itself would keep the graph for ever

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self.batched = largest <= SIDE_BY_SIDE

    def forget_inverse(self) -> None:
        """Make the next system factorise g_vv again."""
        self.inverse, self.null_directions, self.products_since_inverse = (
            None,
            None,
            self.products_since_inverse + self.d.v.size,
        )

    def is_exact(self, slope: Slope) -> bool:
        """Return whether the inverse is that of g_vv at this v."""
        return self.factorised is slope.flat

    def by_inverse(self, slope: Slope, b: Tensor, scale: float) -> Tensor | None:
        """Return about g_vv^-1 b by the inverse of a recent g_vv, without products; None if v is large or projected.

        For `scale`, see `solve_flat`.
        """
        if self.curvature is not None or self.d.v.projected or b.numel() > COLUMNS:
            return None
        near = self._inverse(slope) if self.inverse is None else self._map(self.inverse)
        try:
            return None if near is None else near(self._without_null_directions(slope, b, scale))
        except StaleError:
            near = self._inverse(slope)
            return None if near is None else near(self._without_null_directions(slope, b, scale))

    def correct_inverse(self, move: Tensor, bend: Tensor) -> None:
        """Correct the inverse by a move of v and the change of s along it (the BFGS formula)."""
        product = torch.dot(move, bend).item()
        if self.inverse is None or not TINIEST < product < math.inf:
            return
        turned = self.inverse @ bend
        both = torch.outer(move / product, turned)
        stretch = (1 + torch.dot(bend, turned).item() / product) / product
        self.inverse = torch.addr(self.inverse - both - both.T, move, move, alpha=stretch)

    def solve(
        self,
        slope: Slope,
        derivative: Map | None,
        target: Tensor,
        accuracy: float,
        start: Tensor | None = None,
        scale: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return D x and x with (D - D^2 + D g_vv D) x = D target; D is the identity if `derivative` is None.

        For the other arguments, see `solve_flat`.
        """
        near, patience = None, math.inf
        dense = self.curvature is None and derivative is None and target.numel() <= DENSE
        product = self.product(slope)
        if self.curvature is not None:
            product, near = self.curvature()
        elif dense:
            near, patience = self._near_inverse(slope)

        def system(x: Tensor) -> Tensor:
            self.products += 1
            self.products_since_inverse += 1
            if derivative is None:
                return product(x)
            on = derivative(x)
            return derivative(product(on)) + on - derivative(on)

        b = target if derivative is None else derivative(target)
        scale = max(scale, b.norm().item())

        def solve(near: Map | None, patience: float) -> tuple[Tensor, float]:
            rest = self._without_null_directions(slope, b, scale) if dense and near else b
            return solve_flat(
                system,
                rest,
                steps=PRODUCTS,
                accuracy=accuracy,
                start=start,
                precondition=near,
                patience=patience,
                flat=FLAT if dense else 0.0,
                top=self.top,
                scale=scale,
                convex=self.curvature is not None,  # a caller who knows the products also knows that
            )

        try:
            x, self.top = solve(near, patience)
        except StaleError:
            x, self.top = solve(self._inverse(slope), math.inf)
        return (x if derivative is None else derivative(x)), x

    def _without_null_directions(self, slope: Slope, b: Tensor, scale: float) -> Tensor:
        """Return b without its part in the directions in which g_vv is zero, which has to be tiny next to `scale`."""
        if self.null_directions is None:
            return b
        part = self.null_directions.T @ b
        eps = torch.finfo(b.dtype).eps
        rounding = ROUNDING * eps * self.largest * (1 + flatten(self.d.v.leaves).norm().item())
        if part.norm().item() > max(eps**0.5 * scale, rounding):
            raise FlatError if self.is_exact(slope) else StaleError
        return b - self.null_directions @ part

    def _near_inverse(self, slope: Slope) -> tuple[Map | None, float]:
        """Return the inverse of an earlier g_vv and the products that it is worth, or the inverse of this one.

        This one is factorised if the products since the last time have cost as much.
        """
        n = slope.flat.numel()
        # Up to COLUMNS products are one batched backward pass, which costs less than half of them.
        cost = min(n / 2, 8.0) if n <= COLUMNS else float(n)
        if self.products_since_inverse >= 2 * cost or self.inverse is None:
            return self._inverse(slope), math.inf
        return self._map(self.inverse), cost

    def _inverse(self, slope: Slope) -> Map | None:
        """Return the inverse of g_vv outside its null directions; None if rounding leaves no factor.

        Raise `FlatError` if g_vv has a negative curvature that rounding cannot explain.
        """
        self.products_since_inverse, self.inverse, self.null_directions = 0, None, None
        self.factorised = slope.flat
        matrix = self._matrix(slope)
        diagonal = matrix.diagonal()
        self.largest = diagonal.abs().max().item()
        # The numbers of v can have different units; scaled by 1 / sqrt(diagonal), g_vv does not depend on them.
        unit = torch.where(diagonal > 0, diagonal, max(self.largest, TINIEST)).rsqrt()
        if not math.isfinite(self.largest):
            raise FlatError
        scaled, raised = unit[:, None] * matrix * unit, RAISE[matrix.dtype]
        with _one_thread():
            factor, failed = torch.linalg.cholesky_ex(scaled + raised * torch.eye(len(unit)).to(scaled))
            if failed.item():
                if not torch.linalg.eigvalsh(scaled)[0] >= -NEGATIVE * torch.finfo(matrix.dtype).eps * scaled.norm():
                    raise FlatError(negative=True)
                return None
            flat = _null_space(scaled, factor, raised)
            inverse = unit[:, None] * torch.cholesky_inverse(factor) * unit
            if flat is not None:
                flat = self.null_directions = torch.linalg.qr(unit[:, None] * flat).Q.contiguous()
                inverse = inverse - flat @ (flat.T @ inverse)
                inverse = inverse - (inverse @ flat) @ flat.T
            # In the layout that a checkpoint restores: with another one, products differ in their last bits.
            self.inverse = inverse.contiguous()
        return self._map(self.inverse)

    @staticmethod
    def _map(inverse: Tensor) -> Map:
        return lambda r: inverse @ r

    def _matrix(self, slope: Slope) -> Tensor:
        """Return g_vv."""
        matrix = self.rows(slope.graph, self.d.v.leaves, torch.eye(slope.flat.numel()).to(slope.flat))
        return (matrix + matrix.T) / 2

    def rows(self, outputs: list[Tensor], inputs: list[Tensor], matrix: Tensor) -> Tensor:
        """Return the product of each row of a matrix with the derivative of `outputs` in `inputs`, as rows."""
        try:
            return torch.cat([_rows(outputs, inputs, c) for c in torch.split(matrix, COLUMNS if self.batched else 1)])
        except RuntimeError:  # an operator that cannot be batched
            if not self.batched:
                raise
            self.batched = False
            return self.rows(outputs, inputs, matrix)

    def product(self, slope: Slope) -> Map:
        """Return the product with g_vv."""
        d = self.d
        return lambda x: joined(d.gradient(slope.graph, d.v.leaves, cotangent=self.parts(x), retain=True))

    def tangent(self, slope: Tensor) -> Map | None:
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
