"""A cheaper form of what a record of a second backward holds.

torch writes the double backward of a convolution with convolutions alone. The part that differentiates in the weight,
with A = d input, B = d output,

    dW = conv(A', B')'        (' exchanges batch and channels)

is one whose kernel is as large as the picture: on a GPU it takes 5 to 40 times as long as the kernels made for it. It
is the weight's gradient of a convolution of A with the cotangent B, and becomes that.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def weight_gradients(graph: GraphModule) -> int:
    """Write dW = conv(A', B')' as a weight's gradient; returns how many were found."""
    count = 0
    for node in [node for node in graph.graph.nodes if node.target is aten.convolution.default]:
        first, second, bias, stride, padding, dilation, transposed, _, groups = node.args
        a, b, last = _exchanged(first), _exchanged(second), _end(node)
        if transposed or groups != 1 or bias is not None or a is None or b is None or last is None:
            continue
        if not _fits(a, last, b, dilation, padding, stride):
            continue
        with graph.graph.inserting_before(last):
            like = graph.graph.call_function(aten.new_empty.default, (a, list(last.meta["val"].shape)))
            all_three = graph.graph.call_function(
                aten.convolution_backward.default,
                (b, a, like, None, dilation, padding, stride, False, [0] * len(stride), 1, [False, True, False]),
            )
            last.replace_all_uses_with(graph.graph.call_function(operator.getitem, (all_three, 1)))
        count += 1
    graph.recompile()
    return count


def _fits(data: Any, weight: Any, output: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether a convolution of these sizes has this output: a user may write conv(A', B')' for something else."""
    sizes = zip(*(n.meta["val"].shape[2:] for n in (data, weight, output)), stride, padding, dilation, strict=True)
    return all((n + 2 * p - d * (k - 1) - 1) // s + 1 == m for n, k, m, s, p, d in sizes)


def _exchanged(node: Any) -> Any:
    """What a node is the exchange of batch and channels of, laid out anew (as on a GPU) or not; None for another."""
    if node.target is aten.clone.default:
        node = node.args[0]
    return node.args[0] if _exchanges(node) else None


def _exchanges(node: Any) -> bool:
    return node.target is aten.transpose.int and node.args[1:] == (0, 1)


def _end(node: Any) -> Any:
    """The last of what brings conv(A', B') to the weight's shape: exchanged back, cut where the stride left more."""
    users = list(node.users)
    if len(users) != 1 or not _exchanges(users[0]):
        return None
    last = users[0]
    while len(last.users) == 1 and _cuts(next(iter(last.users))):
        last = next(iter(last.users))
    return last


def _cuts(node: Any) -> bool:
    return node.target is aten.slice.Tensor and node.args[1] >= 2 and node.args[2] == 0
