"""The tables of the studies, made from studies/results, equal the tables of the pages in docs/results."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from bilevel_studies.classical import study as classical
from bilevel_studies.denoising import speed
from bilevel_studies.denoising import tables as denoising
from bilevel_studies.fairness import study as fairness
from bilevel_studies.few_shot import tables as few_shot
from bilevel_studies.poisoning import clean_label, deep_victim
from bilevel_studies.poisoning import tables as poisoning
from bilevel_studies.render import fixed, interval, render, signed
from bilevel_studies.statistics import Numbers
from bilevel_studies.study import read
from bilevel_studies.tuning import tables as tuning
from jinja2 import UndefinedError

ROOT = Path(__file__).parents[2]
PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "studies" / "results"
REPORTS = {
    "classical": classical.report,
    "denoising": denoising.report,
    "denoising-speed": partial(speed.report, "speed"),
    "denoising-steps": partial(speed.report, "steps"),
    "clean-label": clean_label.report,
    "deep-victim": deep_victim.report,
    "tuning": tuning.report,
    "fairness": fairness.report,
    "few-shot": few_shot.report,
    "poisoning": poisoning.report,
}
NEW = (
    "classical: Summary",
    "denoising: Ours minus the other columns",
    "denoising: Seconds of a run of ours",
    "denoising: Begun",
    "denoising-speed: mlp: seconds until",
    "denoising-speed: cnn: seconds until",
    "clean-label: inception: difference by pairs",
    "clean-label: efficientnet: difference by pairs",
    "deep-victim: Pairs of methods",
    "deep-victim: Settings of Penalty",
    "few-shot: Penalty minus the other methods",
    "tuning: A million hyper-parameters",
)
"""The beginnings of tables whose numbers the pages have in sentences."""


def rows_of(text):
    """The cells with numbers of every row of the tables of a text, but for the first column, which is words."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in lines]
    return [tuple(cell for cell in row if re.search(r"\d", cell)) for row in cells]


@pytest.mark.parametrize("name", REPORTS)
def test_the_numbers_of_every_row_of_the_tables_are_on_the_page(name, tmp_path):
    kept = read(RESULTS / f"{name}.json")
    page, found = rows_of((PAGES / f"{name}.md").read_text()), REPORTS[name](kept, tmp_path)
    seen = 0
    for title, body in found.tables.items():
        if f"{name}: {title}".startswith(NEW):
            continue
        for row in rows_of(body)[1:]:
            assert not row or row in page, f"{title}: {row}"
            seen += bool(row)
    assert seen > 1


def test_the_page_of_poisoning_is_what_its_template_makes_of_the_results():
    assert (PAGES / "poisoning.md").read_text() == render("poisoning", read(RESULTS / "poisoning.json"))


def test_the_template_of_poisoning_has_at_most_1500_words_and_no_number_of_the_results_in_it():
    template = (ROOT / "studies/src/bilevel_studies/pages/poisoning.md.j2").read_text()
    assert len(re.sub(r"\{\{.*?\}\}", "0", template).split()) <= 1500
    prose = re.sub(r"\{\{.*?\}\}", "", template)
    decimals = set(re.findall(r"\d+\.\d+", prose))
    assert decimals <= {"0.001", "0.1", "0.03", "0.01"}, "but for the constants of the settings"


def test_a_template_that_names_what_the_study_lacks_is_an_error(monkeypatch):
    monkeypatch.setattr(poisoning, "page", lambda kept: {})
    with pytest.raises(UndefinedError):
        render("poisoning", [])


def test_numbers_are_written_with_their_digits_and_signs():
    assert (fixed(1.005, 1), signed(2.0), signed(-0.25, 2)) == ("1.0", "+2.0", "-0.25")
    assert interval(Numbers((1.0, 3.0))) == "-10.7 to +14.7"
    assert interval(Numbers((1.0,))) == "+1.0 to +1.0"
