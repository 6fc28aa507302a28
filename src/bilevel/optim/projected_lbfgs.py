"""L-BFGS over a set that is known by its projection P, one iteration at a time.

At x with gradient e, D is the derivative of P at x - t e: for a box it keeps the free coordinates, for any set the
directions along the present face. With H from the pairs (D dx, D dgradient) of earlier moves, the trial points are

    P(x + a d),   d = -D H D e - t (e - D e),   a = 1 first

so coordinates outside the face move to it by a gradient step. If no such point lowers the value, the gradient step
P(x - a t e) is tried. Without a set, D is the identity, and this is L-BFGS.

A value can be too coarse to compare two points near a minimum. A trial point whose value is equal up to rounding is
accepted if the slope along the move has fallen (the approximate Wolfe condition of Hager and Zhang, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilevel.optim.lbfgs import Function

# A step is long enough if the slope along it has fallen to the share `CURVATURE`.
ARMIJO, CURVATURE = 1e-4, 0.9
TRIALS = 25
# Values that differ by less than this many units in the last place are equal.
ROUNDING = 1000
# The first move of a new search, relative to 1 + |x|.
FIRST_MOVE = 0.1
MEMORY = 50
# The attributes that a checkpoint keeps.
KEPT = ("x", "value", "gradient", "moves", "bends", "rate", "length", "rise")
# P as a function of the flat vector, and D at a point: it multiplies each row of a matrix.
Project = Callable[[Tensor], Tensor]
RowMap = Callable[[Tensor], Tensor]
Tangent = Callable[[Tensor], RowMap]


def row_derivative(moved: list[Tensor], points: list[Tensor]) -> RowMap:
    """Return the map that multiplies each row of a matrix by the derivative of a projection, which is symmetric."""
    sizes = [point.numel() for point in points]

    def pull(cotangents: list[Tensor], *, batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(moved, points, cotangents, retain_graph=True, is_grads_batched=batched)
        return [x.flatten(1 if batched else 0) for x in found]

    def one(row: Tensor) -> Tensor:
        parts = zip(torch.split(row, sizes), points, strict=True)
        return torch.cat(pull([p.reshape(x.shape) for p, x in parts], batched=False))

    def rows(matrix: Tensor) -> Tensor:
        parts = zip(torch.split(matrix, sizes, 1), points, strict=True)
        try:
            return torch.cat(pull([p.reshape(-1, *x.shape) for p, x in parts], batched=True), 1)
        except RuntimeError:  # an operator that cannot be batched
            return torch.stack([one(row) for row in matrix])

    like = torch.cat([point.detach().reshape(-1) for point in points])
    probe, diagonal = torch.arange(1, len(like) + 1).to(like), one(torch.ones_like(like))
    # If each coordinate is projected for itself, as by a box, the derivative is diagonal.
    return (lambda matrix: matrix * diagonal) if torch.equal(one(probe), probe * diagonal) else rows


class _Face:
    """The function along one face: its slope D e, its inverse curvature D H D, and the step -D H D e.

    H has the compact form of Byrd, Nocedal and Schnabel (1994): with the pairs as rows of S and Y, R the upper triangle
    of S Y', C its diagonal and t the scale of H,

        H e = t e + S' a - t Y' b,   b = R^-1 S e,   a = R^-T (C b + t Y Y' b - t Y e)
    """

    def __init__(self, derivative: RowMap | None, gradient: Tensor, moves: Tensor, bends: Tensor, rate: float) -> None:
        self.derivative, self.rate = derivative, rate
        self.slope = self.along(gradient)
        if derivative is not None and len(moves):
            both = derivative(torch.cat([moves, bends]))
            moves, bends = both[: len(moves)], both[len(moves) :]
        products, squares = (moves * bends).sum(1), (bends * bends).sum(1)
        curved = products > torch.finfo(gradient.dtype).eps * (squares * (moves * moves).sum(1)).sqrt()
        self.moves, self.bends = moves[curved], bends[curved]
        if len(self.moves):
            self.upper = torch.triu(self.moves @ self.bends.T)
            self.rate = (products[curved][-1] / squares[curved][-1]).item()
            self.inner = torch.diag(products[curved]) + self.rate * (self.bends @ self.bends.T)
        self.direction = -self.inverse(self.slope)

    def along(self, x: Tensor) -> Tensor:
        """Return D x."""
        return x if self.derivative is None else self.derivative(x[None])[0]

    def inverse(self, slope: Tensor) -> Tensor:
        """Return D H e for a slope e along the face."""
        found = self.rate * slope
        if len(self.moves):
            b = torch.linalg.solve_triangular(self.upper, (self.moves @ slope)[:, None], upper=True)
            rest = self.inner @ b - self.rate * (self.bends @ slope)[:, None]
            a = torch.linalg.solve_triangular(self.upper.T, rest, upper=False)
            found = found + (self.moves.T @ a - self.rate * (self.bends.T @ b))[:, 0]
        return self.along(found)

    def decrement(self, slope: Tensor) -> float:
        """Return sqrt(<e, H e>) for a slope e along the face."""
        return math.sqrt(max(0.0, torch.dot(slope, self.inverse(slope)).item()))


@dataclass
class _Line:
    """The trial lengths a of a line search, between a good one, `low`, and a bad one, `high`."""

    a: float = 1.0
    low: float = 0.0
    high: float = math.inf
    trials: int = 0

    def shorten(self) -> None:
        self.a, self.trials = 0.3 * self.a, self.trials + 1

    def ends(self, before: float, after: float, *, better: bool) -> bool:
        """Note the slopes along the move at its start and at a; return whether a is the last length, else change it."""
        self.trials += 1
        if better:
            self.low = self.a
            if after >= CURVATURE * before:
                return True
        else:
            self.high = self.a
        if self.high == math.inf:
            # The slope is nearly what it was: go to its zero by the secant.
            self.a *= min(max(before / (before - after), 2.0), 10.0) if after > before else 10.0
        elif self.low > 0:
            self.a = (self.low + self.high) / 2
        elif after > 0:
            self.a *= min(max(before / (before - after), 0.1), 0.5)
        else:
            self.a *= 0.1 if math.isnan(after) else 0.3
        return self.high < math.inf and self.high - self.low <= 1e-3 * self.high


@dataclass
class ProjectedLBFGS:
    """A minimisation in progress: the point, its value and gradient, and the pairs (dx, dgradient) as rows."""

    x: Tensor
    value: float
    gradient: Tensor
    project: Project | None = None
    tangent: Tangent | None = None
    moves: Tensor = field(default_factory=lambda: torch.empty(0))
    bends: Tensor = field(default_factory=lambda: torch.empty(0))
    # The inverse curvature of the last pair: the length t of a gradient step, relative to the gradient.
    rate: float = 0.0
    length: float = 0.0
    # How much the value rose at the first trial point of a search that did not begin with a decrease.
    rise: float = 0.0
    extra: Any = None

    # The quantities of the present point, made when they are first needed.
    _face: _Face | None = field(default=None, init=False, repr=False)
    _promise: float | None = field(default=None, init=False, repr=False)

    @classmethod
    def start(
        cls, function: Function, x: Tensor, project: Project | None = None, tangent: Tangent | None = None
    ) -> ProjectedLBFGS:
        value, gradient, extra = function(x)
        search = cls(x.clone(), value, gradient, project, tangent, extra=extra)
        search.forget()
        return search

    def forget(self, rate: float | None = None) -> None:
        """Drop the pairs; the next move is `rate` times the gradient, by default a tenth of 1 + |x| long."""
        self.moves = self.bends = self.x.new_empty(0, self.x.numel())
        size = self.gradient.norm().item()
        if rate is None:
            rate = FIRST_MOVE * (1 + self.x.norm().item()) / size if size > 0 and math.isfinite(size) else 1.0
        self.rate = rate
        self._face = self._promise = None

    def replace(self, value: float, gradient: Tensor, extra: Any) -> None:
        """Put a better evaluation of the present point in place."""
        self.value, self.gradient, self.extra = value, gradient, extra
        self._face = self._promise = None

    @property
    def noise(self) -> float:
        """The difference of two values that rounding can explain."""
        return ROUNDING * float(torch.finfo(self.x.dtype).eps) * abs(self.value)

    @property
    def face(self) -> _Face:
        """The face at the present point, with the L-BFGS model on it."""
        if self._face is None:
            derivative = None if self.tangent is None else self.tangent(self.x - self.rate * self.gradient)
            self._face = _Face(derivative, self.gradient, self.moves, self.bends, self.rate)
        return self._face

    @property
    def promise(self) -> float:
        """Twice the decrease that the model promises along the face, and outside it. Infinity without a model."""
        if self._promise is None:
            outside, steepest = self.gradient - self.face.slope, self.trial(-self.rate * self.gradient)
            square = self.face.decrement(self.face.slope) ** 2
            self._promise = square + max(0.0, torch.dot(outside, self.x - steepest).item())
            if self._promise > 0 and not len(self.moves):
                self._promise = math.inf
        return self._promise

    @property
    def step(self) -> Tensor:
        """-D H D e - t (e - D e): the move of the next trial point, before it is projected."""
        return self.face.direction - self.rate * (self.gradient - self.face.slope)

    def trial(self, d: Tensor) -> Tensor:
        """Return P(x + d)."""
        return self.x + d if self.project is None else self.project(self.x + d)

    def iterate(self, function: Function) -> bool:
        """Move to a trial point along P(x + a d) that is better; return False if there is none.

        If there is none and the function has no model yet, the first trial point becomes one: a search that begins at
        the minimum then knows that nothing is left to gain.
        """
        directions = [self.step] if self.tangent is None else [self.step, -self.rate * self.gradient]
        new, first = not len(self.moves), None
        for d in directions:
            best: tuple[Tensor, float, Tensor, Any] | None = None
            line = _Line()
            while line.trials < TRIALS:
                x = self.trial(line.a * d)
                move = x - self.x
                before = torch.dot(self.gradient, move).item()
                if not before < 0:  # at the bounds, the point is not along d any more
                    line.shorten()
                    continue
                value, gradient, extra = function(x)
                after = torch.dot(gradient, move).item()
                better = self._better(value, before, after)
                if new and first is None and math.isfinite(value) and math.isfinite(after):
                    first = move, gradient - self.gradient
                    self.rise = max(self.rise, value - self.value)
                if better:
                    best = x, value, gradient, extra
                if line.ends(before, after, better=better):
                    break
            if best is not None:
                self._accept(*best)
                return True
        if first is not None:
            self.learn(*first)
        return False

    def _better(self, value: float, before: float, after: float) -> bool:
        """Return whether a trial value is lower, or equal up to rounding with a slope that has fallen."""
        if not (math.isfinite(value) and math.isfinite(after)):
            return False
        equal = abs(value - self.value) <= self.noise and abs(before) <= self.noise
        return after <= -(1 - 2 * ARMIJO) * before if equal else value <= self.value + ARMIJO * before

    def _accept(self, x: Tensor, value: float, gradient: Tensor, extra: Any) -> None:
        move = x - self.x
        self.learn(move, gradient - self.gradient)
        self.length = move.norm().item()
        self.x, self.value, self.gradient, self.extra = x, value, gradient, extra

    def learn(self, move: Tensor, bend: Tensor) -> None:
        """Add a pair to the model if the function curves up along it."""
        product, square = torch.dot(move, bend).item(), torch.dot(bend, bend).item()
        if product > torch.finfo(move.dtype).eps * move.norm().item() * square**0.5:
            self.moves = torch.cat([self.moves, move[None]])[-MEMORY:]
            self.bends = torch.cat([self.bends, bend[None]])[-MEMORY:]
            self.rate = product / square
        self._face = self._promise = None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}
