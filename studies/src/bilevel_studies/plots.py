"""The figures of the studies, except the synthetic one: small images for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bilevel._util.atomic_files import atomic_write
from bilevel_studies.statistics import Numbers, chosen, numbers, percent, values
from bilevel_studies.study import Kept

COLORS = ("#1f77b4", "#9467bd", "#ff7f0e", "#2ca02c", "#7f7f7f", "#17becf")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 9,
    "lines.linewidth": 1.4,
}
# Panels in a row.
COLUMNS = 4


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, legend_of: Any = None) -> None:
    """Write a PNG, because an SVG with the thin lines of all trials would be large.

    `legend_of` are axes whose legend is put above the figure.
    """
    if legend_of is not None:
        handles, labels = legend_of.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def line(axes: Any, x: Sequence[float], found: Sequence[Numbers], color: str, label: str) -> None:
    """Draw means with their deviations, if there are values."""
    points = [(at, one.mean, one.deviation) for at, one in zip(x, found, strict=True) if one]
    if points:
        at, mean, spread = zip(*points, strict=True)
        axes.errorbar(at, mean, spread, fmt="o-", ms=3, capsize=2, lw=1.2, color=color, label=label)


@matplotlib.rc_context(STYLE)
def against_lower_steps(
    kept: Sequence[Kept], by: str, titles: Mapping[str, str], path: Path, *, log: bool = False
) -> None:
    """Draw the last accuracy and, if it was measured, the time of an upper step against T, a line for each method."""
    counts = sorted(values(kept, "T"))
    panels = [("accuracy", 100.0, "test accuracy, percent")]
    panels += [("ms_per_step", 1.0, "ms per upper step")] if numbers(kept, "ms_per_step") else []
    figure = new_figure(3.6 * len(panels), 2.8)
    cells: list[Any] = list(figure.subplots(1, len(panels), squeeze=False).ravel())
    shown = [name for name in titles if chosen(kept, **{by: name})]
    for axes, (key, scale, label) in zip(cells, panels, strict=True):
        for name, color in zip(shown, COLORS, strict=False):
            mine = chosen(kept, **{by: name})
            line(axes, counts, [numbers(chosen(mine, T=T), key, scale) for T in counts], color, titles[name])
        axes.set(xlabel="T", ylabel=label, xscale="log" if log else "linear")
        axes.set_xticks(counts, [str(T) for T in counts])
        axes.minorticks_off()
    save_figure(figure, path, legend_of=cells[0])


@matplotlib.rc_context(STYLE)
def images(columns: Sequence[Sequence[Any]], path: Path, titles: Sequence[str] = ()) -> None:
    """Draw images, each column under its title."""
    figure = new_figure(0.9 * len(columns), 0.95 * len(columns[0]))
    places = figure.subplots(len(columns[0]), len(columns), squeeze=False)
    for i, column in enumerate(columns):
        for axes, image in zip(places[:, i], column, strict=True):
            axes.imshow(image, cmap="gray", vmin=0, vmax=255)
            axes.set_axis_off()
        if titles:
            places[0, i].set_title(titles[i], fontsize=8)
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def success(found: Mapping[str, Iterable[int]], epsilons: Sequence[int], path: Path) -> None:
    """Draw the share of targets that each epsilon flips, by method."""
    figure = new_figure(4.4, 2.8)
    axes = figure.subplots()
    for (title, needed), color in zip(found.items(), COLORS, strict=False):
        known = list(needed)
        shares = [100 * sum(epsilon <= at for epsilon in known) / len(known) for at in epsilons]
        axes.plot(epsilons, shares, "o-", ms=3, lw=1.2, color=color, label=title)
    axes.set(xlabel="epsilon, l2", ylabel="targets flipped, percent", ylim=(0, 102))
    axes.legend(frameon=False)
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def how_few(kept: Sequence[Kept], path: Path) -> None:
    """Draw accuracy (left) and AUC (right) against the number of trusted examples."""
    counts = sorted(values(kept, "trusted"))
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    lines = {"accuracy": "denoise", "trusted": "trusted set only", "plain": "labels as they are"}
    for (key, label), color in zip(lines.items(), COLORS, strict=False):
        line(left, counts, [percent(chosen(kept, trusted=n), key) for n in counts], color, label)
    for (key, label), color in zip({"auc": "importance", "auc_quality": "quality"}.items(), COLORS, strict=False):
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
def curves(
    panels: Mapping[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]],
    path: Path,
    x: str,
    y: str = "accuracy, percent",
    *,
    log: bool = False,
) -> None:
    """Draw lines of (label, x, y), a panel for each title; the same label has the same color everywhere."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(2.6 * columns + 0.4, 2.5 * rows + 0.3)
    cells: list[Any] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    labels = list(dict.fromkeys(label for lines in panels.values() for label, _, _ in lines))
    for axes, (title, lines) in zip(cells, panels.items(), strict=False):
        seen: set[str] = set()
        for label, at, value in lines:
            axes.plot(at, value, lw=1.2, color=COLORS[labels.index(label)], label=None if label in seen else label)
            seen.add(label)
        axes.set(xlabel=x, title=title)
        if log:
            axes.set(xscale="log", yscale="log")
    for axes in cells[len(panels) :]:
        axes.set_axis_off()
    cells[0].set_ylabel(y)
    save_figure(figure, path, legend_of=max(cells, key=lambda axes: len(axes.get_legend_handles_labels()[1])))
