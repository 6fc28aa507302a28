"""Figures 4(a) and 5(a): accuracy against wall-clock time, and the effect of T, on MNIST with 25% of wrong labels.

1,000 trusted examples. On a GPU the network is the paper's and all other examples are used; on a CPU it is an MLP
784-300-10 on 5,000 of them. The paper's way (its Penalty, and ApproxGrad) starts from a network trained on the trusted
set, with importances at its probabilities of the labels; these seconds count. The accuracy is measured on the lower
variable during the run, without training after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import Callback, Penalty, Rows, Run, solve
from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.denoising.denoise import importance_problem, loaders
from bilevel.applications.training import accuracy, fit, probabilities
from bilevel.data import Pair, corrupt, split_trusted
from bilevel.methods.base import Method
from bilevel_studies import plots
from bilevel_studies.denoising import study as denoising_study
from bilevel_studies.denoising.runs import loaded
from bilevel_studies.denoising.small import network
from bilevel_studies.denoising.study import PAPER_T, SOLVER, STUDIES
from bilevel_studies.statistics import chosen, current, mark, numbers, percent, values
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings, device_name, table

SPEED, STEPS = "speed", "steps"
METHODS = ("Penalty, ours", "Penalty, the paper's", "ApproxGrad")
# T in the study of its effect.
NUMBERS = (1, 2, 5, 10, 20)
BATCH, TRUSTED, NOISE, RATE = 200, 1000, 0.25, 1e-3
ROWS = {"mlp": 5000, "cnn": 59_000}
# Over the training set; an upper step sees one batch of it.
PASSES: dict[str, dict[str, float]] = {"speed": {"mlp": 10, "cnn": 2}, "steps": {"mlp": 4, "cnn": 0.5}}
# Passes of our Penalty in the first study, as in `denoise`: its upper steps have no lower steps before them.
OURS_PASSES = {"mlp": 48, "cnn": 12}
# Steps on the trusted set.
PRETRAINING = 300
# Measurements of a run.
POINTS = {"speed": 20, "steps": 4}


def cells(part: str, kind: str, seeds: int = 1, *, dataset: str = "mnist") -> list[RunItem]:
    """Return the runs of one figure with a network (`mlp` or `cnn`), seed by seed."""
    found: list[dict[str, Any]] = [
        {
            "part": part,
            "dataset": dataset,
            "network": kind,
            "rows": ROWS[kind],
            "trusted": TRUSTED,
            "noise": NOISE,
            "method": name,
            "T": T,
            "passes": PASSES[part][kind],
            "seed": seed,
        }
        for seed in range(seeds)
        for T in (NUMBERS if part == STEPS else (PAPER_T,))
        for name in METHODS
    ]
    for settings in found:
        if part == SPEED and settings["method"] == METHODS[0]:
            settings |= {"T": 0, "passes": OURS_PASSES[kind]}
        if settings["method"] == METHODS[2]:
            settings["solver"] = SOLVER
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def method(name: str, T: int) -> Method:
    if name == METHODS[0]:
        return Penalty(lower_steps=T, cotangent="same", decay="linear")
    if name == METHODS[1]:
        return denoising_study.algorithm_2(T, STUDIES["mnist"].paper_nu)
    return denoising_study.approx_grad(T, RATE)


class Curves(Callback):
    """Measures accuracies on test, trusted and noisy examples, and the seconds of the run without measurements."""

    def __init__(self, model: nn.Module, test: Pair, trusted: Pair, train: Pair, offset: float) -> None:
        self.model, self.offset, self.spent = model, offset, 0.0
        self.pairs = {"test": test, "validation": trusted, "train": train}
        self.found: dict[str, list[float]] = {"seconds": [], "test": [], "validation": [], "train": []}

    def log(self, run: Run) -> None:
        self.measure(run.seconds)

    def measure(self, seconds: float) -> None:
        began = time.perf_counter()
        self.found["seconds"].append(round(self.offset + seconds - self.spent, 3))
        for name, pair in self.pairs.items():
            self.found[name].append(round(accuracy(self.model, pair), 4))
        self.spent += time.perf_counter() - began


def run(settings: Settings, device: torch.device | None = None) -> Found | None:
    """Run a cell; return None after Ctrl-C. The setting `steps` shortens the run."""
    device = device or torch.device("cpu")
    seed, rows, name = int(settings["seed"]), int(settings["rows"]), settings["method"]
    data = split_trusted(loaded(settings["dataset"]), settings["trusted"], seed)
    data = data.select(np.sort(np.random.default_rng(seed).permutation(data.count)[:rows]))
    trusted, test = data.part("trusted"), data.part("test")
    y = corrupt(data.y, settings["noise"], len(data.classes), seed)
    with seeded(seed):
        model = (network("mlp", data) if settings["network"] == "mlp" else models.mnist_cnn()).to(device)
    steps = settings.get("steps") or round(settings["passes"] * len(y) / BATCH)
    ours, began = name == METHODS[0], time.perf_counter()
    init: float | Tensor = 0.0
    if not ours:
        fit(model, *trusted, steps=min(PRETRAINING, steps), batch=BATCH, rate=RATE, seed=seed)
        init = denoising_study.start(probabilities(model, data.x)[torch.arange(len(y)), y])
    curves = Curves(model, test, trusted, (data.x, y), time.perf_counter() - began)
    curves.measure(0.0)
    curves.spent = 0.0
    u = Rows(len(y), init=init, device=device)
    model.train()
    importance = torch.sigmoid if ours else denoising_study.importance
    solution = solve(
        importance_problem(None, importance),
        method(name, settings["T"]),
        u,
        model,
        loaders(data.x, y, *trusted, BATCH),
        max_steps=steps,
        seed=seed,
        hypergradient=False,
        callbacks=[curves],
        log_every=max(1, steps // POINTS[settings["part"]]),
        precision="bf16" if device.type == "cuda" else None,
    )
    if solution.interrupted:
        return None
    return _summary(curves, solution.history["seconds"], solution.engine) | {
        "steps": solution.steps,
        "device": device_name(device),
        "status": solution.status.name.lower(),
        "load": load(),
    }


def load() -> float | None:
    """Return the runnable programs per core in the last minute. Above 1, times are too long."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2) if hasattr(os, "getloadavg") else None


