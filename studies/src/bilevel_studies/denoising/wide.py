"""Denoising with a network of 36 million weights (Appendix D.1.2): WRN-28-10 on CIFAR-10, 36% of the labels wrong.

44,000 examples to clean, 1,000 trusted, batches of 75, T = 1, crops and flips, bfloat16 on a GPU. Importances are
normalised within the batch. `algorithm-2` has the paper's constants, 200 passes, and max(u, 0) as the importance, 1 at
the start; `ours` is `Penalty` with one lower step and no other option, and sigmoid(u). The accuracy is measured on the
lower variable, without training after the run. A run without time left is kept and continues from its checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import relu

from bilevel import Penalty, Rows, Status, solve
from bilevel._util.random_state import seeded
from bilevel.applications.augmentation import crop_and_flip
from bilevel.applications.denoising.denoise import importance_problem, loaders
from bilevel.applications.training import accuracy
from bilevel.data import corrupt, split_trusted
from bilevel_studies.denoising.runs import loaded
from bilevel_studies.denoising.study import ONE_SEED
from bilevel_studies.image_models import wide_resnet
from bilevel_studies.study import Deadline, Found, RunItem, Settings, Sitting, device_name

NAME = "cifar10-wrn"
NOISE, TRUSTED, ROWS, BATCH = 0.36, 1000, 44_000, 75
PASSES = {"ours": 3, "algorithm-2": 200}
PAPER, PAPER_DEVIATION = 87.41, 0.26
# Added to importances, so that their sum in a batch is never zero.
FLOOR = 1e-6


def cells(columns: tuple[str, ...], seeds: int, passes: int | None = None) -> list[RunItem]:
    """Return the cells, ours first. `passes` is the length of a run, over which its rates fall."""
    found = [
        {
            "dataset": NAME,
            "noise": NOISE,
            "kind": "symmetric",
            "column": column,
            "seed": seed,
            "passes": passes or PASSES[column],
            "network": [28, 10],
            "rows": ROWS,
            "trusted": TRUSTED,
        }
        for column in PASSES
        if column in columns
        for seed in range(1 if column in ONE_SEED else seeds)
    ]
    return [RunItem(settings, -1000.0 - i) for i, settings in enumerate(found)]


def positive(u: Tensor) -> Tensor:
    return relu(u) + FLOOR


def method(column: str) -> Penalty:
    if column == "ours":
        return Penalty(lower_steps=1, cotangent="same", decay="linear")
    return Penalty.algorithm_2(lower_steps=1, gamma=1.0, epsilon=1.0, lam=10.0, nu=0.0, upper_rate=3.0, lower_rate=1e-4)


def run(settings: Settings, device: torch.device, checkpoints: Path, deadline: float | None = None) -> Found | None:
    """Run or continue a cell until the deadline; return None after Ctrl-C. The setting `steps` shortens the run."""
    seed, rows = int(settings["seed"]), int(settings["rows"])
    data = split_trusted(loaded("cifar10"), settings["trusted"], seed)
    data = data.select(np.sort(np.random.default_rng(seed).permutation(data.count)[:rows]))
    trusted, test = data.part("trusted"), data.part("test")
    y = corrupt(data.y, settings["noise"], len(data.classes), seed, settings["kind"])
    with seeded(seed):
        depth, width = settings["network"]
        model = wide_resnet(depth, width, len(data.classes)).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as tensor cores have it
    place = checkpoints / RunItem(settings, 0).name
    ours, whole = settings["column"] == "ours", settings.get("steps") or settings["passes"] * rows // BATCH
    u = Rows(rows, init=0.0 if ours else 1.0, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model.train()
    solution = solve(
        importance_problem(crop_and_flip, torch.sigmoid if ours else positive),
        method(settings["column"]),
        u,
        model,
        loaders(data.x, y, *trusted, BATCH),
        hypergradient=False,
        max_steps=whole,
        seed=seed,
        precision="bf16" if device.type == "cuda" else None,
        callbacks=[Deadline(Sitting(place, deadline))],
        checkpoint=place,
        resume=True,
    )
    if solution.interrupted:
        return None
    seconds = solution.history["seconds"]
    half = len(seconds) // 2
    score = u.values.float().cpu()
    return {
        "accuracy": accuracy(model, test),
        "auc": float(roc_auc_score((y == data.y).numpy(), score.numpy())),
        "steps": solution.steps,
        "of": whole,
        "partial": solution.status is Status.STOPPED,
        "ms_per_step": round(1000 * (seconds[-1] - seconds[half]) / max(1, len(seconds) - 1 - half), 2),
        "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "weights": sum(p.numel() for p in model.parameters()),
        "engine": solution.engine,
        "status": solution.status.name.lower(),
        "seconds": round(seconds[-1], 2),
        "device": device_name(device),
    }
