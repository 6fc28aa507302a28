"""The review page: whole in itself, escaped, and in a browser reviewed from the first suspect to the exported file."""

import base64
import csv
import io
import json
import re
import time
from itertools import pairwise

import numpy as np
import pytest
from common import chromium
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_report import Page

from bilevel.errors import OptionError
from bilevel.report import Table
from bilevel.report import read as source
from bilevel.report.figures import importances, losses
from bilevel.report.review import (
    MOST,
    Review,
    Suspect,
    embedded,
    listed,
    mistaken,
    render_review,
    sheets,
    worst_first,
)

COMMAND = "bilevel denoise --apply decisions.csv data --out cleaned"
NASTY = [
    "</script><script>document.title='broken'</script>",
    "<!-- <script>",
    'a "quoted", name.png',
    "two\nlines",
    "naïve 🐍 name",
    "שלום/عربي.png",
    "&amp; &lt;b&gt;",
    "=1+1",
    " edges ",
    "line\u2028separator",
]


def review(count=30, classes=("cat", "dog", "cow"), **changes):
    """Suspects whose importance rises with their index; given labels go round, the next class is suggested."""
    names = max(len(classes), 1)
    suspects = [
        Suspect(10 * i, f"file-{i}.png", i % names, (i + 1) % names, 0.4 * i / max(count, 1), 0.9) for i in range(count)
    ]
    fields = {
        "run": "a run",
        "title": "A title",
        "outcome": "It went well.",
        "good": True,
        "accuracy": Table("How well", ["Trained on", "Accuracy"], [["all", "70"], ["weighted", "90"]]),
        "classes": classes,
        "noise_rate": 0.25,
        "history": {"step": [1, 2, 3], "upper": [3.0, 2.0, 1.0], "lower": [3.0, 2.5, 2.0]},
        "importance": np.linspace(0, 1, 10 * count + 100),
        "suspects": suspects,
        "pictures": None,
        "fields": None,
        "command": COMMAND,
        "settings": [("Seed", "0")],
        "notes": ["A note."],
    }
    return Review(**(fields | changes))


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def decoded(uri):
    head, body = uri.split(",", 1)
    return head, np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def test_elements_are_closed_in_order_and_identifiers_are_there_once():
    for changes in ({}, {"count": 0}, {"accuracy": None, "history": {}}, {"classes": [f"c{i}" for i in range(21)]}):
        text = render_review(review(**changes))
        page = Page(text)
        assert page.open == []
        identifiers = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
        assert len(identifiers) == len(set(identifiers))
        references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)|aria-(?:labelledby|controls)="([^"]*)"', text)
        assert {name for groups in references for name in groups if name} <= set(identifiers)


def test_the_page_loads_nothing():
    pictures = np.zeros((30, 8, 8), dtype=np.uint8)
    text = render_review(review(pictures=pictures))
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]", text.replace("data:image/png;base64", ""))
    assert "@import" not in text
    assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object", "embed"}
    references = [value for _, attrs in page.elements for name, value in attrs.items() if name in ("href", "src")]
    assert all(value.startswith("#") or value == "data:," for value in references)
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'")


def test_the_script_writes_text_never_markup():
    script = source("review.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(|XMLHttp", script)
    assert "</script" not in script
    assert "</style" not in source("review.css")


def test_the_page_says_the_outcome_the_accuracy_the_rate_and_the_command():
    page = Page(render_review(review()))
    for words in ("It went well.", "How well", "weighted", "25%", "30 (8%)", "Seed", "A note."):
        assert words in page.texts
    assert COMMAND in "".join(page.texts)
    assert "Accuracy" not in Page(render_review(review(accuracy=None))).texts
    assert "Estimated share of wrong labels" not in Page(render_review(review(noise_rate=None))).texts


@pytest.mark.parametrize("where", ["title", "outcome", "accuracy", "classes", "command", "settings", "notes", "run"])
def test_a_script_tag_in_a_string_stays_text(where):
    bad = '</script><script>alert("x")</script>'
    changes = {
        "accuracy": {"accuracy": Table(bad, [bad], [[bad, bad]])},
        "classes": {"classes": [bad, "dog", "cow"]},
        "settings": {"settings": [(bad, bad)]},
        "notes": {"notes": [bad]},
    }.get(where, {where: bad})
    text = render_review(review(**changes))
    assert len(Page(text).all("script")) == 2
    assert "alert(" not in re.sub(r"&lt;script&gt;alert|\\u003cscript\\u003ealert", "", text)


