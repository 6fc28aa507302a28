"""The denoising study (Section 3.2, Table 2, Appendices D.1 and E.2): settings, and the paper's numbers.

A cell is one column of the table on one data set, noise and seed. The paper trains with T = 20 and 100 epochs (200 on
CIFAR-10); those cells take minutes to an hour on a GPU and come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from bilevel import ApproxGrad, Penalty
from bilevel.applications import networks as models
from bilevel.applications.augmentation import crop_and_flip
from bilevel.applications.training import Augment
from bilevel_studies.study import RunItem

# The columns by their names in cells, the most important first. `clean` has the same data without wrong labels.
COLUMNS = {
    "ours": "Penalty, ours",
    "stopped": "Train+Val, stopped early",
    "oracle": "Oracle",
    "trusted": "Val-only",
    "plain": "Train+Val",
    "approx-grad": "ApproxGrad",
    "algorithm-2": "Penalty, the paper's",
    "clean": "Clean labels",
}
# The columns of the table, from left to right.
SHOWN = ("oracle", "trusted", "plain", "stopped", "approx-grad", "algorithm-2", "ours")
# The order in which columns run; the columns that are not listed have rank 1 and take seconds.
RANKS = {"ours": 0, "approx-grad": 2, "algorithm-2": 3}
SYMMETRIC, ASYMMETRIC = "symmetric", "asymmetric"


@dataclass(frozen=True)
class Study:
    """How a data set is used. Numbers of training steps are given in passes over the training set."""

    network: Callable[[], nn.Module]
    trusted: int
    # Passes of the bilevel run.
    passes: int
    # Passes of each round of training after it, and of the columns without a bilevel run.
    final_passes: int
    rate: float
    augment: Augment | None
    # Table 2, by noise and column, in percent.
    paper: Mapping[float, Mapping[str, float]]
    # Epochs of all columns in the paper.
    paper_passes: int = 100
    paper_nu: float = 0.0
    # The paper's accuracy with clean labels.
    paper_clean: float | None = None
    target: Mapping[float, float] | None = None
    batch: int = 200
    # Examples of the test set.
    tests: int = 10_000
    # Passes of ApproxGrad.
    implicit_passes: int = 2
    # True if all columns have all seeds.
    cheap: bool = False


STUDIES = {
    "mnist": Study(
        models.mnist_cnn,
        1000,
        12,
        20,
        1e-3,
        None,
        {
            0.25: {"oracle": 99.3, "trusted": 94.6, "plain": 83.9, "approx-grad": 98.11, "algorithm-2": 98.89},
            0.5: {"oracle": 99.3, "trusted": 94.6, "plain": 60.8, "approx-grad": 97.27, "algorithm-2": 97.51},
        },
        paper_nu=1e-6,
        paper_clean=99.5,
        target={0.25: 99.05, 0.5: 98.50},
    ),
    "cifar10": Study(
        models.cifar_cnn,
        10_000,
        12,
        100,
        1e-3,
        crop_and_flip,
        {
            0.25: {"oracle": 82.9, "trusted": 70.3, "plain": 79.1, "approx-grad": 71.59, "algorithm-2": 79.67},
            0.5: {"oracle": 80.7, "trusted": 70.3, "plain": 72.2, "approx-grad": 68.08, "algorithm-2": 79.03},
        },
        paper_passes=200,
        paper_nu=1e-4,
        paper_clean=86.2,
        target={0.25: 83.0, 0.5: 81.5},
    ),
    "svhn": Study(
        models.svhn_cnn,
        1000,
        12,
        20,
        1e-3,
        None,
        {
            0.25: {"oracle": 91.1, "trusted": 70.6, "plain": 71.6, "approx-grad": 80.05, "algorithm-2": 88.12},
            0.5: {"oracle": 89.8, "trusted": 70.6, "plain": 47.9, "approx-grad": 74.18, "algorithm-2": 85.21},
        },
        paper_clean=91.23,
        tests=26_032,
    ),
    "fashion-mnist": Study(models.mnist_cnn, 1000, 12, 20, 1e-3, None, {}),
    "digits": Study(
        partial(models.mlp, 64, (128,)),
        100,
        92,
        92,
        3e-3,
        None,
        {},
        batch=100,
        tests=400,
        implicit_passes=10,
        cheap=True,
    ),
}
NOISES = ((0.25, SYMMETRIC), (0.5, SYMMETRIC), (0.4, ASYMMETRIC))
# Columns with one seed, because a run takes long.
ONE_SEED = ("algorithm-2",)


def cells(
    datasets: Sequence[str], noises: Iterable[tuple[float, str]], columns: Sequence[str], seeds: int
) -> list[RunItem]:
    """Return the cells of some parts of the table, the most important first."""
    order = list(COLUMNS)
    found = []
    for dataset in datasets:
        for column in columns:
            study = STUDIES[dataset]
            passes = {"approx-grad": study.implicit_passes, "algorithm-2": study.paper_passes}
            count = 1 if column in ONE_SEED and not study.cheap else seeds
            for noise, kind in _seen(column, tuple(noises)):
                for seed in range(count):
                    settings = {
                        "dataset": dataset,
                        "noise": noise,
                        "kind": kind,
                        "column": column,
                        "seed": seed,
                        "passes": [passes.get(column, study.passes), study.final_passes],
                    }
                    if column == "approx-grad":
                        settings["solver"] = SOLVER
                    found.append((settings, (RANKS.get(column, 1), seed, order.index(column))))
    found.sort(key=lambda pair: pair[1])
    return [RunItem(settings, float(-i)) for i, (settings, _) in enumerate(found)]


def _seen(column: str, noises: tuple[tuple[float, str], ...]) -> tuple[tuple[float, str], ...]:
    """Return the noises that affect a column."""
    if column == "clean":
        return ((0.0, SYMMETRIC),)
    return noises[:1] if column == "trusted" else noises


# Lower steps in each upper step, and steps of the linear system of ApproxGrad.
PAPER_T = 20
# The solver of ApproxGrad's linear system, as the paper has it: conjugate gradients assume that g_vv is positive
# definite, but the g_vv of a network is not. It is also the best on a held-out fifth of the trusted set, with the
# library's rate on u: see benchmarks/approx_grad_choice.py.
SOLVER: Final = "adam"
DAMPING = 0.1
# rho and sigma in the paper.
LOWER_RATE, UPPER_RATE = 1e-5, 3.0
# The least distance of the first importances from 0 and 1.
NEAREST = 1e-3


def approx_grad(T: int, rate: float) -> ApproxGrad:
    adam = partial(torch.optim.Adam, lr=rate)
    return ApproxGrad(
        lower_steps=T, linear_steps=T, linear_solver=SOLVER, damping=DAMPING, decay="linear", lower_optimizer=adam
    )


def algorithm_2(T: int, nu: float) -> Penalty:
    return Penalty.algorithm_2(
        lower_steps=T, gamma=0.01, epsilon=0.01, lam=0.01, nu=nu, upper_rate=UPPER_RATE, lower_rate=LOWER_RATE
    )


def importance(u: Tensor) -> Tensor:
    """Return the importances of the paper, (tanh u + 1) / 2."""
    return (torch.tanh(u) + 1) / 2


def start(probability: Tensor) -> Tensor:
    """Return the u whose importance is this probability."""
    return torch.logit(probability.clamp(NEAREST, 1 - NEAREST)) / 2
