"""What `bilevel compare` shows: a table in the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from bilevel._util.atomic_files import whole
from bilevel._util.text import counted
from bilevel.applications.comparison.compare import METHODS


def show(result: Mapping[str, Any]) -> None:
    """One table, or two where one is too wide for the terminal, and what the columns do not say."""
    console = Console()
    ((unit, most),) = result["budget"].items()
    title = f"{result['problem']}, {counted(result['trials'], 'start')}, {most:,} {unit}"
    if result["trials"] > 1:
        title += "; means over the starts"
    known = result["measure"] == "error"
    ends: dict[str, list[str]] = {"Error": [f"{row['error']:.1e}" for row in result["methods"]]} if known else {}
    ends |= {
        "f": [f"{row['upper']:.4g}" for row in result["methods"]],
        "|grad_v g|": [f"{row['residual']:.1e}" for row in result["methods"]],
        "Ended": [row["status"] for row in result["methods"]],
    }
    took = {
        "Evaluations": [f"{row['evaluations']:,.0f}" for row in result["methods"]],
        "Steps": [f"{row['steps']:,.0f}" for row in result["methods"]],
        "Seconds": [f"{row['seconds']:.1f}" for row in result["methods"]],
    }
    names = [row["method"] for row in result["methods"]]
    both = _table(title, names, ends | took)
    wide = Measurement.get(console, console.options.update_width(10_000), both).maximum
    if not console.is_terminal:
        console.width = max(console.width, wide)  # a pipe has no width
    if wide <= console.width:
        console.print(both)
    else:
        console.print(_table(title, names, ends))
        console.print(_table("", names, took))


def _table(title: str, names: Sequence[str], columns: dict[str, list[str]]) -> Table:
    """Numbers stay whole; a long name goes on in the next line."""
    table = Table(title=title or None)
    table.add_column("Method", overflow="fold", min_width=max(map(len, METHODS)))
    for head in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for cells in zip(names, *columns.values(), strict=True):
        table.add_row(*cells)
    return table


def draw(result: Mapping[str, Any], image: Path) -> None:
    """Plot the error, or f, of every method against evaluations of g."""
    style: dict[Any, Any] = {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for row in result["methods"]:
            x, y = zip(*row["curve"], strict=True)
            axes.plot(x, y, label=row["method"], marker="o" if len(x) < 3 else None, ms=3)
        if result["measure"] == "error":
            axes.set_yscale("log")
        axes.set(
            xlabel="evaluations of g",
            ylabel=result["measure"],
            title=result["problem"],
        )
        axes.legend(frameon=False)
        with whole(image) as temporary:
            figure.savefig(temporary, dpi=110, format=image.suffix[1:])
