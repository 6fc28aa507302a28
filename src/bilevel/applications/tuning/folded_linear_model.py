"""The lower level of a linear model that is tuned on folds: the weights of all of them, as one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from bilevel._util.tensor_lists import gradient
from bilevel.applications.tuning.nested import Map
from bilevel.applications.tuning.sparse_inputs import Inputs, inputs_of, mean_of, parts_of, rows_of
from bilevel.measures.lower_minimum import flatten
from bilevel.running.run_identity import digest_of

Loss = Literal["squared", "logistic"]
CURVATURES = {"squared": 1.0, "logistic": 0.25}
"""The curvature of a loss in a score: that of the squared error exactly, of the logistic loss at the most."""
DENSE = 4e9
"""Products of numbers that the inverse of a second derivative may take."""
STALE = 10
"""Products of a linear system from which the map near the inverse is made anew."""


@dataclass(frozen=True)
class Rows:
    """Inputs (n, d), dense or CSR, targets, and the fold of each row; rows of fold -1 are held out of none."""

    x: Tensor
    y: Tensor
    """Numbers, or indices of classes."""
    fold: Tensor
    loss: Loss
    outputs: int = 1
    """Scores of a row: one for each class from three classes on."""

    @property
    def folds(self) -> int:
        return int(self.fold.max()) + 1

    def select(self, mask: Tensor) -> Rows:
        return Rows(rows_of(self.x, mask), self.y[mask], self.fold[mask], self.loss, self.outputs)

    def digest(self) -> str:
        """What tells these rows from others."""
        return f"{self.loss} {self.outputs} {digest_of((*parts_of(self.x), self.y, self.fold))}"

    def chances(self, scores: Tensor) -> Tensor:
        """The probabilities of the classes that have a score."""
        return torch.sigmoid(scores) if self.outputs == 1 else scores.softmax(-1)

    def losses(self, scores: Tensor) -> Tensor:
        """Of scores (n, folds, outputs): (n, folds)."""
        if self.loss == "squared":
            return (scores[..., 0] - self.y[:, None]) ** 2 / 2
        if self.outputs == 1:
            return softplus((1 - 2 * self.y[:, None]) * scores[..., 0])
        target = self.y[:, None].expand(scores.shape[:2])
        return cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(scores.shape[:2])


def invertible(rows: int, features: int, outputs: int) -> bool:
    """Whether the inverse of a second derivative is to be had in no more than `DENSE` products of numbers."""
    return outputs * features**2 * (rows + features / 3) <= DENSE


class FoldedModel:
    """The lower level: the weights of all folds, and a bias each that is not penalised, on centred inputs."""

    def __init__(self, rows: Rows, held_out: bool = True) -> None:
        folds = rows.folds if held_out else 1
        inside = torch.ones(len(rows.y), 1, dtype=torch.bool, device=rows.x.device)
        if held_out:
            inside = rows.fold[:, None] != torch.arange(folds, device=rows.x.device)
        self.center = mean_of(rows.x)
        self.curvature = CURVATURES[rows.loss] * inputs_of(rows.x, self.center).mean_square()
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
        """(n, folds, outputs)"""
        w = v["weight"]
        return inputs.scores(w.flatten(0, 1)).view(-1, *w.shape[:2]) + v["bias"]

    def lower(self, alpha: Tensor, v: dict[str, Tensor]) -> Tensor:
        """The mean loss of each fold's training rows and its penalty, summed over the folds."""
        penalty = (alpha * v["weight"].square() / self.counts[:, None, None]).sum() / 2
        return (self.inside * self.train.losses(self.scores(v, self.inputs))).sum() + penalty

    def upper(self, v: dict[str, Tensor]) -> Tensor:
        """The mean loss of the rows that the folds hold out."""
        return (self.out * self.held.losses(self.scores(v, self.held_inputs))).sum()

    def slope(self) -> float:
        """|grad_v g| at the present v, of g without penalties: at v = 0 they have no part in it."""
        g = self.lower(torch.zeros_like(self.center), self.v)
        return float(flatten(gradient(g, list(self.v.values()))).norm())

    def renew(self) -> None:
        """Have the next map near the inverse be one of the present v."""
        self._bent = None if self.train.loss == "logistic" else self._bent

    @torch.no_grad()
    def second(self, alpha: Tensor) -> tuple[Map, Map]:
        """The product with the lower level's second derivative at the present v, and a map near its inverse.

        That has the second derivative of the rows' losses output by output, where it takes no more than `DENSE`
        products of numbers, else its diagonal. It may be of an earlier v: it is renewed where the last linear system
        took more than `STALE` products.
        """
        w, inputs, x = self.v["weight"], self.inputs, self.inputs.dense
        p = None if self.train.loss == "squared" else self.train.chances(self.scores(self.v, inputs))
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
