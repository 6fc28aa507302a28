"""Figures of a tuning: the penalty of each feature as a bar, and the grid that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from .figures import ACCENT, INK, STYLE, _inline, _legend

MOST_NAMED = 40
"""Bars up to which each has its name beside it."""
MOST_BARS = 400
LONGEST = 28
"""Characters of a name that are shown."""


def bars(name: str, names: Sequence[str], penalties: Sequence[float], *, label: str) -> Markup:
    """A bar for each penalty on a logarithmic axis, the least penalised on top.

    Of more than 400 penalties, sorted, every few are drawn, so that the shape stays.
    """
    order = np.argsort(penalties, kind="stable")
    kept = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_BARS)).round().astype(int))]
    values = np.asarray(penalties, dtype=float)[kept]
    named = len(kept) <= MOST_NAMED and len(kept) == len(order)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        height = max(1.6, 0.22 * len(kept) + 0.8) if named else 4.2
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        base = values.min() / 2
        axes.barh(np.arange(len(kept)), values - base, left=base, height=0.8 if named else 1.0, color=ACCENT)
        axes.set_xscale("log")
        axes.set(xlabel="penalty", ylim=(len(kept) - 0.4, -0.6))
        if named:
            axes.set_yticks(np.arange(len(kept)), [_short(names[i]) for i in kept], fontsize=8)
        else:
            axes.set(ylabel="features, the least penalised on top")
            axes.set_yticks([])
        axes.grid(True, axis="x")
        axes.set_axisbelow(True)
        return _inline(figure, name, label)


def grid(name: str, points: Sequence[tuple[float, float]], tuned: float, *, label: str) -> Markup:
    """Validation loss against a single penalty, and that of the tuned penalties as a dashed line."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        axes.semilogx(*zip(*points, strict=True), color=INK, linewidth=1.4, marker="o", markersize=4,
                      label="single penalties")  # fmt: skip
        axes.axhline(tuned, color=ACCENT, linewidth=2.0, linestyle=(0, (4, 2)), label="tuned")
        axes.set(xlabel="penalty", ylabel="validation loss")
        axes.grid(True)
        _legend(figure)
        return _inline(figure, name, label)


def _short(text: str) -> str:
    shown = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return shown.replace("$", r"\$")  # matplotlib would read mathematics
