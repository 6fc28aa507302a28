"""The lower level of a linear model that is tuned on folds: the weights of all folds as one tensor.

Inputs are dense or sparse. A row of text has a hundred words of many thousands, so we keep it as a sparse tensor (CSR):
a product takes the time of the hundred. The mean is subtracted from the products and not from the rows, which would
fill them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from bilevel import DataError
from bilevel._util.checks import require
from bilevel.optim.linear_solvers import Map
from bilevel.running.run_identity import digest_of

Loss = Literal["squared", "logistic"]
# The second derivative of each loss in a score: exact for the squared error, an upper bound for the logistic loss.
CURVATURES = {"squared": 1.0, "logistic": 0.25}
# The most multiplications that we spend on the inverse of a second derivative.
DENSE = 4e9
# If a linear system takes more products than this, the approximate inverse is computed again.
STALE = 10


def folds_of(y: np.ndarray, classes: int, folds: int, seed: int) -> Tensor:
    """Return the fold that holds out each row, with the rows of each class spread evenly over the folds.

    `y` holds class indices, or numbers to predict if `classes` is 0. If a class has fewer rows than `folds`, there are
    as many folds as it has rows.
    """
    selection = require("sklearn.model_selection", "apps")
    most = int(np.bincount(y, minlength=classes).min()) if classes else len(y)
    if most < 2:
        what, remedy = ("rows of each class", " Leave rare classes out.") if classes else ("rows", "")
        raise DataError(f"folds need at least 2 {what}; got n_samples = {len(y)}, of the rarest {most}.{remedy}")
    splitter = (selection.StratifiedKFold if classes else selection.KFold)(
        min(folds, most), shuffle=True, random_state=seed
    )
    fold = np.empty(len(y), dtype=np.int64)
    for k, (_, out) in enumerate(splitter.split(y, y)):
        fold[out] = k
    return torch.from_numpy(fold)


def is_sparse(x: Tensor) -> bool:
    return x.layout is torch.sparse_csr


def from_scipy(matrix: Any) -> Tensor:
    """Return a sparse SciPy matrix as a CSR tensor."""
    csr = matrix.tocsr()
    crow, column = torch.from_numpy(csr.indptr).long(), torch.from_numpy(csr.indices).long()
    return _csr(crow, column, torch.from_numpy(csr.data).double(), tuple(csr.shape))


def rows_of(x: Tensor, mask: Tensor) -> Tensor:
    """Return the rows of a mask."""
    if not is_sparse(x):
        return x[mask]
    counts = x.crow_indices().diff()
    kept = mask.repeat_interleave(counts)
    crow = torch.cat([counts.new_zeros(1), counts[mask].cumsum(0)])
    return _csr(crow, x.col_indices()[kept], x.values()[kept], (int(mask.sum()), x.shape[1]))


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each feature."""
    if not is_sparse(x):
        return x.mean(0)
    return x.values().new_zeros(x.shape[1]).index_add_(0, x.col_indices(), x.values()) / len(x)


class Inputs:
    """Rows minus a center, as linear maps."""

    def __init__(self, x: Tensor, center: Tensor) -> None:
        # The centred rows; None if they are sparse.
        self.dense: Tensor | None = x - center
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


class SparseInputs(Inputs):
    """The same for a sparse tensor: the product with the center is subtracted from each product."""

    def __init__(self, x: Tensor, center: Tensor) -> None:
        self.dense = None
        self._x, self._center = x, center
        with warnings.catch_warnings(action="ignore"):  # torch warns that CSC is new
            csc = x.to_sparse_csc()
        places, size = (csc.ccol_indices(), csc.row_indices()), (x.shape[1], x.shape[0])
        self._across = _csr(*places, csc.values(), size)
        self._squares = _csr(*places, csc.values().square(), size)

    def scores(self, w: Tensor) -> Tensor:
        return _Linear.of(w, self._scores, self._pulled)

    def pulled(self, p: Tensor) -> Tensor:
        return _Linear.of(p, self._pulled, self._scores)

    def squares(self, p: Tensor) -> Tensor:
        c = self._center
        return (self._squares @ p).T - 2 * c * (self._across @ p).T + c.square() * p.sum(0)[:, None]

    def _scores(self, w: Tensor) -> Tensor:
        return self._x @ w.T.contiguous() - w @ self._center

    def _pulled(self, p: Tensor) -> Tensor:
        return (self._across @ p.contiguous()).T - p.sum(0)[:, None] * self._center


