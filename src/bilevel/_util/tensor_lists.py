"""Lists of tensors as one vector: sums, products, norms, and the gradient as such a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# torch imports this at the first derivative with a cotangent, which would make the first step of a run slow.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor


def dot(a: Sequence[Tensor], b: Sequence[Tensor], *, trials: bool = False) -> Tensor:
    """Return <a, b> over all tensors, as a tensor; with `trials`, one for each entry of the leading dimension."""
    products = (x * y for x, y in zip(a, b, strict=True))
    return torch.stack([x.reshape(x.shape[0], -1).sum(1) if trials else torch.sum(x) for x in products]).sum(0)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, as a tensor; an empty list gives zero on the host."""
    if not tensors:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.detach()) for t in tensors]))
    return total


def gradient(
    output: Tensor | Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    cotangent: Sequence[Tensor | None] | None = None,
    keep_graph: bool = False,
    retain: bool = False,
) -> list[Tensor]:
    """Return d<cotangent, output> in the leaves; zero for a leaf on which the output does not depend."""
    outputs = [output] if isinstance(output, Tensor) else list(output)
    weights: list[Tensor | None] = [None] * len(outputs) if cotangent is None else list(cotangent)
    live = [i for i, out in enumerate(outputs) if out.requires_grad]
    for i in live:  # the sum over trials: each depends only on its own part of the leaves
        if weights[i] is None and outputs[i].dim():
            weights[i] = torch.ones_like(outputs[i])
    if not live or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [outputs[i] for i in live],
        leaves,
        [weights[i] for i in live],
        create_graph=keep_graph,
        retain_graph=keep_graph or retain,
        allow_unused=True,
    )
    return [torch.zeros_like(leaf) if d is None else d for d, leaf in zip(found, leaves, strict=True)]


def broadcast_trials(weight: Tensor, like: Tensor) -> Tensor:
    """Reshape a number, or one for each trial, so that it multiplies `like`."""
    return weight if weight.dim() == 0 else weight.reshape(-1, *[1] * (like.dim() - 1))


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return a - b."""
    return list(torch._foreach_sub(list(a), list(b))) if a else []


def summed(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sum of vectors."""
    total = list(lists[0])
    for other in lists[1:]:
        total = list(torch._foreach_add(total, list(other))) if total else []
    return total
