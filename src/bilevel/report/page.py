"""The page of a run: one HTML file that holds its style and figures and loads nothing.

A command fills a `Report`; `render` makes the page of it. All text is escaped; figures are SVG from `figures`.
`review` has the page of a training set with suspect labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from bilevel.report.figures import convergence

__all__ = ["Card", "Report", "Table", "convergence", "render"]

Facts = Sequence[tuple[str, str]]
"""Pairs (term, text)."""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each is its header."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Card:
    """A figure with the facts that belong to it."""

    title: str
    figure: Markup
    facts: Facts = ()
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What a page shows, from the top."""

    title: str
    outcome: str
    good: bool
    table: Table
    cards: Sequence[Card]
    settings: Facts
    heading: str = "Convergence"
    """What stands above the cards."""
    legend: str = ""
    """One sentence above the cards: how to read the figures."""
    notes: Sequence[str] = ()


def render(report: Report) -> str:
    """The page as text."""
    return fill("page.html", page=report, style=Markup(read("style.css")))


def fill(template: str, **values: object) -> str:
    """A template of this folder with values in it; text is escaped, `Markup` is not."""
    environment = Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = unbroken
    return environment.get_template(template).render(values)


def unbroken(text: str) -> Markup:
    """The text, escaped, with names of options that no line ends within: browsers break lines after hyphens."""
    whole = r'<span class="unbroken">\g<0></span>'
    return Markup(re.sub(r"(?<![\w-])--[a-z][\w-]*", whole, str(escape(text))))


def read(name: str) -> str:
    """A file of this folder."""
    return (files(__package__) / name).read_text(encoding="utf-8")