def test_keys_and_fields_come_back_from_the_page_as_they_were():
    suspects = [Suspect(i, key, 0, 1, 0.1, 0.5) for i, key in enumerate(NASTY)]
    fields = [[(key, key)] for key in NASTY]
    text = render_review(review(suspects=suspects, fields=fields))
    assert Page(text).open == []
    found = data_of(text)
    assert found["key"] == NASTY
    assert found["fields"] == [[[key, key]] for key in NASTY]


@given(st.text(st.sampled_from("<>&/!-\"'\\") | st.characters(codec=None, exclude_categories=())))
def test_any_text_is_embedded_without_a_sign_that_html_reads(text):
    found = embedded({"key": text})
    assert found.isascii()
    assert not set("<>&") & set(found)
    assert json.loads(found) == {"key": text}


def test_a_file_name_that_is_no_text_does_not_stop_the_page():
    suspects = [Suspect(0, "caf\udce9.png", 0, 1, 0.1, 0.5)]
    text = render_review(review(suspects=suspects, classes=["caf\udce9", "dog"]))
    assert data_of(text)["key"] == ["caf\udce9.png"]
    text.encode("utf-8")


def test_the_worst_come_first_with_their_pictures_and_fields():
    importance = [0.3, 0.1, 0.2, 0.1]
    suspects = [Suspect(i, str(i), 0, 1, value, 0.5) for i, value in enumerate(importance)]
    pictures = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), dtype=np.uint8)
    fields = [[("i", str(i))] for i in range(4)]
    found = worst_first(review(suspects=suspects, pictures=pictures, fields=fields), most=3)
    assert [s.index for s in found.suspects] == [1, 3, 2]
    assert found.pictures[:, 0, 0].tolist() == [1, 3, 2]
    assert [f[0][1] for f in found.fields] == ["1", "3", "2"]


def test_of_too_many_suspects_the_page_shows_the_worst_and_says_so():
    text = render_review(review(count=MOST + 7))
    assert len(data_of(text)["index"]) == MOST
    assert max(data_of(text)["index"]) == 10 * (MOST - 1)
    assert "These are the 5,000 worst of 5,007 suspects." in text
    assert "These are the" not in render_review(review(count=10))


def test_pairs_are_counted_by_given_and_suggested_label():
    suspects = [Suspect(i, "", a, b, 0, 0) for i, (a, b) in enumerate([(0, 1), (0, 1), (2, 0), (1, 1)])]
    counts = mistaken(suspects, 3)
    assert counts.tolist() == [[0, 2, 0], [0, 1, 0], [1, 0, 0]]
    assert listed(counts) == [(0, 1, 2), (1, 1, 1), (2, 0, 1)]
    assert listed(counts, most=1) == [(0, 1, 2)]
    assert mistaken([], 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("classes", "cells"), [(3, 3), (20, 20), (21, 20), (200, 20)])
def test_the_pairs_are_a_matrix_up_to_twenty_classes_and_a_list_above(classes, cells):
    page = Page(render_review(review(count=30 * classes, classes=[f"class {i}" for i in range(classes)])))
    buttons = [attrs for attrs in page.all("button") if "data-given" in attrs]
    assert len(buttons) == cells
    assert buttons[1]["data-given"] == "1"
    assert buttons[1]["data-suggested"] == "2"
    assert buttons[1]["aria-label"] == "30 given as class 1, suggested class 2: show them"
    assert page.texts.count("30") == cells
    assert any("matrix" in attrs.get("class", "") for attrs in page.all("div")) == (classes <= 20)


