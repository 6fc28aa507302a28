"""The study of constraints on classifiers of a9a: a bound on the parity gap, and a last layer on the simplex."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.running.run_many import Found, RunItem, Settings
from bilevel_studies.fairness.data import SIZES, people
from bilevel_studies.fairness.parity import PROJECTIONS, WIDTH, Measures, measured, projected, soft_gap, train_fairly
from bilevel_studies.fairness.simplex_layer import HIDDEN, off_simplex, put_on_simplex, scores, train_layer
from bilevel_studies.markdown import table

BOUND = 0.02
STEPS = {"gap": 600, "simplex": 1500}
QUICK_STEPS = {"gap": 40, "simplex": 60}
SEEDS = 3
WAYS = {"unconstrained": "without the constraint", "projected": "that, projected", "bilevel": "with the constraint"}
WITHIN = 2.0
"""Standard errors, of the gap on test and on validation rows together, that count as sampling error."""


def cells(*, quick: bool = False, seeds: int = SEEDS) -> list[RunItem]:
    """One cell a part, a way and a seed."""
    steps = QUICK_STEPS if quick else STEPS
    return [
        RunItem({"part": part, "way": way, "steps": steps[part], "seed": seed}, weight=1.0)
        for seed in range(1 if quick else seeds)
        for part in steps
        for way in WAYS
    ]


def run_cell(settings: Settings) -> Found | None:
    """Train one way and measure it; None where Ctrl-C came."""
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
    """Whether the gap on test rows is within the bound, up to sampling error."""
    error = (found["test_error"] ** 2 + found["valid_error"] ** 2) ** 0.5
    return bool(found["test_gap"] <= BOUND + WITHIN * error)


def write(results: Sequence[tuple[Settings, Found]], folder: Path) -> dict[str, Any]:
    """Write the page into a folder; returns the summary."""
    parts = {
        part: {way: [f for s, f in results if (s["part"], s["way"]) == (part, way)] for way in WAYS} for part in STEPS
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "fairness.md", page(parts))
    bilevel = parts["gap"]["bilevel"]
    return {
        "cells": len(results),
        "bound_met": sum(map(met, bilevel)),
        "of": len(bilevel),
        "test_accuracy": {
            part: {way: _mean(found, "test_accuracy") for way, found in ways.items() if found}
            for part, ways in parts.items()
        },
    }


def _mean(found: Sequence[Found], name: str) -> float:
    return fmean(f[name] for f in found)


def page(parts: dict[str, dict[str, list[Found]]]) -> str:
    gap, simplex = parts["gap"], parts["simplex"]
    bilevel = gap["bilevel"]
    count = len(bilevel)
    lines = [
        "# Constrained classifiers of a9a",
        f"Written by `bilevel reproduce fairness`. {SIZES[0]} rows train, {SIZES[1]} validate, drawn by a seed from "
        f"the training part; the test part, 16,281 rows, is only measured. Numbers are means over {count} "
        f"seed{'s' if count != 1 else ''}.",
        "## A parity gap of at most 0.02",
        "Logistic regression; u is one log weight for each pair of sex and label, v the classifier trained with these "
        "weights, f the loss on validation rows, and the constraint an upper inequality on the gap between the shares "
        "of women and men that are called positive, on validation rows, each share the mean of sigmoid(score / "
        f"{WIDTH:g}). The projection takes the classifier without the constraint to the nearest one, in its "
        f"parameters, that meets it on the same rows (at most {PROJECTIONS} tangent steps). Gaps are of answers "
        "(score > 0), with the standard error that the sizes of the groups give.",
        table(
            ["", "test accuracy", "gap, validation", "gap, test", "standard error", "s"],
            [
                [
                    WAYS[way],
                    f"{100 * _mean(found, 'test_accuracy'):.2f}%",
                    f"{_mean(found, 'valid_gap'):.4f}",
                    f"{_mean(found, 'test_gap'):.4f}",
                    f"{_mean(found, 'test_error'):.4f}",
                    f"{_mean(found, 'seconds'):.0f}",
                ]
                for way, found in gap.items()
                if found
            ],
        ),
        f"The gap of answers on test rows is at most {BOUND:g} within sampling error ({WITHIN:g} standard errors of "
        f"test and validation rows together) for {sum(map(met, bilevel))} of {count} seeds with the constraint, and "
        f"for {sum(map(met, gap['unconstrained']))} of {len(gap['unconstrained'])} without.",
        "## A last layer on the simplex",
        f"A network with {HIDDEN} hidden units, on minibatches, u as above and no bound on the gap. The last layer's "
        "rows are not negative and sum to one (`project_lower`). The projection puts the last layer of the network "
        "that was trained without the set into it.",
        table(
            ["", "test accuracy", "distance from the set", "s"],
            [
                [
                    WAYS[way],
                    f"{100 * _mean(found, 'test_accuracy'):.2f}%",
                    f"{max(f['off_simplex'] for f in found):.0e}",
                    f"{_mean(found, 'seconds'):.0f}",
                ]
                for way, found in simplex.items()
                if found
            ],
        ),
        "## To run it again",
        "```bash\nbilevel reproduce fairness --out runs/fairness --page docs/results\n```",
    ]
    return "\n\n".join(lines) + "\n"
