"""Softmax regression in whitened coordinates: the same classifier, for which every pattern of inputs is as frequent.

    scores = x W + b,     W = P z,     P = (curvature X'X/n + decay I)^(-1/2)

The penalty method prices the slope |grad_z g|^2, whose condition is the square of g's own. What is attacked, and what
is trained in the end, is the victim in W.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CURVATURE = 0.03
"""p (1 - p) of a softmax regression that is right most of the time, as a mean over classes and rows."""
LEAST = 1e-6
"""What stands in for decay where there is none, as a share of the largest eigenvalue."""


class Whitened(nn.Module):
    """A linear classifier whose weights are P z."""

    P: Tensor

    def __init__(self, linear: nn.Linear, x: Tensor, decay: float) -> None:
        super().__init__()
        inputs = x.flatten(1).double()
        values, vectors = torch.linalg.eigh(CURVATURE / len(inputs) * inputs.T @ inputs)
        values = values.clamp(min=0) + max(decay, LEAST * float(values.max()))
        weight = linear.weight.detach()
        self.register_buffer("P", (vectors * values.rsqrt()) @ vectors.T)
        self.z = nn.Parameter(((vectors * values.sqrt()) @ vectors.T @ weight.double().T).to(weight.dtype))
        self.P = self.P.to(weight.dtype)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def decayed_weights(self) -> list[Tensor]:
        return [self.P @ self.z]

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(x.flatten(1) @ (self.P @ self.z))

    def mapped(self, x: Tensor) -> Tensor:
        """Inputs in the coordinates of z, for `on_mapped`: computed once of what does not move."""
        return x.flatten(1) @ self.P

    def on_mapped(self, x: Tensor) -> Tensor:
        return self._shifted(x @ self.z)

    def _shifted(self, scores: Tensor) -> Tensor:
        return scores if self.bias is None else scores + self.bias

    def together(self, mapped: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(scores of mapped inputs, scores of inputs as they are, weights), with one product P z."""
        weight = self.P @ self.z
        return self.on_mapped(mapped), self._shifted(x.flatten(1) @ weight), weight


def whitened(model: nn.Module, x: Tensor, decay: float) -> Whitened | None:
    """The model in whitened coordinates, where it is a softmax regression, flattened or not; else None."""
    layers = [m for m in model.modules() if not isinstance(m, (nn.Sequential, nn.Flatten))]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        return None
    return Whitened(layers[0], x, decay)
