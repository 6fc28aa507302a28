"""Table 7: the sizes of u and v in every experiment, as counted from our models, beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from bilevel.applications import networks as models


@dataclass(frozen=True)
class Sizes:
    """A row of the table. None: the network is not there yet."""

    experiment: str
    data: str
    paper_u: str
    paper_v: str
    u: int | None
    v: int | None
    how: str
    """What is counted."""


def _count(name: str, *arguments: int) -> int | None:
    """The weights of a network of `bilevel.applications.networks`."""
    build: Callable[..., nn.Module] | None = getattr(models, name, None)
    return None if build is None else sum(p.numel() for p in build(*arguments).parameters())


def table() -> list[Sizes]:
    """Every row. Upper variables that are one number an example are counted from the sizes of the data sets."""
    return [
        Sizes(
            "Data denoising",
            "MNIST",
            "59K",
            "1.4M",
            60_000 - 1_000,
            _count("mnist_cnn"),
            "training examples; `mnist_cnn`",
        ),
        Sizes(
            "Data denoising",
            "CIFAR10 (Alexnet)",
            "40K",
            "1.2M",
            50_000 - 10_000,
            _count("cifar_cnn"),
            "training examples; `cifar_cnn`, the layers of Appendix E.2",
        ),
        Sizes(
            "Data denoising",
            "CIFAR10 (WRN-28-10)",
            "44K",
            "36M",
            44_000,
            _count("wide_resnet"),
            "training examples; `wide_resnet`",
        ),
        Sizes(
            "Data denoising", "SVHN", "72K", "1.3M", 73_257 - 1_000, _count("svhn_cnn"), "training examples; `svhn_cnn`"
        ),
        Sizes(
            "Few-shot learning",
            "Omniglot",
            "111K",
            "39K",
            _count("few_shot_cnn"),
            64 * 20 * 30,
            "`few_shot_cnn`; 64 weights for each of 20 ways, 30 tasks a batch",
        ),
        Sizes(
            "Few-shot learning",
            "Mini-ImageNet",
            "3.8M",
            "5K",
            _count("mini_imagenet_resnet", 512, 3),
            512 * 5 * 2,
            "`mini_imagenet_resnet(512, 3)`; 512 weights for each of 5 ways, 2 tasks a batch. The text "
            "of the paper has 384 features and 1x1 convolutions: 1,612,640 and 3,840",
        ),
        Sizes(
            "Data poisoning",
            "MNIST (60 poison points)",
            "47K",
            "8K",
            60 * 28 * 28,
            _count("linear", 784, 10),
            "60 images; `linear`",
        ),
        Sizes(
            "Data poisoning",
            "ImageNet (clean label)",
            "268K",
            "4K",
            3 * 299 * 299,
            _count("linear", 2048, 2),
            "one image; `linear` on 2,048 features",
        ),
    ]


def thousands(text: str) -> float:
    """The paper's 59K or 1.4M as a number."""
    return float(text[:-1]) * {"K": 1e3, "M": 1e6}[text[-1]]
