"""Softmax regression in whitened coordinates: the same classifier, in which all directions of the inputs vary equally.

    scores = x W + b,     W = P z,     P = (curvature X'X/n + decay I)^(-1/2)

With fewer rows than inputs, P is a multiple of the identity except in the directions of the rows, and is stored in that
form.

The penalty method penalises |grad_z g|^2, whose condition number is the square of that of g. The victim that is
attacked and trained in the end is the one in W.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

CURVATURE = 0.03
"""The mean of p (1 - p), over classes and rows, of a softmax regression that is right most of the time."""
LEAST = 1e-6
"""The least decay, as a share of the largest eigenvalue."""


class Whitened(nn.Module):
    """A linear classifier whose weights are P z."""

    P: Tensor
    directions: Tensor
    gains: Tensor

    def __init__(self, linear: nn.Linear, x: Tensor, decay: float) -> None:
        super().__init__()
        inputs, weight = x.flatten(1).double(), linear.weight.detach()
        self.few = len(inputs) < inputs.shape[1]
        self.rest = 0.0
        if self.few:
            _, sizes, rows = torch.linalg.svd(math.sqrt(CURVATURE / len(inputs)) * inputs, full_matrices=False)
            values, vectors = sizes.square(), rows.T
        else:
            values, vectors = torch.linalg.eigh(CURVATURE / len(inputs) * inputs.T @ inputs)
        least = max(decay, LEAST * float(values.max()))
        values = values.clamp(min=0) + least
        first = weight.double().T
        if self.few:
            self.rest = least**-0.5
            inside = vectors.T @ first
            z = (vectors * values.sqrt()) @ inside + (first - vectors @ inside) / self.rest
            self.register_buffer("directions", vectors.to(weight.dtype))
            self.register_buffer("gains", (values.rsqrt() - self.rest).to(weight.dtype)[:, None])
        else:
            z = (vectors * values.sqrt()) @ vectors.T @ first
            self.register_buffer("P", ((vectors * values.rsqrt()) @ vectors.T).to(weight.dtype))
        self.z = nn.Parameter(z.to(weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def weight(self) -> Tensor:
        return self._times(self.z)

    def _times(self, columns: Tensor) -> Tensor:
        """Return P times columns."""
        if not self.few:
            return self.P @ columns
        return self.rest * columns + self.directions @ (self.gains * (self.directions.T @ columns))

    def decayed_weights(self) -> list[Tensor]:
        return [self.weight()]

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(x.flatten(1) @ self.weight())

    def mapped(self, x: Tensor) -> Tensor:
        """Return inputs in the coordinates of z, for `on_mapped`; computed once for inputs that do not move."""
        return self._times(x.flatten(1).T).T if self.few else x.flatten(1) @ self.P

    def on_mapped(self, x: Tensor) -> Tensor:
        return self._shifted(x @ self.z)

    def _shifted(self, scores: Tensor) -> Tensor:
        return scores if self.bias is None else scores + self.bias

    def together(self, mapped: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores of mapped inputs, the scores of plain inputs, and the weights, with one product P z."""
        weight = self.weight()
        return self.on_mapped(mapped), self._shifted(x.flatten(1) @ weight), weight


def whitened(model: nn.Module, x: Tensor, decay: float) -> Whitened | None:
    """Return the model in whitened coordinates if it is a softmax regression, with or without flattening; else None."""
    layers = [m for m in model.modules() if not isinstance(m, (nn.Sequential, nn.Flatten))]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        return None
    return Whitened(layers[0], x, decay)
