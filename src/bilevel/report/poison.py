"""The page of a poisoning attack: what it cost, class by class, and every point beside its base.

`render_poison` makes one HTML file that loads nothing. Pictures are PNG inside of it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from bilevel.errors import OptionError
from bilevel.report.page import Facts, Table, fill, read

__all__ = ["MOST", "Point", "PoisonPage", "Target", "render_poison"]

MOST = 120
"""Points on one page."""
GREY = 128


@dataclass(frozen=True, eq=False)
class Point:
    """A poison point. Pictures are (height, width) or (height, width, 3); of a table there are changes instead."""

    title: str
    facts: Facts
    base: NDArray[np.uint8] | None = None
    poison: NDArray[np.uint8] | None = None
    changes: Sequence[tuple[str, str, str]] = ()
    """(column, before, after), the largest first."""


@dataclass(frozen=True, eq=False)
class Target:
    """The input that an attack is aimed at."""

    text: str
    picture: NDArray[np.uint8] | None = None

    @property
    def address(self) -> str:
        """The picture as a data address; empty of a table."""
        return "" if self.picture is None else _png(self.picture)


@dataclass(frozen=True, eq=False)
class PoisonPage:
    """What the page shows, from the top."""

    title: str
    outcome: str
    good: bool
    """Whether the training set withstood the attack."""
    accuracy: Table
    points: Sequence[Point]
    settings: Facts
    target: Target | None = None
    audit: Table | None = None
    defence: str = ""
    notes: Sequence[str] = ()


def render_poison(page: PoisonPage) -> str:
    """The page as text."""
    shown = page.points[:MOST]
    factor = amplification(shown)
    cards = [(point, pictures(point, factor)) for point in shown]
    text = fill(
        "poison.html",
        page=page,
        cards=cards,
        factor=f"{factor:g}",
        shown=len(shown),
        style=Markup(read("style.css") + read("poison.css")),
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def amplification(points: Sequence[Point]) -> float:
    """What the differences are multiplied by, so that the largest fills the range: 1, 2, 5, 10, ..."""
    pairs = [(p.base, p.poison) for p in points if p.base is not None and p.poison is not None]
    largest = max((int(np.abs(_difference(*pair)).max(initial=0)) for pair in pairs), default=0)
    if largest == 0:
        return 1.0
    steps = [a * 10.0**b for b in range(4) for a in (1, 2, 5)]
    return max((step for step in steps if step * largest <= GREY), default=1.0)


def pictures(point: Point, factor: float) -> list[tuple[str, str]]:
    """(what it is, PNG as a data address) of the base, the poison and their difference; none of a table."""
    if point.base is None or point.poison is None:
        return []
    if point.base.shape != point.poison.shape or point.base.dtype != np.uint8 or point.poison.dtype != np.uint8:
        raise OptionError(f"base and poison must be uint8 of one shape; got {point.base.shape}, {point.poison.shape}.")
    apart = np.clip(GREY + factor * _difference(point.base, point.poison), 0, 255).astype(np.uint8)
    return [("base", _png(point.base)), ("poison", _png(point.poison)), ("difference", _png(apart))]


def _difference(base: NDArray[np.uint8], poison: NDArray[np.uint8]) -> NDArray[np.int64]:
    return poison.astype(np.int64) - base.astype(np.int64)


def _png(picture: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
