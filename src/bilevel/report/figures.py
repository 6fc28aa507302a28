"""Figures as inline SVG. Colours come from the page (`currentColor`, `--accent`), so that they suit light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, ACCENT = "#010203", "#040506"
"""Stand-ins that matplotlib draws with; the SVG has the page's colours in their place."""
FLOOR = 1e-17
"""Where an exact zero is drawn on a logarithmic axis."""
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.spines.right": False, "axes.spines.top": False,
    "font.size": 10, "grid.alpha": 0.15, "grid.color": INK, "svg.fonttype": "path", "text.color": INK,
    "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


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
