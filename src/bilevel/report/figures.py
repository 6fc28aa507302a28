"""The figures of the pages, as inline SVG, pictures or lists.

Colours come from the page (`currentColor`, `--accent`), so that figures suit light and dark. In every function `name`
is a prefix that keeps the identifiers of an SVG unique on the page, and `label` is the text for screen readers.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel._util.checks import require
from bilevel.errors import OptionError

# Stand-ins that matplotlib draws with; the SVG gets the page's colours in their place.
INK, ACCENT = "#010203", "#040506"
# The most points of a curve, and bars of a shape; more would not be visible.
POINTS = 400
# The ratio of the largest to the smallest loss above which the axis is logarithmic.
SPREAD = 50
BINS = 25
# The most bars without a figure of their shape, and the most bars that are listed.
MOST_ALONE, MOST_LISTED = 40, 1000
# The most characters of a name that are shown next to a bar.
LONGEST = 60
# Pixels of a small image and between two fields of a task; small images across and down in a field.
CELL, GAP, FIELD = 34, 4, 2
# The most characters of the name of a class in a legend; of a longer name, the last ones are shown.
MOST = 24
# Colours of a field, with their opacity: the page behind a task is light or dark.
RIGHT, WRONG, EMPTY = (110, 190, 130, 255), (225, 105, 95, 255), (128, 128, 128, 40)
GREY = 128
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
# (height, width), (height, width, 3) or (height, width, 4).
Picture = NDArray[np.uint8]


class Html(str):
    """HTML that a template does not escape."""

    def __html__(self) -> str:
        return self


def losses(
    name: str, curves: Mapping[str, Sequence[float]], step: Sequence[float] | None = None, *, label: str
) -> Html:
    """Draw losses against step: the first curve thick, the second dashed. A value that is not finite leaves a gap."""
    values = {title: np.asarray(curve, dtype=float) for title, curve in curves.items()}
    values = {title: np.where(np.isfinite(curve), curve, np.nan) for title, curve in values.items()}
    length = min(len(curve) for curve in values.values())
    steps = np.arange(1, length + 1) if step is None or len(step) < length else np.asarray(step[:length], dtype=float)
    kept = _some(np.arange(length), POINTS)
    every = np.concatenate([curve[np.isfinite(curve)] for curve in values.values()])
    looks = ({"color": ACCENT, "linewidth": 2.2}, {"color": INK, "linewidth": 1.4, "linestyle": (0, (4, 2))})

    def draw(axes: Any) -> None:
        for (title, curve), look in zip(values.items(), looks, strict=False):
            axes.plot(steps[kept], curve[kept], label=title, **look)
        axes.set(xlabel="step", ylabel="loss", xlim=(steps[0], max(steps[-1], steps[0] + 1)))
        if every.size and every.min() > 0 and every.max() > SPREAD * every.min():
            axes.set_yscale("log")

    return drawn(name, label, draw, whole="x")


def importances(
    name: str, values: NDArray[np.floating[Any]], suspected: NDArray[np.floating[Any]], *, label: str
) -> Html:
    """Draw how many examples have which importance: the suspects in colour, the others above them in grey."""
    edges = np.linspace(0, 1, BINS + 1)
    low, total = (np.histogram(np.clip(given, 0, 1), edges)[0] for given in (suspected, values))
    place: dict[str, Any] = {"x": edges[:-1], "width": 0.9 / BINS, "align": "edge"}

    def draw(axes: Any) -> None:
        axes.bar(height=low, color=ACCENT, label="suspects", **place)
        axes.bar(height=np.maximum(total - low, 0), bottom=low, color=INK, alpha=0.3, label="other examples", **place)
        axes.set(xlabel="importance", ylabel="examples", xlim=(0, 1), ylim=(0, 1.05 * max(total.max(), 1)))

    return drawn(name, label, draw, grid="y", whole="y")


def bars(name: str, names: Sequence[str], penalties: Sequence[float], *, label: str) -> Html:
    """Return a list with a bar for each penalty on a logarithmic scale, its name and its number, the smallest on top.

    The bars are text of the page, to be readable on any screen. More than 40 are in a list to scroll through, below a
    figure of their shape; of more than 1,000, an evenly spread selection is listed.
    """
    order = np.argsort(penalties, kind="stable")
    shown = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in names]
    values = np.asarray(penalties, dtype=float)
    shape = _shape(name, values[_some(order, POINTS)], label) if len(order) > MOST_ALONE else ""
    lengths = np.log(values / (values.min() / 2))
    rows = [
        f'<li><span title="{escape(names[i])}">{escape(shown[i])}</span>'
        f'<i><b style="width:{100 * lengths[i] / lengths.max():.1f}%"></b></i><span>{_number(values[i])}</span></li>'
        for i in _some(order, MOST_LISTED)
    ]
    scroll = ' tabindex="0"' if shape else ""
    return Html(f'{shape}<ol class="bars" aria-label="{escape(label)}"{scroll}>{"".join(rows)}</ol>')


def _shape(name: str, values: np.ndarray, label: str) -> Html:
    base = values.min() / 2

    def draw(axes: Any) -> None:
        axes.barh(np.arange(len(values)), values - base, left=base, height=1.0, color=ACCENT)
        axes.set_xscale("log")
        axes.set(xlabel="penalty", ylabel="the smallest penalty on top", ylim=(len(values) - 0.4, -0.6), yticks=[])

    return drawn(name, label, draw, grid="x", legend=False)


def grid(name: str, points: Sequence[tuple[float, float]], tuned: float, *, label: str) -> Html:
    """Draw validation loss against a single penalty, and the loss of the tuned penalties as a dashed line."""

    def draw(axes: Any) -> None:
        look = {"color": INK, "linewidth": 1.4, "marker": "o", "markersize": 4}
        axes.semilogx(*zip(*points, strict=True), label="single penalties", **look)
        axes.axhline(tuned, color=ACCENT, linewidth=2.0, linestyle=(0, (4, 2)), label="tuned")
        axes.set(xlabel="penalty", ylabel="validation loss")

    return drawn(name, label, draw)


def accuracies(name: str, rows: Sequence[Mapping[str, float]], *, label: str) -> Html:
    """Draw accuracy in percent against step, with its 95% interval; `rows` have `step`, `accuracy`, `interval`."""
    steps = [row["step"] for row in rows]
    middle, half = (np.array([100 * row[key] for row in rows]) for key in ("accuracy", "interval"))

    def draw(axes: Any) -> None:
        axes.fill_between(steps, middle - half, middle + half, color=ACCENT, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color=ACCENT, linewidth=2.0, marker="o", markersize=3)
        low, high = axes.get_ylim()
        axes.set(xlabel="step", ylabel="accuracy, percent", ylim=(max(low, 0.0), min(high, 100.5)))

    return drawn(name, label, draw, whole="x", legend=False)


def plane(name: str, points: NDArray[np.floating], classes: Sequence[str], *, label: str) -> Html:
    """Draw points (n, 2), each with the colour and the mark of its class."""

    def draw(axes: Any) -> None:
        colors = require("matplotlib", "apps").colormaps["tab10"].colors
        for i, title in enumerate(dict.fromkeys(classes)):
            mine = points[[c == title for c in classes]]
            named = (title if len(title) <= MOST else f"…{title[1 - MOST :]}").replace("$", r"\$")
            named = f" {named}" if named.startswith("_") else named  # matplotlib leaves such a name out of the legend
            look = {"color": colors[i % 10], "markersize": 5, "alpha": 0.8, "label": named, "linestyle": "none"}
            axes.plot(mine[:, 0], mine[:, 1], "os^Dv<>PX*"[i % 10], **look)
        axes.set(xticks=[], yticks=[])

    # Names are the user's, in any script: the page has them as text, and the browser has the fonts.
    return drawn(name, label, draw, size=(5.2, 4.6), grid=None, style={"svg.fonttype": "none"})


def task_picture(support: Picture, queries: Picture, predictions: NDArray[np.integer], *, label: str) -> Html:
    """Return a task as a table of images.

    The first image to learn from of each class is on the left and on top. A field has the queries of the class on the
    left that were predicted as the class on top. `support` is (ways, height, width[, 3]), `queries` (ways, n, ...),
    `predictions` (ways, n).
    """
    ways, field = len(support), FIELD * CELL
    side = field + GAP
    sheet = np.zeros(((ways + 1) * side + GAP, (ways + 1) * side + GAP, 4), np.uint8)
    for i in range(ways):
        _put(sheet, (i + 1) * side + GAP, GAP, support[i], field)
        _put(sheet, GAP, (i + 1) * side + GAP, support[i], field)
        for j in range(ways):
            there = np.flatnonzero(predictions[i] == j)
            color = EMPTY if not len(there) else RIGHT if i == j else WRONG
            top, left = (i + 1) * side + GAP, (j + 1) * side + GAP
            sheet[top : top + field, left : left + field] = color
            for place, query in enumerate(there[: FIELD * FIELD]):
                down, across = divmod(place, FIELD)
                _put(sheet, top + down * CELL + 2, left + across * CELL + 2, queries[i, query], CELL - 4)
    return Html(f'<img src="{image(sheet)}" alt="{escape(label)}" style="max-width:100%">')


def _put(sheet: Picture, top: int, left: int, picture: Picture, side: int) -> None:
    """Put a square thumbnail on the sheet."""
    opaque = np.asarray(require("PIL.Image", "apps").fromarray(picture).convert("RGBA"))
    sheet[top : top + side, left : left + side] = resized(opaque, side, side)


def amplification(pairs: Sequence[tuple[Picture, Picture]]) -> float:
    """Return the factor 1, 2, 5, 10, ... by which the largest difference of (before, after) fills the range."""
    largest = max(
        (int(np.abs(np.subtract(after, before, dtype=np.int64)).max(initial=0)) for before, after in pairs), default=0
    )
    steps = [a * 10.0**b for b in range(4) for a in (1, 2, 5)]
    return max((step for step in steps if largest and step * largest <= GREY), default=1.0)


def comparison(title: str, pair: tuple[Picture, Picture], factor: float) -> Html:
    """Return a pair of pictures, base and poison, and their difference times `factor`; grey means no change."""
    before, after = pair
    if before.shape != after.shape or before.dtype != np.uint8 or after.dtype != np.uint8:
        raise OptionError(f"base and poison must be uint8 of one shape; got {before.shape}, {after.shape}.")
    apart = np.clip(GREY + factor * np.subtract(after, before, dtype=np.int64), 0, 255).astype(np.uint8)
    return pictures({"base": before, "poison": after, "difference": apart}, title)


def pictures(named: Mapping[str, Picture], title: str) -> Html:
    """Return pictures in a row, each with its name below it."""
    found = [
        f'<figure><img src="{image(picture)}" alt="{escape(f"{name} of {title}")}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for name, picture in named.items()
    ]
    return Html(f'<div class="pictures">{"".join(found)}</div>')


def image(picture: Picture, *, jpeg: bool = False) -> str:
    """Return a picture as the address of a PNG or JPEG that the page holds."""
    buffer, kind = io.BytesIO(), "jpeg" if jpeg else "png"
    options = {"quality": 85, "subsampling": 0} if jpeg else {"compress_level": 9}
    require("PIL.Image", "apps").fromarray(picture).save(buffer, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def resized(picture: Picture, width: int, height: int) -> Picture:
    """Return a picture at another size."""
    pillow = require("PIL.Image", "apps")
    return np.asarray(pillow.fromarray(picture).resize((width, height), pillow.Resampling.LANCZOS))


def _some(order: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` elements, evenly spread, including the first and the last."""
    found: np.ndarray = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), most)).round().astype(int))]
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.3g}"


