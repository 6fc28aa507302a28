"""Keeps a compiled step's draws of random numbers in the order in which they are written.

Draws that do not need each other have no order for inductor, which may move one before the other: every draw would
still be one of its distribution, but not the one that the step makes as it is written.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Graph, Node


def order_of_draws(graph: Graph) -> dict[str, Any]:
    """Inductor's options for it, where there is an order to keep."""
    if len(_draws(graph)) < 2:
        return {}
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class InOrder(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            in_order(graph)

        def uuid(self) -> bytes:
            """What a cache of compiled code goes by."""
            return get_hash_for_files((__file__,))

    # A draw would be moved to its first use before this pass sees it.
    return {"post_grad_custom_post_pass": InOrder(), "reorder_for_locality": False}


def in_order(graph: Graph) -> None:
    """Have every draw of this graph wait for the one before it."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    waits = {after: OrderedSet([_value(before)]) for before, after in itertools.pairwise(_draws(graph))}
    preserve_node_ordering(graph, waits)


def _draws(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]


def _value(draw: Node) -> Node:
    """A tensor that the draw gives: dropout gives two."""
    return next(iter(draw.users)) if isinstance(draw.meta.get("val"), (tuple, list)) else draw