def inputs_of(x: Tensor, center: Tensor) -> Inputs:
    return (SparseInputs if is_sparse(x) else Inputs)(x, center)


class _Linear(torch.autograd.Function):
    """A linear map with its transpose as derivative: torch's own derivative of a CSR product is ten times slower."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Map, back: Map) -> Tensor:
        ctx.maps = back, there
        return there(value)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _Linear.of(slope, *ctx.maps), None, None

    @staticmethod
    def of(value: Tensor, there: Map, back: Map) -> Tensor:
        return _Linear.apply(value, there, back)  # type: ignore[no-untyped-call, no-any-return]


def _csr(crow: Tensor, column: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch warns that CSR is new
        return torch.sparse_csr_tensor(crow, column, values, size=size, check_invariants=False)


@dataclass(frozen=True)
class Rows:
    """The rows that a linear model is tuned on.

    - `x`: inputs (n, d), dense or CSR.
    - `y`: numbers, or class indices.
    - `fold`: the fold that holds out each row; -1 for a row that is never held out.
    - `loss`: "squared" or "logistic".
    - `outputs`: scores of a row, by default 1; one for each class if there are three or more.
    """

    x: Tensor
    y: Tensor
    fold: Tensor
    loss: Loss
    outputs: int = 1

    @property
    def folds(self) -> int:
        return int(self.fold.max()) + 1

    def select(self, mask: Tensor) -> Rows:
        return Rows(rows_of(self.x, mask), self.y[mask], self.fold[mask], self.loss, self.outputs)

    def digest(self) -> str:
        """Return a text that identifies these rows."""
        x = self.x
        parts = [x.crow_indices(), x.col_indices(), x.values()] if is_sparse(x) else [x]
        return f"{self.loss} {self.outputs} {digest_of((*parts, self.y, self.fold))}"

    def losses(self, scores: Tensor) -> Tensor:
        """Return the losses (n, folds) of scores (n, folds, outputs)."""
        if self.loss == "squared":
            return (scores[..., 0] - self.y[:, None]) ** 2 / 2
        if self.outputs == 1:
            return softplus((1 - 2 * self.y[:, None]) * scores[..., 0])
        target = self.y[:, None].expand(scores.shape[:2])
        return cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(scores.shape[:2])


def invertible(rows: int, features: int, outputs: int) -> bool:
    """Return True if the inverse of a second derivative takes at most `DENSE` multiplications."""
    return outputs * features**2 * (rows + features / 3) <= DENSE


class FoldedModel:
    """The lower level: the weights and the biases of all folds, on centred inputs. Biases are not penalised."""

    def __init__(self, rows: Rows, held_out: bool = True) -> None:
        folds = rows.folds if held_out else 1
        inside = torch.ones(len(rows.y), 1, dtype=torch.bool, device=rows.x.device)
        if held_out:
            inside = rows.fold[:, None] != torch.arange(folds, device=rows.x.device)
        self.center = mean_of(rows.x)
        share = torch.full_like(rows.y[:, None], 1 / len(rows.y), dtype=rows.x.dtype)
        self.curvature = CURVATURES[rows.loss] * inputs_of(rows.x, self.center).squares(share)[0]
        used, out = inside.any(1), ~inside.all(1)
        self.train, self.held = rows.select(used), rows.select(out)
        self.inputs, self.held_inputs = (inputs_of(part.x, self.center) for part in (self.train, self.held))
        self.counts = inside.sum(0).to(rows.x.dtype)
        self.inside = inside[used].to(rows.x.dtype) / self.counts
        self.out = (~inside[out]).to(rows.x.dtype) / max(1, int(out.sum()))
        self.v = {
            "weight": self.center.new_zeros(folds, rows.outputs, rows.x.shape[1], requires_grad=True),
            "bias": self.center.new_zeros(folds, rows.outputs, requires_grad=True),
        }
        self._bent: Tensor | None = None
        self._products = 0

    def scores(self, v: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the scores (n, folds, outputs)."""
        w = v["weight"]
        return inputs.scores(w.flatten(0, 1)).view(-1, *w.shape[:2]) + v["bias"]

    def lower(self, alpha: Tensor, v: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of each fold's training rows plus its penalty, summed over the folds."""
        penalty = (alpha * v["weight"].square() / self.counts[:, None, None]).sum() / 2
        return (self.inside * self.train.losses(self.scores(v, self.inputs))).sum() + penalty

    def upper(self, v: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of the rows that the folds hold out."""
        return (self.out * self.held.losses(self.scores(v, self.held_inputs))).sum()

    def renew(self) -> None:
        """Compute the next approximate inverse at the then present v."""
        self._bent = None if self.train.loss == "logistic" else self._bent

    @torch.no_grad()
    def second(self, alpha: Tensor) -> tuple[Map, Map]:
        """Return the product with the lower level's second derivative at the present v, and an approximate inverse.

        The approximate inverse treats the outputs one by one if that takes at most `DENSE` multiplications, and else
        has the diagonal only. It can belong to an earlier v: it is computed again if the last linear system took more
        than `STALE` products.
        """
        w, inputs, x = self.v["weight"], self.inputs, self.inputs.dense
        p = None
        if self.train.loss == "logistic":  # the probabilities of the classes that have a score
            scores = self.scores(self.v, inputs)
            p = torch.sigmoid(scores) if self.train.outputs == 1 else scores.softmax(-1)
        bend = self.inside[..., None].expand(-1, -1, w.shape[1])  # (n, folds, outputs)
        bend = bend if p is None else bend * p * (1 - p)
        top = bend.sum(0)
        ridge = (alpha / self.counts[:, None]).unsqueeze(1)  # (folds, 1, d)
        factor, diagonal = None, torch.ones(())
        if x is not None and invertible(len(x), x.shape[1], bend[0].numel()):
            if self._products > STALE:
                self.renew()
            if self._bent is None:
                blocks = [x.T @ (b[:, None] * x) for b in bend.flatten(1).T]
                self._bent = torch.stack(blocks).view(*w.shape, x.shape[1])
            factor, failed = torch.linalg.cholesky_ex(self._bent + torch.diag_embed(ridge.expand(w.shape)))
            factor = None if bool(failed.any()) else factor
        if factor is None:
            diagonal = inputs.squares(bend.flatten(1)).view(w.shape) + ridge
            diagonal = diagonal.clamp(min=1e-12 * float(diagonal.max()))
        self._products = 0

        def product(vector: Tensor) -> Tensor:
            self._products += 1
            first, last = torch.split(vector, [w.numel(), top.numel()])
            part = first.view(w.shape)
            moved = inputs.scores(part.flatten(0, 1)).view(bend.shape) + last.view(top.shape)
            pull = bend * moved
            if p is not None and w.shape[1] > 1:
                pull = self.inside[..., None] * p * (moved - (p * moved).sum(-1, keepdim=True))
            bent = inputs.pulled(pull.flatten(1)).view(w.shape) + ridge * part
            return torch.cat([bent.flatten(), pull.sum(0).flatten()])

        def near(vector: Tensor) -> Tensor:
            first, last = torch.split(vector, [w.numel(), top.numel()])
            part = first.view(w.shape)
            part = part / diagonal if factor is None else torch.cholesky_solve(part[..., None], factor)[..., 0]
            return torch.cat([part.flatten(), last / top.flatten().clamp(min=1e-12)])

        return product, near
