"""The deep victim: its cells, its tables, and a small version run in earnest."""

from __future__ import annotations

import pytest
import torch
from bilevel_studies.poisoning import deep_victim
from bilevel_studies.poisoning.deep_victim import METHODS
from common import needs

from bilevel.cli.main import main
from bilevel.data import load


def kept(flips, targets=4, tether=deep_victim.TETHER):
    """Cells in which Penalty flips these, and the others nothing."""
    return [
        (
            cell.settings,
            {
                "device": "CPU",
                "clean": [1, 2, 3],
                "label": 1,
                "wanted": 2,
                "clean_accuracies": [0.5, 0.6, 0.55],
                "runs": [
                    {
                        "method": method,
                        "flips": flips if method == "penalty" else [False] * 3,
                        "attack_seconds": 2.0,
                        "accuracies": [0.5, 0.4, 0.45],
                        "margins": [0.0, 0.0, 0.0],
                    }
                    for method in METHODS
                ],
            },
        )
        for cell in deep_victim.cells(targets, tether=tether)
    ]


def test_every_target_is_a_cell_of_its_own():
    cells = deep_victim.cells(2)
    assert [c.settings["target"] for c in cells] == [0, 1]
    assert {c.settings["points"] for c in cells} == {50}
    assert {c.settings["points"] for c in deep_victim.cells(1, rows=1000)} == {10}


def test_known_and_other_first_weights_are_counted_apart(tmp_path):
    report = deep_victim.report(kept([True, False, True]), tmp_path)
    assert report.summary["methods"]["penalty"] == {
        "targets": 4,
        "known": 4,
        "others": 4,
        "of_others": 8,
        "seconds": 2.0,
        "accuracy": pytest.approx(0.45),
    }
    assert report.summary["clean_accuracy"] == pytest.approx(0.55)
    assert report.summary["wanted_without_poison"] == [0, 4, 0], "of targets, by first weights"
    text = report.tables["Flipped targets"]
    assert "| Penalty | 4 | 4 of 4 (100%; 40% to 100%) | 4 of 8 (50%; 16% to 84%) | 45.0% | 2.0 |" in text
    assert "| feature collision | 4 | 0 of 4" in text


@pytest.mark.parametrize(
    ("flip", "targets", "row"), [(1, 4, "| 4 | 0 | 0.12 |"), (1, 20, "| 20 | 0 | 1.9e-06 |"), (0, 20, "| 0 | 0 | 1 |")]
)
def test_methods_are_compared_by_the_sign_test_over_targets(flip, targets, row):
    text = deep_victim.pair_table(kept([bool(flip), False, False], targets))
    assert f"| Penalty | feature collision {row}" in text


def test_margins_are_compared_by_targets():
    cells = kept([False] * 3, 4)
    for k, (_, found) in enumerate(cells):
        for run, margin in zip(found["runs"], (2.0 + 0.1 * k, 1.0, 0.5), strict=True):
            run["margins"] = [margin, margin, margin - 1.5]
    text = deep_victim.pair_table(cells)
    assert "| Penalty | the bases as they are | 0 | 0 | 1 | +1.65 (+1.44 to +1.86) |" in text
    assert "| Penalty | feature collision | 0 | 0 | 1 | +1.15 (+0.94 to +1.36) |" in text


def test_seconds_of_attacks_that_shared_the_machine_are_not_shown(tmp_path):
    report = deep_victim.report([(settings, one | {"beside": 2}) for settings, one in kept([True] * 3)], tmp_path)
    assert report.summary["methods"]["penalty"]["seconds"] is None
    assert "| 8 of 8 (100%; 63% to 100%) | 45.0% |  |" in report.tables["Flipped targets"]


def compared(margins, rows=deep_victim.ROWS):
    """Choice cells in which retrained victims have the wanted class ahead by so much, by the tether."""
    runs = [{"method": "penalty", "margins": [margins[tether]] * 3} for tether in deep_victim.TETHERS]
    return [(c.settings, {"runs": runs, "device": "CPU"}) for c in deep_victim.choice_cells(2, rows=rows)]


def test_tether_is_the_one_with_the_largest_margins_on_targets_that_are_not_in_the_table(tmp_path):
    found = compared({0.0003: -5.0, 0.003: -1.0, 0.03: -2.0})
    assert {s["target"] for s, _ in found} == {1000, 1001}, "the table has 0 to 3"
    assert deep_victim.best(found, deep_victim.ROWS) == 0.003
    stale = [(s | {"batch": 7}, f) for s, f in found]
    assert deep_victim.best(stale, deep_victim.ROWS) == deep_victim.TETHER, "they are of other settings"
    assert deep_victim.best(found, 1000) == deep_victim.TETHER, "they are of another size"
    table, other = kept([True, False, True], tether=0.003), kept([True] * 3)
    report = deep_victim.report([*found, *table, *other], tmp_path)
    assert report.summary["methods"]["penalty"]["targets"] == 4, "neither the choice nor another tether is in the table"
    assert report.summary["methods"]["penalty"]["known"] == 4
    text = report.tables["Settings of Penalty"]
    for row in ("0.0003 | -5.00", "0.003 (taken) | -1.00", "0.03 | -2.00"):
        assert f"| 5,000 | {row} |" in text


def test_margin_is_that_of_the_wanted_class_over_the_best_other():
    scores = torch.tensor([1.0, 4.0, 2.5])
    assert [deep_victim.ahead(scores, k) for k in range(3)] == [-3.0, 1.5, -1.5]


def test_command_writes_no_tables_if_nothing_was_run(tmp_path, capsys):
    assert main(["reproduce", "deep-victim", "--no-run", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--no-run needs results" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "tables.md").exists()


@needs("cifar10")
@pytest.mark.slow
def test_small_version_attacks_within_the_bound_and_retrains_every_victim(monkeypatch):
    monkeypatch.setattr(deep_victim, "POOL", 100)
    monkeypatch.setattr(deep_victim, "TEST", 60)
    monkeypatch.setattr(deep_victim, "FIRST_CHOICE", 40)
    deep_victim.scene_of.cache_clear()
    few = {"training": 3, "steps": {"penalty": 2, "feature-collision": 2}, "batch": 50}
    (cell,), (choice,) = deep_victim.cells(1, rows=200), deep_victim.choice_cells(1, rows=200)
    found = deep_victim.run(dict(cell.settings) | few, torch.device("cpu"))
    assert found["label"] != found["wanted"]
    assert [run["method"] for run in found["runs"]] == list(METHODS)
    for run in found["runs"]:
        assert len(run["given"]) == len(run["flips"]) == 3
        assert run["linf"] <= deep_victim.EPSILON
        assert (run["linf"] == 0) == (run["method"] == "unmoved")
        assert len(run["accuracies"]) == 3
    assert len(found["clean_accuracies"]) == 3
    runs = deep_victim.run(dict(choice.settings) | few, torch.device("cpu"))["runs"]
    assert [run["method"] for run in runs] == ["penalty"] * len(deep_victim.TETHERS)


@needs("cifar10")
def test_victims_see_pixels_about_zero():
    x = deep_victim.Standard()(load("cifar10").x[:1000])
    assert abs(float(x.mean())) < 0.1
    assert abs(float(x.std()) - 1) < 0.1
