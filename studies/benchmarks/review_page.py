"""Measure whether the review page stays smooth with thousands of suspects, and print the table.

    python studies/benchmarks/review_page.py    measure in Chromium (BILEVEL_CHROMIUM or the one on the path)

The page is docs/results/review-page.md. The browser opens the pages with 100 and with 5,000 suspects (the most that it
shows) in turn. Times are the work of its one thread, for a key or a scroll, until the page is laid out.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bilevel_studies.denoising.speed import load
from bilevel_studies.study import table
from playwright.sync_api import Page, sync_playwright

from bilevel.report.page import Table
from bilevel.report.review_page import MOST, Review, Suspect, render_review

COUNTS = (100, MOST)
ROUNDS = 5
WORK = """async ([what, times]) => {
    const found = [];
    const height = document.documentElement.scrollHeight - innerHeight;
    for (let i = 0; i < times; i++) {
        await new Promise(requestAnimationFrame);
        const began = performance.now();
        if (what === "scroll") {
            scrollTo(0, height * i / times);
            document.dispatchEvent(new Event("scroll"));
            await new Promise(requestAnimationFrame);
        } else {
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: what, bubbles: true}));
        }
        document.body.offsetHeight;  // lays the page out
        found.push(performance.now() - began);
    }
    return found;
}"""
ACTIONS = {
    "opening the page": "",
    "dropping a suspect by its key": "d",
    "undoing that": "u",
    "scrolling by a hundredth": "scroll",
}
TIMES = 100


def example(count: int) -> Review:
    """Return suspects of ten classes with pictures of noise, which no format compresses."""
    draw = np.random.default_rng(0)
    return Review(
        run=f"{count} suspects",
        title="Labels of noise",
        outcome="Measured.",
        good=True,
        accuracy=Table("How well", ["Trained on", "Accuracy"], [["all", "70"]]),
        classes=[f"class {c}" for c in range(10)],
        history={"step": [1, 2], "upper": [2.0, 1.0], "lower": [2.0, 1.0]},
        importance=draw.random(4 * count),
        suspects=[Suspect(i, f"{i}.png", i % 10, (i + 1) % 10, 0.4 * i / count, 0.9) for i in range(count)],
        pictures=draw.integers(0, 256, (count, 28, 28), dtype=np.uint8),
        fields=None,
        command="bilevel denoise",
        settings=[("Seed", "0")],
        notes=[],
    )


def measured(page: Page, path: Path) -> dict[str, list[float]]:
    """Return the milliseconds of each action on a fresh page, and its number of elements."""
    page.goto(path.as_uri())
    page.wait_for_selector(".suspect")
    found = {"opening the page": [page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")]}
    page.locator(".suspect").first.click()
    for name, what in ACTIONS.items():
        if what:
            found[name] = page.evaluate(WORK, [what, TIMES])
    found["elements"] = [page.evaluate("document.querySelectorAll('*').length")]
    done = page.locator("#progress").text_content() or ""
    assert done.startswith("0 of"), done  # every key worked and was undone
    return found


def run(chromium: str) -> dict[str, Any]:
    results: dict[int, dict[str, list[float]]] = {count: {} for count in COUNTS}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        paths = {count: Path(folder) / f"{count}.html" for count in COUNTS}
        for count, path in paths.items():
            path.write_text(render_review(example(count)), encoding="utf-8")
            sizes[count] = path.stat().st_size
        for _ in range(ROUNDS):
            for count, path in paths.items():
                context = browser.new_context(viewport={"width": 1280, "height": 800})
                for name, values in measured(context.new_page(), path).items():
                    results[count].setdefault(name, []).extend(values)
                context.close()
        version = browser.version
        browser.close()
    return {"chromium": version, "load": load(), "bytes": sizes, "milliseconds": results}


def table_of(found: dict[str, Any]) -> str:
    """Return the median / the slowest of a hundred of each action, in milliseconds."""

    def shown(values: list[float]) -> str:
        slow = sorted(values)[max(0, round(0.99 * len(values)) - 1)]
        return f"{statistics.median(values):.1f}" + (f" / {slow:.1f}" if len(values) > ROUNDS else "")

    by = found["milliseconds"]
    rows = [[name, *(shown(by[count][name]) for count in COUNTS)] for name in ACTIONS]
    rows.append(["elements of the page, at the end", *(f"{max(by[count]['elements']):,.0f}" for count in COUNTS)])
    rows.append(["megabytes", *(f"{found['bytes'][count] / 1e6:.1f}" for count in COUNTS)])
    return table(["", *(f"{count:,} suspects" for count in COUNTS)], rows)


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("BILEVEL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        sys.exit("Chromium is needed: install it, or name it with BILEVEL_CHROMIUM.")
    found = run(chromium)
    print(table_of(found))
    print(json.dumps({"chromium": found["chromium"], "load": found["load"]}), file=sys.stderr)


if __name__ == "__main__":
    main()
