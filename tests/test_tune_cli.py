"""`bilevel tune` as a user runs it: files, numbers and classes, the run folder and its page, wrong input, Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bilevel.cli.main import main
from bilevel.data import load_numbers
from bilevel.errors import DataError
from bilevel.models import mlp


def run(*arguments: object) -> int:
    return main(["tune", *map(str, arguments)])


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Prices: size and one district matter, the other columns do not."""
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "prices.csv"
    size, noise = draw.normal(size=160), draw.normal(size=(160, 6))
    district = draw.choice(["north", "south"], 160)
    price = 50 + 10 * size + 8 * (district == "south") + 3 * draw.normal(size=160)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "district", *(f"n{i}" for i in range(6)), "price"])
        for i in range(160):
            writer.writerow([f"{size[i]:.6f}", district[i], *(f"{x:.6f}" for x in noise[i]), f"{price[i]:.6f}"])
    return path


def test_run_folder_of_a_table_of_numbers_has_all_files_and_they_agree(table, tmp_path, capsys):
    options = ("--model", "ridge", "--label", "price", "--caution", 0, "--steps", 40)
    assert run(table, *options, "--out", tmp_path / "r", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "r" / "result.json").read_text())
    names = {"config.json", "history.csv", "model.safetensors", "penalties.csv", "report.html", "result.json"}
    assert {p.name for p in (tmp_path / "r").iterdir()} == names
    rows = rows_of(tmp_path / "r" / "penalties.csv")
    assert rows[0]["name"] == "size"
    assert {"district = north", "district = south", "n0"} < {row["name"] for row in rows}
    assert [float(row["penalty"]) for row in rows] == sorted(float(row["penalty"]) for row in rows)
    assert len(rows) == printed["penalties"] == 9
    assert printed["valid_loss"] <= printed["best_single"]["valid_loss"]
    assert printed["test_accuracy"] is None
    # The model in the file predicts the rows that were held out as well as the result says.
    weights = load_file(tmp_path / "r" / "model.safetensors")
    data = load_numbers(table, label="price")
    error = ((data.x.numpy() @ weights["weight"][0] + weights["bias"][0] - data.y.numpy()) ** 2).mean() / 2
    assert error == pytest.approx(9 / 2, rel=0.4)
    assert printed["test_loss"] == pytest.approx(9 / 2, rel=0.6)


def test_page_holds_all_that_it_shows_and_loads_nothing(table, tmp_path):
    assert run(table, "--model", "ridge", "--label", "price", "--penalty", "single", "--out", tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "grid" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search("https?:", page.replace("http://www.w3.org", ""))


@pytest.mark.parametrize(
    ("model", "penalty", "count"),
    [("logistic", "per-feature", 5), ("mlp", "per-feature", 5), ("mlp", "per-layer", 2), ("mlp", "single", 1)],
)
def test_classes_of_an_npz_file_with_each_model_and_penalty(model, penalty, count, tmp_path, capsys):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(120, 5))
    y = np.where(x[:, 0] + 0.3 * draw.normal(size=120) > 0, "up", "down")
    np.savez(tmp_path / "d.npz", x=x[:90], y=y[:90], x_test=x[90:], y_test=y[90:])
    options = ("--model", model, "--penalty", penalty, "--steps", 60, "--folds", 3, "--out", tmp_path / "r", "--json")
    assert run(tmp_path / "d.npz", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["penalties"] == count == len(rows_of(tmp_path / "r" / "penalties.csv"))
    assert found["test_accuracy"] > 0.7
    assert len(found["grid"]) >= 5
    if model == "logistic":
        assert rows_of(tmp_path / "r" / "penalties.csv")[0]["name"] == "column 0"


def test_numbers_are_predicted_by_a_network_too(table, tmp_path, capsys):
    options = ("--model", "mlp", "--numbers", "--label", "price", "--steps", 200, "--out", tmp_path, "--json")
    assert run(table, *options) == 0
    found, data = json.loads(capsys.readouterr().out), load_numbers(table, label="price")
    assert max(found["valid_loss"], found["test_loss"]) < 0.3 * float(data.y.var()) / 2
    # The network in the file predicts prices, not prices that were brought to mean 0.
    network = mlp(data.x.shape[1], (128,), 1)
    network.load_state_dict({k: torch.from_numpy(v) for k, v in load_file(tmp_path / "model.safetensors").items()})
    error = (network(data.x)[:, 0].detach() - data.y).square().mean() / 2
    assert float(error) < 0.3 * float(data.y.var()) / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.csv",), "no file or folder"),
        (("TABLE",), "label must name the column"),
        (("TABLE", "--label", "price"), "looks like regression"),
        (("TABLE", "--model", "ridge", "--label", "district"), "must hold numbers to predict"),
        (("TABLE", "--model", "ridge", "--label", "price", "--penalty", "per-layer"), "per-layer"),
        (("digits", "--model", "ridge"), "classes as labels"),
        (("digits", "--numbers"), "--numbers is for"),
        (("digits", "--model", "mlp", "--caution", "1"), "--caution is for linear"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(arguments, message, table, tmp_path, capsys):
    given = [str(table) if word == "TABLE" else word for word in arguments]
    assert run(*given, "--out", tmp_path / "r") in (1, 2)
    assert message in capsys.readouterr().err


def test_numbers_that_are_missing_or_all_the_same_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 2))
    for y, message in ((np.full(20, 3.0), "must vary"), (np.r_[np.nan, np.arange(19.0)], "missing or not finite")):
        np.savez(tmp_path / "d.npz", x=x, y=y)
        with pytest.raises(DataError, match=message):
            load_numbers(tmp_path / "d.npz")


def test_ctrl_c_ends_with_one_sentence(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=draw.normal(size=(3000, 200)), y=draw.integers(0, 10, 3000))
    command = [sys.executable, "-m", "bilevel", "tune", str(tmp_path / "d.npz"), "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    while not (tmp_path / "r" / "config.json").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped by Ctrl-C. Nothing but config.json was written." in err
    assert "Traceback" not in err
