"""Penalties of linear models by implicit gradients: a small independent solver to compare with.

phi(u) = f(v*(u)) and its gradient come from numpy: Newton steps for v*, a dense g_vv for the adjoint q. L-BFGS-B of
scipy minimises phi within bounds, with its default tolerances. Nothing here uses bilevel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

Array = NDArray[np.float64]
NEWTON_STEPS = 100
TIGHT = {"ftol": 1e-13, "gtol": 1e-9, "maxiter": 3000, "maxfun": 5000}


class Split(NamedTuple):
    """Rows for g and rows for f."""

    x: Array
    y: Array
    x_valid: Array
    y_valid: Array


@dataclass(frozen=True)
class Ridge:
    """g = mean (x v - y)^2 + sum exp(u) v^2 and f = mean (x v - y)^2 on other rows."""

    data: Split

    def lower_solution(self, u: Array, v: Array) -> tuple[Array, Array]:
        """Return v* and the Hessian of g there."""
        x, y = self.data.x, self.data.y
        hessian = 2 * (x.T @ x / len(y) + np.diag(np.exp(u)))
        return np.linalg.solve(hessian, 2 * x.T @ y / len(y)), hessian

    def upper(self, v: Array) -> tuple[float, Array]:
        rest = self.data.x_valid @ v - self.data.y_valid
        return float(np.mean(rest**2)), 2 * self.data.x_valid.T @ rest / len(rest)

    def mixed(self, u: Array, v: Array, q: Array) -> Array:
        """Return g_uv q."""
        return 2 * np.exp(u) * v * q

    def solve(self, hessian: Array, b: Array) -> Array:
        return np.linalg.solve(hessian, b)

    @property
    def start(self) -> Array:
        return np.zeros(self.data.x.shape[1])


@dataclass(frozen=True)
class Logistic:
    """g = mean log-loss + sum exp(u_j) v_jk^2 / 2 over features j; the bias, the last row of v, has no penalty.

    With two classes v has one column, the score of the second class. With more, a column for each class. A u of one
    number is the penalty of all features.
    """

    data: Split
    classes: int

    @property
    def columns(self) -> int:
        return 1 if self.classes == 2 else self.classes

    @property
    def start(self) -> Array:
        return np.zeros((self.data.x.shape[1] + 1) * self.columns)

    def _loss(self, x: Array, y: Array, v: Array) -> tuple[float, Array, Array]:
        """Return the mean loss, its gradient and the probabilities."""
        scores = np.c_[x, np.ones(len(x))] @ v.reshape(-1, self.columns)
        if self.columns == 1:
            scores = np.c_[np.zeros(len(x)), scores]
        logs = log_softmax(scores, axis=1)
        p = np.exp(logs)
        slope = p.copy()
        slope[np.arange(len(y)), y] -= 1
        slope = slope[:, -self.columns :] / len(y)
        gradient = np.r_[x.T @ slope, slope.sum(0)[None]]
        return -float(np.mean(logs[np.arange(len(y)), y])), gradient.ravel(), p[:, -self.columns :]

    def _penalty(self, u: Array) -> Array:
        """Return exp(u) for each number of v."""
        return np.repeat(np.r_[np.broadcast_to(np.exp(u), self.data.x.shape[1]), 0.0], self.columns)

    def _lower(self, u: Array, v: Array) -> tuple[float, Array, Array]:
        loss, gradient, p = self._loss(self.data.x, self.data.y, v)
        penalty = self._penalty(u)
        return loss + float(np.sum(penalty * v**2)) / 2, gradient + penalty * v, p

    def _hessian(self, u: Array, p: Array) -> Array:
        x, k = np.c_[self.data.x, np.ones(len(p))], self.columns
        blocks = np.empty((x.shape[1], k, x.shape[1], k))
        for a in range(k):
            for b in range(a, k):
                bend = p[:, a] * ((a == b) - p[:, b]) / len(p)
                blocks[:, a, :, b] = blocks[:, b, :, a] = (x * bend[:, None]).T @ x
        return blocks.reshape(self.start.size, -1) + np.diag(self._penalty(u))

    def solve(self, hessian: Array, b: Array) -> Array:
        """Solve with the last bias held at zero if a constant on all biases changes nothing."""
        free = slice(None) if self.columns == 1 else slice(-1)
        found = np.zeros_like(b)
        found[free] = np.linalg.solve(hessian[free, free], b[free])
        return found

    def lower_solution(self, u: Array, v: Array) -> tuple[Array, Array]:
        value, gradient, p = self._lower(u, v)
        for _ in range(NEWTON_STEPS):
            hessian = self._hessian(u, p)
            step = self.solve(hessian, -gradient)
            share, fall = 1.0, float(gradient @ step)
            while True:
                new = self._lower(u, v + share * step)
                if new[0] <= value + 1e-4 * share * fall + 1e-14 * abs(value) or share < 1e-10:
                    break
                share /= 2
            v, (value, gradient, p) = v + share * step, new
            if -fall <= 1e-20 * max(abs(value), 1e-20) or np.linalg.norm(step) <= 1e-12 * np.linalg.norm(v):
                break
        return v, self._hessian(u, p)

    def upper(self, v: Array) -> tuple[float, Array]:
        return self._loss(self.data.x_valid, self.data.y_valid, v)[:2]

    def mixed(self, u: Array, v: Array, q: Array) -> Array:
        found = np.exp(u) * (v * q).reshape(-1, self.columns)[:-1].sum(1)
        return found if len(u) == len(found) else found.sum(keepdims=True)


Model = Ridge | Logistic


def implicit(model: Model) -> Callable[[Array], tuple[float, Array]]:
    """Return the function from u to phi and its gradient; v* starts from the last one."""
    v = model.start

    def phi(u: Array) -> tuple[float, Array]:
        nonlocal v
        v, hessian = model.lower_solution(u, v)
        f, f_v = model.upper(v)
        return f, -model.mixed(u, v, model.solve(hessian, f_v))

    return phi


def minimised(model: Model, u: Array, bounds: tuple[float, float], *, tight: bool = False) -> tuple[Array, float, int]:
    """Return u, phi there, and the number of evaluations; with the default tolerances of scipy, or with `TIGHT`."""
    options = TIGHT if tight else {}
    found = minimize(implicit(model), u, jac=True, method="L-BFGS-B", bounds=[bounds] * len(u), options=options)
    return found.x, float(found.fun), int(found.nfev)
