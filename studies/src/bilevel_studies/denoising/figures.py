"""The figures of the denoising studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bilevel_studies.denoising.numbers import Numbers, chosen, numbers, percent, values
from bilevel_studies.denoising.speed import METHODS
from bilevel_studies.figures import STYLE, legend_above, new_figure, save_figure
from bilevel_studies.filed import Kept

COLORS = dict(zip(METHODS, ("#1f77b4", "#9467bd", "#ff7f0e"), strict=True))
TIMES = [factor * 10.0**power for power in range(-1, 5) for factor in (1, 2, 5)]
"""Where the axis of milliseconds may have a mark."""
LINES = {
    "accuracy": ("denoise", "#1f77b4"),
    "trusted": ("trusted set alone", "#2ca02c"),
    "plain": ("labels as they are", "#7f7f7f"),
}


@matplotlib.rc_context(STYLE)
def how_few(kept: Sequence[Kept], path: Path) -> None:
    """Accuracy (left) and AUC (right) against the number of trusted examples."""
    counts = sorted(values(kept, "trusted"))
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for key, (label, color) in LINES.items():
        line(left, counts, [percent(chosen(kept, trusted=n), key) for n in counts], color, label)
    for key, label, color in (("auc", "importance", "#9467bd"), ("auc_quality", "quality", "#d62728")):
        line(right, counts, [numbers(chosen(kept, trusted=n), key) for n in counts], color, label)
    left.set_ylabel("test accuracy, percent")
    right.set_ylabel("AUC of right against wrong labels")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="trusted examples")
        axes.set_xticks(counts, [f"{n:,}" for n in counts])
        axes.minorticks_off()
        axes.legend(frameon=False)
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def speed(kept: Sequence[Kept], path: Path) -> None:
    """Accuracies of the lower variable against seconds, each seed a line."""
    figure = new_figure(8.4, 2.8)
    cells = figure.subplots(1, 3)
    names = {"test": "test", "validation": "validation (trusted)", "train": "train (wrong labels among them)"}
    for axes, (key, title) in zip(cells, names.items(), strict=True):
        for name in METHODS:
            for i, (_, found) in enumerate(chosen(kept, method=name)):
                curves = found["curves"]
                x = [max(t, 0.05) for t in curves["seconds"]]
                y = [100 * value for value in curves[key]]
                axes.plot(x, y, color=COLORS[name], lw=1.2, label=name if not i else None)
        shown = [100 * value for _, found in kept for value in found["curves"][key][1:]]
        axes.set(xscale="log", xlabel="seconds", title=title)
        # A network at its first weights, at no time at all, is far below.
        axes.set_xlim(left=min(found["curves"]["seconds"][1] for _, found in kept) / 2)
        axes.set_ylim(min(shown) - 2, min(max(shown) + 2, 100.5))
    cells[0].set_ylabel("accuracy, percent")
    legend_above(figure, cells[0])
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def steps(kept: Sequence[Kept], path: Path) -> None:
    """The last accuracy (left) and the time of an upper iteration (right) against T."""
    counts = sorted(values(kept, "T"))
    figure = new_figure(7.2, 2.8)
    left, right = figure.subplots(1, 2)
    for name in METHODS:
        mine = chosen(kept, method=name)
        line(left, counts, [percent(chosen(mine, T=T)) for T in counts], COLORS[name], name)
        line(right, counts, [numbers(chosen(mine, T=T), "ms_per_step") for T in counts], COLORS[name], name)
    left.set_ylabel("test accuracy, percent")
    right.set_ylabel("ms per upper iteration")
    right.set_yscale("log")
    times = numbers(kept, "ms_per_step").values
    ticks = [at for at in TIMES if min(times) <= at <= max(times)]
    right.set_yticks(ticks, [f"{at:g}" for at in ticks])
    for axes in (left, right):
        axes.set(xscale="log", xlabel="T")
        axes.set_xticks(counts, [str(T) for T in counts])
        axes.minorticks_off()
    legend_above(figure, left)
    save_figure(figure, path)


def line(axes: Any, x: Sequence[float], found: Sequence[Numbers], color: str, label: str) -> None:
    """Means with their deviations, where there are values."""
    points = [(at, one.mean, one.deviation) for at, one in zip(x, found, strict=True) if one]
    if points:
        at, mean, spread = zip(*points, strict=True)
        axes.errorbar(at, mean, spread, fmt="o-", ms=3, capsize=2, lw=1.2, color=color, label=label)
