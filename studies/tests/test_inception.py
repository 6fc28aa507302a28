"""Inception-V3 in plain layers next to the stored ones: small layers of the same kinds, and the file if it is there."""

from __future__ import annotations

import pytest
import torch
from bilevel_studies.poisoning import clean_label_features
from bilevel_studies.poisoning.clean_label_features import plain
from torch import nn
from torch.nn.functional import batch_norm, conv2d

from bilevel.errors import DataError, OptionError


class Conv2dLayer(nn.Module):
    """A convolution as it is stored."""

    def __init__(self, channels, out, size=1, stride=1, padding=0):
        super().__init__()
        size = (size, size) if isinstance(size, int) else size
        self.stride, self.padding = stride, padding
        for name, value in (
            ("weight", torch.randn(out, channels, *size)),
            ("beta", torch.randn(out)),
            ("mean", torch.randn(out)),
            ("var", torch.rand(out)),
        ):
            self.register_parameter(name, nn.Parameter(value.double(), requires_grad=False))

    def forward(self, x):
        return batch_norm(
            conv2d(x, self.weight, None, self.stride, self.padding),
            self.mean,
            self.var,
            None,
            self.beta,
            False,
            0.1,
            0.001,
        ).relu()


class Fork(nn.Module):
    def forward(self, x):
        return torch.cat([child(x) for child in self.children()], 1)


class InceptionA(Fork):
    def __init__(self, channels):
        super().__init__()
        self.conv = Conv2dLayer(channels, 2)
        self.tower = nn.Sequential(Conv2dLayer(channels, 3), Conv2dLayer(3, 2, (1, 3), padding=(0, 1)))
        self.tower_1 = nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), Conv2dLayer(channels, 1))


class InceptionD(Fork):
    def __init__(self, channels):
        super().__init__()
        self.tower = Conv2dLayer(channels, 2, 3, stride=2)
        self.pool = nn.MaxPool2d(3, 2)


class InceptionE(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = Conv2dLayer(channels, 1)
        self.tower_conv = Conv2dLayer(channels, 2)
        self.tower_mixed_conv = Conv2dLayer(2, 1, (1, 3), padding=(0, 1))
        self.tower_mixed_conv_1 = Conv2dLayer(2, 2, (3, 1), padding=(1, 0))
        self.tower_1_conv = Conv2dLayer(channels, 3)
        self.tower_1_conv_1 = Conv2dLayer(3, 2, 3, padding=1)
        self.tower_1_mixed_conv = Conv2dLayer(2, 1, (1, 3), padding=(0, 1))
        self.tower_1_mixed_conv_1 = Conv2dLayer(2, 2, (3, 1), padding=(1, 0))
        self.tower_2_pool = nn.MaxPool2d(3, 1, 1)
        self.tower_2_conv = Conv2dLayer(channels, 1)

    def forward(self, x):
        a, b = self.tower_conv(x), self.tower_1_conv_1(self.tower_1_conv(x))
        return torch.cat(
            [
                self.conv(x),
                self.tower_mixed_conv(a),
                self.tower_mixed_conv_1(a),
                self.tower_1_mixed_conv(b),
                self.tower_1_mixed_conv_1(b),
                self.tower_2_conv(self.tower_2_pool(x)),
            ],
            1,
        )


def slope(network, x):
    x = x.clone().requires_grad_()
    z = network(x).flatten(1)
    return z.detach(), torch.autograd.grad((z**2).sum(), x)[0]


def test_plain_layers_are_the_stored_ones_in_value_and_slope():
    torch.manual_seed(0)
    stored = nn.Sequential(Conv2dLayer(3, 4, 3, stride=2), InceptionA(4), InceptionD(5), InceptionE(7), nn.AvgPool2d(2))
    network = plain(stored)
    assert not any(p.requires_grad for p in network.parameters())
    x = torch.randn(2, 3, 13, 13, dtype=torch.float64)
    for found, expected in zip(slope(network, x), slope(stored, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_layer_that_inception_does_not_have_is_refused():
    with pytest.raises(DataError, match="must belong to Inception-V3; got a layer 'Linear'"):
        plain(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.slow
def test_file_of_the_package_has_the_same_features_in_plain_layers():
    try:
        stored = clean_label_features.stored_inception().double()
    except OptionError:
        pytest.skip("needs bilevel[inception]")
    x = torch.rand(1, 3, 299, 299, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for found, expected in zip(slope(plain(stored.net.layers), x), slope(stored, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
