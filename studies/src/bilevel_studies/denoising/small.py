"""Denoising on a CPU: hyper-cleaning (Appendix D.1.1), and how few trusted examples are enough.

Both take 5,000 MNIST images with wrong labels, a linear model or an MLP, and `denoise` with its defaults. They
differ in the noise and in the number of trusted examples.
"""

from __future__ import annotations

import copy
import time

import numpy as np
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.training import accuracy, fit
from bilevel.data import Labelled, corrupt, split_trusted
from bilevel_studies.denoising.runs import loaded
from bilevel_studies.study import Found, RunItem, Settings, device_name

HYPER_CLEANING, HOW_FEW = "hyper-cleaning", "how-few"
NETWORKS = ("linear", "mlp")
ROWS = 5000
CLEANING_SEEDS, FEW_SEEDS = 10, 3
# Numbers of trusted examples.
FEW = (50, 100, 250, 500, 1000, 5000)
FEW_NOISE = 0.4
# Steps of hyper-cleaning: 80 passes (the paper: 100). Better than the default, 1,200, on seeds 100 to 102.
CLEANING_STEPS = 4000
HIDDEN = 300
# The paper's rule: train on the examples of greater importance and the trusted ones.
SURE = 0.9


def cells(dataset: str = "mnist", rows: int = ROWS) -> list[RunItem]:
    """Return the cells of hyper-cleaning, then of how few are enough, the first seeds first."""
    cleaning = [
        {
            "part": HYPER_CLEANING,
            "dataset": dataset,
            "network": network,
            "rows": rows,
            "trusted": rows,
            "noise": 0.5,
            "seed": seed,
            "steps": CLEANING_STEPS,
        }
        for seed in range(CLEANING_SEEDS)
        for network in NETWORKS
    ]
    few = [
        {
            "part": HOW_FEW,
            "dataset": dataset,
            "network": "mlp",
            "rows": rows,
            "trusted": trusted,
            "noise": FEW_NOISE,
            "seed": seed,
        }
        for seed in range(FEW_SEEDS)
        for trusted in FEW
    ]
    return [RunItem(settings, float(-i)) for i, settings in enumerate([*cleaning, *few])]


def run(settings: Settings, device: torch.device | None = None) -> Found | None:
    """Run a cell; return None after Ctrl-C. The setting `steps` replaces the default."""
    device = device or torch.device("cpu")
    whole, seed, rows = loaded(settings["dataset"]), int(settings["seed"]), int(settings["rows"])
    order = np.random.default_rng(seed).permutation(whole.count)
    data = whole.select(order[:rows])
    trusted = split_trusted(whole.select(order[rows:]), settings["trusted"], seed).part("trusted")
    y = corrupt(data.y, settings["noise"], len(whole.classes), seed)
    right = y == data.y
    with seeded(seed):
        model = network(settings["network"], data).to(device)
    first, began = copy.deepcopy(model), time.perf_counter()
    try:
        found = denoise((data.x, y), trusted, model, seed=seed, steps=settings.get("steps"))
    except KeyboardInterrupt:
        return None
    seconds = time.perf_counter() - began

    def after(kept: Tensor) -> float:
        """Return the accuracy after training on these rows and the trusted ones, with the steps of one round."""
        rival, used = copy.deepcopy(first), found.settings
        fit(
            rival,
            torch.cat([data.x[kept], trusted[0]]),
            torch.cat([y[kept], trusted[1]]),
            seed=seed + 1,
            steps=used["final_steps"],
            batch=used["batch"],
            rate=used["rate"],
        )
        return accuracy(rival, whole.part("test"))

    none, sure = torch.zeros_like(right), found.importance > SURE
    rivals = {"trusted": none, "plain": ~none}
    if settings["part"] == HYPER_CLEANING:
        rivals["oracle"] = right
        if settings["network"] == "linear":  # as the paper's was
            rivals["rule"] = sure
    return {
        "accuracy": accuracy(model, whole.part("test")),
        **{name: after(rows) for name, rows in rivals.items()},
        "rule_rows": int(sure.sum()),
        "auc": float(roc_auc_score(right.numpy(), found.importance.numpy())),
        "auc_quality": float(roc_auc_score(right.numpy(), found.quality.numpy())),
        "f1": float(f1_score((~right).numpy(), found.suspect.numpy())),
        "noise_rate": found.noise_rate,
        "seconds": round(seconds, 2),
        "device": device_name(device),
    }


def network(name: str, data: Labelled) -> nn.Module:
    inputs, classes = int(data.x[0].numel()), len(data.classes)
    return models.linear(inputs, classes) if name == "linear" else models.mlp(inputs, (HIDDEN,), classes)
