"""The tables of the tuning study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bilevel_studies.statistics import chosen
from bilevel_studies.study import Kept, Report, table
from bilevel_studies.tuning.data import DATASETS
from bilevel_studies.tuning.ridge import LEFT_OUT
from bilevel_studies.tuning.study import FIXED, WAYS

# The largest relative difference between a single penalty and the minimiser of the closed form.
NEAR = 0.01
# Our ways, and the single penalty to compare the test loss of each with.
OURS = {
    "per-feature": "single",
    "per-feature, caution 1": "single",
    "folds": "folds, single",
    "folds, auto": "folds, single",
}


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Return the tables of all parts."""
    tables, summary = {}, {}
    for name in DATASETS:
        if own := whole(chosen(kept, part="linear", dataset=name)):
            tables[f"{name}: penalties of a linear model"] = linear_table(own)
            summary[name] = claims(own)
    tables |= {
        "A network on MNIST": network_table(chosen(kept, part="network")),
        "A million hyper-parameters, CPU seconds": scale_table(chosen(kept, part="scale")),
        "Ridge regression with noise features": ridge_table(chosen(kept, part="ridge")),
        "One penalty of ridge regression": curve_table(chosen(kept, part="curve")),
    }
    ratios = [found["ratio"] for _, found in chosen(kept, part="ridge")]
    return Report({"cells": len(kept), "claims": summary, "noise_over_informative_penalty": ratios}, tables)


def whole(found: Sequence[Kept]) -> list[Kept]:
    """Return the runs of the seeds that every way has; all runs if no seed is common."""
    ways = {s["way"] for s, _ in found}
    seeds = {s["seed"] for s, _ in found if ways == {other["way"] for other, _ in found if other["seed"] == s["seed"]}}
    return [pair for pair in found if pair[0]["seed"] in seeds] or list(found)


def linear_table(found: Sequence[Kept]) -> str:
    rows = []
    for way, title in WAYS.items():
        if runs := [r for _, r in chosen(found, way=way)]:
            losses = [spread([r[key] for r in runs]) for key in ("valid_loss", "test_loss")]
            rows.append([title, *losses, f"{mean(r['seconds'] for r in runs):.1f}"])
    return table(["penalties", "validation loss", "test loss", "CPU seconds"], rows)


def claims(found: Sequence[Kept]) -> dict[str, Any]:
    """Return the way with the least validation loss, and each way's test loss minus its single penalty's."""
    means = {
        way: {key: mean(r[key] for _, r in mine) for key in ("valid_loss", "test_loss")}
        for way in WAYS
        if (mine := chosen(found, way=way))
    }
    split = [way for way in means if not way.startswith("folds")]
    least = min(split, key=lambda way: means[way]["valid_loss"]) if split else None
    gaps = {}
    for way, rival in OURS.items():
        single = [means[name]["test_loss"] for name in (rival, *["grid"] * (rival == "single")) if name in means]
        if way in means and single:
            gaps[way] = means[way]["test_loss"] - min(single)
    both = [
        way for way in split if means[way]["valid_loss"] <= means[least or way]["valid_loss"] and gaps.get(way, 1) <= 0
    ]
    return {"least_validation_loss": least, "test_loss_above_single": gaps, "both_at_once": both}


def network_table(found: Sequence[Kept]) -> str:
    rows = []
    for way in ("tuned", *FIXED):
        if runs := [r for _, r in chosen(found, way=way)]:
            accuracies = spread([100 * r["test_accuracy"] for r in runs], 2)
            rows.append([way, accuracies, f"{mean(r['seconds'] for r in runs):.1f}"])
    return table(["hyper-parameters", "test accuracy, percent", "CPU seconds"], rows)


def scale_table(found: Sequence[Kept]) -> str:
    rows = []
    for _, r in found[:1]:
        times = [f"{r[key]:.2f}" for key in ("tuned_seconds", "plain_seconds", "ratio")]
        rows.append([f"{r['hyper_parameters']:,}", *times, f"{min(r['ratios']):.2f} to {max(r['ratios']):.2f}"])
    return table(["hyper-parameters", "tuned", "plain training", "ratio", "ratios of single turns"], rows)


def ridge_table(found: Sequence[Kept]) -> str:
    titles = {"per feature": "test_error", "the best single one": "best_single_error"}
    rows = [[title, spread([r[key] for _, r in found], 3)] for title, key in titles.items() if found]
    return table(["penalties", "test error (mean square)"], rows)


def curve_table(found: Sequence[Kept]) -> str:
    rows = []
    for what, title in LEFT_OUT.items():
        if runs := [r for _, r in chosen(found, left_out=what)]:
            apart = [100 * abs(r["penalty"] / r["minimiser"] - 1) for r in runs]
            within = sum(share <= 100 * NEAR for share in apart)
            rows.append([title, f"{max(apart):.4f}%", f"{within} of {len(runs)}"])
    return table(["left out in turn", "furthest from the minimiser", f"within {NEAR:.0%}"], rows)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean as text, with the least and the most if there are several."""
    form = f".{digits}f" if min(values) >= 10**-digits or not min(values) else ".1e"
    text = f"{mean(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"
