"""Compiled draws come in the order in which they are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

from bilevel.engines.draws import in_order, order_of_draws


def drawing(x: Tensor) -> list[Tensor]:
    """Four draws, used in another order."""
    a, b = torch.rand(5), dropout(x, 0.5)
    c, d = torch.randn(5), dropout(2 * x, 0.5)
    return [d.sum(), c + 1, b.sum(), 2 * a]


def test_every_draw_waits_for_the_one_before_it():
    graph = make_fx(drawing, tracing_mode="real")(torch.ones(5))
    in_order(graph.graph)
    graph.graph.lint()
    waits = [node for node in graph.graph.nodes if str(node.target) == "control_deps"]
    assert len(waits) == 3
    known: list[torch.fx.Node] = [next(n for n in graph.graph.nodes if "rand" in str(n.target))]
    for node in waits:
        (before,) = node.args[0]
        assert before is known[-1] or known[-1] in before.all_input_nodes
        known.append(node)


def test_graph_without_draws_stays_as_it_is():
    graph = make_fx(torch.sin, tracing_mode="real")(torch.ones(5)).graph
    before = [str(node.target) for node in graph.nodes]
    assert order_of_draws(graph) == {}
    in_order(graph)
    assert [str(node.target) for node in graph.nodes] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own code
def test_compiled_draws_are_those_of_eager():
    from torch._inductor import compile as compile_graph

    x = torch.ones(5)
    graph = make_fx(drawing, tracing_mode="real")(x)
    compiled = compile_graph(graph, [x], options={"fallback_random": True} | order_of_draws(graph.graph))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = drawing(x)
        torch.manual_seed(0)
        found = compiled(x)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
