"""Run folders that version 0.1 wrote are refused in one sentence, and stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bilevel.cli.main import main

VERSIONS = {"bilevel": "0.1.0", "torch": "2.11.0", "numpy": "1.26.4", "python": "3.11.9"}
NONE: dict[str, Any] = {"test": None, "label": None, "steps": None, "seed": 0}
# What version 0.1 (6c02224) wrote to config.json, but for "data" and "versions", and to the folder of the checkpoint.
OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "denoise": (
        {"trusted": "10", "noise": None, "noise_kind": "symmetric", "model": "auto", "method": "penalty"}
        | {"baselines": True, **NONE},
        {"task.json": {"train": "0f", "trusted": "1e", "steps": None}},
    ),
    "tune": (
        {"model": "logistic", "penalty": "per-feature", "numbers": False, "folds": 5, "caution": None} | NONE,
        {"tuning/task.json": {"columns": "0f", "model": "1e"}},
    ),
    "poison": (
        {"attack": "untargeted", "points": None, "fraction": None, "target_class": None, "as": None, "target": None}
        | {"epsilon": None, "norm": "l2", "rows": None, "model": "auto", "audit": False, "cost": 5.0, **NONE},
        {},
    ),
    "fewshot": (
        {"ways": 2, "shots": 1, "queries": 1, "train_ways": None, "train_shots": None, "backbone": "conv4"}
        | {"meta_batch": 2, "rotations": None, "lists": None, "tasks": 20, "seed": 0, "steps": 8, "decay": 0.0},
        {},
    ),
}
OPTIONS = {
    "denoise": ["--trusted", "10"],
    "fewshot": ["--ways", "2", "--queries", "1", "--meta-batch", "2", "--steps", "8", "--tasks", "20"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    draw = np.random.default_rng(0)
    rows = tmp_path_factory.mktemp("rows") / "d.npz"
    np.savez(rows, x=draw.normal(size=(60, 3)).astype(np.float32), y=np.arange(60) % 2)
    images = tmp_path_factory.mktemp("images")
    for name in "abcdefghijkl":
        (images / name).mkdir()
        for i in range(3):
            Image.fromarray(draw.integers(0, 256, (16, 16), np.uint8)).save(images / name / f"{i}.png")
    return dict.fromkeys(OLD, rows) | {"fewshot": images}


@pytest.mark.parametrize("ended", [False, True], ids=["stopped", "finished"])
@pytest.mark.parametrize("command", OLD)
def test_run_folder_of_version_0_1_is_refused_in_one_sentence_and_stays(command, ended, data, tmp_path, capsys):
    out = tmp_path / "old"
    config, tasks = OLD[command]
    files = {"config.json": {"command": command, "data": str(data[command]), **config, "versions": VERSIONS}}
    files |= (
        {"result.json": {"message": "done"}} if ended else {f"checkpoint/{name}": task for name, task in tasks.items()}
    )
    (out / "checkpoint").mkdir(parents=True)
    for name, value in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(json.dumps(value))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for resume in ([], ["--resume"]):
        assert main([command, str(data[command]), *OPTIONS.get(command, []), "--out", str(out), *resume]) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert told == f"bilevel: {out} was written by a version before 0.2. Use another --out to start again."
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
