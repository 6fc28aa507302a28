"""Training under a bound on the demographic-parity gap, with one weight a group as the upper variable.

    min_u  f = validation loss   subject to   |rate(group 1) - rate(group 0)| <= bound,   v minimises the training loss,
    g = sum_i exp(u_k(i)) loss_i / sum_i exp(u_k(i)) + ridge/2 |v|^2,   k(i): the group and the label of row i

The rate of a group is the share of its rows that the classifier calls positive; in the constraint, the mean of
sigmoid(score / WIDTH), which has a derivative. u moves v only through the training loss: what comes out is a classifier
that was trained as any other, on weighted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bilevel.errors import OptionError
from bilevel.methods.penalty import Penalty
from bilevel.problem.problem import Problem
from bilevel.results import Solution
from bilevel.running.solve import solve

WIDTH = 0.2
"""How wide the step between a negative and a positive answer is, in the unit of the score."""
RIDGE = 1e-3
PROJECTIONS = 200


@dataclass(frozen=True)
class People:
    """Rows with a label and a group, each 0 or 1."""

    x: Tensor
    """(n, p); float64, the last column one."""
    y: Tensor
    group: Tensor

    @property
    def kind(self) -> Tensor:
        """The position in u of each row: 2 group + label."""
        return (2 * self.group + self.y).long()


@dataclass(frozen=True)
class Measures:
    """What a classifier does on rows."""

    accuracy: float
    gap: float
    """|share called positive in group 1 - that in group 0|"""
    error: float
    """The standard error of the gap, by the sizes of the groups."""


def measured(scores: Tensor, people: People) -> Measures:
    """The accuracy and the gap of answers score > 0."""
    answers = (scores > 0).double()
    rates, variances = [], []
    for group in (0, 1):
        own = answers[people.group == group]
        if not len(own):
            raise OptionError(f"people must have rows of both groups; group {group} has none.")
        rate = own.mean().item()
        rates.append(rate)
        variances.append(rate * (1 - rate) / len(own))
    right = (answers == people.y).double().mean().item()
    return Measures(right, abs(rates[1] - rates[0]), sum(variances) ** 0.5)


def soft_gap(v: Tensor, people: People) -> Tensor:
    """The difference of the groups' rates, each the mean of sigmoid(score / WIDTH)."""
    soft = torch.sigmoid(people.x @ v / WIDTH)
    one = people.group.to(soft.dtype)
    return (soft * one).sum() / one.sum() - (soft * (1 - one)).sum() / (1 - one).sum()


def fair_problem(train: People, valid: People, bound: float | None) -> Problem:
    """The problem above; without the constraint where `bound` is None."""
    kind = train.kind

    def upper(u: Tensor, v: Tensor, _: object) -> Tensor:
        return binary_cross_entropy_with_logits(valid.x @ v, valid.y)

    def lower(u: Tensor, v: Tensor, _: object) -> Tensor:
        weights = torch.exp(u)[kind]
        losses = binary_cross_entropy_with_logits(train.x @ v, train.y, reduction="none")
        return (weights * losses).sum() / weights.sum() + RIDGE / 2 * torch.sum(v * v)

    def excess(u: Tensor, v: Tensor, _: object) -> Tensor:
        gap = soft_gap(v, valid)
        return torch.stack([gap - limit, -gap - limit])

    limit = 0.0 if bound is None else bound
    return Problem(upper, lower, inequalities=[] if bound is None else [excess])


def train_fairly(
    train: People, valid: People, bound: float | None = 0.02, *, max_steps: int = 600, seed: int = 0
) -> tuple[Tensor, Tensor, Solution]:
    """(u, v, solution): the log weights of the four kinds of rows and the classifier trained with them."""
    if bound is not None and not bound > 0:
        raise OptionError(f"bound must be positive, or None for no constraint; got {bound}.")
    u = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(train.x.shape[1], dtype=torch.float64, requires_grad=True)
    problem = fair_problem(train, valid, bound)
    solution = solve(problem, Penalty(), u, v, max_steps=max_steps, tolerance=1e-4, seed=seed, hypergradient=False)
    return u.detach(), v.detach(), solution


def projected(v: Tensor, valid: People, bound: float) -> Tensor:
    """The nearest classifier to v, in its parameters, whose soft gap on `valid` is at most `bound`.

    The constraint is replaced by its tangent at the present point, the nearest point taken there, and so on.
    """
    origin, x = v.detach(), v.detach().clone()
    for _ in range(PROJECTIONS):
        leaf = x.clone().requires_grad_()
        gap = soft_gap(leaf, valid)
        (slope,) = torch.autograd.grad(gap, leaf)
        value, sign = gap.item(), 1.0 if gap.item() >= 0 else -1.0
        if abs(value) <= bound * (1 + 1e-9) and torch.equal(x, origin):
            return x
        # sign gap + sign <slope, new - x> = bound on the line through the origin along the slope.
        needed = (bound - sign * value) / sign - torch.dot(slope, origin - x).item()
        new = origin + needed / torch.dot(slope, slope).item() * slope
        step = new - x
        x = x + 0.5 * step
        if step.norm().item() <= 1e-9 * (1 + x.norm().item()):
            break
    return x
