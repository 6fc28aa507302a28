"""A network whose last layer lives on the simplex, trained on rows that are weighted by group and label.

    min_u  f = validation loss,   v minimises the weighted training loss over networks whose last layer has rows that
    are not negative and sum to one: each score is a mixture of the hidden units.

The set is `project_lower`. The method penalises v - P(v - grad_v g) for the last layer's weight, and grad_v g for the
other tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel import Penalty, Problem, Simplex, Solution, solve
from bilevel_studies.fairness.parity import People

HIDDEN = 32
BATCH = 256
# The name of the constrained tensor.
LAST = "2.weight"


class Batches:
    """One pass over rows in batches, in the order that the seed draws."""

    def __init__(self, people: People, seed: int) -> None:
        self.people, self.seed = people, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = torch.randperm(len(self.people.y), generator=torch.Generator().manual_seed(self.seed))
        for rows in torch.split(order, BATCH):
            yield self.people.x[rows].float(), self.people.y[rows].long(), self.people.kind[rows]


def network(columns: int, seed: int) -> nn.Sequential:
    """Return two layers; the rows of the last one start on the simplex."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(columns, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2, bias=True))
    return put_on_simplex(model)


def layer_problem(simplex: bool) -> Problem:
    """Return the problem above; without the set if `simplex` is False."""

    def upper(u: Tensor, v: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return cross_entropy(v(batch[0]), batch[1])

    def lower(u: Tensor, v: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, kind = batch
        weights = torch.softmax(u, 0)[kind]
        return (weights * cross_entropy(v(x), y, reduction="none")).sum() / weights.sum()

    return Problem(upper, lower, project_lower={LAST: Simplex()} if simplex else None)


def train_layer(
    train: People, valid: People, *, simplex: bool = True, steps: int = 1500, seed: int = 0
) -> tuple[nn.Sequential, Solution]:
    """Train on minibatches and return the network and the run."""
    v, u = network(train.x.shape[1], seed), torch.zeros(4, requires_grad=True)
    solution = solve(
        layer_problem(simplex),
        Penalty(decay="linear") if simplex else Penalty(),
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
    """Project the last layer of the network, in place."""
    last: Tensor = model.get_parameter(LAST)
    last.copy_(Simplex()(last))
    return model


@torch.no_grad()
def scores(model: nn.Module, people: People) -> Tensor:
    """Return the score of each row: positive if the network answers 1."""
    found: Tensor = model(people.x.float())
    return (found[:, 1] - found[:, 0]).double()


def off_simplex(model: nn.Sequential) -> float:
    """Return the largest entry of the difference between the last layer's weight and its projection."""
    last = model.get_parameter(LAST).detach()
    return (last - Simplex()(last)).abs().max().item()
