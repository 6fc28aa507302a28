"""A network whose last layer lives on the simplex, trained on rows that are weighted by kind.

    min_u  f = validation loss,   v minimises the weighted training loss over networks whose last layer has rows that
    are not negative and sum to one: each score is a mixture of the hidden units.

The set is `project_lower`: what is penalised is v - P(v - grad_v g), for the last layer's weight, and the slope itself
for the other tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel.methods.penalty import Penalty
from bilevel.problem.problem import Problem
from bilevel.problem.projections import Simplex
from bilevel.results import Solution
from bilevel.running.solve import solve
from bilevel_studies.fairness.parity import People

HIDDEN = 32
BATCH = 256
LAST = "2.weight"
"""The name of the constrained tensor."""


class Batches:
    """Endless passes over rows in batches, each pass in another order."""

    def __init__(self, people: People, seed: int) -> None:
        self.people, self.seed = people, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = torch.randperm(len(self.people.y), generator=torch.Generator().manual_seed(self.seed))
        for rows in torch.split(order, BATCH):
            yield self.people.x[rows].float(), self.people.y[rows].long(), self.people.kind[rows]


def network(columns: int, seed: int) -> nn.Sequential:
    """Two layers; the last one's rows start in the middle of the simplex."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(columns, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2, bias=True))
    with torch.no_grad():
        last: Tensor = model.get_parameter(LAST)
        last.copy_(Simplex()(last))
    return model


def layer_problem(simplex: bool) -> Problem:
    """The problem above; without the set where `simplex` is False."""

    def upper(u: Tensor, v: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, _ = batch
        return cross_entropy(v(x), y)

    def lower(u: Tensor, v: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, kind = batch
        weights = torch.softmax(u, 0)[kind]
        return (weights * cross_entropy(v(x), y, reduction="none")).sum() / weights.sum()

    return Problem(upper, lower, project_lower={LAST: Simplex()} if simplex else None)


def train_layer(
    train: People, valid: People, *, simplex: bool = True, steps: int = 1500, seed: int = 0
) -> tuple[nn.Sequential, Solution]:
    """The network at the end of a run on minibatches."""
    v, u = network(train.x.shape[1], seed), torch.zeros(4, requires_grad=True)
    solution = solve(
        layer_problem(simplex),
        Penalty(),
        u,
        v,
        (Batches(valid, seed), Batches(train, seed + 1)),
        max_steps=steps,
        seed=seed,
        hypergradient=False,
    )
    return v, solution


@torch.no_grad()
def put_on_simplex(model: nn.Sequential) -> nn.Sequential:
    """The network with its last layer projected, in place."""
    last: Tensor = model.get_parameter(LAST)
    last.copy_(Simplex()(last))
    return model


@torch.no_grad()
def scores(model: nn.Module, people: People) -> Tensor:
    """Positive where the network answers 1."""
    found: Tensor = model(people.x.float())
    return (found[:, 1] - found[:, 0]).double()


def off_simplex(model: nn.Sequential) -> float:
    """How far the last layer's weight is from its projection, at most in one number."""
    last = model.get_parameter(LAST).detach()
    return (last - Simplex()(last)).abs().max().item()
