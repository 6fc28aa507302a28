"""The figures of the poisoning study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from bilevel_studies.denoising.figures import COLORS, line
from bilevel_studies.denoising.numbers import chosen, numbers, percent
from bilevel_studies.figures import STYLE, new_figure, save_figure
from bilevel_studies.filed import Kept
from bilevel_studies.poisoning.study import COLUMNS, LOWER_STEPS

SIDE = 28


@matplotlib.rc_context(STYLE)
def points(pictures: Mapping[str, Any], path: Path) -> None:
    """Points above their bases, each under its label."""
    labels = pictures["labels"]
    figure = new_figure(0.8 * len(labels), 1.9)
    cells = figure.subplots(2, len(labels))
    for row, name in enumerate(("poison", "base")):
        for column, (pixels, label) in enumerate(zip(pictures[name], labels, strict=True)):
            axes = cells[row, column]
            axes.imshow(np.array(pixels, dtype=np.uint8).reshape(SIDE, SIDE), cmap="gray", vmin=0, vmax=255)
            axes.set_axis_off()
            if row == 0:
                axes.set_title(str(label), fontsize=8)
    save_figure(figure, path)


@matplotlib.rc_context(STYLE)
def effect(kept: Sequence[Kept], path: Path) -> None:
    """The last accuracy (left) and the time of an upper step (right) against T."""
    figure = new_figure(7.2, 2.8)
    left, right = figure.subplots(1, 2)
    for column, color in zip(("penalty", "approx-grad"), COLORS.values(), strict=False):
        mine = chosen(kept, column=column)
        line(left, LOWER_STEPS, [percent(chosen(mine, T=T)) for T in LOWER_STEPS], color, COLUMNS[column])
        times = [numbers(chosen(mine, T=T), "ms_per_step") for T in LOWER_STEPS]
        line(right, LOWER_STEPS, times, color, COLUMNS[column])
    left.set_ylabel("test accuracy, percent")
    right.set_ylabel("ms per upper step")
    for axes in (left, right):
        axes.set(xlabel="T")
        axes.set_xticks(LOWER_STEPS)
        axes.legend(frameon=False)
    save_figure(figure, path)
