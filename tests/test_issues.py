"""issues.csv of a run, and the data with all suggestions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from bilevel.cli.main import main
from bilevel.data import load

QUICK = ["--steps", "100", "--no-baselines"]
COUNT = 300


def denoise(*arguments: object) -> int:
    return main(["denoise", *map(str, arguments)])


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def written(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """Digits with every fifth label wrong, the first 60 trusted; return the source and its options."""
    digits = load_digits()
    pixels, y = (digits.images[:COUNT] * 15).astype(np.uint8), digits.target[:COUNT].copy()
    y[60::5] = (y[60::5] + 3) % 10
    if kind == "npz":
        np.savez(folder / "d.npz", x=pixels[60:], y=y[60:], x_trusted=pixels[:60], y_trusted=y[:60])
        return folder / "d.npz", []
    if kind == "folder":
        for i, (image, label) in enumerate(zip(pixels, y, strict=True)):
            place = folder / "d" / ("trusted" if i < 60 else "train") / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{i:03d}.png")
        return folder / "d", []
    frame = pd.DataFrame(pixels.reshape(COUNT, -1), columns=[f"p{j}" for j in range(64)]).assign(digit=y)
    frame[60:].to_csv(folder / "d.csv", index=False)
    frame[:60].to_csv(folder / "t.csv", index=False)
    return folder / "d.csv", ["--label", "digit", "--trusted", str(folder / "t.csv")]


@pytest.mark.parametrize("kind", ["npz", "csv", "folder"])
def test_suggestions_are_applied_at_the_end_of_a_run_and_from_its_issues(kind, tmp_path):
    source, words = written(kind, tmp_path)
    out = tmp_path / "r"
    assert denoise(source, *words, *QUICK, "--apply", "suggested", "--out", out) == 0
    issues, importance = rows_of(out / "issues.csv"), rows_of(out / "importance.csv")
    names = ["is_label_issue", "label_quality", "given_label", "predicted_label", "sample_weight"]
    assert list(issues[0]) == ["index", *names, "key"]
    assert [row["is_label_issue"] for row in issues] == [("False", "True")[int(row["suspect"])] for row in importance]
    same = {"label_quality": "quality", "given_label": "label", "predicted_label": "suggested", "key": "key"}
    for theirs, ours in (same | {"sample_weight": "importance"}).items():
        assert [row[theirs] for row in issues] == [row[ours] for row in importance]
    new = [row["predicted_label" if row["is_label_issue"] == "True" else "given_label"] for row in issues]
    assert sum(row["is_label_issue"] == "True" for row in issues) > 10
    label = words[:2] if kind == "csv" else []
    again = tmp_path / f"again{source.suffix}"
    assert denoise(source, *label, "--apply", out / "issues.csv", "--out", again) == 0
    for path in (out / f"cleaned{source.suffix}", again):
        data = load(path, label="digit" if kind == "csv" else None)
        found = {Path(key).name: data.classes[c] for key, c in zip(data.keys, data.y, strict=True)}
        if kind == "folder":
            assert found == {Path(row["key"]).name: name for row, name in zip(issues, new, strict=True)}
        else:
            assert list(found.values()) == new
    assert denoise(source, *words, *QUICK, "--apply", "suggested", "--out", out, "--resume") == 0


def test_issues_of_other_data_are_refused(tmp_path, capsys):
    source, words = written("npz", tmp_path)
    assert denoise(source, *words, *QUICK, "--out", tmp_path / "r") == 0
    lines = (tmp_path / "r" / "issues.csv").read_text().splitlines()
    for name, change, said in (
        ("key", lambda line: line + "0", "the decisions were made for other data"),
        ("column", lambda line: line.rpartition(",")[0], "key is missing"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([lines[0] if name == "key" else change(lines[0]), *map(change, lines[1:])]))
        capsys.readouterr()
        assert denoise(source, "--apply", path, "--out", tmp_path / "c.npz") == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "c.npz").exists()
