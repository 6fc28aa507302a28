"""The tables of the denoising study: Table 2 next to what was found, hyper-cleaning, few trusted examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel_studies import plots
from bilevel_studies.denoising import wide
from bilevel_studies.denoising.small import CLEANING_SEEDS, FEW_SEEDS, HOW_FEW, HYPER_CLEANING, NETWORKS
from bilevel_studies.denoising.study import (
    ASYMMETRIC,
    COLUMNS,
    NOISES,
    SHOWN,
    STUDIES,
    SYMMETRIC,
)
from bilevel_studies.statistics import Numbers, alone, chosen, current, finite, mark, numbers, percent, values
from bilevel_studies.study import Kept, Report, table

TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "svhn": "SVHN",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "digits (MLP)",
}
NAMES = {"linear": "linear", "mlp": "MLP 784-300-10"}
# The target of hyper-cleaning: accuracy in percent and F1.
TARGETS = {"linear": (90.1, 0.918), "mlp": (92.4, 0.921)}
# Appendix D.1.1, in percent.
RULE = {"trusted": 90.54, "plain": 86.25, "RMD": 90.09, "rule": 90.77, "oracle": 91.06}
# Standard errors by which two networks of one seed must differ.
SURE = 1.96


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figure and return the tables."""
    few, cleaning = chosen(kept, part=HOW_FEW), chosen(kept, part=HYPER_CLEANING)
    if few:
        plots.how_few(few, folder / "denoising-how-few.png")
    tables = {
        "Table 2: accuracy, percent": accuracy_table(kept),
        "Ours minus the other columns, on common seeds": gap_table(kept),
        "How well wrong labels are found": detection_table(kept),
        "Clean labels": clean_table(kept),
        "Seconds of a run of ours": seconds_table(kept),
        "Hyper-cleaning": cleaning_table(cleaning),
        "Hyper-cleaning by the paper's rule": rule_table(chosen(cleaning, network="linear")),
        "How few trusted examples": few_table(few),
        f"WRN-28-10 on CIFAR-10; the paper: {wide.PAPER:g} ± {wide.PAPER_DEVIATION:g}": wide_table(
            chosen(kept, dataset=wide.NAME)
        ),
        "Begun": begun_table(kept),
    }
    return Report({"cells": len(kept), "not_run": not_run(kept), "aims_reached": aims_reached(kept)}, tables)


def row(kept: Sequence[Kept], dataset: str, noise: float, kind: str) -> dict[str, list[Kept]]:
    """Return the finished cells of a row of the table, by column. `trusted` sees no noise: any row counts."""
    final = STUDIES[dataset].final_passes
    finished = [
        pair
        for pair in chosen(current(kept), dataset=dataset)
        if "part" not in pair[0] and pair[0]["passes"][1] == final and not pair[1].get("partial")
    ]
    mine = chosen(finished, noise=noise, kind=kind)
    found = {column: chosen(mine, column=column) for column in COLUMNS}
    by_seed = {pair[0]["seed"]: pair for pair in chosen(finished, column="trusted")}
    return found | {"trusted": list(by_seed.values())}


def places(kept: Sequence[Kept]) -> list[tuple[str, float, str]]:
    """Return the rows of the table as (data set, noise, kind): the study's rows and all others that have cells."""
    found = []
    for dataset in STUDIES:
        mine = [s for s, _ in chosen(kept, dataset=dataset) if "part" not in s and s["column"] != "clean"]
        others = {(s["noise"], s["kind"]) for s in mine} - set(NOISES)
        ordered = sorted(others, key=lambda pair: (pair[1] == ASYMMETRIC, pair[0]))
        found += [(dataset, noise, kind) for noise, kind in (*NOISES, *ordered)]
    return found


def title_of(dataset: str, noise: float, kind: str) -> str:
    return f"{TITLES[dataset]}, {100 * noise:g}% {kind}"


