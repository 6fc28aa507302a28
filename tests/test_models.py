"""The paper's networks: shapes, counts of weights, and a double backward through each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bilevel_studies.image_models import wide_resnet
from torch import nn
from torch.nn.functional import cross_entropy

from bilevel import OptionError
from bilevel.applications.networks import (
    cifar_cnn,
    cosine_logits,
    few_shot_cnn,
    linear,
    mini_imagenet_resnet,
    mlp,
    mnist_cnn,
    svhn_cnn,
)

IMAGE = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "mini-imagenet": (3, 84, 84)}
WIDE = partial(mini_imagenet_resnet, 512, 3)
NETWORKS = {
    "linear": (linear, "mnist", 10, 7_850),
    "mlp": (mlp, "mnist", 10, 784 * 300 + 300 + 300 * 10 + 10),
    "mnist_cnn": (mnist_cnn, "mnist", 10, 1_389_578),
    "cifar_cnn": (cifar_cnn, "cifar", 10, 1_172_410),
    "svhn_cnn": (svhn_cnn, "cifar", 10, 1_341_226),
    "wide_resnet": (wide_resnet, "cifar", 10, 36_479_194),
    "few_shot_cnn": (few_shot_cnn, "mnist", 64, 111_936),
    "mini_imagenet_resnet": (mini_imagenet_resnet, "mini-imagenet", 384, 1_612_640),
    "mini_imagenet_resnet as counted": (WIDE, "mini-imagenet", 512, 3_809_888),
}
SMALLER = {
    "wide_resnet": (partial(wide_resnet, 10, 1), 32),
    "mini_imagenet_resnet": (mini_imagenet_resnet, 32),
    "mini_imagenet_resnet as counted": (WIDE, 32),
}
"""Less of the same, and the size of its images: the derivatives of the whole take long, and have more kinks."""
each = pytest.mark.parametrize("name", NETWORKS)


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, image, _, _ = NETWORKS[name]
    channels, _, size = IMAGE[image]
    make, size = SMALLER.get(name, (make, size))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(), torch.randn(6, channels, size, size)


@each
def test_network_has_its_stated_shape_and_count_of_weights(name):
    make, image, outputs, count = NETWORKS[name]
    with torch.device("meta"):
        network, x = make(), torch.randn(6, *IMAGE[image])
        assert network(x).shape == (6, outputs)
    assert sum(p.numel() for p in network.parameters()) == count
    if make is not WIDE:
        assert f"{count:,} weights" in make.__doc__ or name in ("linear", "mlp")


@each
def test_batch_of_two_is_enough(name):
    network, x = built(name)
    assert bool(torch.isfinite(network(x[:2])).all())


@each
def test_second_derivative_of_a_network_is_that_of_a_difference_of_gradients(name):
    network, x = built(name)
    network, x = network.double(), x.double()
    # Moved along one direction the ReLUs and pools must not switch, or the difference of gradients is of two pieces:
    # with dropout off and a step of 1e-9 none does here.
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    leaves = list(network.parameters())
    target = torch.arange(6) % 10

    def slope(graph: bool) -> list[torch.Tensor]:
        return list(torch.autograd.grad(cross_entropy(network(x), target), leaves, create_graph=graph))

    draw = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in leaves]
    product = torch.autograd.grad(slope(True), leaves, direction)
    sides = []
    for step in (1e-9, -2e-9):
        with torch.no_grad():
            for leaf, d in zip(leaves, direction, strict=True):
                leaf.add_(d, alpha=step)
        sides.append(slope(False))
    found = torch.cat([p.reshape(-1) for p in product])
    difference = torch.cat([(a - b).reshape(-1) / 2e-9 for a, b in zip(*sides, strict=True)])
    # Rounding of a gradient of size one, divided by the step, is 1e-6 or so.
    assert float((found - difference).norm()) <= 1e-5 * float(found.norm())


def test_last_block_of_the_few_shot_network_has_no_activation():
    network, x = built("few_shot_cnn")
    assert bool((network(x) < 0).any())


@pytest.mark.parametrize("make", [mnist_cnn, cifar_cnn, svhn_cnn, mini_imagenet_resnet])
def test_dropout_can_be_left_out(make):
    assert any(isinstance(m, nn.Dropout) for m in make().modules())
    assert not any(isinstance(m, nn.Dropout) for m in make(dropout=False).modules())


def test_cosine_logits_do_not_depend_on_lengths():
    draw = torch.Generator().manual_seed(0)
    features, weights = torch.randn(3, 4, 8, generator=draw), torch.randn(3, 8, 5, generator=draw)
    logits = cosine_logits(features, weights)
    assert logits.shape == (3, 4, 5)
    assert float(logits.abs().max()) <= 1 + 1e-6
    torch.testing.assert_close(cosine_logits(7 * features, weights / 3), logits)


@pytest.mark.parametrize("depth", [4, 27])
def test_depth_that_no_wide_network_has_is_refused(depth):
    with pytest.raises(OptionError, match=f"depth must be 6 n . 4 with n at least 1, as 28 is; got {depth}"):
        wide_resnet(depth)


@pytest.mark.parametrize("kernel", [0, 2])
def test_kernel_that_changes_the_size_of_the_image_is_refused(kernel):
    with pytest.raises(OptionError, match=f"kernel must be odd.*; got {kernel}"):
        mini_imagenet_resnet(kernel=kernel)


def test_layer_without_units_is_refused():
    with pytest.raises(OptionError, match="at least 1 unit; got \\[784, 0, 10\\]"):
        mlp(hidden=(0,))


def test_cosines_of_the_residual_network_differ_little_at_first():
    """By the shift of its last normalisation, and of no other; else the loss starts above that of guessing."""
    network, plain = mini_imagenet_resnet(64, 3), mini_imagenet_resnet(64, 3, normalised=False)
    shifts = [layer.bias for layer in network.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert [bool((shift == 1).all()) for shift in shifts] == [False] * (len(shifts) - 1) + [True]
    assert all(bool((shift == 0).all()) for shift in shifts[:-1])
    assert [network[-3].bias is None, plain[-2].bias is None] == [True, False], "a normalisation has a shift of its own"
    spread, images = [], torch.rand(40, 3, 32, 32)
    with torch.no_grad():
        for shift in (1.0, 0.0):
            network[-2].bias.fill_(shift)
            z = torch.nn.functional.normalize(network.train()(images), dim=1)
            spread.append((z @ z.T)[~torch.eye(40, dtype=torch.bool)].std())
    assert spread[0] < 0.75 * spread[1], "half as much where features are many; 64 are few"
