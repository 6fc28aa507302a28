"""The page of the clean-label study: success against distortion, and the difference of the two methods by pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from scipy import stats

from ..whole import write_whole
from .clean_label import EPSILONS, LOWER_STEPS, METHODS, TITLES
from .denoising_numbers import chosen, values
from .figures import STYLE, _figure, _save
from .filed import Kept
from .markdown import table

BEYOND = EPSILONS[-1] + 1
"""What a target that no epsilon flips counts as in medians and differences."""
MAPS = {"inception": "Inception-V3", "small": "a small network, for a look on a CPU"}


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figures and the page; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"cells": len(kept)}
    parts = [
        "# One clean-label poison point for a target",
        "Written by `bilevel reproduce clean-label` (Section 3.4, Appendix E.4 and Figure 3 of the paper); all numbers "
        "are in `clean-label.json`, from which the command goes on. **The photographs are a stand-in**: dogs and fish "
        "of other sources than the paper's dog-fish set, which cannot be had.",
        "For each test photograph that the clean victim has right: the smallest epsilon of 1 to 16, in l2 over pixels "
        "in [-1, 1], at which one poison point flips it after training the last layer anew. The base is the nearest "
        "test photograph of the other class, in the features; the point keeps its label. Penalty solves Eq. 12 with "
        f"the collision term squared (Section 3.4), T = {LOWER_STEPS}, the bound as an inequality with a multiplier, "
        "the last layer in whitened coordinates; Algorithm 1 of Shafahi et al. has beta 0.1 and rate 0.01 and is "
        "projected into the same bound.",
    ]
    for name in values(kept, "features"):
        mine = chosen(kept, features=name)
        found = compared(mine)
        summary[name] = found
        figure = f"clean-label-{name}.png"
        success(mine, folder / figure)
        parts += [f"## {MAPS.get(name, name)}", _table(mine), sentence(found), f"![Success against epsilon]({figure})"]
    parts += ["## To run it again", "```bash\nbilevel reproduce clean-label --targets 60 --page docs/results\n```"]
    write_whole(folder / "clean-label.md", "\n\n".join(parts) + "\n")
    return summary


def needed(kept: Sequence[Kept], method: str) -> dict[int, int]:
    """The smallest epsilon of each target that was not skipped; BEYOND where none was enough."""
    return {
        int(settings["target"]): found["epsilon"] or BEYOND
        for settings, found in chosen(kept, method=method)
        if not found.get("skipped")
    }


def compared(kept: Sequence[Kept]) -> dict[str, Any]:
    """Medians, and the mean difference by pairs with its 95% confidence interval (Student's t)."""
    by_method = {method: needed(kept, method) for method in METHODS}
    both = sorted(set.intersection(*(set(found) for found in by_method.values())))
    gaps = [by_method["feature-collision"][t] - by_method["penalty"][t] for t in both]
    interval = None
    if len(gaps) > 1:
        spread = statistics.stdev(gaps) / len(gaps) ** 0.5 * float(stats.t.ppf(0.975, len(gaps) - 1))
        interval = [statistics.fmean(gaps) - spread, statistics.fmean(gaps) + spread]
    return {
        "targets": len(both), "mean_difference": statistics.fmean(gaps) if gaps else None, "interval": interval,
        "medians": {m: statistics.median([f[t] for t in both]) if both else None for m, f in by_method.items()},
    }  # fmt: skip


def sentence(found: Mapping[str, Any]) -> str:
    if found["interval"] is None:
        return f"{found['targets']} targets are too few to compare."
    low, high = found["interval"]
    text = (
        f"Over {found['targets']} targets, Algorithm 1 needs {found['mean_difference']:.2f} more epsilon than Penalty "
        f"in the mean (95% interval {low:.2f} to {high:.2f}); a target that was not flipped counts as {BEYOND}. "
    )
    verdict = "needs less" if low > 0 else "needs more" if high < 0 else "cannot be told from Algorithm 1 in"
    return text + f"Penalty {verdict} distortion."


def _table(kept: Sequence[Kept]) -> str:
    rows = []
    for method in METHODS:
        found = list(needed(kept, method).values())
        flipped = [e for e in found if e < BEYOND]
        shares = [f"{sum(e <= at for e in found) / len(found):.0%}" if found else "" for at in (2, 4, 8, 16)]
        median = f"{statistics.median(found):g}" if found else ""
        rows.append([TITLES[method], f"{len(flipped)} of {len(found)}", median, *shares])
    return table(["method", "flipped", "median epsilon", "by 2", "by 4", "by 8", "by 16"], rows)


@matplotlib.rc_context(STYLE)
def success(kept: Sequence[Kept], path: Path) -> None:
    """The share of targets that are flipped by each epsilon."""
    figure = _figure(4.4, 2.8)
    axes = figure.subplots()
    for method, color in zip(METHODS, ("#1f77b4", "#ff7f0e"), strict=True):
        found = list(needed(kept, method).values())
        if found:
            shares = [100 * sum(e <= at for e in found) / len(found) for at in EPSILONS]
            axes.plot(EPSILONS, shares, "o-", ms=3, lw=1.2, color=color, label=TITLES[method])
    axes.set(xlabel="epsilon, l2", ylabel="targets flipped, percent", ylim=(0, 102))
    axes.legend(frameon=False)
    _save(figure, path)