def accuracy_table(kept: Sequence[Kept]) -> str:
    rows = []
    for dataset, noise, kind in places(kept):
        cells = row(kept, dataset, noise, kind)
        rows.append([title_of(dataset, noise, kind), *(percent(cells[c]).show() + mark(cells[c]) for c in SHOWN)])
        if paper := STUDIES[dataset].paper.get(noise, {}) if kind == SYMMETRIC else {}:
            rows.append(["the paper", *(f"{paper[name]:g}" if name in paper else "" for name in SHOWN)])
    return table(["data, noise", *(COLUMNS[name] for name in SHOWN)], rows)


def gap_table(kept: Sequence[Kept]) -> str:
    """Return the table of ours minus each other column, and whether ours is above, below or level."""
    rows = []
    for place in places(kept):
        cells = row(kept, *place)
        found = [compared(cells["ours"], cells[name], STUDIES[place[0]].tests) for name in SHOWN[:-1]]
        if any(found):
            shown = ["" if one is None else f"{one[1].mean:+.2f} ({one[0]}, {len(one[1].values)})" for one in found]
            rows.append([title_of(*place), *shown])
    return table(["data, noise", *(COLUMNS[name] for name in SHOWN[:-1])], rows)


def compared(ours: Sequence[Kept], other: Sequence[Kept], tests: int) -> tuple[str, Numbers] | None:
    """Return `above`, `below` or `level` for ours and the differences, on common seeds without divergence, or None.

    `level` means within the deviation of the differences or, with one seed, within 1.96 binomial standard errors.
    """
    mine, theirs = ({s["seed"]: f["accuracy"] for s, f in finite(cells)} for cells in (ours, other))
    common = sorted(set(mine) & set(theirs))
    if not common:
        return None
    gaps = Numbers(tuple(100 * (mine[seed] - theirs[seed]) for seed in common))
    least = gaps.deviation
    if len(common) == 1:
        least = SURE * 100 * math.sqrt(sum(p * (1 - p) / tests for p in (mine[common[0]], theirs[common[0]])))
    return "level" if abs(gaps.mean) <= least else "above" if gaps.mean > 0 else "below", gaps


def seconds_table(kept: Sequence[Kept]) -> str:
    rows = []
    for dataset, title in TITLES.items():
        cells = [pair for pair in chosen(kept, dataset=dataset, column="ours") if not pair[1].get("partial")]
        if timed := numbers(alone([pair for pair in cells if "part" not in pair[0]]), "seconds"):
            rows.append([title, f"{timed.mean:.0f}", f"{max(timed.values):.0f}"])
    return table(["data", "mean", "most"], rows)


def detection_table(kept: Sequence[Kept]) -> str:
    rows = []
    for place in places(kept):
        by_column = row(kept, *place)
        for column in ("approx-grad", "algorithm-2", "ours"):
            if cells := by_column[column]:
                quality = numbers(cells, "auc_quality")
                shown = [
                    numbers(cells, "auc").show(3),
                    quality.show(4) if quality else "",
                    numbers(cells, "f1").show(3),
                ]
                suspects = percent(cells, "noise_rate").show(1)
                rows.append([title_of(*place), COLUMNS[column] + mark(cells), *shown, suspects])
    heads = ["AUC of importance", "AUC of quality", "F1 of suspects", "suspects, percent"]
    return table(["data, noise", "method", *heads], rows)


def clean_table(kept: Sequence[Kept]) -> str:
    papers = {name: "" if study.paper_clean is None else f"{study.paper_clean:g}" for name, study in STUDIES.items()}
    rows = [
        [TITLES[name], percent(row(kept, name, 0.0, SYMMETRIC)["clean"]).show(), paper]
        for name, paper in papers.items()
    ]
    return table(["data", "found", "the paper"], rows)


