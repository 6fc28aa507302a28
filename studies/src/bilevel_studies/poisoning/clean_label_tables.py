"""The tables of the clean-label study: success against distortion, and differences of methods by pairs of targets."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bilevel_studies import plots
from bilevel_studies.poisoning.clean_label import (
    CANDIDATES,
    CHOICE,
    EPSILONS,
    METHODS,
    PAPER,
    TITLES,
    best,
    earlier,
    in_table,
)
from bilevel_studies.statistics import Numbers, alone, chosen, values
from bilevel_studies.study import Kept, Report, table

BEYOND = EPSILONS[-1] + 1
"""Counts as the epsilon of a target that no epsilon flips."""
SHOWN = 8


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables, for each feature map."""
    found = Report({"cells": len(kept)})
    for name in values(kept, "features"):
        mine, before = in_table(kept, name), earlier(kept, name)
        if tried := chosen(kept, part=CHOICE, features=name):
            found.tables[f"{name}: settings of Penalty"] = choice_table(tried, best(kept, name))
        if not mine:
            continue
        found.summary[name] = compared(mine)
        found.tables[f"{name}: distortion"] = method_table(mine, before)
        found.tables[f"{name}: difference by pairs"] = difference_table(mine, before)
        targets = common(mine)
        by_title = {TITLES[m]: [e for t, e in needed(mine, m).items() if t in targets] for m in METHODS}
        known = {title: epsilons for title, epsilons in by_title.items() if epsilons}
        plots.success(known, EPSILONS, folder / f"clean-label-{name}.png")
        ours = [one for _, cell in chosen(mine, method="penalty") for one in cell["targets"]]
        if pictures := [one["pictures"] for one in ours if "pictures" in one][:SHOWN]:
            columns = [[np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in row] for row in pictures]
            plots.images(columns, folder / f"clean-label-{name}-points.png")
    return found


def needed(kept: Sequence[Kept], method: str) -> dict[int, int]:
    """Return the smallest epsilon of each target that was not skipped."""
    return {
        int(one["target"]): one["epsilon"] or BEYOND
        for _, found in chosen(kept, method=method)
        for one in found["targets"]
        if not one.get("skipped")
    }


def common(kept: Sequence[Kept]) -> set[int]:
    """Return the targets that all methods have, of those methods that have any."""
    return set.intersection(*(set(found) for method in METHODS if (found := needed(kept, method))))


def compared(kept: Sequence[Kept], other: str = "feature-collision", one: str = "penalty") -> dict[str, Any]:
    """Return the medians, and the mean difference by pairs with its 95% interval (Student's t)."""
    by_method = {method: needed(kept, method) for method in (one, other)}
    both = sorted(set.intersection(*(set(found) for found in by_method.values())))
    gaps = [by_method[other][t] - by_method[one][t] for t in both]
    return {
        "targets": len(both),
        "mean_difference": statistics.fmean(gaps) if gaps else None,
        "interval": Numbers(tuple(gaps)).interval,
        "medians": {m: statistics.median([f[t] for t in both]) if both else None for m, f in by_method.items()},
        "less": sum(gap > 0 for gap in gaps),
        "more": sum(gap < 0 for gap in gaps),
    }


def difference_table(mine: Sequence[Kept], before: Sequence[Kept]) -> str:
    """By how much more epsilon a method needs than another: in all targets, and in those not run before the choice."""
    as_published = [*chosen(before, method="penalty", options=PAPER), *chosen(mine, method="feature-collision")]
    rows = []
    for title, cells, one, other in (
        ("", mine, "penalty", "feature-collision"),
        (", the paper's settings", as_published, "penalty", "feature-collision"),
        ("", mine, "penalty", "collision-adam"),
        ("", mine, "collision-adam", "feature-collision"),
        (", new targets", fresh(mine, before), "penalty", "feature-collision"),
    ):
        found = compared(cells, other, one)
        if found["interval"] is not None:
            low, high = found["interval"]
            interval = f"{low:.2f} to {high:.2f}"
            counts = [str(found[key]) for key in ("targets", "less", "more")]
            rows.append([TITLES[one] + title, TITLES[other], f"{found['mean_difference']:.2f}", interval, *counts])
    heads = ["method", "other", "the other needs more by", "95%", "targets", "needs less for", "needs more for"]
    return table(heads, rows)


def fresh(mine: Sequence[Kept], before: Sequence[Kept]) -> list[Kept]:
    """Return the cells without the targets of runs before the settings were chosen; none if there were no such runs."""
    seen = needed(before, "penalty")
    return [
        (settings, {**found, "targets": [one for one in found["targets"] if int(one["target"]) not in seen]})
        for settings, found in mine
        if seen
    ]


def choice_table(tried: Sequence[Kept], taken: Mapping[str, Any]) -> str:
    """The mean epsilon with each of the settings that were compared."""
    shown: list[Mapping[str, Any]] = list(CANDIDATES)
    shown += [settings["options"] for settings, _ in tried if settings["options"] not in shown]
    rows = []
    for options in shown:
        found = list(needed(chosen(tried, options=options), "penalty").values())
        mark = " (taken)" if options == taken else ""
        said = ", ".join(f"{key} {value if isinstance(value, str) else f'{value:g}'}" for key, value in options.items())
        rows.append([f"{said}{mark}", f"{statistics.fmean(found):.2f}" if found else "not run"])
    return table(["settings", "mean epsilon"], rows)


def method_table(kept: Sequence[Kept], before: Sequence[Kept] = ()) -> str:
    """Flipped targets, median epsilon and seconds of each method; of cells that had the GPU to themselves."""
    rows, targets = [], common(kept)
    shown = [(TITLES[method], method, kept) for method in METHODS]
    for options in CANDIDATES:
        title = "with the paper's settings" if options == PAPER else f"with {options}"
        shown.append((f"{TITLES['penalty']} {title}", "penalty", chosen(before, options=options)))
    for title, method, cells in shown:
        found = [epsilon for target, epsilon in needed(cells, method).items() if target in targets]
        if not found:
            continue
        shares = [f"{sum(e <= at for e in found) / len(found):.0%}" for at in (2, 4, 8, 16)]
        timed = [cell for _, cell in alone(chosen(cells, method=method))]
        count = sum(not one.get("skipped") for cell in timed for one in cell["targets"])
        each = f"{sum(cell['seconds'] for cell in timed) / count:.1f}" if count else ""
        flipped = f"{sum(e < BEYOND for e in found)} of {len(found)}"
        rows.append([title, flipped, f"{statistics.median(found):g}", *shares, each])
    return table(["method", "flipped", "median epsilon", "by 2", "by 4", "by 8", "by 16", "seconds a target"], rows)
