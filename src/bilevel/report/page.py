"""The page of a run: one HTML file that holds its style and figures and loads nothing.

A command fills a `Report`; `render` makes the page of it. All text is escaped; figures are `Html` from
`bilevel.report.figures`. The page of a training set with suspect labels is in `bilevel.report.review_page`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import numpy as np

from bilevel._util.checks import require
from bilevel.report.figures import Html

# Pairs (term, text).
Facts = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each row is its header."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Card:
    """A figure or a table, with the facts that belong to it."""

    title: str
    # `Html`; plain text is escaped.
    figure: str = ""
    facts: Facts = ()
    note: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Report:
    """The contents of a page, from the top."""

    title: str
    outcome: str
    good: bool
    table: Table
    cards: Sequence[Card]
    settings: Facts
    # The heading above the cards.
    heading: str = "Convergence"
    # One sentence above the cards: how to read the figures.
    legend: str = ""
    # Sentences above the table.
    notes: Sequence[str] = ()
    # More tables, below the first one.
    tables: Sequence[Table] = ()
    # Sentences below the tables.
    remarks: Sequence[str] = ()


def render(report: Report) -> str:
    """Return the page as text."""
    return fill("page.html", page=report, style=Html(read("style.css")))


def fill(template: str, **values: object) -> str:
    """Return a template with values in it; text is escaped, `Html` is not."""
    jinja2 = require("jinja2", "apps")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = unbroken
    text: str = environment.get_template(template).render(values)
    # The name of a file can hold bytes that are not text; the page has a question mark in their place.
    return text.encode("utf-8", "replace").decode("utf-8")


def unbroken(text: str) -> Html:
    """Return the text, escaped, without line breaks in the names of options: browsers break lines after hyphens."""
    return Html(re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="unbroken">\g<0></span>', escape(text)))


def read(name: str) -> str:
    """Return a file of the folder `templates`."""
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def cell_text(value: object) -> str:
    """Return the text of a value on a card: numbers with at most 6 digits.

    Whole numbers below 1e15 can be identifiers and keep all digits. None, NaN and pandas' marks for missing values give
    `missing`.
    """
    try:
        missing = value is None or bool(value != value)
    except (TypeError, ValueError):  # pandas.NA is neither equal to itself nor different
        missing = not isinstance(value, np.ndarray)
    if missing:
        return "missing"
    if not isinstance(value, (float, np.floating)):
        return str(value)
    number = float(value)
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:.6g}"
