"""Limited-memory BFGS on a flat vector, one iteration at a time, with a weak Wolfe line search by bisection.

torch.optim.LBFGS cannot be saved and resumed between two iterations, and does not report a failed line search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# x -> (value, gradient, whatever else the caller wants kept of the point)
Function = Callable[[Tensor], tuple[float, Tensor, Any]]

ARMIJO, CURVATURE = 1e-4, 0.9
TRIALS = 40


@dataclass
class LBFGS:
    """A minimisation in progress: the point, its value and gradient, and the last `memory` pairs (dx, dgradient)."""

    x: Tensor
    value: float
    gradient: Tensor
    memory: int = 50
    # The expected inverse curvature of each coordinate; None stands for ones.
    metric: Tensor | None = None
    moves: list[Tensor] = field(default_factory=list)
    bends: list[Tensor] = field(default_factory=list)
    length: float = 0.0
    extra: Any = None
    # Below this step length the line search gives up. If it is not 0, lengths are resolved to a hundredth.
    shortest: float = 0.0
    # Each bend that was seen last, with its 1 / <s, y>.
    _products: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def start(cls, function: Function, x: Tensor, *, memory: int = 50, metric: Tensor | None = None) -> LBFGS:
        value, gradient, extra = function(x)
        return cls(x.clone(), value, gradient, memory, metric, extra=extra)

    def direction(self) -> Tensor:
        """-H gradient by the two-loop recursion."""
        q = self.gradient.clone()
        rhos, tape = self._rhos(), []
        for s, y, rho in zip(reversed(self.moves), reversed(self.bends), reversed(rhos), strict=True):
            a = rho * torch.dot(s, q)
            q -= a * y
            tape.append(a)
        if self.metric is not None:
            q *= self.metric
        if self.moves:
            s, y = self.moves[-1], self.bends[-1]
            q *= torch.dot(s, y) / torch.dot(y, y if self.metric is None else y * self.metric)
        for s, y, rho, a in zip(self.moves, self.bends, rhos, reversed(tape), strict=True):
            q += (a - rho * torch.dot(y, q)) * s
        return -q

    def _rhos(self) -> list[Tensor]:
        """Return 1 / <s, y> of each pair; values of earlier pairs are reused."""
        held = {id(y): (y, rho) for y, rho in self._products}
        self._products = [
            held[id(y)] if id(y) in held else (y, 1 / torch.dot(s, y))
            for s, y in zip(self.moves, self.bends, strict=True)
        ]
        return [rho for _, rho in self._products]

    def iterate(self, function: Function) -> bool:
        """Take one iteration; return False if no step along the direction or along -gradient lowers the value."""
        while True:
            d = self.direction()
            slope = torch.dot(self.gradient, d).item()
            if slope < 0 and self._search(function, d, slope):
                return True
            if not self.moves:
                return False
            self.moves, self.bends = [], []

    def _search(self, function: Function, d: Tensor, slope: float) -> bool:
        low, high, t = 0.0, float("inf"), 1.0
        noise = 10 * torch.finfo(self.x.dtype).eps * abs(self.value)
        kept: tuple[float, Tensor, float, Tensor, Any] | None = None
        for _ in range(TRIALS):
            x = self.x + t * d
            value, gradient, extra = function(x)
            finite = value == value and abs(value) != float("inf") and bool(torch.isfinite(gradient).all())
            if not finite or value > self.value + ARMIJO * t * slope + noise:
                high = t
            else:
                kept = (t, x, value, gradient, extra)
                if torch.dot(gradient, d).item() >= CURVATURE * slope:
                    break
                low = t
            t = 2 * low if high == float("inf") else (low + high) / 2
            # Two lengths this close have a kink or rounding between them: there is no better one.
            if high - low <= (1e-2 if self.shortest else 1e-14) * high or high <= self.shortest:
                break
        if kept is None:
            return False
        self.length, x, value, gradient, extra = kept
        move, bend = x - self.x, gradient - self.gradient
        if torch.equal(x, self.x):
            return False
        if torch.dot(move, bend).item() > torch.finfo(x.dtype).eps * torch.dot(bend, bend).item():
            self.moves.append(move)
            self.bends.append(bend)
            del self.moves[: -self.memory], self.bends[: -self.memory]
        self.x, self.value, self.gradient, self.extra = x, value, gradient, extra
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "x": self.x,
            "value": self.value,
            "gradient": self.gradient,
            "memory": self.memory,
            "metric": self.metric,
            "moves": list(self.moves),
            "bends": list(self.bends),
            "length": self.length,
            "shortest": self.shortest,
        }
