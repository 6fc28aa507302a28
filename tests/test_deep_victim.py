"""The deep victim: its cells, its page, and a small version run in earnest."""

from __future__ import annotations

import pytest
import torch
from common import needs

from bilevel.cli.main import main
from bilevel.paper import deep_victim, deep_victim_page
from bilevel.paper.deep_victim import METHODS


def kept(flips, targets=4):
    """Cells in which Penalty flips these, and the others nothing."""
    return [
        (cell.settings, {"flips": flips if cell.settings["method"] == "penalty" else [False] * 3,
                         "attack_seconds": 2.0, "device": "CPU"})
        for cell in deep_victim.cells(targets)
    ]  # fmt: skip


def test_all_methods_meet_the_same_targets_one_target_after_another():
    cells = deep_victim.cells(2)
    assert [(c.settings["target"], c.settings["method"]) for c in cells] == [(t, m) for t in range(2) for m in METHODS]
    assert {c.settings["points"] for c in cells} == {50}
    assert {c.settings["points"] for c in deep_victim.cells(1, rows=1000)} == {10}


def test_page_counts_known_and_other_first_weights_apart(tmp_path):
    summary = deep_victim_page.write(kept([True, False, True]), tmp_path)
    assert summary["methods"]["penalty"] == {
        "targets": 4, "known": 4, "others": 4, "of_others": 8, "seconds": 2.0,
    }  # fmt: skip
    text = (tmp_path / "deep-victim.md").read_text()
    assert "| Penalty | 4 | 4 of 4 (100%; 40% to 100%) | 4 of 8 (50%; 16% to 84%) | 2.0 |" in text
    assert "| feature collision | 4 | 0 of 4" in text


def test_what_is_found_is_told_by_the_sign_test_over_targets():
    few, many, none = (deep_victim_page.stated(kept([flip, False, False], n)) for flip, n in ((1, 4), (1, 20), (0, 20)))
    assert "for 4, fewer for 0: by the sign test (p = 0.12) the two cannot be told apart." in few
    assert "for 20, fewer for 0: by the sign test (p = 1.9e-06) the two differ: Penalty has more." in many
    assert "for 0, fewer for 0: by the sign test (p = 1) the two cannot be told apart." in none
    assert deep_victim_page.stated([]) == ""


def compared(margins, rows=deep_victim.ROWS):
    """Choice cells in which retrained victims have the wanted class ahead by so much, by the tether."""
    return [
        (cell.settings, {"margins": [margins[cell.settings["tether"]]] * 3, "flips": [True] * 3, "device": "CPU"})
        for cell in deep_victim.choice_cells(4, 2, rows=rows)
    ]


def test_tether_is_the_one_with_the_largest_margins_on_targets_that_are_not_in_the_table(tmp_path):
    found = compared({0.003: -5.0, 0.03: -2.0, 0.3: -1.0})
    assert {s["target"] for s, _ in found} == {4, 5}, "the table has 0 to 3"
    assert deep_victim.best(found, deep_victim.ROWS) == 0.3
    assert deep_victim.best(found[:-1], deep_victim.ROWS) == deep_victim.TETHER, "not all were run"
    assert deep_victim.best(found, 1000) == deep_victim.TETHER, "they are of another size"
    table = [(s | ({"tether": 0.3} if "tether" in s else {}), f) for s, f in kept([True, False, True])]
    other = [(s, f | {"flips": [False] * 3}) for s, f in kept([True] * 3) if s["method"] == "penalty"]
    summary = deep_victim_page.write([*found, *table, *other], tmp_path)
    assert summary["methods"]["penalty"]["targets"] == 4, "neither the choice nor another tether is in the table"
    assert summary["methods"]["penalty"]["known"] == 4
    text = (tmp_path / "deep-victim.md").read_text()
    assert "a tether of 0.3, chosen on 2 targets" in text
    assert "-5.00 with 0.003, -2.00 with 0.03, -1.00 with 0.3." in text


def test_margin_is_that_of_the_wanted_class_over_the_best_other():
    scores = torch.tensor([1.0, 4.0, 2.5])
    assert [deep_victim.ahead(scores, k) for k in range(3)] == [-3.0, 1.5, -1.5]


def test_command_writes_no_page_where_nothing_was_run(tmp_path, capsys):
    assert main(["reproduce", "deep-victim", "--no-run", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "has no results" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "deep-victim.md").exists()


@needs("cifar10")
@pytest.mark.slow
def test_small_version_attacks_within_the_bound_and_retrains_every_victim(monkeypatch):
    monkeypatch.setattr(deep_victim, "POOL", 100)
    monkeypatch.setattr(deep_victim, "TEST", 60)
    deep_victim.scene_of.cache_clear()
    for cell in deep_victim.cells(1, rows=200, steps={"penalty": 2, "feature-collision": 2}):
        found = deep_victim.run(dict(cell.settings) | {"training": 3}, torch.device("cpu"))
        assert found["clean"][0] == found["label"] != found["wanted"]
        assert len(found["given"]) == len(found["flips"]) == 3
        assert found["linf"] <= deep_victim.EPSILON
        assert (found["linf"] == 0) == (cell.settings["method"] == "unmoved")
