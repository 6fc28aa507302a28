"""The figures of the few-shot study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bilevel_studies.denoising.numbers import chosen
from bilevel_studies.few_shot.study import LOWER_STEPS, METHODS
from bilevel_studies.figures import STYLE, legend_above, new_figure, save_figure
from bilevel_studies.filed import Kept

COLORS = dict(zip(METHODS, ("#1f77b4", "#7f7f7f", "#17becf", "#ff7f0e", "#9467bd", "#2ca02c"), strict=True))


@matplotlib.rc_context(STYLE)
def curves(kept: Sequence[Kept], path: Path) -> None:
    """Accuracy on unseen classes against seconds of training, a panel for each kind of task."""
    places = list(dict.fromkeys((s["dataset"], s["backbone"], s["ways"], s["shots"]) for s, _ in kept))
    columns = min(4, len(places))
    rows = -(-len(places) // columns)
    figure = new_figure(2.6 * columns + 0.4, 2.5 * rows + 0.3)
    cells: list[Any] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes, (dataset, backbone, ways, shots) in zip(cells, places, strict=False):
        some = chosen(kept, dataset=dataset, backbone=backbone, ways=ways, shots=shots)
        for method, title in METHODS.items():
            for _, found in chosen(some, method=method):
                x, y = zip(*((row["seconds"], 100 * row["accuracy"]) for row in found["curve"]), strict=True)
                axes.plot(x, y, "o-", ms=2.5, color=COLORS[method], label=title)
        axes.set(xlabel="seconds", title=f"{dataset}, {ways}-way {shots}-shot" + (", resnet" * (backbone == "resnet")))
    for axes in cells[len(places) :]:
        axes.set_axis_off()
    cells[0].set_ylabel("accuracy, percent")
    most = max(range(len(places)), key=lambda i: len(cells[i].get_legend_handles_labels()[1]))
    legend_above(figure, cells[most])
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def effect(kept: Sequence[Kept], path: Path) -> None:
    """Accuracy and, where it was measured, the time of an upper step against T."""
    measured = [pair for pair in kept if pair[1]["ms_per_step"] is not None]
    panels = [("accuracy", 100, kept, "accuracy, percent")]
    panels += [("ms_per_step", 1, measured, "ms per upper step")] if measured else []
    figure = new_figure(3.2 * len(panels), 2.6)
    cells: list[Any] = list(figure.subplots(1, len(panels), squeeze=False).ravel())
    for axes, (key, factor, some, label) in zip(cells, panels, strict=True):
        for method, title in METHODS.items():
            mine = sorted(chosen(some, method=method), key=lambda pair: pair[0]["T"])
            if mine:
                x, y = [s["T"] for s, _ in mine], [factor * found[key] for _, found in mine]
                axes.plot(x, y, "o-", color=COLORS[method], label=title)
        axes.set(xlabel="T", ylabel=label, xticks=LOWER_STEPS)
    legend_above(figure, cells[0])
    save_figure(figure, path)
