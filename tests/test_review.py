"""The review page as a file: whole in itself, escaped, readable, and small."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reviews import COMMAND, NASTY, data_of, decoded, review
from test_report import Page

from bilevel.report.figures import importances, losses
from bilevel.report.page import Table
from bilevel.report.page import read as source
from bilevel.report.review_page import MOST, Suspect, embedded, listed, mistaken, render_review, sheets, worst_first


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
    for words in ("It went well.", "How well", "weighted", "30 (8%)", "Seed", "A note."):
        assert words in page.texts
    assert "Estimated share of wrong labels" not in page.texts  # that of the suspects, which is told
    assert COMMAND in "".join(page.texts)
    assert "Accuracy" not in Page(render_review(review(accuracy=None))).texts


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
