"""Training under a bound on the demographic-parity gap, with weights of groups as the upper variable.

    min_u  f = validation loss   subject to   |rate(group 1) - rate(group 0)| <= bound,   v minimises the training loss,
    g = sum_i exp(u_k(i)) loss_i / sum_i exp(u_k(i)) + ridge/2 |v|^2,   k(i): the group and the label of row i

The rate of a group is the share of its rows that the classifier calls positive; in the constraint, the mean of
sigmoid(score / WIDTH), which has a derivative. u moves v only through the training loss: the result is an ordinary
classifier, trained on weighted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bilevel import OptionError, Penalty, Problem, Solution, solve

# The width of the step between a negative and a positive answer, in the unit of the score.
WIDTH = 0.2
RIDGE = 1e-3
PROJECTIONS = 200


@dataclass(frozen=True)
class People:
    """Rows with a label and a group, each 0 or 1."""

    # (n, p); float64, the last column one.
    x: Tensor
    y: Tensor
    group: Tensor

    @property
    def kind(self) -> Tensor:
        """The position in u of each row: 2 group + label."""
        return (2 * self.group + self.y).long()


@dataclass(frozen=True)
class Measures:
    """The scores of a classifier on some rows."""

    accuracy: float
    # |share called positive in group 1 - share in group 0|
    gap: float
    # The standard error of the gap, from the sizes of the groups.
    error: float


def measured(scores: Tensor, people: People) -> Measures:
    """Return the accuracy and the gap of the answers `score > 0`."""
    answers = (scores > 0).double()
    groups = [answers[people.group == group] for group in (0, 1)]
    for group, own in enumerate(groups):
        if not len(own):
            raise OptionError(f"people must have rows of both groups; group {group} has none.")
    rates = [own.mean().item() for own in groups]
    error = sum(rate * (1 - rate) / len(own) for rate, own in zip(rates, groups, strict=True)) ** 0.5
    return Measures((answers == people.y).double().mean().item(), abs(rates[1] - rates[0]), error)


def soft_gap(v: Tensor, people: People) -> Tensor:
    """Return the difference of the groups' rates, each the mean of sigmoid(score / WIDTH)."""
    soft = torch.sigmoid(people.x @ v / WIDTH)
    one = people.group.to(soft.dtype)
    return (soft * one).sum() / one.sum() - (soft * (1 - one)).sum() / (1 - one).sum()


def fair_problem(train: People, valid: People, bound: float | None) -> Problem:
    """Return the problem above; without the constraint if `bound` is None."""
    kind, limit = train.kind, bound or 0.0

    def upper(u: Tensor, v: Tensor, _: object) -> Tensor:
        return binary_cross_entropy_with_logits(valid.x @ v, valid.y)

    def lower(u: Tensor, v: Tensor, _: object) -> Tensor:
        weights = torch.exp(u)[kind]
        losses = binary_cross_entropy_with_logits(train.x @ v, train.y, reduction="none")
        return (weights * losses).sum() / weights.sum() + RIDGE / 2 * torch.sum(v * v)

    def excess(u: Tensor, v: Tensor, _: object) -> Tensor:
        gap = soft_gap(v, valid)
        return torch.stack([gap - limit, -gap - limit])

    return Problem(upper, lower, inequalities=[] if bound is None else [excess])


def train_fairly(
    train: People, valid: People, bound: float | None = 0.02, *, max_steps: int = 600, seed: int = 0
) -> tuple[Tensor, Tensor, Solution]:
    """Return (u, v, solution): the log weights of the four kinds of rows, the classifier trained with them, the run."""
    if bound is not None and not bound > 0:
        raise OptionError(f"bound must be positive, or None for no constraint; got {bound}.")
    u = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(train.x.shape[1], dtype=torch.float64, requires_grad=True)
    problem = fair_problem(train, valid, bound)
    solution = solve(problem, Penalty(), u, v, max_steps=max_steps, tolerance=1e-4, seed=seed, hypergradient=False)
    return u.detach(), v.detach(), solution


def projected(v: Tensor, valid: People, bound: float) -> Tensor:
    """Return the classifier nearest to v, in its parameters, whose soft gap on `valid` is at most `bound`.

    Each step replaces the constraint by its tangent at the present point and moves towards the nearest point there.
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
        step = origin + needed / torch.dot(slope, slope).item() * slope - x
        x = x + 0.5 * step
        if step.norm().item() <= 1e-9 * (1 + x.norm().item()):
            break
    return x
