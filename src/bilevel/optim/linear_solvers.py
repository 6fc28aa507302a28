"""Iterative solvers of A q = b for a symmetric A that is known only by its products.

They take a fixed number of steps, can keep q from one system to the next, and read nothing on the host, so they never
end early. Each trial has its own numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bilevel._util.tensor_lists import broadcast_trials

Map = Callable[[Tensor], Tensor]
Product = Callable[[list[Tensor]], list[Tensor]]
Dot = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
# A step of `Neumann` is 1 over this many times the largest curvature that power iterations have found.
SAFETY = 1.25
BETAS = (0.9, 0.999)
TINY = 1e-8
# Squares can underflow.
TINIEST = 1e-300
# A curvature below this many units in the last place of the largest one counts as zero.
FLAT = 1e3
# A curvature below minus this many units in the last place of the largest one is negative.
NEGATIVE = 1e3
# How far the product of A and a preconditioner can be from 1 before the preconditioner is stale.
STRETCH = 30.0
# A residual above this share of b, after all steps, is not a solution.
LEAST = 1e-3
# An error of x above this share shows that a preconditioner is stale.
COARSE = 1e-5


class StaleError(Exception):
    """A preconditioner is not near the inverse of A."""


class FlatError(Exception):
    """A has no positive curvature in some direction, or the system takes too many products.

    Args:
        negative: Whether the curvature is negative beyond what rounding explains. Default: False.
    """

    def __init__(self, *, negative: bool = False) -> None:
        super().__init__()
        self.negative = negative


def conjugate_gradients(
    product: Product,
    b: Sequence[Tensor],
    dot: Dot,
    *,
    steps: int,
    accuracy: float | None = None,
    start: tuple[list[Tensor], list[Tensor]] | None = None,
    precondition: Product | None = None,
    flat: float = 0.0,
) -> tuple[list[Tensor], Tensor]:
    """Solve A q = b by conjugate gradients; return q and |b - A q|^2, for each trial.

    `product` multiplies by A, and `precondition` by a matrix near its inverse. With an `accuracy`, the iteration ends
    when |b - A q| <= accuracy |b|, which it decides on the host; without one, it takes all `steps` without a host read.
    `start` is (q, b - A q), by default (0, b). A trial keeps its q from the step on at which the residual is down to
    the accuracy (or to rounding), or the curvature of a direction p is at most `flat` |p|^2.
    """
    q, r = start or ([torch.zeros_like(x, requires_grad=False) for x in b], list(b))
    z = precondition(r) if precondition else r
    p, slope = z, dot(r, z)
    square = dot(r, r) if precondition else slope
    goal = dot(b, b) * (torch.finfo(square.dtype).eps if accuracy is None else accuracy) ** 2
    going = torch.ones_like(square, dtype=torch.bool)
    for _ in range(steps):
        going = going & (square > goal)
        if accuracy is not None and not bool(going.any()):
            break
        bent = product(p)
        bend = dot(p, bent)
        going = going & (bend > (flat * dot(p, p) if flat else 0))
        a = torch.where(going, slope / torch.where(going, bend, 1.0), 0.0)
        q, r = _add(q, a, p), _add(r, -a, bent)
        z = precondition(r) if precondition else r
        new = dot(r, z)
        square = torch.where(going, dot(r, r) if precondition else new, square)
        p = _add(z, torch.where(going, new / torch.where(going, slope, 1.0), 0.0), p)
        slope = new
    return q, square


def solve_flat(
    product: Map,
    b: Tensor,
    *,
    steps: int,
    accuracy: float,
    start: Tensor | None = None,
    precondition: Map | None = None,
    patience: float = math.inf,
    flat: float = 0.0,
    top: float = 0.0,
    scale: float = 0.0,
    convex: bool = False,
) -> tuple[Tensor, float]:
    """Solve A x = b by conjugate gradients for one flat vector, on the host; return x and the largest curvature met.

    This is the quick form for small systems that are solved many times. It ends when |b - A x| <= accuracy |b|; with a
    preconditioner M that is perhaps no longer near the inverse, also |M (b - A x)| <= accuracy |x|, which is the error
    of x if M is the inverse. Then it raises `StaleError` if A M stretches a direction by more than `STRETCH`, or if
    `patience` products are not enough. It raises `FlatError` if |b - A x| is above `LEAST` |b| after all steps, or if
    a direction has no positive curvature, relative to the largest one met and to `top`; with a preconditioner, at most
    `flat` times the curvature that it knows. A `convex` A is known to have none: then only rounding can hide the
    curvature, and x is as good as it gets. If b is a difference, `scale` is the size of its terms, which says how much
    of b is rounding.
    """
    x, r = torch.zeros_like(b), b
    size = math.sqrt(torch.dot(b, b).item())
    eps = torch.finfo(b.dtype).eps
    if size == 0.0:
        return x, top
    if not math.isfinite(size):  # squares overflow
        raise FlatError
    if start is not None:
        rest = b - product(start)
        if torch.dot(rest, rest).item() < size**2:
            x, r = start, rest
    z = r if precondition is None else precondition(r)
    p, slope = z, torch.dot(r, z).item()
    for k in range(steps):
        left = math.sqrt(torch.dot(r, r).item())
        near = patience == math.inf or z.norm().item() <= max(accuracy, COARSE) * x.norm().item()
        if left <= accuracy * size and near:
            return x, top
        if k >= patience:
            raise StaleError
        bent = product(p)
        bend, length = torch.dot(p, bent).item(), torch.dot(p, p).item()
        if patience < math.inf and not slope / STRETCH < bend < slope * STRETCH:
            raise StaleError
        if not bend > (flat * slope if precondition else FLAT * eps * top * length):
            # The residual is rounding, which a projection magnifies.
            negative, whole = bend < -NEGATIVE * eps * top * length, max(size, scale)
            if convex or left <= FLAT * eps * whole or (left <= eps**0.5 * whole and not negative):
                return x, top
            raise FlatError(negative=negative)
        top = max(top, bend / max(length, TINIEST))
        x, r = torch.add(x, p, alpha=slope / bend), torch.add(r, bent, alpha=-slope / bend)
        z = r if precondition is None else precondition(r)
        slope, before = torch.dot(r, z).item(), slope
        if not before > 0:  # squares underflow
            break
        p = torch.add(z, p, alpha=slope / before)
    if not convex and not left <= max(LEAST, accuracy) * size:
        raise FlatError
    return x, top


class LinearSolver(ABC):
    """A solver and its q. A solve changes only `state`, in place; all of it is zero at the start."""

    def __init__(self, like: Sequence[Tensor], steps: int, dot: Dot, *, warm_start: bool) -> None:
        self.steps, self.dot, self.warm_start = steps, dot, warm_start
        self.q = [torch.zeros_like(x, requires_grad=False) for x in like]
        self.state: dict[str, list[Tensor]] = {"q": self.q}

    @torch.no_grad()
    def solve(self, product: Product, b: Sequence[Tensor], left: Tensor) -> list[Tensor]:
        """Take the steps towards A q = b, and return q. `left` scales the learning rate."""
        if not self.warm_start:
            self.restart()
        for mine, new in zip(self.q, self._solved(product, list(b), left), strict=True):
            mine.copy_(new)
        return self.q

    @abstractmethod
    def _solved(self, product: Product, b: list[Tensor], left: Tensor) -> list[Tensor]:
        """The new q."""

    def restart(self) -> None:
        """Reset q and all that is known of A."""
        for tensor in (t for tensors in self.state.values() for t in tensors):
            tensor.zero_()

    def _residual(self, product: Product, b: list[Tensor]) -> list[Tensor]:
        """b - A q; without a product where q is zero."""
        return _add(b, -1.0, product(self.q)) if self.warm_start else b


class ConjugateGradients(LinearSolver):
    """Conjugate gradients: exact after as many steps as A has different eigenvalues.

    If a direction has no positive curvature, or the residual is down to rounding, the trial keeps its q for the rest of
    the solve: its further steps are zero.
    """

    def _solved(self, product: Product, b: list[Tensor], left: Tensor) -> list[Tensor]:
        start = (list(self.q), self._residual(product, b))
        return conjugate_gradients(product, b, self.dot, steps=self.steps, start=start)[0]


class Neumann(LinearSolver):
    """The Neumann series, q <- q + eta (b - A q), with eta from the largest curvature of A.

    A vector that one power iteration a solve turns towards the top of A gives eta = 1 / (SAFETY |A x|). Before the
    vector has converged, or after A has grown, this eta can be too long. So no step is longer than <r, A r> / |A r|^2,
    which minimises the residual r along it; the step is zero if <r, A r> is not positive.
    """

    def __init__(self, like: Sequence[Tensor], steps: int, dot: Dot, *, warm_start: bool) -> None:
        super().__init__(like, steps, dot, warm_start=warm_start)
        self.top = [torch.zeros_like(q) for q in self.q]
        self.state["top"] = self.top

    def _solved(self, product: Product, b: list[Tensor], left: Tensor) -> list[Tensor]:
        top = self._unit(self.top, self._unit(b, [torch.ones_like(x) for x in b]))  # at first, the direction of b
        turned = product(top)
        for mine, new in zip(self.top, self._unit(turned, top), strict=True):
            mine.copy_(new)
        longest = _ratio(1.0 / SAFETY, self.dot(turned, turned).sqrt())
        q, r = list(self.q), self._residual(product, b)
        for _ in range(self.steps):
            bent = product(r)
            least = _ratio(self.dot(r, bent), self.dot(bent, bent)).clamp(min=0.0)
            eta = torch.minimum(longest, least)
            q, r = _add(q, eta, r), _add(r, -eta, bent)
        return q

    def _unit(self, x: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        """Return x scaled to length 1, or `other` if x is zero."""
        size = self.dot(x, x).sqrt()
        return [
            torch.where(broadcast_trials(size, a) > 0, a / broadcast_trials(torch.where(size > 0, size, 1.0), a), b)
            for a, b in zip(x, other, strict=True)
        ]


class GradientSteps(LinearSolver):
    """Gradient steps on <q, A q> / 2 - <b, q>: q <- q + rate (b - A q)."""

    def __init__(self, like: Sequence[Tensor], steps: int, dot: Dot, *, warm_start: bool, rate: float) -> None:
        super().__init__(like, steps, dot, warm_start=warm_start)
        self.rate = rate

    def _solved(self, product: Product, b: list[Tensor], left: Tensor) -> list[Tensor]:
        q = list(self.q)
        for _ in range(self.steps):
            q = _add(q, left * self.rate, _add(b, -1.0, product(q)))
        return q


class LeastSquares(LinearSolver):
    """Adam on |A q - b|^2 / 2, whose gradient is A (A q - b): two products a step."""

    def __init__(self, like: Sequence[Tensor], steps: int, dot: Dot, *, warm_start: bool, rate: float) -> None:
        super().__init__(like, steps, dot, warm_start=warm_start)
        self.rate = rate
        self.mean, self.square = ([torch.zeros_like(q) for q in self.q] for _ in range(2))
        # In float64: 1 - 0.999^t in float32 is off by 6e-5 at the first steps.
        self.count = torch.zeros((), dtype=torch.float64, device=self.q[0].device)
        self.state |= {"mean": self.mean, "square": self.square, "count": [self.count]}

    def _solved(self, product: Product, b: list[Tensor], left: Tensor) -> list[Tensor]:
        q = list(self.q)
        for _ in range(self.steps):
            gradient = product(_add(product(q), -1.0, b))
            self.count += 1
            for i, d in enumerate(gradient):
                self.mean[i].lerp_(d, 1 - BETAS[0])
                self.square[i].lerp_(d * d, 1 - BETAS[1])
                first, second = ((1 - beta**self.count).to(d.dtype) for beta in BETAS)
                move = (self.mean[i] / first) / ((self.square[i] / second).sqrt() + TINY)
                q[i] = q[i] - left * self.rate * move
        return q


def _add(x: Sequence[Tensor], a: float | Tensor, y: Sequence[Tensor]) -> list[Tensor]:
    """Return x + a y for a number a, or one for each trial."""
    return [m + (broadcast_trials(a, n) if isinstance(a, Tensor) else a) * n for m, n in zip(x, y, strict=True)]


def _ratio(a: float | Tensor, b: Tensor) -> Tensor:
    """a / b, or zero where b is."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
