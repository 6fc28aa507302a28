"""The engine that records a step operator by operator and compiles it with inductor.

torch writes the double backward of a convolution as other convolutions. The derivative in the weight,
with A = d input, B = d output,

    dW = conv(A', B')'        (' exchanges batch and channels)

has a kernel as large as the image: on a GPU it takes 5 to 40 times as long as the kernels for weight gradients. It
equals the weight gradient of a convolution of A with the cotangent B, which replaces it here.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.engines._torch_private import pytree
from bilevel.engines.recording import Recorded, recordable

aten = torch.ops.aten


class Compiled(Recorded):
    """Records the operators of a step, second backward and optimizers included, and compiles the record."""

    name = "compile"

    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        forms: list[Any] = []
        # Without copies, a tensor that is passed twice, or that the objectives keep, would become one input.
        tensors = [_copied(tensor) for tensor in tensors]

        def recorded(*given: Tensor) -> list[Any]:
            out, form = pytree.tree_flatten(step(given))
            forms.append(form)
            return out

        with self.restoring_state():
            self._try(step, tensors)
        with warnings.catch_warnings(action="ignore"):  # of torch, and of the step, which has already given them
            from torch._inductor import compile as compile_graph
            from torch.fx.experimental.proxy_tensor import make_fx

            with self.restoring_state(), recordable(self.host.optimizers()):
                graph, count = self._counted(lambda: make_fx(recorded, tracing_mode="real")(*tensors))
            lived = _lift(graph, len(tensors))
            weight_gradients(graph)
            inputs: list[Any] = [*tensors, *lived]
            with self.restoring_state(), torch.no_grad():
                compiled = compile_graph(graph, inputs, options=_options(self.host.derivatives.v.device))
                compiled(*inputs)  # an error here still leads to the eager step

        def unit(given: list[Tensor]) -> Any:
            with torch.no_grad():
                out = compiled(*_apart(given), *lived)
            count()
            return pytree.tree_unflatten(list(out), forms[-1])

        return unit


def _options(device: torch.device) -> dict[str, Any]:
    """Return inductor's options.

    It draws random numbers as eager steps do, but can change the order of independent draws: a compiled step with
    dropout can draw other masks than an eager step.

    On a CPU, channels-last convolutions cost more copies than they save. On a GPU, `combo_kernels` joins the many small
    kernels of moments and multipliers; inductor's reordering of loops then fails one of its assertions (torch 2.11).
    """
    cuda = {"combo_kernels": True, "loop_ordering_after_fusion": False}
    own = {"layout_optimization": False} if device.type == "cpu" else cuda
    return {"fallback_random": True} | own


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; if these overlap, as after `expand`, a view of the same memory."""
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor.detach()


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors that share memory with an earlier one: compiled code assumes that all are separate."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [tensor.clone() if memory[i] in memory[:i] else tensor for i, tensor in enumerate(tensors)]


def _name(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that a leaf and its `detach` share, so that they become one input."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _lift(graph: torch.fx.GraphModule, count: int) -> list[Tensor]:
    """Turn the tensors that the record keeps into inputs, each only once; return them."""
    nodes = list(graph.graph.nodes)
    start = nodes[count] if count < len(nodes) else nodes[-1]
    lived: list[Tensor] = []
    inputs: dict[Any, Any] = {}
    held = {node: _name(getattr(graph, node.target)) for node in nodes if node.op == "get_attr"}
    for node, name in held.items():
        if name not in inputs:
            with graph.graph.inserting_before(start):
                inputs[name] = graph.graph.placeholder(f"lived_{len(lived)}")
            lived.append(getattr(graph, node.target).detach())
    for node, name in held.items():
        node.replace_all_uses_with(inputs[name])
        graph.graph.erase_node(node)
    for node in reversed(graph.graph.nodes):
        if str(node.target).startswith("profiler."):  # marks of torch's profiler around an optimizer's step
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return lived


def weight_gradients(graph: torch.fx.GraphModule) -> int:
    """Write each dW = conv(A', B')' as a weight gradient; return how many there were."""
    count = 0
    for node in [node for node in graph.graph.nodes if node.target is aten.convolution.default]:
        first, second, bias, stride, padding, dilation, transposed, _, groups = node.args
        a, b, last = _exchanged(first), _exchanged(second), _end(node)
        plain = not transposed and groups == 1 and bias is None
        if not plain or None in (a, b, last) or not _fits(a, last, b, dilation, padding, stride):
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
    """Return whether a convolution with such sizes has this output; a user's conv(A', B')' can be something else."""
    sizes = zip(*(n.meta["val"].shape[2:] for n in (data, weight, output)), stride, padding, dilation, strict=True)
    return all((n + 2 * p - d * (k - 1) - 1) // s + 1 == m for n, k, m, s, p, d in sizes)


def _exchanged(node: Any) -> Any:
    """Return the node whose batch and channels this one exchanges, or None. A copy can lie between (as on a GPU)."""
    source = node.args[0] if node.target is aten.clone.default else node
    return source.args[0] if _exchanges(source) else None


def _exchanges(node: Any) -> bool:
    """Return whether a node exchanges batch and channels."""
    return node.target is aten.transpose.int and node.args[1:] == (0, 1)


def _end(node: Any) -> Any:
    """Return the last node that gives conv(A', B') the shape of the weight, after an exchange and cuts for strides."""
    users = list(node.users)
    if len(users) != 1 or not _exchanges(users[0]):
        return None
    last = users[0]
    while len(last.users) == 1 and _cuts(next(iter(last.users))):
        last = next(iter(last.users))
    return last


def _cuts(node: Any) -> bool:
    """Return whether a node cuts the end of an image dimension."""
    return node.target is aten.slice.Tensor and node.args[1] >= 2 and node.args[2] == 0
