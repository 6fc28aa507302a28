"""The Gram form of the penalty on linear layers.

For z = x W' + b with n rows, the only use of W in g, and dz = dg/dz, the slope in W is s_W = dz' x, and

    |s_W|^2 = <dz dz', x x'>,    d(|s_W|^2 / 2) = <(x x') dz, d dz> + <(dz dz') x, dx>,
    <nu, s_W> = <x nu', dz>,     d<nu, s_W>     = <x nu', d dz>     + <dz nu, dx>.

Products with the n x n Gram matrices replace dz' x with a graph, x s_W' and dz s_W. They are cheaper if n is smaller
than the width. The terms of nu cost full products, but s_W itself is still saved. The cotangent must be nu + gamma s
of one batch in one process, without a projection. A weight that g also uses elsewhere (weight decay, a layer used
twice, tied weights) keeps the plain form. The layers are found in the graph of g, so any way of writing g works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# The number of entries of a weight from which looking for layers pays (measured on one CPU core: 0.96 at 256 x 256).
LEAST = 2**16
# The nodes that a linear layer leaves in the graph, and where each keeps x.
PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}


@dataclass(frozen=True)
class Layer:
    """One product z = x W' in g, or z = x W."""

    # The position of W among the leaves
    position: int
    x: Tensor
    z: GradientEdge
    # Columns of z
    width: int
    # Whether the leaf is multiplied as W', as in `nn.Linear`
    transposed: bool

    def wins(self, *, with_slope: bool, with_nu: bool) -> bool:
        """Return whether the Gram form takes fewer multiplications: n (m + k), not m k, for each product it replaces.

        The product that gives s itself is saved only if s is not requested; nu adds further products.
        """
        (n, m), k = self.x.shape, self.width
        replaced = 2 if self.x.requires_grad else 1
        saved = (0 if with_nu else replaced) + (0 if with_slope else 1)
        return replaced * n * (m + k) < saved * m * k


def layers(g: Tensor, leaves: Sequence[Tensor], least: int = 0) -> list[Layer]:
    """Return the products in the graph of g whose weight g uses nowhere else; smaller weights are left out."""
    often = Counter(map(id, leaves))
    weights: dict[Any, int] = {
        get_gradient_edge(leaf).node: i
        for i, leaf in enumerate(leaves)
        # The Gram form makes no gradient of the weight, which a hook needs.
        if leaf.ndim == 2 and leaf.numel() >= least and often[id(leaf)] == 1 and not leaf._backward_hooks
    }
    if not weights or g.grad_fn is None:
        return []
    uses: Counter[Any] = Counter()
    products: list[Any] = []
    todo: list[Any] = [g.grad_fn]
    while todo:
        node = todo.pop()
        if node.name() in PRODUCTS:
            products.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                uses[following] += 1
                if uses[following] == 1:
                    todo.append(following)
    found = []
    for node in products:
        factor = node.next_functions[-1][0]
        used = uses[factor]
        if transposed := factor is not None and _transposes(factor):
            factor = factor.next_functions[0][0]
            used = max(used, uses[factor])
        if factor not in weights or used > 1 or getattr(node, "_saved_alpha", 1) != 1:
            continue
        position, x = weights[factor], getattr(node, PRODUCTS[node.name()])
        if x.layout is torch.strided:
            width = leaves[position].shape[0 if transposed else 1]
            found.append(Layer(position, x, GradientEdge(node, 0), width, transposed))
    return found


def _transposes(node: Any) -> bool:
    """Return whether a node belongs to W.t() or W.T."""
    name: str = node.name()
    return name == "TBackward0" or (name == "PermuteBackward0" and tuple(node._saved_dims) == (1, 0))


def terms(
    g: Tensor,
    leaves: Sequence[Tensor],
    layers: Sequence[Layer],
    gamma: Tensor,
    nu: Sequence[Tensor] | None,
    *,
    with_slope: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return (outputs, cotangents, s) with d(<nu, s> + gamma/2 |s|^2) = sum <cotangent, d output>.

    `nu` is None if it is zero. s is empty without `with_slope`. `layers` are in Gram form, all other leaves plain.
    """
    taken = {layer.position for layer in layers}
    plain = [i for i in range(len(leaves)) if i not in taken]
    inputs: list[Any] = [*(leaves[i] for i in plain), *(layer.z for layer in layers)]
    found = torch.autograd.grad(g, inputs, create_graph=True, allow_unused=True)
    outputs, cotangents = [], []
    slope = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves] if with_slope else []
    for i, s in zip(plain, found, strict=False):
        if s is not None:
            outputs.append(s)
            cotangents.append(gamma * s.detach() + (0 if nu is None else nu[i]))
            if with_slope:
                slope[i] = s.detach()
    for layer, dz in zip(layers, found[len(plain) :], strict=True):
        if dz is not None:
            x, d = layer.x.detach(), dz.detach()
            pulls = [(dz, gamma * (x @ x.T) @ d)]
            if layer.x.requires_grad:
                pulls.append((layer.x, gamma * (d @ d.T) @ x))
            if nu is not None:
                multiplier = nu[layer.position].T if layer.transposed else nu[layer.position]
                full = (x @ multiplier, d @ multiplier.T) if layer.x.requires_grad else (x @ multiplier,)
                pulls = [(output, pull + more) for (output, pull), more in zip(pulls, full, strict=True)]
            outputs += [output for output, _ in pulls]
            cotangents += [pull for _, pull in pulls]
            if with_slope:
                slope[layer.position] = d.T @ x if layer.transposed else x.T @ d
    return outputs, cotangents, slope
