"""The problems of the field's benchmark (github.com/benchopt/benchmark_bilevel), and their exact value F.

F(u) = f(u, v*(u)) on all data, with v* by Newton steps, L-BFGS or a linear system: by none of the methods that are
compared. Batches are drawn as in the benchmark: they are consecutive examples, the same in each pass, and each pass
takes all of them in a random order. The random numbers are not the benchmark's.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bilevel import Box, DataError, Problem
from bilevel.data import load

BATCH = 64
# u of data cleaning and of the quadratics at the start.
START = -2.0
# The largest entry of grad_v g at v* of data cleaning.
TOLERANCE = 1e-5
Batches = DataLoader[Any]
Columns = Sequence[Tensor]


class FieldProblem(ABC):
    """f and g, as functions of u, v and some examples: columns of equal length."""

    # All examples of f and of g.
    upper_rows: Columns
    lower_rows: Columns
    # The set of u if all data are used at once.
    box: Box | None = None

    @abstractmethod
    def f(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        """Return the upper objective on some examples."""

    @abstractmethod
    def g(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        """Return the lower objective on some examples."""

    @abstractmethod
    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return u and v at the start."""

    @abstractmethod
    def lower_solution(self, u: Tensor, v: Tensor) -> Tensor:
        """Return v*(u), from the start v."""

    def value(self, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
        """Return F(u) and v*(u), from the start v."""
        v = self.lower_solution(u, v)
        with torch.no_grad():
            return self.f(u, v, self.upper_rows).item(), v

    def on_batches(self) -> tuple[Problem, tuple[Batches, Batches]]:
        """Return the problem with minibatches, and its data."""

        def upper(u: Tensor, v: Tensor, batch: Columns) -> Tensor:
            return self.f(u, v, [column[0] for column in batch])

        def lower(u: Tensor, v: Tensor, batch: Columns) -> Tensor:
            return self.g(u, v, [column[0] for column in batch])

        return Problem(upper, lower), (batches(self.upper_rows), batches(self.lower_rows))

    def on_all_data(self) -> Problem:
        """Return the problem without batches, in double precision."""
        above, below = self.doubled()
        return Problem(lambda u, v, _: self.f(u, v, above), lambda u, v, _: self.g(u, v, below), project_upper=self.box)

    @cache  # noqa: B019
    def doubled(self) -> tuple[Columns, Columns]:
        """Return all examples of f and of g in double precision."""
        above, below = ([t.double() if t.is_floating_point() else t for t in rows] for rows in self.rows)
        return above, below

    @property
    def rows(self) -> tuple[Columns, Columns]:
        return self.upper_rows, self.lower_rows


def batches(columns: Columns) -> Batches:
    """Return consecutive batches; the last one overlaps its neighbour if the examples do not come out even."""
    count = len(columns[0])
    first = torch.arange(0, count, BATCH).clamp(max=count - BATCH)
    rows = first[:, None] + torch.arange(BATCH)
    return DataLoader(TensorDataset(*(column[rows] for column in columns)), batch_size=1, shuffle=True)


class Cleaning(FieldProblem):
    """Data cleaning: 20,000 images of MNIST, a share of them with random labels, and 5,000 validation images.

    g = mean(sigmoid(u_i) loss_i) + 0.2 |v|^2, f = the mean loss of the validation images, softmax regression.
    """

    def __init__(self, share: float, sizes: tuple[int, int] = (20_000, 5_000)) -> None:
        data = load("mnist")
        images, labels = data.x.flatten(1).double().numpy(), data.y.numpy()
        draw = np.random.default_rng(32)
        order = draw.permutation(len(labels))
        first, valid = order[: sizes[0]], order[sizes[0] : sum(sizes)]
        noisy, wrong = labels[first].copy(), draw.random(len(first)) < share
        noisy[wrong] = draw.integers(0, 10, int(wrong.sum()))
        center, spread = images[first].mean(0), images[first].std(0)
        spread[spread == 0] = 1
        x, x_valid = (torch.from_numpy((images[rows] - center) / spread).float() for rows in (first, valid))
        self.lower_rows = x, torch.from_numpy(noisy), torch.arange(len(first))
        self.upper_rows = x_valid, torch.from_numpy(labels[valid])

    def f(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        x, y = rows
        return functional.cross_entropy(x @ v, y)

    def g(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        x, y, index = rows
        losses = functional.cross_entropy(x @ v, y, reduction="none")
        return (torch.sigmoid(u.index_select(0, index)) * losses).mean() + 0.2 * v.square().sum()

    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        x = self.lower_rows[0]
        return torch.full((len(x),), START), torch.zeros(x.shape[1], 10)

    def lower_solution(self, u: Tensor, v: Tensor) -> Tensor:
        leaf = v.detach().clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [leaf],
            max_iter=200,
            history_size=20,
            tolerance_grad=TOLERANCE,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            g = self.g(u, leaf, self.lower_rows)
            g.backward()  # type: ignore[no-untyped-call]
            return g

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return leaf.detach()


class Regularisation(FieldProblem):
    """A penalty for each feature of a logistic regression on ijcnn1: g = mean loss + sum exp(u_j) v_j^2 / 2.

    The validation examples of f are ijcnn1's test part. The start is random: u = log of uniform, v normal.
    """

    box = Box(-12, 8)

    def __init__(self) -> None:
        path = Path(os.environ.get("BILEVEL_DATA", "data")) / "tabular" / "ijcnn1.npz"
        if not path.exists():
            raise DataError(
                f"ijcnn1 needs {path}, with X_train, y_train, X_test and y_test. Set BILEVEL_DATA to its folder."
            )
        kept = np.load(path)
        self.lower_rows, self.upper_rows = (
            (torch.from_numpy(kept[f"X_{part}"]).float(), torch.from_numpy(kept[f"y_{part}"] > 0).float())
            for part in ("train", "test")
        )

    def f(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        x, y = rows
        return functional.binary_cross_entropy_with_logits(x @ v, y.to(v))

    def g(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        return self.f(u, v, rows) + (u.exp() * v.square()).sum() / 2

    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        generator, count = torch.Generator().manual_seed(seed), self.lower_rows[0].shape[1]
        return torch.rand(count, generator=generator).log(), torch.randn(count, generator=generator)

    @torch.no_grad()
    def lower_solution(self, u: Tensor, v: Tensor) -> Tensor:
        rows, u, v = self.doubled()[1], u.double(), v.double()
        (x, y), value = rows, self.g(u, v, rows)
        for _ in range(60):
            p = torch.sigmoid(x @ v)
            slope = x.T @ (p - y) / len(y) + u.exp() * v
            step = torch.linalg.solve((x.T * (p * (1 - p))) @ x / len(y) + torch.diag(u.exp() + 1e-14), slope)
            share, fall = 1.0, float(slope @ step)
            while (new := self.g(u, v - share * step, rows)) > value - 1e-4 * share * fall + 1e-15 and share > 1e-8:
                share /= 2
            v, value = v - share * step, new
            if fall < 1e-18:
                break
        return v

    def value(self, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
        v = self.lower_solution(u, v)
        return self.f(u.double(), v, self.doubled()[0]).item(), v


class Quadratics(FieldProblem):
    """1,024 random quadratics each for f and for g, of 100 numbers in u and in v.

    Of (a'v)^2 / 2 + (b'u)^2 / 2 + (c'u)(d'v) + e'v + h'u a batch has the mean; a row holds a, b, c, d, e, h.
    """

    def __init__(self, seed: int = 2442, count: int = 1024, size: int = 100) -> None:
        draw = np.random.default_rng(seed)
        while True:
            below, above = quadratics(draw, count, size), quadratics(draw, count, size)
            a, _, c, d, e, _ = below
            g_vv, g_uv = a.T @ a / count, c.T @ d / count
            a, b, c, d, f_v, f_u = above
            f_vv, f_uu, f_uv = a.T @ a / count, b.T @ b / count, c.T @ d / count
            response, offset = -np.linalg.solve(g_vv, g_uv.T), -np.linalg.solve(g_vv, e.mean(0))
            mixed = f_uv @ response
            self.hessian = response.T @ f_vv @ response + f_uu + mixed + mixed.T
            if np.linalg.eigvalsh(self.hessian)[0] > 1e-8:
                break
        self.response, self.offset = response, offset
        self.linear = response.T @ (f_vv @ offset + f_v.mean(0)) + f_uv @ offset + f_u.mean(0)
        self.constant = offset @ f_vv @ offset / 2 + f_v.mean(0) @ offset
        self.lower_rows, self.upper_rows = (
            [torch.from_numpy(part).float() for part in rows] for rows in (below, above)
        )

    def f(self, u: Tensor, v: Tensor, rows: Columns) -> Tensor:
        a, b, c, d, e, h = rows
        curved = ((a @ v).square() + (b @ u).square()) / 2 + (c @ u) * (d @ v)
        return curved.mean() + e.mean(0) @ v + h.mean(0) @ u

    g = f

    def start(self, seed: int) -> tuple[Tensor, Tensor]:
        size = len(self.linear)
        return torch.full((size,), START), torch.zeros(size)

    def lower_solution(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.from_numpy(self.response @ u.double().numpy() + self.offset).float()

    def value(self, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
        return self.exact(u.double().numpy()), v

    def exact(self, u: np.ndarray) -> float:
        """Return F in closed form."""
        return float(u @ self.hessian @ u / 2 + self.linear @ u + self.constant)

    def least(self) -> float:
        """Return the least value of F."""
        return self.exact(-np.linalg.solve(self.hessian, self.linear))


def quadratics(draw: np.random.Generator, count: int, size: int, least: float = 0.1, cross: float = 0.1) -> list[Any]:
    """Return the rows a, b, c, d, e, h of random quadratics.

    The mean Hessians have eigenvalues from `least` to 1; in u, one is zero. The mixed derivatives have singular values
    from `least` to `cross`.
    """

    def root(spectrum: np.ndarray) -> np.ndarray:
        basis = np.linalg.svd(draw.normal(size=(size, 1)))[0]
        return np.asarray(basis @ np.diag(spectrum) @ basis.T)

    a = draw.normal(size=(count, size)) @ root(np.logspace(np.log10(least) / 2, 0, size))
    b = draw.normal(size=(count, size)) @ root(np.r_[0, np.logspace(np.log10(least) / 2, 0, size - 1)])
    left, _, right = np.linalg.svd(draw.normal(size=(size, size)))
    z = draw.normal(size=(count, size))
    c, d = z @ (left @ np.diag(np.logspace(np.log10(least), np.log10(cross), size))).T, z @ right.T
    return [a, b, c, d, draw.normal(size=(count, size)), draw.normal(size=(count, size))]


@cache
def problem(name: str) -> FieldProblem:
    """Return a problem by its name in the study."""
    if name.startswith("cleaning"):
        return Cleaning(float(name.removeprefix("cleaning ")))
    return Regularisation() if name == "ijcnn1" else Quadratics()