def drawn(
    name: str,
    label: str,
    draw: Callable[[Any], None],
    *,
    size: tuple[float, float] = (4.0, 3.7),
    grid: str | None = "both",
    whole: str = "",
    legend: bool = True,
    style: Mapping[str, str] | None = None,
) -> Html:
    """Return a figure as an <svg> element, which `draw(axes)` draws.

    `size` is in inches. `grid` is x, y, both or None. The ticks of the axis `whole`, x or y, are whole numbers
    (default: neither axis). `legend` shows a legend above the axes. `style` changes settings of matplotlib.
    """
    matplotlib, canvas = require("matplotlib", "apps"), require("matplotlib.backends.backend_svg", "apps")
    buffer = io.StringIO()
    context = {**STYLE, "svg.hashsalt": name, **(style or {})}
    with matplotlib.rc_context(context), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a script that matplotlib's font does not have
        figure = require("matplotlib.figure", "apps").Figure(figsize=size, layout="constrained")
        canvas.FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(axes)
        if whole:
            locator = require("matplotlib.ticker", "apps").MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])
            getattr(axes, f"{whole}axis").set_major_locator(locator)
        if legend:
            figure.legend(loc="outside upper left", ncols=2, frameon=False, borderaxespad=0, handlelength=1.6)
        if grid is not None:
            axes.grid(True, axis=grid)
            axes.set_axisbelow(True)
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), name, label)


def _inline(svg: str, name: str, label: str) -> Html:
    """Return the <svg> element without prologue, fixed size and address, and with a prefix for its identifiers."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    box = "".join(re.findall(r'viewBox="[^"]*"', svg)[:1])
    opening = f'<svg {box} role="img" aria-label="{escape(label)}">'
    svg = re.sub(r"^<svg[^>]*>", lambda _: opening, svg)
    prefix = re.sub(r"[^a-zA-Z0-9-]", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-")
    return Html(svg.replace(INK, "currentColor").replace(ACCENT, "var(--accent)"))
