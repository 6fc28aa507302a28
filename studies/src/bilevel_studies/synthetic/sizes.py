"""Table 7: the sizes of u and v in every experiment, counted from our models, next to the sizes in the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from bilevel.applications import networks as models
from bilevel_studies.image_models import wide_resnet

# A function of `bilevel.applications.networks`, or `wide_resnet`, and its arguments.
Network = tuple[str | int, ...]
BUILDERS = {**vars(models), "wide_resnet": wide_resnet}


@dataclass(frozen=True)
class Sizes:
    """A row of the table."""

    experiment: str
    data: str
    paper_u: str
    paper_v: str
    u: int
    v: int
    # The things that are counted.
    how: str


# The rows of the table. If u has one number per example, it is counted from the size of the data set.
ROWS: list[tuple[str, str, str, str, int | Network, int | Network, str]] = [
    (
        "Data denoising",
        "MNIST",
        "59K",
        "1.4M",
        60_000 - 1_000,
        ("mnist_cnn",),
        "training examples; `mnist_cnn`",
    ),
    (
        "Data denoising",
        "CIFAR10 (Alexnet)",
        "40K",
        "1.2M",
        50_000 - 10_000,
        ("cifar_cnn",),
        "training examples; `cifar_cnn`, the layers of Appendix E.2",
    ),
    (
        "Data denoising",
        "CIFAR10 (WRN-28-10)",
        "44K",
        "36M",
        44_000,
        ("wide_resnet",),
        "training examples; `wide_resnet`",
    ),
    ("Data denoising", "SVHN", "72K", "1.3M", 73_257 - 1_000, ("svhn_cnn",), "training examples; `svhn_cnn`"),
    (
        "Few-shot learning",
        "Omniglot",
        "111K",
        "39K",
        ("few_shot_cnn",),
        64 * 20 * 30,
        "`few_shot_cnn`; 64 weights for each of 20 ways, 30 tasks a batch",
    ),
    (
        "Few-shot learning",
        "Mini-ImageNet",
        "3.8M",
        "5K",
        ("mini_imagenet_resnet", 512, 3),
        512 * 5 * 2,
        "`mini_imagenet_resnet(512, 3)`; 512 weights for each of 5 ways, 2 tasks a batch. The text "
        "of the paper has 384 features and 1x1 convolutions: 1,612,640 and 3,840",
    ),
    (
        "Data poisoning",
        "MNIST (60 poison points)",
        "47K",
        "8K",
        60 * 28 * 28,
        ("linear", 784, 10),
        "60 images; `linear`",
    ),
    (
        "Data poisoning",
        "ImageNet (clean label)",
        "268K",
        "4K",
        3 * 299 * 299,
        ("linear", 2048, 2),
        "one image; `linear` on 2,048 features",
    ),
]


def table() -> list[Sizes]:
    """Return every row, with the weights of networks counted."""
    return [Sizes(*row[:4], _count(row[4]), _count(row[5]), row[6]) for row in ROWS]


def _count(size: int | Network) -> int:
    if isinstance(size, int):
        return size
    build: Callable[..., nn.Module] = BUILDERS[str(size[0])]
    return sum(p.numel() for p in build(*size[1:]).parameters())


def thousands(text: str) -> float:
    """Convert text such as 59K or 1.4M to a number."""
    return float(text[:-1]) * {"K": 1e3, "M": 1e6}[text[-1]]
