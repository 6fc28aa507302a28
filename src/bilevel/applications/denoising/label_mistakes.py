"""Which class is labelled as which, from a classifier that has not seen the labels.

With q the classifier's probabilities, and T[k, y] the share of the examples of class k that are labelled y,

    P(label y | x) = sum_k T[k, y] q_k(x)^(1 / tau) / Z(x)

The labels' likelihood is maximised over T by expectation and maximisation, and over the temperature tau on a grid: a
classifier may be too sure of itself, or not sure enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURES = torch.linspace(-1, 2, 13).exp().tolist()
SWEEPS = 15
"""Of expectation and maximisation, at each temperature; T goes on from the temperature before."""
RIGHT, OTHER = 1.0, 0.01
"""Examples of each class that are taken as labelled right, and as each other class, before any is seen."""
TINY = 1e-12


@dataclass(frozen=True)
class Mistakes:
    """The table T, and the temperature of the classifier that it was found with."""

    table: Tensor
    temperature: float

    def posterior(self, probabilities: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """The probability of each class, given what a classifier says of each example and how it is labelled."""
        return _joint(probabilities.clamp(min=TINY).log() / temperature, self.table.log(), labels).softmax(1)


def mistakes(probabilities: Tensor, labels: Tensor) -> Mistakes:
    """The table that explains the labels best."""
    classes = probabilities.shape[1]
    logs = probabilities.clamp(min=TINY).log()
    prior = torch.full((classes, classes), OTHER).fill_diagonal_(RIGHT).to(logs)
    table = prior / prior.sum(1, keepdim=True)
    found: list[tuple[float, Mistakes]] = []
    for temperature in TEMPERATURES:
        sharp = (logs / temperature).log_softmax(1)
        for _ in range(SWEEPS):
            posterior = _joint(sharp, table.log(), labels).softmax(1)
            counts = torch.zeros_like(table).index_add_(0, labels, posterior).T + prior
            table = counts / counts.sum(1, keepdim=True)
        likelihood = _joint(sharp, table.log(), labels).logsumexp(1).mean().item()
        found.append((likelihood, Mistakes(table, temperature)))
    return max(found, key=lambda pair: pair[0])[1]


def _joint(logs: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """log q_k + log T[k, y] of each example."""
    return logs + table.T[labels]
