"""Figures of few-shot learning: accuracy as a run goes, tasks as images, unseen classes in two dimensions."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from bilevel.report.figures import ACCENT, STYLE, _inline, _legend

CELL, GAP = 34, 4
"""Pixels of a small image and between two fields of a task."""
FIELD = 2
"""Small images across and down in a field."""
MOST = 24
"""Letters of the name of a class in a legend; of a longer one, the last."""
RIGHT, WRONG, EMPTY = (110, 190, 130, 255), (225, 105, 95, 255), (128, 128, 128, 40)
"""With their opacity: the page behind a task is light or dark."""


def accuracies(name: str, rows: Sequence[Mapping[str, float]], *, label: str) -> Markup:
    """Accuracy in percent against step, with its 95% interval."""
    steps = [row["step"] for row in rows]
    middle, half = (np.array([100 * row[key] for row in rows]) for key in ("accuracy", "interval"))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        axes.fill_between(steps, middle - half, middle + half, color=ACCENT, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color=ACCENT, linewidth=2.0, marker="o", markersize=3)
        low, high = axes.get_ylim()
        axes.set(xlabel="step", ylabel="accuracy, percent", ylim=(max(low, 0.0), min(high, 100.5)))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(True)
        return _inline(figure, name, label)


def plane(name: str, points: NDArray[np.floating], classes: Sequence[str], *, label: str) -> Markup:
    """Points (n, 2), each in the colour and with the mark of its class."""
    known = list(dict.fromkeys(classes))
    colors, marks = matplotlib.colormaps["tab10"].colors, "os^Dv<>PX*"  # type: ignore[attr-defined]
    # Names are the user's, in any script: the page has them as text, and the browser has the fonts.
    style = {**STYLE, "svg.hashsalt": name, "svg.fonttype": "none"}
    with matplotlib.rc_context(style), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(5.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for i, title in enumerate(known):
            mine = points[[c == title for c in classes]]
            named = (title if len(title) <= MOST else f"…{title[1 - MOST :]}").replace("$", r"\$")
            named = f" {named}" if named.startswith("_") else named  # matplotlib leaves such a name out of the legend
            axes.plot(
                mine[:, 0],
                mine[:, 1],
                marks[i % 10],
                color=colors[i % 10],
                markersize=5,
                alpha=0.8,
                label=named,
                linestyle="none",
            )
        axes.set(xticks=[], yticks=[])
        _legend(figure)
        return _inline(figure, name, label)


def task_picture(
    support: NDArray[np.uint8], queries: NDArray[np.uint8], predictions: NDArray[np.integer], *, label: str
) -> Markup:
    """A task as a table of images.

    On the left and on top stands the first image to learn from of each class; a field has queries of the class on the
    left that were given to the class on top. `support` is (ways, height, width[, 3]), `queries` (ways, n, ...),
    `predictions` (ways, n).
    """
    ways = len(support)
    field = FIELD * CELL
    side = field + GAP
    sheet = np.zeros(((ways + 1) * side + GAP, (ways + 1) * side + GAP, 4), np.uint8)
    for i in range(ways):
        big = _fitted(support[i], field)
        _put(sheet, (i + 1) * side + GAP, GAP, big)
        _put(sheet, GAP, (i + 1) * side + GAP, big)
        for j in range(ways):
            there = np.flatnonzero(predictions[i] == j)
            color = EMPTY if not len(there) else RIGHT if i == j else WRONG
            top, left = (i + 1) * side + GAP, (j + 1) * side + GAP
            sheet[top : top + field, left : left + field] = color
            for place, query in enumerate(there[: FIELD * FIELD]):
                down, across = divmod(place, FIELD)
                small = _fitted(queries[i, query], CELL - 4)
                _put(sheet, top + down * CELL + 2, left + across * CELL + 2, small)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Markup(f'<img src="data:image/png;base64,{data}" alt="{escape(label)}" style="max-width:100%">')


def _fitted(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    image = Image.fromarray(picture).convert("RGBA").resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _put(sheet: NDArray[np.uint8], top: int, left: int, picture: NDArray[np.uint8]) -> None:
    height, width = picture.shape[:2]
    sheet[top : top + height, left : left + width] = picture
