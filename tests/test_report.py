"""The page of a run: whole in itself, escaped, accessible."""

import re
from functools import cache
from html.parser import HTMLParser

import pytest
from bilevel_studies.demo import convergence
from markupsafe import Markup

from bilevel.report.page import Card, Report, Table, render, unbroken

CURVES = [[10.0, 1e-2, 1e-5], [5.0, 1e-3, 1e-6, 1e-9, 0.0]]


@cache
def figure(name):
    return convergence(name, CURVES, goal=1e-6, label=f"Figure {name}")


def report(**changes):
    fields = {
        "title": "A title",
        "outcome": "It went well.",
        "good": True,
        "table": Table("What was found", ["Problem", "Error"], [["first", "1e-9"], ["second", "1e-8"]]),
        "cards": [Card(f"Card {name}", figure(name), [("f", "|u|²")], note="A note.") for name in ("one", "two")],
        "settings": [("Seed", "0")],
        "legend": "How to read it.",
    }
    return Report(**(fields | changes))


class Page(HTMLParser):
    """The elements of a page, and whether they nest."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def test_elements_are_closed_in_order():
    assert Page(render(report())).open == []


def test_the_page_loads_nothing():
    text = render(report())
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]", text)
    assert "@import" not in text
    assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "embed"}
    references = [value for _, attrs in page.elements for name, value in attrs.items() if name in ("href", "src")]
    assert references
    assert all(value.startswith("#") or value == "data:," for value in references)
    assert any("default-src 'none'" in attrs.get("content", "") for attrs in page.all("meta"))
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))


def test_every_identifier_is_there_once_and_every_reference_is_met():
    text = render(report())
    identifiers = [attrs["id"] for _, attrs in Page(text).elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)|aria-labelledby="([^"]*)"', text)
    assert references
    assert {name for groups in references for name in groups if name} <= set(identifiers)


@pytest.mark.parametrize("where", ["title", "outcome", "legend", "table", "card", "settings", "notes", "label"])
def test_a_script_tag_in_a_string_stays_text(where):
    bad = '<script>alert("x")</script>'
    changes = {
        "title": {"title": bad},
        "outcome": {"outcome": bad},
        "legend": {"legend": bad},
        "table": {"table": Table(bad, [bad], [[bad, bad]])},
        "card": {"cards": [Card(bad, Markup(""), [(bad, bad)], note=bad)]},
        "settings": {"settings": [(bad, bad)]},
        "notes": {"notes": [bad]},
        "label": {"cards": [Card("", convergence("x", CURVES, goal=1, label=bad))]},
    }[where]
    text = render(report(**changes))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert Page(text).open == []


def test_the_page_says_the_outcome_the_table_and_the_settings():
    page = Page(render(report()))
    for words in ("It went well.", "What was found", "second", "1e-8", "How to read it.", "|u|²", "A note.", "Seed"):
        assert words in page.texts


def test_a_bad_outcome_is_marked():
    assert 'class="outcome good"' in render(report())
    assert 'class="outcome bad"' in render(report(good=False))


def test_the_page_is_accessible():
    page = Page(render(report()))
    assert page.all("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert len(page.all("caption")) == 1
    headers = [attrs.get("scope") for attrs in page.all("th")]
    assert headers == ["col", "col", "row", "row"]
    figures = page.all("svg")
    assert [(svg["role"], svg["aria-label"]) for svg in figures] == [("img", "Figure one"), ("img", "Figure two")]


def test_figures_take_their_colours_from_the_page_and_suit_both_schemes():
    svg = figure("one")
    assert "currentColor" in svg
    assert "var(--accent)" in svg
    # Neither a background nor a colour of matplotlib's own is left.
    assert not re.search(r"#[0-9a-f]{6}\b", svg.replace("#one", ""))
    assert "prefers-color-scheme: dark" in render(report())


def test_a_figure_has_one_line_for_each_curve_their_median_and_the_goal():
    def lines(curves):
        svg = convergence("one", curves, goal=1e-6, label="A figure")
        return len(re.findall(r'<path [^>]*clip-path="[^"]*" style="fill: none; stroke: var\(--accent\)', svg))

    assert lines(CURVES) == 3
    assert lines(CURVES * 3) == 7


def test_the_same_curves_give_the_same_bytes():
    assert convergence("one", CURVES, goal=1e-6, label="Figure one") == figure("one")


def test_a_page_without_cards_is_whole():
    text = render(report(cards=[]))
    assert "Convergence" not in text
    assert Page(text).open == []


def test_notes_stand_above_the_results_and_names_of_options_are_kept_whole():
    text = render(report(notes=["Less --caution <b> may help, or --penalty single."], outcome="See --steps."))
    assert text.index("may help") < text.index('id="results"')
    assert 'Less <span class="unbroken">--caution</span> &lt;b&gt; may help' in text
    assert 'See <span class="unbroken">--steps</span>.' in text
    assert unbroken("a--b -- c-- ---d 2--x") == "a--b -- c-- ---d 2--x"
