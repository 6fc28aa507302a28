"""The tables of Figures 4(a) and 5(a)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel_studies import plots
from bilevel_studies.denoising.speed import METHODS, SPEED
from bilevel_studies.statistics import chosen, current, mark, numbers, percent, values
from bilevel_studies.study import Kept, Report, table

LEVELS = (0.90, 0.92, 0.94, 0.96, 0.98)
"""Test accuracies; the table says when they were reached."""
CURVES = {"test": "test", "validation": "validation (trusted)", "train": "train (wrong labels among them)"}
FIRST = 0.05
"""Seconds: the time of a logarithmic axis at which curves begin."""


def report(part: str, kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figure of each network and return its tables. `load` is the number of programs per core."""
    mine = current(chosen(kept, part=part))
    tables = {}
    for network in values(mine, "network"):
        cells, image = chosen(mine, network=network), folder / f"denoising-{part}-{network}.png"
        if part == SPEED:
            plots.curves({title: _curves(cells, key) for key, title in CURVES.items()}, image, "seconds")
            tables[f"{network}: seconds until a test accuracy"] = level_table(cells)
            tables[f"{network}: at the end"] = speed_table(cells)
        else:
            plots.against_lower_steps(cells, "method", dict(zip(METHODS, METHODS, strict=True)), image, log=True)
            tables[f"{network}: effect of T"] = step_table(cells)
    loads = [found["load"] for _, found in mine if found.get("load") is not None]
    return Report({"cells": len(mine), "most_load": max(loads, default=None)}, tables)


def _curves(cells: Sequence[Kept], key: str) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for name in METHODS:
        for curves in (one["curves"] for _, one in chosen(cells, method=name)):
            found.append((name, [max(t, FIRST) for t in curves["seconds"]], [100 * value for value in curves[key]]))
    return found


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
