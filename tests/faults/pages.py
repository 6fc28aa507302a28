"""Labels, columns and file names that are markup, from the data to the page in a browser."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from tally import Tally

from bilevel.cli.main import main

TAGS = (
    "<script>document.title='broken'<_script>",
    "<img src=x onerror=document.title='broken'>",
    "<svg onload=document.title='broken'>",
    "'\"><b onmouseover=document.title='broken'>",
    "{{7*7}}",
)
BROWSER = shutil.which("chromium")


def of_images(folder: Path) -> list[str]:
    """A folder of images whose classes and files are named so; returns the arguments of a run on it."""
    draw = np.random.default_rng(0)
    for k, tag in enumerate(TAGS[:3]):
        (folder / "images" / tag).mkdir(parents=True)
        for i in range(12):
            pixels = (draw.random((8, 8)) * 80 + 80 * (k if i % 4 else (k + 1) % 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / tag / f"{i} {TAGS[i % 5]}.png".replace("/", "_"))
    return [str(folder / "images")]


def of_a_table(folder: Path) -> list[str]:
    """A table whose labels, columns and cells are so."""
    draw = np.random.default_rng(0)
    tags = [tag.replace("<_", "</") for tag in ("<_script>" + TAGS[0], *TAGS[1:])]
    quoted = ['"' + tag.replace('"', '""') + '"' for tag in tags]
    lines = [f"{quoted[0]},{quoted[1]},{quoted[3]}"]
    for i in range(150):
        k = i % 3
        number = (k if i % 5 else (k + 1) % 3) + 0.1 * draw.normal()
        lines.append(f"{number:.3f},{quoted[int(draw.integers(5))]},{quoted[k]}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return [str(folder / "table.csv"), "--label", TAGS[3]]


def shown(folder: Path) -> Tally:
    """Run `denoise` on both, open the page, and look whether any of it became markup."""
    from playwright.sync_api import sync_playwright

    tally = Tally()
    for make in (of_images, of_a_table):
        with tally.attempt(make.__name__):
            arguments = make(folder)
            out = folder / make.__name__
            told = io.StringIO()
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                code = main(
                    ["denoise", *arguments, "--trusted", "15", "--steps", "150", "--no-baselines", "--out", str(out)]
                )
            assert code == 0, told.getvalue()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
                page = browser.new_page()
                errors: list[str] = []
                page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
                page.on("dialog", lambda dialog, errors=errors: errors.append(dialog.message))
                page.goto((out / "report.html").as_uri())
                page.wait_for_timeout(300)
                for key in ("ArrowDown", "ArrowRight", "n", "r"):
                    page.keyboard.press(key)
                assert page.title().startswith("Labels of"), page.title()
                assert errors == []
                assert page.locator("svg[onload], img[onerror], b[onmouseover]").count() == 0
                text = page.locator("body").inner_text()
                assert any(tag in text for tag in TAGS[:3]), "no tag is shown as text"
                browser.close()
    return tally
