"""The review page of a cleaned training set: the findings, and every suspect to keep, drop or relabel.

`render_review` makes one HTML file that loads nothing. It holds the suspects as JSON, and their pictures as a few
sheets of many thumbnails; `review.js` shows only the cards near the window, so that thousands stay smooth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.report.figures import Html, image, importances, losses, resized
from bilevel.report.page import Facts, Table, fill, read

# The most suspects on one page; of more, the worst are shown.
MOST = 5000
# Up to this many classes, the mistaken pairs are shown as a matrix; for more, this many pairs are listed.
PAIRS = 20
# The longest side of a thumbnail in pixels; the second if there are more than MANY of them.
SIDE, SMALL_SIDE, MANY = 96, 64, 2000
# The longest side of a sheet of thumbnails, in pixels.
SHEET = 1024
# The most bytes of thumbnails for which the sheets are PNG; above, they are JPEG.
EXACT = 6_000_000


@dataclass(frozen=True)
class Suspect:
    """A training example whose label is probably wrong."""

    # Its place in the training set.
    index: int
    # Its name at the source: a file, a row.
    key: str
    # The class that the data give, as an index into `Review.classes`.
    label: int
    # The class that the classifier suggests.
    suggested: int
    # In [0, 1]; low if the label does not help on the trusted set.
    importance: float
    # The probability of the suggested class, in [0, 1].
    confidence: float
    # Orders the suspects, lowest first. None: the importance.
    quality: float | None = None

    @property
    def rank(self) -> float:
        """The number that orders the suspects."""
        return self.importance if self.quality is None else self.quality


@dataclass(frozen=True, eq=False)
class Review:
    """The contents of the page, from the top."""

    # Names the run; the browser keeps the decisions under this name.
    run: str
    title: str
    outcome: str
    good: bool
    accuracy: Table | None
    classes: Sequence[str]
    # The losses `upper` (trusted) and `lower` (training), and `step` if not every step is recorded.
    history: Mapping[str, Sequence[float]]
    # The importances of all training examples.
    importance: NDArray[np.floating[Any]]
    suspects: Sequence[Suspect]
    # Pictures of the suspects, in their order: (n, height, width) or (n, height, width, 3).
    pictures: NDArray[np.uint8] | None
    # For each suspect, the pairs (name, text) that its card shows.
    fields: Sequence[Sequence[tuple[str, str]]] | None
    # The command that applies the exported decisions.
    command: str
    settings: Facts
    notes: Sequence[str] = ()
    # The name of the number of suspects.
    counted: str = "Suspects: estimated wrong labels"
    # What the cards show: the heading of their section.
    heading: str = "Suspects"


def render_review(review: Review) -> str:
    """Return the page as text."""
    count, found = len(review.importance), len(review.suspects)
    pairs = mistaken(review.suspects, len(review.classes))
    shown = worst_first(review)
    return fill(
        "review.html",
        page=review,
        style=Html(read("style.css") + read("review.css")),
        script=Html(read("review.js")),
        data=Html(embedded(_data(shown))),
        facts=[
            ("Training examples", f"{count:,}"),
            (review.counted, f"{found:,} ({found / max(count, 1):.0%})"),
            ("Classes", f"{len(review.classes):,}"),
        ],
        curves=_curves(review.history),
        histogram=_histogram(review),
        matrix=pairs if found and len(review.classes) <= PAIRS else None,
        pairs=listed(pairs),
        shown=len(shown.suspects),
        found=found,
    )


def worst_first(review: Review, most: int = MOST) -> Review:
    """Return the review with its `most` worst suspects only, in order, with their pictures and fields."""
    suspects = review.suspects
    order = sorted(range(len(suspects)), key=lambda i: (suspects[i].rank, suspects[i].index))[:most]
    return replace(
        review,
        suspects=[suspects[i] for i in order],
        pictures=None if review.pictures is None else review.pictures[order],
        fields=None if review.fields is None else [review.fields[i] for i in order],
    )


def mistaken(suspects: Sequence[Suspect], classes: int) -> NDArray[np.int64]:
    """Return the number of suspects with the class of the row given and the class of the column suggested."""
    counts = np.zeros((classes, classes), dtype=np.int64)
    for suspect in suspects:
        counts[suspect.label, suspect.suggested] += 1
    return counts


def listed(counts: NDArray[np.int64], most: int = PAIRS) -> list[tuple[int, int, int]]:
    """Return (given, suggested, count) of the most frequent pairs."""
    pairs = [(int(i), int(j), int(counts[i, j])) for i, j in np.argwhere(counts)]
    return sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))[:most]


def embedded(data: object) -> str:
    """Return the data as JSON that is safe in a script element: ASCII, without the characters that HTML interprets."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def sheets(pictures: NDArray[np.uint8]) -> dict[str, Any]:
    """Return the pictures as sheets of thumbnails: picture i is on sheet i // (columns * rows), row by row."""
    count, height, width = pictures.shape[:3]
    scale = min(1.0, (SIDE if count <= MANY else SMALL_SIDE) / max(height, width))
    height, width = max(1, round(scale * height)), max(1, round(scale * width))
    thumbnails = pictures if scale == 1 else np.stack([resized(picture, width, height) for picture in pictures])
    exact = thumbnails.nbytes <= EXACT
    # JPEG works on blocks of 8 by 8: a thumbnail that shared one with its neighbour would take on its colours.
    across, down = (side if exact else -(-side // 8) * 8 for side in (width, height))
    columns, rows = SHEET // across, SHEET // down
    return {
        "width": width,
        "height": height,
        "across": across,
        "down": down,
        "columns": columns,
        "rows": rows,
        "sheets": [
            _sheet(thumbnails[start : start + columns * rows], across, down, columns, exact)
            for start in range(0, count, columns * rows)
        ],
    }


def _sheet(thumbnails: NDArray[np.uint8], across: int, down: int, columns: int, exact: bool) -> str:
    count, height, width = thumbnails.shape[:3]
    columns = min(columns, count)
    rows = -(-count // columns)
    canvas = np.zeros((rows * down, columns * across, *thumbnails.shape[3:]), dtype=np.uint8)
    edges = ((0, 0), (0, down - height), (0, across - width), (0, 0))[: thumbnails.ndim]
    for i, thumbnail in enumerate(np.pad(thumbnails, edges, mode="edge")):
        y, x = down * (i // columns), across * (i % columns)
        canvas[y : y + down, x : x + across] = thumbnail
    return image(canvas, jpeg=not exact)


def _data(review: Review) -> dict[str, Any]:
    suspects = review.suspects
    return {
        "run": review.run,
        "classes": list(review.classes),
        "index": [int(s.index) for s in suspects],
        "key": [s.key for s in suspects],
        "label": [int(s.label) for s in suspects],
        "suggested": [int(s.suggested) for s in suspects],
        "importance": [round(float(s.importance), 4) for s in suspects],
        "confidence": [round(float(s.confidence), 4) for s in suspects],
        "fields": None if review.fields is None else [[list(pair) for pair in fields] for fields in review.fields],
        "pictures": None if review.pictures is None or not suspects else sheets(review.pictures),
    }


def _curves(history: Mapping[str, Sequence[float]]) -> Html | None:
    names = {"upper": "Trusted loss", "lower": "Training loss"}
    curves = {name: history[key] for key, name in names.items() if len(history.get(key, ()))}
    if not curves:
        return None
    ends = [f"{name} from {curve[0]:.3g} to {curve[-1]:.3g}" for name, curve in curves.items()]
    return losses("losses", curves, history.get("step"), label=f"Losses against step. {'; '.join(ends)}.")


def _histogram(review: Review) -> Html:
    values = np.asarray(review.importance, dtype=float)
    suspected = np.array([s.importance for s in review.suspects], dtype=float)
    low, high = (np.mean(values < 0.5), np.mean(values >= 0.5)) if len(values) else (0.0, 0.0)
    label = (
        f"Histogram of the importances of {len(values):,} training examples, {len(suspected):,} of them suspects. "
        f"{low:.0%} lie below one half, {high:.0%} above."
    )
    return importances("importances", values, suspected, label=label)
