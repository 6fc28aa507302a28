"""Figures as inline SVG. Colours come from the page (`currentColor`, `--accent`), so that they suit light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

INK, ACCENT = "#010203", "#040506"
"""Stand-ins that matplotlib draws with; the SVG has the page's colours in their place."""
FLOOR = 1e-17
"""Where an exact zero is drawn on a logarithmic axis."""
POINTS = 400
"""Points of a curve at most: the figure is no finer."""
SPREAD = 50
"""The ratio of the largest to the smallest loss from which the axis is logarithmic."""
BINS = 25
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "svg.fonttype": "path",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def convergence(name: str, curves: Sequence[Sequence[float]], *, goal: float, label: str) -> Markup:
    """Error against step on a logarithmic axis: every curve thin, their median thick, the goal dashed.

    A curve that ends early keeps its last value. `name` sets the SVG's identifiers apart from those of others on the
    page; `label` is what a screen reader says.
    """
    length = max(len(curve) for curve in curves)
    padded = [[*curve, *[curve[-1]] * (length - len(curve))] for curve in curves]
    values = np.maximum(np.array(padded, dtype=float), FLOOR)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        axes = figure.subplots()
        for curve in curves:
            axes.semilogy(np.maximum(curve, FLOOR), color=ACCENT, linewidth=0.8, alpha=0.35)
        axes.semilogy(np.median(values, axis=0), color=ACCENT, linewidth=2.4)
        axes.axhline(goal, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
        axes.set(xlabel="step", ylabel="error", xlim=(0, max(length - 1, 1)))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        axes.grid(True)
        return _inline(figure, name, label)


def losses(
    name: str, curves: Mapping[str, Sequence[float]], step: Sequence[float] | None = None, *, label: str
) -> Markup:
    """Losses against step: the first curve thick, the second dashed. A value that is not finite leaves a gap."""
    values = {title: np.asarray(curve, dtype=float) for title, curve in curves.items()}
    values = {title: np.where(np.isfinite(curve), curve, np.nan) for title, curve in values.items()}
    length = min(len(curve) for curve in values.values())
    steps = np.arange(1, length + 1) if step is None or len(step) < length else np.asarray(step[:length], dtype=float)
    kept = np.unique(np.linspace(0, length - 1, min(length, POINTS)).round().astype(int))
    every = np.concatenate([curve[np.isfinite(curve)] for curve in values.values()])
    spread = every.size > 0 and every.min() > 0 and every.max() > SPREAD * every.min()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        looks: tuple[dict[str, Any], ...]
        looks = ({"color": ACCENT, "linewidth": 2.2}, {"color": INK, "linewidth": 1.4, "linestyle": (0, (4, 2))})
        for (title, curve), look in zip(values.items(), looks, strict=False):
            axes.plot(steps[kept], curve[kept], label=title, **look)
        axes.set(xlabel="step", ylabel="loss", xlim=(steps[0], max(steps[-1], steps[0] + 1)))
        if spread:
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        axes.grid(True)
        _legend(figure)
        return _inline(figure, name, label)


def importances(
    name: str, values: NDArray[np.floating[Any]], suspected: NDArray[np.floating[Any]], *, label: str
) -> Markup:
    """How many examples have which importance: the suspects in colour, the others above them in grey."""
    edges = np.linspace(0, 1, BINS + 1)
    low, all_of_them = (np.histogram(np.clip(given, 0, 1), edges)[0] for given in (suspected, values))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.0, 3.7), layout="constrained")
        axes = figure.subplots()
        place: dict[str, Any] = {"x": edges[:-1], "width": 0.9 / BINS, "align": "edge"}
        axes.bar(height=low, color=ACCENT, label="suspects", **place)
        rest = np.maximum(all_of_them - low, 0)
        axes.bar(height=rest, bottom=low, color=INK, alpha=0.3, label="other examples", **place)
        axes.set(xlabel="importance", ylabel="examples", xlim=(0, 1), ylim=(0, 1.05 * max(all_of_them.max(), 1)))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(True, axis="y")
        axes.set_axisbelow(True)
        _legend(figure)
        return _inline(figure, name, label)


def _legend(figure: Figure) -> None:
    """Above the axes, where it hides nothing."""
    figure.legend(loc="outside upper left", ncols=2, frameon=False, borderaxespad=0, handlelength=1.6)


def _inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an <svg> element of its own: no prologue, no fixed size, no address, identifiers with a prefix."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    box = "".join(re.findall(r'viewBox="[^"]*"', svg)[:1])
    opening = f'<svg {box} role="img" aria-label="{escape(label)}">'
    svg = re.sub(r"^<svg[^>]*>", lambda _: opening, svg)
    prefix = re.sub(r"[^a-zA-Z0-9-]", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-")
    return Markup(svg.replace(INK, "currentColor").replace(ACCENT, "var(--accent)"))
