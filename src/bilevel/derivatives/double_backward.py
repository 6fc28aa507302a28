"""Finds operators that can be differentiated once and not twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def missing_double_backward(error: BaseException | None) -> str | None:
    """Return the operator that an autograd error names as having no second derivative, or None."""
    text = str(error)
    if found := re.search(r"derivative for '?([\w:.]+)'? is not implemented", text):
        return found.group(1)
    if "double backward" in text and ("compile" in text or "aot_autograd" in text):
        return "torch.compile"
    if "once_differentiable" in text or "differentiate twice" in text:
        return "an autograd.Function marked once_differentiable"
    if "heckpoint" in text and ".grad()" in text:
        return "re-entrant checkpointing"
    return None


def refuse_once_differentiable(tensors: Sequence[Tensor]) -> None:
    """Raise an error if the graph of a gradient has a node that stands for a missing derivative.

    autograd raises only when it runs such a node. If the gradient is taken in other tensors, it skips the node and
    returns a wrong result.
    """
    seen: set[Any] = set()
    todo = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function marked once_differentiable cannot be differentiated twice")
        todo += [following for following, _ in node.next_functions]
