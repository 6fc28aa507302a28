"""The tuning study: its cells run, its tables show what they found, a stopped study continues."""

from __future__ import annotations

import json
import shutil

import pytest
from bilevel_studies.tuning import data as tuning_data
from bilevel_studies.tuning import study as tuning
from bilevel_studies.tuning import tables
from common import needs

from bilevel.cli.main import main


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tuning, "BUDGETS", dict.fromkeys(tuning_data.DATASETS, 0.5))
    monkeypatch.setattr(tuning_data, "SIZES", {"digits": (150, 150), "text": (60, 60), "a9a": (200, 200)})
    monkeypatch.setattr(tuning_data, "TEXTS", 200)
    monkeypatch.setattr(tuning_data, "WORDS", 300)


def test_every_way_ends_with_losses_and_the_tables_show_them(quick, tmp_path, capsys, monkeypatch):
    arguments = [
        "reproduce",
        "tuning",
        "--parts",
        "linear",
        "--dataset",
        "text",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["cells"] == len(tuning.WAYS)
    page = (tmp_path / "tables.md").read_text()
    for title in tuning.WAYS.values():
        assert f"| {title} |" in page
    kept = json.loads((tmp_path / "tuning.json").read_text())["cells"]
    losses = {settings["way"]: found["valid_loss"] for settings, found in kept}
    # Which way is best depends on how much half a second allows; the page must name the one that was found.
    least = min((way for way in losses if not way.startswith("folds")), key=losses.__getitem__)
    assert first["claims"]["text"]["least_validation_loss"] == least
    # Finished cells are kept: nothing is run again, and the page is the same.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert main(arguments) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert (tmp_path / "tables.md").read_text() == page
    # The file next to the page also has them all; a cell with settings that the study no longer has is not shown.
    stale = [{"part": "linear", "dataset": "text", "way": "single", "seed": 0, "old": 1}, {"valid_loss": 9.0}]
    (tmp_path / "tuning.json").write_text(json.dumps({"cells": [*kept, stale]}))
    shutil.rmtree(tmp_path / "cells")
    monkeypatch.setattr(tuning, "run", None)
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == len(tuning.WAYS)
    assert (tmp_path / "tables.md").read_text() == page


def test_rows_of_a_problem_are_those_of_its_parts(quick):
    rows, test = tuning_data.problem("digits", 0)
    assert int((rows.fold == -1).sum()) == int((rows.fold == 0).sum()) == 150
    assert len(test.y) == 1797 - 300
    assert rows.outputs == 10


def test_the_ridge_cell_measures_penalties_and_test_errors():
    found = tuning.run({"part": "ridge", "seed": 1})
    assert found is not None
    assert found["ratio"] >= 100
    assert 1 < found["test_error"] < found["best_single_error"] < 4


@pytest.mark.parametrize("left_out", ["folds", "rows"])
def test_the_curve_cell_measures_how_far_a_single_penalty_is_from_the_closed_form(left_out):
    settings = {"part": "curve", "left_out": left_out, "seed": 1}
    found = tuning.run(settings)
    assert found is not None
    assert found["penalty"] == pytest.approx(found["minimiser"], rel=1e-3)
    off = {"penalty": 1.02, "minimiser": 1.0}
    title = {"folds": "five folds", "rows": "single rows"}[left_out]
    assert f"| {title} | 2.0000% | 1 of 2 |" in tables.curve_table([(settings, found), (settings | {"seed": 2}, off)])


@needs("mnist")
def test_the_scale_cell_measures_both_sides():
    found = tuning.run({"part": "scale", "hidden": 6, "steps": 12, "turns": 2})
    assert found is not None
    assert found["hyper_parameters"] == 6 * (784 + 10)
    assert found["ratio"] == pytest.approx(found["tuned_seconds"] / found["plain_seconds"])
    assert len(found["ratios"]) == 2
    assert f"| {6 * 794:,} | {found['tuned_seconds']:.2f} |" in tables.scale_table([({}, found)])


def test_means_are_of_seeds_that_every_way_has(tmp_path):
    def cell(way, seed, valid, test):
        result = {"valid_loss": valid, "test_loss": test, "seconds": 7.0, "features": 64}
        return {"part": "linear", "dataset": "digits", "way": way, "seed": seed}, result

    found = [
        cell("per-feature", 0, 0.1, 0.3),
        cell("single", 0, 0.2, 0.25),
        cell("per-feature", 1, 0.4, 0.2),
        cell("single", 1, 0.3, 0.3),
        cell("per-feature", 2, 9.0, 9.0),
        cell("folds", 0, 0.2, 0.2),
        cell("per-feature, caution 1", 0, 0.2, 0.25),
        cell("per-feature, caution 1", 1, 0.35, 0.3),
        cell("folds", 1, 0.2, 0.3),
        cell("folds, single", 0, 0.3, 0.25),
        cell("folds, single", 1, 0.3, 0.25),
    ]
    report = tables.report(found, tmp_path)
    text = report.tables["digits: penalties of a linear model"]
    assert "| per feature | 0.2500 (0.1000 to 0.4000) | 0.2500 (0.2000 to 0.3000) | 7.0 |" in text
    claims = report.summary["claims"]["digits"]
    assert claims["both_at_once"] == ["per-feature"]
    assert claims["test_loss_above_single"]["per-feature"] == pytest.approx(0.25 - 0.275)
    assert claims["test_loss_above_single"]["folds"] == 0
    for worse in ({"test_loss": 0.4}, {"valid_loss": 0.4}):
        changed = [(s, r | worse if s["way"] == "per-feature" else r) for s, r in found]
        assert tables.report(changed, tmp_path).summary["claims"]["digits"]["both_at_once"] == []


def test_tables_of_the_regression_and_the_network_have_their_numbers(tmp_path):
    regression = [
        ({"part": "ridge", "seed": seed}, {"ratio": ratio, "test_error": error, "best_single_error": 2.0})
        for seed, (ratio, error) in enumerate([(50.0, 1.5), (2e5, 1.25), (300.0, 2.5)])
    ]
    network = ({"part": "network", "way": "by hand", "seed": 0}, {"test_accuracy": 0.5, "seconds": 1.0})
    report = tables.report([*regression, network], tmp_path)
    assert "| per feature | 1.750 (1.250 to 2.500) |" in report.tables["Ridge regression with noise features"]
    assert report.summary["noise_over_informative_penalty"] == [50.0, 2e5, 300.0]
    assert "| by hand | 50.00 | 1.0 |" in report.tables["A network on MNIST"]
