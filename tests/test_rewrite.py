"""The weight's gradient in the double backward of a convolution, written as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bilevel.engines.compiled import weight_gradients


@pytest.mark.parametrize(
    ("kernel", "options", "size"),
    [
        (5, {"padding": 2}, (12, 12)),
        (3, {"stride": 2, "padding": 1}, (10, 11)),
        (3, {"stride": 3, "dilation": 2, "bias": False}, (13, 9)),
        ((3, 1), {"padding": "same"}, (6, 7)),
        (4, {"padding": 0}, (9, 9)),
    ],
)
def test_second_derivative_is_that_of_the_plain_record(kernel, options, size):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, kernel, **options), nn.Tanh()
        ).double()
        x, other = torch.randn(2, 5, 2, *size, dtype=torch.float64)
    leaves = list(net.parameters())

    def step(x: Tensor) -> list[Tensor]:
        slope = torch.autograd.grad(net(x).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(slope, leaves, [s.detach() for s in slope]))

    graph = make_fx(step, tracing_mode="real")(x)
    assert weight_gradients(graph) == 1  # the first convolution's input is data, which has no d
    graph.graph.lint()
    for found, exact in zip(graph(other), step(other), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_grouped_and_transposed_convolutions_are_left_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, groups=2),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 3),
        ).double()
        x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    leaves = list(net.parameters())

    def step(x: Tensor) -> list[Tensor]:
        slope = torch.autograd.grad(net(x).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(slope, leaves, [s.detach() for s in slope]))

    graph = make_fx(step, tracing_mode="real")(x)
    weight_gradients(graph)
    for found, exact in zip(graph(x), step(x), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