def cleaning_table(kept: Sequence[Kept]) -> str:
    rows = []
    for network in NETWORKS:
        mine, (accuracy, f1) = chosen(kept, network=network), TARGETS[network]
        rows.append(
            [
                NAMES[network],
                percent(mine).show(usual=CLEANING_SEEDS),
                f"{accuracy:g}",
                numbers(mine, "f1", 100).show(1, CLEANING_SEEDS),
                f"{100 * f1:.1f}",
                *(numbers(mine, key).show(3, CLEANING_SEEDS) for key in ("auc", "auc_quality")),
                *(percent(mine, name).show(usual=CLEANING_SEEDS) for name in ("trusted", "plain", "oracle")),
            ]
        )
    found = ["accuracy", "target", "F1", "target", "AUC of importance", "AUC of quality"]
    return table(["network", *found, "Val-only", "Train+Val", "Oracle"], rows)


def rule_table(mine: Sequence[Kept]) -> str:
    found = [percent(mine, name).show(usual=CLEANING_SEEDS) for name in ("trusted", "plain", "rule", "oracle")]
    paper = [f"{RULE[name]:g}" for name in ("trusted", "plain", "RMD", "rule", "oracle")]
    heads = ["", "Val-only", "Train+Val", "RMD", "Penalty, the rule", "Oracle"]
    return table(heads, [["found", *found[:2], "", *found[2:]], ["the paper", *paper]])


def few_table(kept: Sequence[Kept]) -> str:
    rows = []
    for count in sorted(values(kept, "trusted")):
        mine = chosen(kept, trusted=count)
        shown = [percent(mine, key).show(usual=FEW_SEEDS) for key in ("accuracy", "trusted", "plain")]
        found = [numbers(mine, key).show(3, FEW_SEEDS) for key in ("auc", "auc_quality")]
        rows.append([f"{count:,}", *shown, *found])
    heads = ["trusted", "denoise", "trusted set only", "labels as they are", "AUC of importance", "AUC of quality"]
    return table(heads, rows)


def wide_table(kept: Sequence[Kept]) -> str:
    rows = []
    for settings, found in kept:
        memory = "" if found.get("memory") is None else f"{found['memory'] / 2**30:.1f}"
        steps, accuracy = f"{found['steps']:,} of {found['of']:,}", f"{100 * found['accuracy']:.2f}"
        measured = [steps, accuracy, f"{found['auc']:.3f}", f"{found['ms_per_step']:.0f}", memory, found["device"]]
        rows.append([COLUMNS[settings["column"]], str(settings["seed"]), str(settings["passes"]), *measured])
    heads = ["method", "seed", "passes", "upper steps", "accuracy", "AUC", "ms a step", "GiB", "device"]
    return table(heads, rows)


def aims_reached(kept: Sequence[Kept]) -> dict[str, bool]:
    """Return whether ours reaches its target accuracy."""
    found = {}
    for dataset, study in STUDIES.items():
        for noise, wanted in (study.target or {}).items():
            if ours := percent(row(kept, dataset, noise, SYMMETRIC)["ours"]):
                found[title_of(dataset, noise, SYMMETRIC)] = ours.mean >= wanted
    return found


def not_run(kept: Sequence[Kept]) -> list[dict[str, Any]]:
    """Return the places of the table that have no cell."""
    found: list[dict[str, Any]] = []
    for dataset, noise, kind in places(kept):
        cells = row(kept, dataset, noise, kind)
        if left := [column for column in SHOWN if not cells[column]]:
            found.append({"dataset": dataset, "noise": noise, "kind": kind, "columns": left})
    return found


def begun_table(kept: Sequence[Kept]) -> str:
    """Return the cells of the table that a time limit ended, and their progress."""
    rows = []
    for settings, cell in kept:
        if cell.get("partial") and settings.get("dataset") in STUDIES:
            title = title_of(settings["dataset"], settings["noise"], settings["kind"])
            steps = f"{cell['steps']:,} of {cell['of']:,}"
            so_far = f"{100 * cell['accuracy']:.2f}" if "accuracy" in cell else ""
            rows.append([title, COLUMNS[settings["column"]], str(settings["seed"]), steps, so_far])
    return table(["data, noise", "column", "seed", "steps", "accuracy so far"], rows)
