"""The study of constraints on classifiers of a9a: a bound on the parity gap, and a last layer on the simplex."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bilevel_studies.fairness.parity import Measures, People, measured, projected, soft_gap, train_fairly
from bilevel_studies.fairness.simplex_layer import off_simplex, put_on_simplex, scores, train_layer
from bilevel_studies.statistics import chosen, numbers
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings, table
from bilevel_studies.tuning.data import _source as source

BOUND = 0.02
STEPS = {"gap": 600, "simplex": 1500}
QUICK_STEPS = {"gap": 40, "simplex": 60}
SEEDS = 3
WAYS = {"unconstrained": "without the constraint", "projected": "the same, projected", "bilevel": "with the constraint"}
# Standard errors that count as sampling error, of the gap on test and on validation rows together.
WITHIN = 2.0
# The column that is 1 for women: Platt's encoding of Adult has `sex` in columns 71 (Female) and 72 (Male).
FEMALE = 71
# Training and validation rows, drawn from the training part.
SIZES = (16_000, 8000)


def cells(*, quick: bool = False, seeds: int = SEEDS) -> list[RunItem]:
    """Return one cell per part, way and seed."""
    steps = QUICK_STEPS if quick else STEPS
    return [
        RunItem({"part": part, "way": way, "steps": steps[part], "seed": seed}, weight=1.0)
        for seed in range(1 if quick else seeds)
        for part in steps
        for way in WAYS
    ]


def run_cell(settings: Settings) -> Found | None:
    """Train one way and measure it; return None after Ctrl-C."""
    try:
        run = _gap if settings["part"] == "gap" else _simplex
        return run(settings["way"], settings["steps"], settings["seed"])
    except KeyboardInterrupt:
        return None


def _gap(way: str, steps: int, seed: int) -> Found | None:
    train, valid, test = people(seed)
    began = time.process_time()
    bound = BOUND if way == "bilevel" else None
    u, v, solution = train_fairly(train, valid, bound, max_steps=steps, seed=seed)
    if way == "projected":
        v = projected(v, valid, BOUND)
    if solution.interrupted:
        return None
    return _found(measured(valid.x @ v, valid), measured(test.x @ v, test)) | {
        "soft_gap": abs(soft_gap(v, valid).item()),
        "status": solution.status.name,
        "u": u.tolist(),
        "seconds": round(time.process_time() - began, 1),
    }


def _simplex(way: str, steps: int, seed: int) -> Found | None:
    train, valid, test = people(seed)
    began = time.process_time()
    model, solution = train_layer(train, valid, simplex=way == "bilevel", steps=steps, seed=seed)
    if way == "projected":
        put_on_simplex(model)
    if solution.interrupted:
        return None
    return _found(measured(scores(model, valid), valid), measured(scores(model, test), test)) | {
        "off_simplex": off_simplex(model),
        "status": solution.status.name,
        "seconds": round(time.process_time() - began, 1),
    }


def _found(valid: Measures, test: Measures) -> Found:
    return {
        "valid_accuracy": valid.accuracy,
        "valid_gap": valid.gap,
        "valid_error": valid.error,
        "test_accuracy": test.accuracy,
        "test_gap": test.gap,
        "test_error": test.error,
    }


def met(found: Found) -> bool:
    """Return whether the gap on test rows is within the bound, up to sampling error."""
    error = (found["test_error"] ** 2 + found["valid_error"] ** 2) ** 0.5
    return bool(found["test_gap"] <= BOUND + WITHIN * error)


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Return the means over seeds of both parts."""
    rows: dict[str, list[list[str]]] = {part: [] for part in STEPS}
    accuracy: dict[str, dict[str, float]] = {part: {} for part in STEPS}
    for part, (way, title) in product(STEPS, WAYS.items()):
        if mine := chosen(kept, part=part, way=way):
            accuracy[part][way] = numbers(mine, "test_accuracy").mean
            row = [title, f"{100 * accuracy[part][way]:.2f}%"]
            if part == "gap":
                row += [f"{numbers(mine, key).mean:.4f}" for key in ("valid_gap", "test_gap", "test_error")]
            else:
                row.append(f"{max(found['off_simplex'] for _, found in mine):.0e}")
            rows[part].append([*row, f"{numbers(mine, 'seconds').mean:.0f}"])
    bounded = [met(found) for _, found in chosen(kept, part="gap", way="bilevel")]
    tables = {
        f"A parity gap of at most {BOUND:g}": table(
            ["", "test accuracy", "gap, validation", "gap, test", "standard error", "s"], rows["gap"]
        ),
        "A last layer on the simplex": table(["", "test accuracy", "distance from the set", "s"], rows["simplex"]),
    }
    summary = {"bound_met": sum(bounded), "of": len(bounded), "test_accuracy": accuracy}
    return Report({"cells": len(kept), **summary}, tables)


def people(seed: int) -> tuple[People, People, People]:
    """Return training, validation and test rows of a9a; the seed draws the first two."""
    x, y, first_test = source("a9a", seed)
    count = first_test or len(y)
    order = np.random.default_rng(seed).permutation(count)
    train, valid = order[: SIZES[0]], order[SIZES[0] : sum(SIZES)]
    return _people(x, y, train), _people(x, y, valid), _people(x, y, np.arange(count, len(y)))


def _people(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> People:
    own = torch.from_numpy(x[rows]).double()
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    return People(torch.cat([own, ones], 1), torch.from_numpy(y[rows]).double(), own[:, FEMALE].clone())