@pytest.mark.parametrize("shape", [(8, 8), (28, 28), (28, 28, 3), (5, 90), (96, 96, 3)])
def test_sheets_hold_every_picture_to_the_pixel(shape):
    pictures = np.random.default_rng(0).integers(0, 256, (150, *shape), dtype=np.uint8)
    found = sheets(pictures)
    assert (found["height"], found["width"]) == shape[:2]
    per = found["columns"] * found["rows"]
    assert len(found["sheets"]) == -(-150 // per)
    images = [decoded(uri) for uri in found["sheets"]]
    assert {head for head, _ in images} == {"data:image/png;base64"}
    for i, picture in enumerate(pictures):
        sheet = images[i // per][1]
        assert max(sheet.shape[:2]) <= 1024
        row, column = divmod(i % per, found["columns"])
        y, x = row * found["down"], column * found["across"]
        np.testing.assert_array_equal(sheet[y : y + shape[0], x : x + shape[1]], picture)


def test_large_pictures_are_scaled_down_and_keep_their_proportions():
    found = sheets(np.full((3, 100, 200, 3), 77, dtype=np.uint8))
    assert (found["width"], found["height"]) == (96, 48)
    assert np.unique(decoded(found["sheets"][0])[1]).tolist() == [77]
    assert sheets(np.zeros((2, 1000, 3), dtype=np.uint8))["width"] == 1


def test_many_large_pictures_become_small_jpeg_that_do_not_run_into_each_other():
    colours = np.random.default_rng(0).integers(0, 256, (2001, 1, 1, 3), dtype=np.uint8)
    found = sheets(np.broadcast_to(colours, (2001, 68, 62, 3)))
    assert (found["width"], found["height"]) == (58, 64)
    head, sheet = decoded(found["sheets"][-1])
    assert head == "data:image/jpeg;base64"
    last = 2000 % (found["columns"] * found["rows"])
    row, column = divmod(last, found["columns"])
    part = sheet[row * found["down"] :, column * found["across"] :][:64, :58].astype(int)
    assert np.abs(part - colours[-1]).max() < 8  # JPEG's rounding of one colour


def test_five_thousand_suspects_with_thumbnails_stay_small():
    pictures = np.random.default_rng(0).integers(0, 256, (5000, 28, 28), dtype=np.uint8)
    text = render_review(review(count=5000, pictures=pictures))
    assert len(text) < 7_000_000  # noise, which no format makes smaller: 3.9 MB, a third more in base 64
    assert len(render_review(review(count=5000))) < 500_000


def test_without_suspects_the_page_is_whole_and_has_nothing_to_review():
    text = render_review(review(count=0, pictures=np.zeros((0, 8, 8), dtype=np.uint8)))
    page = Page(text)
    assert "No label is suspected of being wrong; there is nothing to review." in page.texts
    assert not page.all("script")
    assert not page.all("button")
    assert page.open == []


def test_one_class_is_enough():
    page = Page(render_review(review(count=2, classes=["only"])))
    assert page.open == []


def test_the_page_is_accessible():
    page = Page(render_review(review()))
    assert page.all("html") == [{"lang": "en"}]
    assert [svg["role"] for svg in page.all("svg")] == ["img", "img"]
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert "400 training examples, 30 of them suspects" in labels[0]
    assert "Trusted loss from 3 to 1; Training loss from 3 to 2" in labels[1]
    live = [attrs["id"] for _, attrs in page.elements if attrs.get("aria-live") == "polite"]
    assert live == ["progress"]
    assert all(attrs.get("type") for attrs in page.all("button"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(dark):
    colours = {}
    for sheet in (source("style.css"), source("review.css")):
        light, _, rest = sheet.partition("@media (prefers-color-scheme: dark)")
        blocks = [light.partition("}")[0]] + [rest.partition("}")[0]] * dark
        for name, value in re.findall(r"--([a-z-]+): #([0-9a-f]{6})", "".join(blocks)):
            colours[name] = np.array([int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    colours["heat"] = 0.44 * colours["accent"] + 0.56 * colours["card"]
    pairs = "ink/paper ink/card ink/tint ink/heat soft/paper soft/card soft/tint accent/card accent/paper good/card "
    for pair in (pairs + "bad/card on-accent/accent paper/ink").split():
        one, other = (luminance(colours[name]) for name in pair.split("/"))
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5, pair


def test_figures_take_their_colours_from_the_page():
    curves = {"Trusted loss": [3.0, 2.0, 1.0], "Training loss": [3.0, 2.5, 2.0]}
    for svg in (losses("x", curves, label="L"), importances("x", np.array([0.1, 1.0]), np.array([0.1]), label="L")):
        assert "currentColor" in svg
        assert "var(--accent)" in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg)


def test_the_histogram_shows_the_suspects_share_in_every_bin():
    values = np.repeat([0.1, 0.9], [5, 3])
    svg = importances("x", values, values[:4], label="L")
    bars = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: (var\(--accent\)|currentColor)', svg)

    def reach(path):
        ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
        return max(ys), min(ys)  # an SVG's y runs downwards

    (floor, top), *_ = [r for path, c in bars if c == "var(--accent)" and np.ptp(r := reach(path)) > 0]
    unit = (floor - top) / 4
    others = [r for path, c in bars if c == "currentColor" and np.ptp(r := reach(path)) > 0]
    np.testing.assert_allclose(others, [(top, top - unit), (floor, floor - 3 * unit)], rtol=1e-4)


def test_losses_that_are_not_finite_or_few_or_many_are_drawn():
    for curve in ([1.0], [float("nan")] * 3, [1.0, float("inf"), 2.0], list(np.geomspace(1, 1e-6, 50_000))):
        svg = losses("x", {"Trusted loss": curve}, label="L")
        assert len(svg) < 60_000
    text = render_review(review(history={"upper": [1.0, float("nan")]}))
    assert "Trusted loss from 1 to nan" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["cat", "cat", "cow"]}, "classes must have different names.*'cat' is twice"),
        ({"classes": []}, "classes must name at least one"),
        ({"suspects": [Suspect(0, "a", 3, 0, 0.1, 0.5)]}, "below 3"),
        ({"suspects": [Suspect(0, "a", 0, -1, 0.1, 0.5)]}, "below 3"),
        ({"suspects": [Suspect(0, "a", 0, 1, float("nan"), 0.5)]}, r"in \[0, 1\]"),
        ({"suspects": [Suspect(0, "a", 0, 1, 0.1, 0.5)] * 2}, "different indexes"),
        ({"pictures": np.zeros((29, 8, 8), dtype=np.uint8)}, "pictures must be of the suspects, 30 in number; got 29"),
        ({"fields": []}, "fields must be of the suspects, 30 in number; got 0"),
        ({"pictures": np.zeros((30, 8, 8))}, "uint8.*float64"),
        ({"pictures": np.zeros((30, 8, 8, 4), dtype=np.uint8)}, r"uint8.*\(30, 8, 8, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, words):
    with pytest.raises(OptionError, match=words):
        render_review(review(**changes))


# In a browser.


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH; name one in BILEVEL_CHROMIUM")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open the page of a review; at the end there must have been no error and no request."""
    contexts, troubles = [], []

    def open_(wanted, *, before="", **options):
        address = tmp_path / "report.html"
        address.write_text(render_review(wanted), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(5000)
        context.add_init_script(before)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        local = ("file:", "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(local) or troubles.append(request.url))
        page.goto(address.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def wait(page, expression):
    """Until it is true. (The page forbids the evaluation of text, which `wait_for_function` does.)"""
    end = time.monotonic() + 5
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def card(page, index):
    return page.locator(f'.suspect:has(.index:text-is("#{index}"))')


def verdict(page, index):
    return card(page, index).locator(".verdict").inner_text()


def press(page, index, name):
    card(page, index).get_by_role("button", name=name, exact=True).click()


def progress(page):
    return page.locator("#progress").inner_text()


def focused(page):
    """The index on the card that has the focus."""
    return page.evaluate("document.activeElement.querySelector('.index')?.textContent ?? document.activeElement.id")


def indexes(page):
    return [int(text[1:]) for text in page.locator(".suspect .index").all_inner_texts()]


def exported(page):
    with page.expect_download() as download:
        page.locator("#bar [data-save]").click()
    assert download.value.suggested_filename == "decisions.csv"
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_mouse_decisions_show_on_the_card_and_in_the_progress_and_are_undone_one_by_one(visit):
    page = visit(review())
    assert progress(page) == "0 of 30 reviewed: 0 kept, 0 dropped, 0 relabelled"
    assert page.locator("#undo").is_disabled()
    press(page, 0, "Relabel")
    press(page, 10, "Keep")
    press(page, 20, "Drop")
    assert [verdict(page, i) for i in (0, 10, 20, 30)] == ["Relabelled as dog", "Kept", "Dropped", "Undecided"]
    assert progress(page) == "3 of 30 reviewed: 1 kept, 1 dropped, 1 relabelled"
    assert card(page, 20).get_by_role("button", name="Drop").get_attribute("aria-pressed") == "true"
    press(page, 20, "Relabel")
    assert verdict(page, 20) == "Relabelled as cat"
    press(page, 10, "Keep")
    assert verdict(page, 10) == "Undecided"  # the same again takes it back
    undone = []
    while page.locator("#undo").is_enabled():
        page.locator("#undo").click()
        undone.append(progress(page)[:1] + verdict(page, 10)[0] + verdict(page, 20)[0])
    assert undone == ["3KR", "3KD", "2KU", "1UU", "0UU"]


def test_keys_decide_and_move_on(visit):
    page = visit(review())
    page.locator("#bar").scroll_into_view_if_needed()
    card(page, 0).click(position={"x": 4, "y": 4})
    for key in "rkd":
        page.keyboard.press(key)
    assert [verdict(page, i) for i in (0, 10, 20)] == ["Relabelled as dog", "Kept", "Dropped"]
    assert focused(page) == "#30"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == "#40"
    columns = page.evaluate("getComputedStyle(document.querySelector('.chunk')).gridTemplateColumns.split(' ').length")
    page.keyboard.press("ArrowDown")
    assert focused(page) == f"#{40 + 10 * columns}"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+z")
    assert focused(page) == "#20"
    assert verdict(page, 20) == "Undecided"
    page.keyboard.press("u")
    assert verdict(page, 10) == "Undecided"
    page.keyboard.press("n")
    assert focused(page) == "#20"
    assert progress(page).startswith("1 of 30")


def in_sight(page, index):
    top = "e => e.getBoundingClientRect().top >= document.querySelector('#bar').getBoundingClientRect().bottom"
    whole = f"e => ({top})(e) && e.getBoundingClientRect().bottom <= innerHeight"
    return card(page, index).evaluate(whole)


@pytest.mark.parametrize(("place", "key"), [("top", "r"), ("amid", "k"), ("end", "d"), ("top", "l")])
def test_the_first_key_brings_up_the_first_undecided_wherever_the_page_is_scrolled(visit, place, key):
    page = visit(review(count=300), viewport={"width": 360, "height": 780})
    page.get_by_role("button", name="Undo").scroll_into_view_if_needed()
    press(page, 0, "Keep")  # so that the first undecided is another
    page.evaluate(f"scrollTo(0, {{top: 0, amid: 0.5, end: 1}}.{place} * document.documentElement.scrollHeight)")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(key)
    assert focused(page) == "#10"
    assert in_sight(page, 10)
    assert progress(page) == "1 of 300 reviewed: 1 kept, 0 dropped, 0 relabelled"  # nothing is decided unseen
    assert page.locator("#message").inner_text() == "Press the key again to decide on this one."
    page.keyboard.press(key)
    if key == "l":
        page.keyboard.type("cow")
        page.keyboard.press("Enter")
    assert verdict(page, 10) == {"r": "Relabelled as cow", "k": "Kept", "d": "Dropped", "l": "Relabelled as cow"}[key]
    assert focused(page) == "#20"
    assert in_sight(page, 20)
    assert page.locator("#message").inner_text() == ""


def test_a_card_in_hand_that_was_scrolled_away_comes_back_before_a_key_decides_on_it(visit):
    page = visit(review(count=300))
    card(page, 50).click(position={"x": 4, "y": 4})
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("d")
    assert focused(page) == "#50"
    assert in_sight(page, 50)
    assert progress(page).startswith("0 of 300")
    page.keyboard.press("d")
    assert verdict(page, 50) == "Dropped"
    assert focused(page) == "#60"


def test_a_key_does_not_take_back_a_decision_where_no_card_has_the_focus(visit):
    page = visit(review())
    press(page, 0, "Keep")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("k")
    assert verdict(page, 0) == "Kept"
    assert focused(page) == "#10"


def test_keys_say_when_all_are_reviewed(visit):
    page = visit(review())
    page.get_by_role("button", name="Keep all 30").click()
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    page.keyboard.press("r")
    assert progress(page) == "30 of 30 reviewed: 30 kept, 0 dropped, 0 relabelled"
    assert page.locator("#message").inner_text() == "All are reviewed."


def test_the_legend_names_every_key_and_where_they_begin():
    page = Page(render_review(review()))
    text = " ".join(" ".join(page.texts).split())
    assert (
        "Wherever the page is scrolled, the first press brings up the first undecided suspect, and the next decides"
        in text
    )
    keys = re.findall(r"const acts = \{([^}]*)\}", source("review.js"))[0]
    for key in re.findall(r"(\w): ", keys):
        assert key.upper() in page.texts


def test_another_label_is_chosen_by_writing_its_name(visit):
    page = visit(review(classes=[f"kind {i}" for i in range(200)]))
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("l")
    assert focused(page) == "wanted"
    assert page.locator("#choices li").count() == 200
    page.keyboard.press("Enter")  # nothing is chosen yet
    assert page.locator("#chooser").is_visible()
    page.keyboard.type("kind 15")
    assert page.locator("#choices li").all_inner_texts()[:3] == ["kind 15", "kind 150", "kind 151"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert verdict(page, 0) == "Relabelled as kind 150"
    assert focused(page) == "#10"
    page.keyboard.press("l")
    page.keyboard.type("d")  # a letter of the name, not the key that drops
    page.keyboard.press("Escape")
    assert verdict(page, 10) == "Undecided"
    assert focused(page) == "#10"
    press(page, 20, "Other…")
    page.locator("#choices li", has_text=re.compile("^kind 7$")).click()
    assert verdict(page, 20) == "Relabelled as kind 7"
    assert card(page, 20).get_by_role("button", name="Other…").get_attribute("aria-pressed") == "true"


def test_keys_are_left_alone_in_inputs_with_modifiers_and_when_switched_off(visit):
    page = visit(review())
    page.locator("#search").click()
    page.keyboard.type("dkru")
    assert page.locator("#search").input_value() == "dkru"
    page.locator("#clear").click()
    page.locator("#state").focus()
    page.keyboard.press("k")
    card(page, 0).click(position={"x": 4, "y": 4})
    for key in ("Control+d", "Alt+k", "Shift+R", "Meta+k"):
        page.keyboard.press(key)
    page.locator("#keys").uncheck()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("d")
    assert progress(page).startswith("0 of 30")
    page.locator("#keys").check()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("d")
    assert progress(page).startswith("1 of 30")


def test_a_suggestion_that_is_the_given_label_is_not_relabelled(visit):
    page = visit(review(suspects=[Suspect(i, str(i), 0, i, 0.1 * i, 0.5) for i in range(3)]))
    assert card(page, 0).get_by_role("button", name="Relabel").is_disabled()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("r")
    assert "is the given one" in page.locator("#message").inner_text()
    page.get_by_role("button", name="Relabel all 2 as suggested").click()
    assert [verdict(page, i) for i in range(3)] == ["Undecided", "Relabelled as dog", "Relabelled as cow"]


def test_filters_by_given_and_suggested_label_state_and_name(visit):
    page = visit(review())
    page.locator("#given").select_option(label="dog (10)")
    assert indexes(page) == list(range(10, 300, 30))
    page.locator("#suggested").select_option(label="cat (10)")
    assert indexes(page) == []
    assert page.locator("#nothing").is_visible()
    page.locator("#clear").click()
    wait(page, "document.querySelector('#shown').innerText === '30 of 30 shown, 30 of them undecided.'")
    page.locator("#search").fill("FILE-1")
    wait(page, "document.querySelectorAll('.suspect').length === 11")
    assert indexes(page) == [10, *range(100, 200, 10)]
    page.locator("#search").fill("290")
    wait(page, "document.querySelectorAll('.suspect').length === 1")
    assert indexes(page) == [290]
    page.locator("#clear").click()
    press(page, 20, "Drop")
    page.locator("#state").select_option("decided")
    assert indexes(page) == [20]
    page.locator("#state").select_option("undecided")
    assert page.locator("#shown").inner_text() == "29 of 30 shown, 29 of them undecided."
    press(page, 30, "Keep")  # it leaves, and the focus goes to the one in its place
    assert 30 not in indexes(page)
    assert focused(page) == "#40"
    page.keyboard.press("u")
    assert focused(page) == "#30"


def test_a_number_of_the_matrix_shows_its_suspects(visit):
    page = visit(review())
    page.locator('.pair[data-given="1"]').click()
    assert indexes(page) == list(range(10, 300, 30))
    assert focused(page) == "#10"
    assert page.locator("#suggested").input_value() == "2"
    page.locator('.pair[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.given") == "1"


def test_bulk_decisions_leave_those_made_by_hand_and_are_undone_as_one(visit):
    page = visit(review())
    press(page, 0, "Keep")
    page.locator("#given").select_option(label="cat (10)")
    page.get_by_role("button", name="Relabel all 9 as suggested").click()
    assert progress(page) == "10 of 30 reviewed: 1 kept, 0 dropped, 9 relabelled"
    assert page.get_by_role("button", name="Drop all 0").is_disabled()
    page.locator("#clear").click()
    page.get_by_role("button", name="Drop all 20").click()
    assert progress(page) == "30 of 30 reviewed: 1 kept, 20 dropped, 9 relabelled"
    page.locator("#undo").click()
    assert progress(page) == "10 of 30 reviewed: 1 kept, 0 dropped, 9 relabelled"
    page.locator("#undo").click()
    assert progress(page) == "1 of 30 reviewed: 1 kept, 0 dropped, 0 relabelled"


def test_progress_is_kept_over_a_reload_and_under_the_name_of_the_run(visit, tmp_path):
    page = visit(review())
    press(page, 0, "Relabel")
    press(page, 20, "Drop")
    page.reload()
    assert progress(page) == "2 of 30 reviewed: 0 kept, 1 dropped, 1 relabelled"
    assert verdict(page, 20) == "Dropped"
    page.keyboard.press("n")
    assert focused(page) == "#10"
    page.keyboard.press("n")
    assert focused(page) == "#30"
    (tmp_path / "report.html").write_text(render_review(review(run="another")), encoding="utf-8")
    page.reload()
    assert progress(page).startswith("0 of 30")


def test_two_windows_of_one_run_agree(visit):
    page = visit(review())
    other = page.context.new_page()
    other.goto(page.url)
    press(other, 0, "Drop")
    wait(page, "document.querySelector('#progress').textContent.startsWith('1 of')")
    assert verdict(page, 0) == "Dropped"


def test_what_the_browser_kept_is_not_trusted(visit):
    broken = 'localStorage.setItem("bilevel-review:a run", \'{"0": 99, "10": "x", "77": 1, "20": -1}\')'
    assert progress(visit(review(), before=broken)).startswith("1 of 30")
    assert progress(visit(review(), before='localStorage.setItem("bilevel-review:a run", "{")')).startswith("0 of 30")


@pytest.mark.parametrize(
    "denied",
    [
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})",
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }",
    ],
    ids=["denied", "full"],
)
def test_without_the_browsers_memory_the_page_says_so_and_exports(visit, denied):
    page = visit(review(), before=denied)
    assert page.locator("#forgetful").is_visible()
    press(page, 0, "Drop")
    assert exported(page)[1:] == [["0", "file-0.png", "drop", ""]]
    assert not visit(review()).locator("#forgetful").is_visible()


def test_the_export_holds_every_decision_in_the_order_of_the_index(visit):
    suspects = [Suspect(9 - i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate(NASTY)]
    classes = ["cat", 'dog, "large"', "🐄"]
    page = visit(review(suspects=suspects, classes=classes, pictures=np.zeros((10, 4, 4), dtype=np.uint8)))
    assert page.title() == "A title"
    assert page.locator("#bar [data-save]").is_disabled()
    press(page, 9, "Relabel")
    page.get_by_role("button", name="Keep all 9").click()
    press(page, 4, "Drop")
    press(page, 3, "Other…")
    page.locator("#choices li").nth(2).click()
    rows = exported(page)
    assert rows[0] == ["index", "key", "decision", "label"]
    decisions = {9: ["relabel", 'dog, "large"'], 4: ["drop", ""], 3: ["relabel", "🐄"]}
    assert rows[1:] == [[str(i), NASTY[9 - i], *decisions.get(i, ["keep", "cat"])] for i in range(10)]


def test_a_saved_file_is_read_back_and_what_does_not_fit_is_skipped(visit, tmp_path):
    suspects = [Suspect(i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate([*NASTY, "caf\udce9"])]
    page = visit(review(suspects=suspects))
    page.get_by_role("button", name="Relabel all 11").click()
    press(page, 3, "Drop")
    press(page, 4, "Keep")
    rows = exported(page)
    fresh = visit(review(suspects=suspects, run="fresh"))
    path = tmp_path / "decisions.csv"

    def read(rows):
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows(rows)
        fresh.locator("#file").set_input_files(path)
        wait(fresh, "document.querySelector('#file').value === ''")
        return fresh.locator("#message").inner_text()

    assert read(rows) == "11 decisions read."
    assert progress(fresh) == "11 of 11 reviewed: 1 kept, 1 dropped, 9 relabelled"
    assert exported(fresh) == rows
    fresh.locator("#undo").click()
    assert progress(fresh).startswith("0 of 11")
    strange = [["0", "other.png", "drop", ""], ["99", "x", "drop", ""], ["1", NASTY[1], "relabel", "bird"]]
    strange += [["2", NASTY[2], "burn", ""], ["3", NASTY[3], "relabel", "cow"]]
    assert read([rows[0], *strange]) == ("1 decisions read. 4 skipped: they name no suspect of this page, or no label.")
    assert verdict(fresh, 3) == "Relabelled as cow"
    assert 'no column "index"' in read([["a", "b"]])


def test_names_that_look_like_markup_or_run_from_right_to_left_are_shown_as_they_are(visit):
    suspects = [Suspect(i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate(NASTY)]
    page = visit(review(suspects=suspects, fields=[[(key, key)] for key in NASTY], title="</title><b>"))
    assert page.locator(".suspect .key").all_text_contents() == NASTY
    assert page.locator(".features dd").all_text_contents() == NASTY
    assert page.title() == "</title><b>"


def test_pictures_are_drawn_to_the_pixel(visit):
    pictures = np.random.default_rng(0).integers(0, 256, (30, 7, 5, 3), dtype=np.uint8)
    page = visit(review(pictures=pictures))
    for i in (0, 1, 29):
        page.evaluate(f"scrollTo(0, {i} * 9999)")
        canvas, end = card(page, 10 * i).locator("canvas"), time.monotonic() + 5
        while not (found := decoded(canvas.evaluate("c => c.toDataURL()"))[1]).any() and time.monotonic() < end:
            page.wait_for_timeout(20)
        np.testing.assert_array_equal(found[..., :3], pictures[i])


def test_many_fields_are_folded(visit):
    page = visit(review(fields=[[(f"f{k}", str(k)) for k in range(20)]] * 30))
    first = card(page, 0)
    assert first.locator(".features dt").count() == 8
    first.get_by_text("12 more").click()
    wait(page, "document.querySelector('.suspect').querySelectorAll('.features dt').length === 20")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_in_light_and_dark(visit, width, scheme):
    classes = [f"a class with a long name {i}" for i in range(20)]
    suspects = [Suspect(i, "W" * 300, i % 20, i % 7, 0.01 * i, 0.5) for i in range(40)]
    fields = [[("name" * 30, "v" * 300)]] * 40
    viewport = {"width": width, "height": 800}
    command = "bilevel denoise --apply " + "d" * 200
    wanted = review(suspects=suspects, classes=classes, fields=fields, command=command)
    page = visit(wanted, viewport=viewport, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = "e => e.getBoundingClientRect().right"
    inside = f"e => ({right})(e) <= ({right})(e.closest('.suspect')) - 8"
    assert page.evaluate(f"[...document.querySelectorAll('.suspect *')].every({inside})")
    press(page, 0, "Other…")
    assert page.evaluate("document.querySelector('#chooser').getBoundingClientRect().right") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_no_line_ends_within_the_name_of_an_option(visit):
    command = "bilevel denoise table.csv --apply decisions.csv --label diagnosis --out cleaned.csv"
    page = visit(review(command=command, notes=["Use --trusted " * 40]), viewport={"width": 360, "height": 800})
    lines = page.evaluate("[...document.querySelectorAll('.unbroken')].map(e => e.getClientRects().length)")
    assert lines == [1] * 43
    assert page.locator("pre").inner_text() == command
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_only_the_current_card_is_a_stop_of_the_tab_key(visit):
    page = visit(review())
    page.locator("#bar [data-save]").evaluate("e => e.disabled = false")
    page.locator("#bar [data-save]").focus()
    stops = []
    for _ in range(6):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.dataset.do ?? document.activeElement.className"))
    assert stops[:5] == ["suspect current", "relabel", "keep", "drop", "other"]
    assert not page.evaluate("document.querySelector('#feed').contains(document.activeElement)")


def test_five_thousand_suspects_open_at_once_and_few_of_them_are_elements(visit):
    pictures = np.random.default_rng(0).integers(0, 256, (5000, 28, 28), dtype=np.uint8)
    page = visit(review(count=5000, pictures=pictures))
    opened = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    print(f"5,000 suspects: interactive after {opened:.0f} ms")
    count = "document.querySelectorAll('.suspect').length"
    assert page.evaluate(count) <= 100
    seen = "e => e.getBoundingClientRect().top > 200 && e.getBoundingClientRect().bottom < innerHeight"
    for share in (0.5, 0.9, 0.2, 0.7, 0.4, 1.0):
        page.evaluate(f"scrollTo(0, {share} * document.documentElement.scrollHeight)")
        if share < 1:
            wait(page, f"[...document.querySelectorAll('.suspect')].some({seen})")
            page.evaluate(f"[...document.querySelectorAll('.suspect')].find({seen}).click()")
        wait(page, f"{count} <= 150")
    assert page.evaluate("document.querySelectorAll('*').length") < 6_000
    page.locator("#search").fill("49990")
    wait(page, f"{count} === 1")
    page.locator("#clear").click()
    page.get_by_role("button", name="Drop all 5,000").click()
    assert progress(page) == "5,000 of 5,000 reviewed: 0 kept, 5,000 dropped, 0 relabelled"


def test_printing_shows_cards_and_no_blank_space(visit):
    page = visit(review(count=1000))
    pdf = page.pdf()
    assert page.locator("#printed").text_content() == "288 of 1,000 suspects are printed."
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) < 30
