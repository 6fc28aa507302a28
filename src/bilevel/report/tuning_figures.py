"""Figures of a tuning: the penalty of each feature as a bar, and the grid that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from bilevel.report.figures import ACCENT, INK, STYLE, _inline, _legend

MOST_ALONE = 40
"""Bars up to which a list of them is short enough to be seen at a glance."""
MOST_LISTED = 1000
MOST_DRAWN = 400
LONGEST = 60
"""Characters of a name that are shown."""


def bars(name: str, names: Sequence[str], penalties: Sequence[float], *, label: str) -> Markup:
    """A bar for each penalty on a logarithmic scale, with its name and its number, the least penalised on top.

    The bars are text of the page, so that they are read on any screen. More than 40 are in a list to scroll through,
    below a figure of their shape; of more than 1,000, sorted, every few are listed.
    """
    order = np.argsort(penalties, kind="stable")
    values = np.asarray(penalties, dtype=float)
    shape = _shape(name, values[_some(order, MOST_DRAWN)], label) if len(order) > MOST_ALONE else ""
    listed = _some(order, MOST_LISTED)
    lengths = np.log(values / (values.min() / 2))
    rows = Markup("").join(
        Markup('<li><span title="{}">{}</span><i><b style="width:{:.1f}%"></b></i><span>{}</span></li>').format(
            names[i], _short(names[i]), 100 * lengths[i] / lengths.max(), _number(values[i])
        )
        for i in listed
    )
    scroll = Markup(' tabindex="0"') if shape else ""
    return shape + Markup('<ol class="bars" aria-label="{}"{}>{}</ol>').format(label, scroll, rows)


def _some(order: np.ndarray, most: int) -> np.ndarray:
    """As many of these at most, the first and the last among them."""
    found: np.ndarray = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), most)).round().astype(int))]
    return found


def _shape(name: str, values: np.ndarray, label: str) -> Markup:
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        base = values.min() / 2
        axes.barh(np.arange(len(values)), values - base, left=base, height=1.0, color=ACCENT)
        axes.set_xscale("log")
        axes.set(xlabel="penalty", ylabel="the least penalised on top", ylim=(len(values) - 0.4, -0.6))
        axes.set_yticks([])
        axes.grid(True, axis="x")
        axes.set_axisbelow(True)
        return _inline(figure, name, label)


def grid(name: str, points: Sequence[tuple[float, float]], tuned: float, *, label: str) -> Markup:
    """Validation loss against a single penalty, and that of the tuned penalties as a dashed line."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        axes.semilogx(
            *zip(*points, strict=True), color=INK, linewidth=1.4, marker="o", markersize=4, label="single penalties"
        )
        axes.axhline(tuned, color=ACCENT, linewidth=2.0, linestyle=(0, (4, 2)), label="tuned")
        axes.set(xlabel="penalty", ylabel="validation loss")
        axes.grid(True)
        _legend(figure)
        return _inline(figure, name, label)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.3g}"