def _summary(curves: Curves, seconds: Any, engine: str) -> Found:
    """Return the curves and their ends. The time of a step is the median of the second half, without measurements."""
    differences = np.diff(np.array(seconds))[len(seconds) // 2 :]
    return {
        "curves": curves.found,
        "accuracy": curves.found["test"][-1],
        "seconds": curves.found["seconds"][-1],
        "ms_per_step": round(1000 * float(np.median(differences)), 3) if len(differences) else None,
        "engine": engine,
    }


# Test accuracies; the table says when they were reached.
LEVELS = (0.90, 0.92, 0.94, 0.96, 0.98)
CURVES = {"test": "test", "validation": "validation (trusted)", "train": "train (wrong labels among them)"}
# Seconds: the time of a logarithmic axis at which curves begin.
FIRST = 0.05


def report(part: str, kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figure of each network and return its tables. `load` is the number of programs per core."""
    mine = current(chosen(kept, part=part))
    tables = {}
    for kind in values(mine, "network"):
        some, image = chosen(mine, network=kind), folder / f"denoising-{part}-{kind}.png"
        if part == SPEED:
            plots.curves({title: _curves(some, key) for key, title in CURVES.items()}, image, "seconds")
            tables[f"{kind}: seconds until a test accuracy"] = level_table(some)
            tables[f"{kind}: at the end"] = speed_table(some)
        else:
            plots.against_lower_steps(some, "method", dict(zip(METHODS, METHODS, strict=True)), image, log=True)
            tables[f"{kind}: effect of T"] = step_table(some)
    loads = [found["load"] for _, found in mine if found.get("load") is not None]
    return Report({"cells": len(mine), "most_load": max(loads, default=None)}, tables)


def _curves(cells: Sequence[Kept], key: str) -> list[tuple[str, list[float], list[float]]]:
    found = [(name, one["curves"]) for name in METHODS for _, one in chosen(cells, method=name)]
    return [(name, [max(t, FIRST) for t in one["seconds"]], [100 * value for value in one[key]]) for name, one in found]


def reached(found: dict[str, Any], level: float) -> float | None:
    """Return the seconds after which the test accuracy first had a level; None: never."""
    pairs = zip(found["curves"]["seconds"], found["curves"]["test"], strict=True)
    return next((float(at) for at, value in pairs if value >= level), None)


def level_table(cells: Sequence[Kept]) -> str:
    """The mean over seeds; empty if a seed did not reach the level."""
    rows = []
    for name in METHODS:
        found = [one for _, one in chosen(cells, method=name)]
        times = [[reached(one, level) for one in found] for level in LEVELS]
        shown = [f"{sum(map(float, some)) / len(some):.1f}" if some and None not in some else "" for some in times]  # type: ignore[arg-type]
        rows.append([name, *shown])
    return table(["method", *(f"{level:.0%}" for level in LEVELS)], rows)


def speed_table(cells: Sequence[Kept]) -> str:
    rows = []
    for settings, found in sorted(cells, key=lambda pair: (METHODS.index(pair[0]["method"]), pair[0]["seed"])):
        method = settings["method"] + mark([(settings, found)])
        time = [f"{found['steps']:,}", f"{found['ms_per_step']:.1f}", f"{found['seconds']:.1f}"]
        ends = [f"{100 * found['curves'][key][-1]:.2f}" for key in CURVES]
        rows.append([method, str(settings["seed"]), *time, *ends])
    return table(["method", "seed", "upper steps", "ms a step", "seconds", "test", "validation", "train"], rows)


def step_table(cells: Sequence[Kept]) -> str:
    rows, usual = [], len(values(cells, "seed"))
    for name in METHODS:
        for T in sorted(values(cells, "T")):
            mine = chosen(cells, method=name, T=T)
            time = numbers(mine, "ms_per_step")
            rows.append([name, str(T), percent(mine).show(usual=usual) + mark(mine), time.show(1, usual)])
    return table(["method", "T", "test accuracy", "ms per upper iteration"], rows)
