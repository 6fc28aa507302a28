"""A step recorded operator by operator, and compiled by inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.engines.recording import Recorded, recordable
from bilevel.engines.rewrite import weight_gradients


class Compiled(Recorded):
    """Records the operators of a step, second backward and optimizers included, and compiles the record."""

    name = "compile"

    def _make(self, step: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        forms: list[Any] = []
        # A tensor that comes in twice, or that the objectives hold on to, would be recorded and compiled as one.
        tensors = [_copied(tensor) for tensor in tensors]

        def recorded(*given: Tensor) -> list[Any]:
            out, form = pytree.tree_flatten(step(given))
            forms.append(form)
            return out

        with self._undone():
            self._try(step, tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch, and from the step for a second time
            from torch._inductor import compile as compile_graph
            from torch.fx.experimental.proxy_tensor import make_fx

            with self._undone(), recordable(self.host.optimizers()):
                graph, count = self._counted(lambda: make_fx(recorded, tracing_mode="real")(*tensors))
            lived = _lift(graph, len(tensors))
            weight_gradients(graph)
            inputs: list[Any] = [*tensors, *lived]
            with self._undone(), torch.no_grad():
                compiled = compile_graph(graph, inputs, options=_options(self.host.derivatives.v.device))
                compiled(*inputs)  # while it can still be given up

        def unit(given: list[Tensor]) -> Any:
            with torch.no_grad():
                out = compiled(*_apart(given), *lived)
            count()
            return pytree.tree_unflatten(list(out), forms[-1])

        return unit


def _options(device: torch.device) -> dict[str, Any]:
    """Inductor's options. Random numbers are drawn as in eager steps, but draws that do not need each other can change
    their order: a compiled step with dropout can then draw other masks than an eager one.

    On a CPU, convolutions in channels-last cost more copies than they save; on a GPU, the many small kernels of moments
    and prices become few. With these, inductor's reordering of loops fails on one of its assertions (torch 2.11).
    """
    cuda = {"combo_kernels": True, "loop_ordering_after_fusion": False}
    own = {"layout_optimization": False} if device.type == "cpu" else cuda
    return {"fallback_random": True} | own


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; if these overlap, as after `expand`, another name for the same memory."""
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor.detach()


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors that share memory with one before: compiled code assumes that all are separate."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if memory in seen else tensor)
        seen.add(memory)
    return found


def _name(tensor: Tensor) -> tuple[Any, ...]:
    """What a leaf and its `detach` have in common. As two inputs, they would be merged again in every call."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _lift(graph: torch.fx.GraphModule, count: int) -> list[Tensor]:
    """Turn the tensors that the record holds on to into inputs, each once; returns them."""
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
