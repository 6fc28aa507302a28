"""Inputs of linear models, dense or sparse, and their differentiable products with weights.

A row of text has a hundred words of many thousands, so we keep it as a sparse tensor (CSR): a product takes the time of
the hundred. The mean is subtracted from the products and not from the rows, which would fill them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel._util.optional import require

Map = Callable[[Tensor], Tensor]


def from_scipy(matrix: Any) -> Tensor:
    """Return a sparse SciPy matrix as a CSR tensor."""
    csr = matrix.tocsr()
    crow, column = torch.from_numpy(csr.indptr).long(), torch.from_numpy(csr.indices).long()
    return _csr(crow, column, torch.from_numpy(csr.data).double(), tuple(csr.shape))


def to_sklearn(x: Tensor) -> Any:
    """Return inputs for scikit-learn: an array, or a sparse array."""
    if not _sparse(x):
        return x.numpy()
    return require("scipy.sparse", "apps").csr_array(
        (x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()), shape=tuple(x.shape)
    )


def rows_of(x: Tensor, mask: Tensor) -> Tensor:
    """Return the rows of a mask."""
    if not _sparse(x):
        return x[mask]
    counts = x.crow_indices().diff()
    kept = mask.repeat_interleave(counts)
    crow = torch.cat([counts.new_zeros(1), counts[mask].cumsum(0)])
    return _csr(crow, x.col_indices()[kept], x.values()[kept], (int(mask.sum()), x.shape[1]))


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each feature."""
    return _sums(x, x.values()) / len(x) if _sparse(x) else x.mean(0)


def parts_of(x: Tensor) -> list[Tensor]:
    """Return the dense tensors that the inputs consist of."""
    return [x.crow_indices(), x.col_indices(), x.values()] if _sparse(x) else [x]


class Inputs:
    """Rows minus a center, as linear maps."""

    def __init__(self, x: Tensor, center: Tensor) -> None:
        self.dense: Tensor | None = x - center
        """The centred rows; None if they are sparse."""
        self._x = self.dense

    def scores(self, w: Tensor) -> Tensor:
        """Return the products (n, k) with weights (k, d)."""
        return self._x @ w.T

    def pulled(self, p: Tensor) -> Tensor:
        """Return the sums (k, d) of the rows, each times its entry of p (n, k)."""
        return p.T @ self._x

    def squares(self, p: Tensor) -> Tensor:
        """Return the sums (k, d) of the squared rows, each times its entry of p (n, k)."""
        return p.T @ self._x.square()

    def mean_square(self) -> Tensor:
        """Return the mean square of each feature."""
        return self._x.square().mean(0)


class SparseInputs(Inputs):
    """The same for a sparse tensor: the product with the center is subtracted from each product."""

    def __init__(self, x: Tensor, center: Tensor) -> None:
        self.dense = None
        self._x, self._center = x, center
        self._across = _transposed(x)
        self._squares = _with(self._across, self._across.values().square())

    def scores(self, w: Tensor) -> Tensor:
        return _linear(w, self._scores, self._pulled)

    def pulled(self, p: Tensor) -> Tensor:
        return _linear(p, self._pulled, self._scores)

    def squares(self, p: Tensor) -> Tensor:
        c = self._center
        return (self._squares @ p).T - 2 * c * (self._across @ p).T + c.square() * p.sum(0)[:, None]

    def mean_square(self) -> Tensor:
        return _sums(self._x, self._x.values().square()) / len(self._x) - self._center.square()

    def _scores(self, w: Tensor) -> Tensor:
        return self._x @ w.T.contiguous() - w @ self._center

    def _pulled(self, p: Tensor) -> Tensor:
        return (self._across @ p.contiguous()).T - p.sum(0)[:, None] * self._center


def inputs_of(x: Tensor, center: Tensor) -> Inputs:
    return (SparseInputs if _sparse(x) else Inputs)(x, center)


class _Linear(torch.autograd.Function):
    """A linear map with its transpose as derivative: torch's own derivative of a CSR product is ten times slower."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Map, back: Map) -> Tensor:
        ctx.maps = back, there
        return there(value)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _linear(slope, *ctx.maps), None, None


def _linear(value: Tensor, there: Map, back: Map) -> Tensor:
    found: Tensor = _Linear.apply(value, there, back)  # type: ignore[no-untyped-call]
    return found


def _sparse(x: Tensor) -> bool:
    return x.layout is torch.sparse_csr


def _sums(x: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(x.shape[1]).index_add_(0, x.col_indices(), values)


def _transposed(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSC is new
        csc = x.to_sparse_csc()
    return _csr(csc.ccol_indices(), csc.row_indices(), csc.values(), (x.shape[1], x.shape[0]))


def _with(x: Tensor, values: Tensor) -> Tensor:
    """Return x with other values in the same places."""
    return _csr(x.crow_indices(), x.col_indices(), values, tuple(x.shape))


def _csr(crow: Tensor, column: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSR is new
        return torch.sparse_csr_tensor(crow, column, values, size=size, check_invariants=False)
