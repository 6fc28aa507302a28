"""The page of `bilevel tune`: a bar for each feature, on any screen, and nothing that it would have to load."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from common import chromium

from bilevel.cli.main import main
from bilevel.report.figures import bars

FEATURES = 9
TITLES = ("The penalties, sorted", "The path of the validation loss", "The losses of a grid")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tune")
    x = draw.normal(size=(80, FEATURES))
    names = ["the size of the living space in square metres", *(f"n{i}" for i in range(FEATURES - 1))]
    rows = [*names, "price"], *np.c_[x, 10 * x[:, 0] + draw.normal(size=80)].tolist()
    (folder / "d.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    options = ["--model", "ridge", "--label", "price", "--caution", "1", "--steps", "5", "--out", str(folder / "r")]
    assert main(["tune", str(folder / "d.csv"), *options]) == 0
    return folder / "r" / "report.html"


def test_page_holds_all_that_it_shows_and_loads_nothing(page):
    text = page.read_text()
    assert text.count("<svg") == 2
    assert text.count("<li>") == FEATURES
    assert all(f">{title}</h" in text for title in TITLES)
    assert "prefers-color-scheme: dark" in text
    assert not re.search("https?:", text.replace("http://www.w3.org", ""))


def test_every_feature_has_a_bar_with_its_name_and_penalty_the_least_first():
    draw = np.random.default_rng(0)
    names, penalties = [f"<b>&{i}" for i in range(100)], 10 ** draw.uniform(-3, 7, 100)
    shown = bars("p", names, penalties.tolist(), label="Penalties")
    rows = re.findall(
        r'<li><span title="(.*?)">(.*?)</span><i><b style="width:(.*?)%"></b></i><span>(.*?)</span>', shown
    )
    order = np.argsort(penalties)
    assert [unescape(row[0]) for row in rows] == [unescape(row[1]) for row in rows] == [names[i] for i in order]
    assert [float(row[3].replace(",", "")) for row in rows] == pytest.approx(penalties[order].tolist(), rel=0.006)
    lengths = [float(row[2]) for row in rows]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 100
    share = np.log(2 * penalties[order[50]] / penalties.min()) / np.log(2 * penalties.max() / penalties.min())
    assert lengths[50] == pytest.approx(100 * share, abs=0.06)


def test_many_features_are_in_a_list_to_scroll_through_below_the_shape_of_their_penalties():
    names, penalties = [str(i) for i in range(5000)], [1.0 + i for i in range(5000)]
    assert "<svg" not in bars("p", names[:40], penalties[:40], label="Penalties")
    for count in (41, 1000, 5000):
        shown = bars("p", names[:count], penalties[:count], label="Penalties")
        assert shown.count("<svg") == 1
        assert '<ol class="bars" aria-label="Penalties" tabindex="0">' in shown
        assert shown.count("<li>") == min(count, 1000)
        assert f'title="{count - 1}"' in shown


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_names_and_numbers_of_the_bars_are_readable_on_a_phone(page):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        phone = browser.new_page(viewport={"width": 360, "height": 780})
        phone.goto(page.as_uri())
        sizes = phone.evaluate("[...document.querySelectorAll('.bars span')].map(e => getComputedStyle(e).fontSize)")
        widths = phone.evaluate("[...document.querySelectorAll('.bars b')].map(e => e.getBoundingClientRect().width)")
        wide = phone.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert len(sizes) == 2 * FEATURES
    assert min(float(size.removesuffix("px")) for size in sizes) >= 12
    assert max(widths) > 80
    assert wide <= 360
