"""Random problems with badly scaled variables and known answers.

u is S w, where w has the problem's own unit and S lies between 1e-6 and 1e6. f = f0 + weight * F, with a weight between
1e-4 and 1, so f can depend weakly on u. A quarter of the problems is in float32. Four kinds, by the lower objective:

    quadratic   g = (v - A w - a)' H (v - A w - a) / 2                                the answer is known in closed form
    ridge       g = mean (x v - y)^2 / 2 + sum exp(w_j) |v_j|^2 / 2                   one weight for each group of v
    logistic    g = mean log(1 + exp(-y x v)) + r |v - A w|^2 / 2
    huber       g = mean sqrt(1 + (x v - y - z w)^2) + r |v|^2 / 2

F is the same loss on other rows, plus alpha |w - b|^2 / 2. `Exact` is the independent computation: dense algebra in
float64, Newton steps for v*, and BFGS of scipy in w for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional

from bilevel import Problem

KINDS = ("quadratic", "ridge", "logistic", "huber")
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scaled:
    """A problem in w and v (float64), its scale S and the dtype that the solver sees."""

    kind: str
    upper: Loss
    lower: Loss
    w: Tensor
    v: Tensor
    scale: float
    dtype: torch.dtype
    answer: Tensor | None

    def problem(self) -> tuple[Problem, Tensor, Tensor]:
        """Return the problem that a user would state, with u = S w, and its start."""
        u = (self.scale * self.w).to(self.dtype).requires_grad_()
        v = self.v.to(self.dtype, copy=True).requires_grad_()
        return (
            Problem(lambda u, v, _: self.upper(u / self.scale, v), lambda u, v, _: self.lower(u / self.scale, v)),
            u,
            v,
        )


def scaled_problem(number: int, seed: int = 0) -> Scaled:
    """Draw a problem."""
    draw = np.random.default_rng([seed, number])
    kind, dtype = KINDS[number % 4], torch.float32 if number // 4 % 4 == 3 else torch.float64

    def power(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def normal(*shape: int) -> Tensor:
        """Draw numbers that float32 represents exactly, so that both dtypes state the same problem."""
        return torch.from_numpy(draw.standard_normal(shape)).float().to(dtype)

    p, q = (int(n) for n in draw.integers(2, 11, 2))
    rows = int(power(2, 4))
    scale, weight, offset = power(-6, 6), power(-4, 0), float(draw.uniform(-2, 2))
    alpha, ridge = power(-2, 0), power(-2, 0)
    a, b, start, v = normal(q), normal(p), normal(p), normal(q)
    A = normal(q, p) / p**0.5
    x, x_valid = normal(rows, q), normal(rows, q)
    truth = normal(q)
    y, y_valid = x @ truth + normal(rows), x_valid @ truth + normal(rows)
    groups, z = torch.arange(q) % p, normal(rows, p)

    def lower(w: Tensor, v: Tensor) -> Tensor:
        A_, x_, y_, z_ = (t.to(v.dtype) for t in (A, x, y, z))
        if kind == "quadratic":
            rest = v - A_ @ w - a.to(v.dtype)
            return (rest * spectrum.to(v.dtype) * rest).sum() / 2
        if kind == "ridge":
            return ((x_ @ v - y_) ** 2).mean() / 2 + (w.exp()[groups] * v**2).sum() / 2
        if kind == "logistic":
            return functional.softplus(-torch.sign(y_) * (x_ @ v)).mean() + ridge * ((v - A_ @ w) ** 2).sum() / 2
        return (1 + (x_ @ v - y_ - z_ @ w) ** 2).sqrt().mean() + ridge * (v**2).sum() / 2

    def upper(w: Tensor, v: Tensor) -> Tensor:
        x_, y_ = x_valid.to(v.dtype), y_valid.to(v.dtype)
        if kind == "quadratic":
            loss = ((v - truth.to(v.dtype)) ** 2).sum() / 2
        elif kind == "ridge":
            loss = ((x_ @ v - y_) ** 2).mean() / 2
        elif kind == "logistic":
            loss = functional.softplus(-torch.sign(y_) * (x_ @ v)).mean()
        else:
            loss = (1 + (x_ @ v - y_) ** 2).sqrt().mean()
        return offset + weight * (loss + alpha * ((w - b.to(v.dtype)) ** 2).sum() / 2)

    spectrum = torch.logspace(0, -draw.uniform(0, 3), q, dtype=torch.float64).to(dtype)
    answer = None
    if kind == "quadratic":
        A_, rest = A.double(), (truth - a).double()
        left = A_.T @ A_ + alpha * torch.eye(p, dtype=torch.float64)
        answer = torch.linalg.solve(left, alpha * b.double() + A_.T @ rest)
    return Scaled(kind, upper, lower, start.double(), v.double(), scale, dtype, answer)


class Exact:
    """phi(w) = f(w, v*(w)) with its derivatives, by dense algebra in float64."""

    def __init__(self, problem: Scaled) -> None:
        self.problem, self.v = problem, problem.v.clone()

    def minimum(self, w: Tensor) -> Tensor:
        """Return v* by damped Newton steps; g is convex."""
        g, v = self.problem.lower, self.v
        for _ in range(100):
            slope, bend = self._lower(w, v)
            step, share = torch.linalg.solve(bend, slope), 1.0
            while g(w, v - share * step) > g(w, v) - 1e-4 * share * slope @ step and share > 1e-9:
                share /= 2
            if step.norm() <= 1e-13 * (1 + v.norm()) or share <= 1e-9:
                break
            v = v - share * step
        self.v = v
        return v.clone()

    def _lower(self, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient and the Hessian of g in v."""

        def g(v: Tensor) -> Tensor:
            return self.problem.lower(w, v)

        return torch.autograd.functional.jacobian(g, v), torch.autograd.functional.hessian(g, v)

    def phi(self, w: Tensor) -> tuple[float, Tensor]:
        """Return phi and the hypergradient."""
        w, v = w.detach().requires_grad_(), self.minimum(w).requires_grad_()
        f, g = self.problem.upper(w, v), self.problem.lower(w, v)
        f_u, f_v = torch.autograd.grad(f, (w, v))
        (s,) = torch.autograd.grad(g, v, create_graph=True)
        q = torch.linalg.solve(self._lower(w.detach(), v.detach())[1], f_v)
        (mixed,) = torch.autograd.grad(s @ q, w)
        return float(f.detach()), f_u - mixed

    @cached_property
    def best(self) -> float:
        """The smallest phi."""
        if self.problem.answer is not None:
            return self.phi(self.problem.answer)[0]
        first, slope = self.phi(self.problem.w)
        unit = max(float(slope.norm()), 1e-300)

        def relative(w: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            value, slope = self.phi(torch.from_numpy(w))
            return (value - first) / unit, slope.numpy() / unit

        found = minimize(relative, self.problem.w.numpy(), jac=True, method="BFGS", options={"gtol": 1e-10})
        return float(found.fun * unit + first)

    def missing(self, w: Tensor) -> float:
        """Return the share of the possible decrease of phi that w misses."""
        return (self.phi(w)[0] - self.best) / (self.phi(self.problem.w)[0] - self.best)

    def distance(self, w: Tensor) -> float:
        """Return the hypergradient in the problem's own unit: sqrt(e' H^-1 e / (2 gain)) with the Hessian H of phi."""
        slope = self.phi(w)[1]
        h = 1e-4
        rows = [(self.phi(w + h * e)[1] - self.phi(w - h * e)[1]) / (2 * h) for e in torch.eye(len(w)).double()]
        bend = torch.stack(rows)
        values, turn = torch.linalg.eigh((bend + bend.T) / 2)
        left = ((turn.T @ slope) ** 2 / values.abs().clamp(min=1e-12 * values.abs().max())).sum()
        gain = self.phi(self.problem.w)[0] - self.phi(w)[0]
        return float((left / (2 * max(gain, 1e-300))).sqrt())
