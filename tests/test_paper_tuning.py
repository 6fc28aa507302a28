"""The tuning study: its cells run, its page says what they found, a stopped study goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bilevel.cli.main import main
from bilevel.paper import tuning, tuning_data, tuning_page


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tuning, "BUDGETS", dict.fromkeys(tuning_data.DATASETS, 0.5))
    monkeypatch.setattr(tuning_data, "SIZES", {"digits": (150, 150), "text": (60, 60), "a9a": (200, 200)})
    monkeypatch.setattr(tuning_data, "TEXTS", 200)
    monkeypatch.setattr(tuning_data, "WORDS", 300)


def test_every_way_ends_with_losses_and_the_page_shows_them(quick, tmp_path, capsys):
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
    page = (tmp_path / "tuning.md").read_text()
    for title in tuning.WAYS.values():
        assert f"| {title} |" in page
    kept = json.loads((tmp_path / "tuning.json").read_text())["cells"]
    losses = {settings["way"]: found["valid_loss"] for settings, found in kept}
    assert losses["per-feature"] < losses["single"] <= losses["grid"] + 1e-4
    assert first["claims"]["text"]["least_validation_loss"] is True
    # Finished cells are kept: nothing is run again, and the page is the same.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert main(arguments) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert (tmp_path / "tuning.md").read_text() == page


def test_rows_of_a_problem_are_those_of_its_parts(quick):
    rows, test = tuning_data.problem("digits", 0)
    assert int((rows.fold == -1).sum()) == int((rows.fold == 0).sum()) == 150
    assert len(test.y) == 1797 - 300
    assert rows.outputs == 10


def test_the_scale_cell_measures_both_sides():
    if not (Path(os.environ.get("BILEVEL_DATA", "../shared/data")) / "mnist").exists():
        pytest.skip("MNIST is not in $BILEVEL_DATA")
    found = tuning.run({"part": "scale", "hidden": 6, "steps": 12})
    assert found is not None
    assert found["hyper_parameters"] == 6 * (784 + 10)
    assert found["ratio"] == pytest.approx(found["tuned_seconds"] / found["plain_seconds"])
    assert f"{found['ratio']:.2f} times plain training" in tuning_page._scale(found)
