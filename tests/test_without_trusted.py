"""Denoising without a trusted set: the cross-validated estimate, rows to check, and going on from the decisions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from sklearn.datasets import load_wine

import bilevel
from bilevel import DataError, OptionError
from bilevel.applications.denoising.cross_validation import (
    FOLDS,
    confident_mistakes,
    cross_validate,
    folds,
    rows_to_check,
)
from bilevel.applications.networks import mlp
from bilevel.cli.main import main
from bilevel.data import load
from bilevel.data.decisions import is_decisions, trusted_by_decisions

STEPS = ["--steps", "150"]
WRONG = 30


def denoise(*arguments: object) -> int:
    return main(["denoise", *map(str, arguments)])


@pytest.fixture(scope="module")
def wine(tmp_path_factory) -> tuple[Path, list[str]]:
    """Wine with wrong labels, and the right ones."""
    frame = load_wine(as_frame=True).frame
    right = [("a", "b", "c")[k] for k in frame.pop("target")]
    kind, rng = list(right), np.random.default_rng(0)
    for i in rng.choice(len(kind), WRONG, replace=False):
        kind[i] = str(rng.choice([name for name in "abc" if name != right[i]]))
    path = tmp_path_factory.mktemp("wine") / "wine.csv"
    frame.assign(kind=kind).to_csv(path, index=False)
    return path, right


def test_mistakes_that_probabilities_show_are_those_of_the_confident_counts():
    """By hand: five labels 0 and five labels 1; one of each looks like the other class, beyond its mean probability."""
    p1 = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.9, 0.9, 0.9, 0.8, 0.8, 0.05])
    y = torch.tensor([0] * 5 + [1] * 5)
    # Levels: class 0 over labels 0 is 0.7, class 1 over labels 1 is 0.69. Rows 4 and 9 exceed the other class's level.
    found = confident_mistakes(torch.stack([1 - p1, p1], 1), y)
    assert found.nonzero().flatten().tolist() == [4, 9]
    assert not confident_mistakes(torch.stack([1 - p1, p1], 1)[[0, 1, 2, 5, 6]], y[[0, 1, 2, 5, 6]]).any()


def test_parts_have_the_classes_in_proportion():
    y = torch.tensor([0] * 50 + [1] * 25 + [2] * 10)
    parts = folds(y, seed=3)
    counts = [torch.bincount(y[parts == k], minlength=3).tolist() for k in range(FOLDS)]
    assert counts == [[10, 5, 2]] * FOLDS
    assert not torch.equal(parts, folds(y, seed=4))


def test_no_row_is_judged_by_a_network_that_saw_its_label(monkeypatch):
    """A label that nothing else explains stays improbable: 60 rows, each with an input of its own."""
    x = torch.eye(60)
    y = torch.arange(60) % 2
    torch.manual_seed(0)
    found = cross_validate((x, y), torch.nn.Linear(60, 2), steps=300)
    assert float(found.quality.mean()) < 0.6
    with pytest.raises(DataError, match="at least 10 examples"):
        cross_validate((x[:9], y[:9]), torch.nn.Linear(60, 2))


def test_estimate_of_a_table_finds_wrong_labels_and_says_what_it_is(wine, tmp_path, capsys):
    path, right = wine
    assert denoise(path, "--label", "kind", *STEPS, "--out", tmp_path / "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "cross-validation"
    assert "estimated by cross-validation" in result["message"]
    assert any("Nothing is trusted" in note for note in result["notes"])
    with open(tmp_path / "r" / "issues.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    said = [row["is_label_issue"] == "True" for row in rows]
    wrong = [row["given_label"] != name for row, name in zip(rows, right, strict=True)]
    hits = sum(a and b for a, b in zip(said, wrong, strict=True))
    assert hits / sum(said) > 0.8
    assert hits / WRONG > 0.7
    assert np.mean(bilevel.load(tmp_path / "r").predict(path) == np.array(right)) > 0.9
    page = (tmp_path / "r" / "report.html").read_text()
    assert "estimated by cross-validation" in page
    assert '<h2 id="suspects" tabindex="-1">Suspects</h2>' in page
    with safe_open(tmp_path / "r" / "model.safetensors", framework="pt") as weights:
        about = json.loads(weights.metadata()["classifier"])
    assert about == {"model": "mlp", "shape": [13], "classes": ["a", "b", "c"]}
    assert denoise(path, "--label", "kind", *STEPS, "--out", tmp_path / "r", "--resume") == 0


def test_of_several_ranks_only_the_first_makes_the_estimate(wine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [wine[0], "--label", "kind", "--steps", 5, "--out", tmp_path / "r"]
    for rank, there in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert denoise(*words) == 0
        assert ("probably wrong" in capsys.readouterr().out) is there
        assert (tmp_path / "r").exists() is there
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert denoise(*words) == 0  # the finished run is shown again, as with --resume


def test_checked_rows_become_the_trusted_set(wine, tmp_path, capsys):
    path, right = wine
    words = [path, "--label", "kind", *STEPS]
    assert denoise(*words, "--pick-trusted", 30, "--out", tmp_path / "p", "--json") == 0
    picked = json.loads(capsys.readouterr().out)["to_check"]
    assert len(set(picked)) == 30
    assert min(np.unique([right[i] for i in picked], return_counts=True)[1]) >= 6
    page = (tmp_path / "p" / "report.html").read_text()
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert sorted(data["index"]) == picked
    assert "--trusted" in page
    assert "Rows to check" in page
    assert "estimated wrong labels" not in page
    assert '<h2 id="suspects" tabindex="-1">Rows to check</h2>' in page
    assert "Suspects" not in page
    keys = dict(zip(data["index"], data["key"], strict=True))
    given = pd.read_csv(path)["kind"]
    lines = ["index,key,decision,label", f"{picked[0]},{keys[picked[0]]},drop,"]
    for i in picked[1:]:
        lines.append(f"{i},{keys[i]},{'keep' if given[i] == right[i] else 'relabel'},{right[i]}")
    decisions = tmp_path / "decisions.csv"
    decisions.write_text("\n".join(lines))
    found = trusted_by_decisions(load(path, label="kind"), decisions)
    assert found.count == len(right) - 30
    assert [found.classes[c] for c in found.trusted[1]] == [right[i] for i in picked[1:]]
    assert torch.equal(found.trusted[0], load(path, label="kind").x[picked[1:]])
    assert denoise(*words, "--trusted", decisions, "--out", tmp_path / "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["trusted"], result["rows"]) == (29, len(right) - 30)
    with open(tmp_path / "r" / "importance.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["index"]) for row in rows} == {*range(len(right))} - {*picked}


def test_rows_to_check_are_doubtful_and_typical_ones_of_every_class(wine):
    data = load(wine[0], label="kind")
    torch.manual_seed(0)
    found = cross_validate((data.x, data.y), mlp(13, (16,), 3), steps=150)
    rows = rows_to_check(data, found, 24)
    assert len(set(rows.tolist())) == 24
    counts = np.bincount(found.suggested.numpy()[rows], minlength=3)
    assert counts.tolist() == [8, 8, 8]
    quality = found.quality.numpy()
    assert (quality[rows] < np.quantile(quality, 0.25)).sum() >= 6
    assert (quality[rows] > np.quantile(quality, 0.75)).sum() >= 6
    for wrong in (2, data.count, 2.5):
        with pytest.raises(OptionError, match="count must be"):
            rows_to_check(data, found, wrong)


def test_options_that_contradict_each_other_are_refused(wine, tmp_path, capsys):
    path = wine[0]
    for words, said in (
        (["--pick-trusted", 20, "--trusted", 20], "leave --trusted and --noise out"),
        (["--pick-trusted", 20, "--noise", 0.2], "leave --trusted and --noise out"),
        (["--method", "value-gap"], "--method value-gap needs a trusted set"),
        (["--pick-trusted", 20, "--method", "value-gap"], "--method value-gap needs a trusted set"),
        (["--no-baselines"], "--no-baselines must be left out without --trusted"),
        (["--pick-trusted", 20, "--apply", "suggested"], "--apply suggested must be left out with --pick-trusted"),
    ):
        assert denoise(path, "--label", "kind", *words, "--out", tmp_path / "r") == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "r").exists()
    assert not is_decisions(path)
    assert not is_decisions(tmp_path / "none.csv")
    drop = tmp_path / "drop.csv"
    data = load(path, label="kind")
    drop.write_text(f"index,key,decision,label\n0,{data.keys[0]},drop,\n")
    assert denoise(path, "--label", "kind", "--trusted", drop, "--out", tmp_path / "r") == 1
    assert "keeps or relabels no row" in capsys.readouterr().err
