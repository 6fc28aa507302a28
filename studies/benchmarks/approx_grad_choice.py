"""Choose the settings of ApproxGrad in the denoising study, on a held-out fifth of the trusted set.

    .venv/bin/python studies/benchmarks/approx_grad_choice.py

A small network of convolutions with dropout, 3,000 MNIST images with 25% or 50% of wrong labels, and 1,000 trusted
examples, one in five of them held out. As in the study, v is pretrained on the trusted set, and the importances start
at its probabilities of the labels. T = 20 lower steps, 20 steps of the linear solver, two and a half passes. The test
set is not read; the least held-out loss decides. Write studies/results/approx-grad-choice.json and print the table.

The first rows show why runs of conjugate gradients diverged: q is kept from step to step, while each batch and each
draw of dropout has another Hessian, which is indefinite. Then q grows without limit.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bilevel_studies.denoising import study
from bilevel_studies.denoising.runs import HELD_OUT
from bilevel_studies.study import RESULTS, commit, table
from torch import nn
from torch.nn.functional import nll_loss

from bilevel import ApproxGrad, Rows, run_many, solve
from bilevel._util.random_state import seeded
from bilevel.applications.denoising.denoise import importance_problem, loaders
from bilevel.applications.training import fit, probabilities
from bilevel.data import corrupt, load, split_trusted

ROWS, TRUSTED, BATCH, RATE, STEPS, PRETRAINING = 3000, 1000, 100, 1e-3, 75, 240
TRIED: dict[str, dict[str, Any]] = {
    "cg, q is kept": {"linear_solver": "cg", "upper_rate": 0.1},
    "cg": {"linear_solver": "cg", "warm_start": False, "upper_rate": 0.1},
    "cg, damping 1": {"linear_solver": "cg", "warm_start": False, "damping": 1.0, "upper_rate": 0.1},
    "adam, the library's rate on u": {},
    **{f"adam, rate {rate:g} on u": {"upper_rate": rate} for rate in (1.0, 0.3, 0.1, 0.03)},
}
"""The settings that are compared. The damping is 0.1 if none is given, and Adam keeps q."""
NOISES, SEEDS = (0.25, 0.5), (0,)
KEPT = RESULTS / "approx-grad-choice.json"


def network() -> nn.Sequential:
    """Return the paper's MNIST network with an eighth of its filters."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))


def method(upper_rate: float | None = None, **options: Any) -> ApproxGrad:
    usual = {"linear_solver": study.SOLVER, "damping": study.DAMPING, "decay": "linear"} | options
    return ApproxGrad(
        lower_steps=study.PAPER_T,
        linear_steps=study.PAPER_T,
        lower_optimizer=partial(torch.optim.Adam, lr=RATE),
        upper_optimizer=None if upper_rate is None else partial(torch.optim.Adam, lr=upper_rate),
        **usual,
    )


def run(settings: dict[str, Any]) -> dict[str, Any]:
    seed = settings["seed"]
    data = split_trusted(load("mnist"), TRUSTED, seed)
    data = data.select(np.sort(np.random.default_rng(seed).permutation(data.count)[:ROWS]))
    x, y = data.part("trusted")
    held = torch.arange(TRUSTED) % HELD_OUT == 0
    labels = corrupt(data.y, settings["noise"], len(data.classes), seed)
    with seeded(seed):
        model = network()
    fit(model, x[~held], y[~held], steps=PRETRAINING, batch=BATCH, rate=RATE, seed=seed)
    u = Rows(ROWS, init=study.start(probabilities(model, data.x)[torch.arange(ROWS), labels]))
    model.train()
    solution = solve(
        importance_problem(None, study.importance),
        method(**TRIED[settings["tried"]]),
        u,
        model,
        loaders(data.x, labels, x[~held], y[~held], BATCH),
        max_steps=STEPS,
        seed=seed,
        hypergradient=False,
        engine="eager",
    )
    size = float(torch.stack([(q * q).sum() for q in solution.adjoint]).sum().sqrt())
    p = probabilities(model, x[held])
    return {
        "held": float((p.argmax(1) == y[held]).double().mean()),
        "loss": float(nll_loss(p.log(), y[held])),
        "status": solution.status.name.lower(),
        "size_of_q": size,
        "commit": commit(),
    }


def main() -> None:
    items = [{"tried": name, "noise": noise, "seed": seed} for name in TRIED for noise in NOISES for seed in SEEDS]
    found = run_many(run, items, Path("runs/approx-grad-choice"))
    kept = [list(pair) for pair in zip(items, found, strict=True)]
    KEPT.write_text('{"cells": [\n' + ",\n".join(map(json.dumps, kept)) + "\n]}\n")
    heads = ["settings", "held-out loss, 25%", "50%", "mean", "held-out accuracy", "diverged", "largest q"]
    rows = []
    for name in TRIED:
        mine = [(settings, one) for settings, one in zip(items, found, strict=True) if settings["tried"] == name]
        means = [statistics.fmean(one["loss"] for s, one in mine if s["noise"] == noise) for noise in NOISES]
        diverged = sum(one["status"] == "diverged" for _, one in mine)
        numbers = [f"{value:.3f}" for value in (*means, statistics.fmean(means))]
        numbers.append(f"{100 * statistics.fmean(one['held'] for _, one in mine):.2f}")
        largest = max(one["size_of_q"] for _, one in mine)
        rows.append([name, *numbers, f"{diverged} of {len(mine)}", f"{largest:.2g}"])
    print(table(heads, rows))


if __name__ == "__main__":
    main()
