"""Which class is labelled as which, from a classifier that was not trained on the labels.

With the classifier's probabilities q, and T[k, y] the share of the examples of class k that are labelled y,

    P(label y | x) = sum_k T[k, y] q_k(x)^(1 / tau) / Z(x)

We maximise the likelihood of the labels over T by expectation-maximisation, and over the temperature tau on a grid,
because a classifier can be too confident or not confident enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURES = torch.linspace(-1, 2, 13).exp().tolist()
# Iterations of expectation-maximisation at each temperature; T starts from its value at the last temperature.
SWEEPS = 15
# Prior counts for each class: of examples with the right label, and with each other label.
RIGHT, OTHER = 1.0, 0.01
TINY = 1e-12


@dataclass(frozen=True)
class Mistakes:
    """The table T, and the temperature of the classifier for which it was found."""

    table: Tensor
    temperature: float

    def posterior(self, probabilities: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the probability of each class, given a classifier's probabilities and the label of each example."""
        return _joint(probabilities.clamp(min=TINY).log() / temperature, self.table.log(), labels).softmax(1)


def mistakes(probabilities: Tensor, labels: Tensor) -> Mistakes:
    """Return the table and the temperature with the highest likelihood of the labels."""
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
    """Return log q_k + log T[k, y] for each example."""
    return logs + table.T[labels]
