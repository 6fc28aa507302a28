"""`bilevel tune` as a user runs it: files, numbers and classes, the run folder and its page, wrong input, Ctrl-C."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import PATIENCE, wait_for
from safetensors.numpy import load_file

from bilevel.applications.networks import mlp
from bilevel.applications.tuning.unrolled_training import UnrolledTraining
from bilevel.cli import tune_run
from bilevel.cli.main import main
from bilevel.data import load_numbers
from bilevel.errors import DataError
from bilevel.optim.lbfgs import LBFGS

tuned_table = importlib.import_module("bilevel.applications.tuning.tune_table")  # the function has its name


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


@pytest.mark.parametrize(
    ("model", "penalty", "count"),
    [("logistic", "per-feature", 5), ("mlp", "per-feature", 6), ("mlp", "per-layer", 2), ("mlp", "single", 1)],
)
def test_classes_of_an_npz_file_with_each_model_and_penalty(model, penalty, count, tmp_path, capsys):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(120, 5))
    y = np.where(x[:, 0] + 0.3 * draw.normal(size=120) > 0, "up", "down")
    np.savez(tmp_path / "d.npz", x=x[:90], y=y[:90], x_test=x[90:], y_test=y[90:])
    options = ["--model", model, "--penalty", penalty, "--steps", 60, "--out", tmp_path / "r", "--json"]
    options += ["--folds", 3] if model == "logistic" else []
    assert run(tmp_path / "d.npz", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["penalties"] == count == len(rows_of(tmp_path / "r" / "penalties.csv"))
    assert found["test_accuracy"] > 0.7
    assert len(found["grid"]) >= 5
    if model == "logistic":
        rows = rows_of(tmp_path / "r" / "penalties.csv")
        assert max(rows, key=lambda row: float(row["weight"]))["name"] == "column 0"


@pytest.mark.filterwarnings("ignore:the run on minibatches ended")
@pytest.mark.parametrize(("largest", "mode"), [(None, "training"), (0, "minibatch")])
def test_the_result_names_the_mode_that_tuned_a_network(largest, mode, table, tmp_path, capsys, monkeypatch):
    if largest is not None:
        monkeypatch.setattr(sys.modules["bilevel.applications.tuning.tune"], "UNROLLED", largest)
    options = ("--model", "mlp", "--penalty", "single", "--numbers", "--label", "price", "--steps", 20)
    assert run(table, *options, "--out", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["method"] == mode


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
        (("nothing.csv",), "nothing.csv does not exist"),
        (("TABLE",), "label must name the column"),
        (("TABLE", "--label", "price"), "looks like regression"),
        (("TABLE", "--model", "ridge", "--label", "district"), "must hold numbers to predict"),
        (("TABLE", "--model", "ridge", "--label", "price", "--penalty", "per-layer"), "per-layer"),
        (("digits", "--model", "ridge"), "classes as labels"),
        (("digits", "--numbers"), "--numbers is for"),
        (("digits", "--model", "mlp", "--caution", "1"), "--caution is for linear"),
        (("digits", "--model", "mlp", "--folds", "3"), "--folds is for linear"),
        (("digits", "--penalty", "single", "--caution", "1"), "--caution is for penalties that differ"),
        (("digits", "--device", "cuda:77"), "--device must be"),
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


@pytest.mark.parametrize("model", ["ridge", "mlp"])
def test_numbers_of_no_use_in_the_rows_that_are_trained_on_are_refused(model, tmp_path, capsys):
    x, y = np.random.default_rng(0).normal(size=(20, 2)), np.full(20, 0.1)
    y[np.random.default_rng(0).permutation(20)[0]] = 1.0  # a row that seed 0 holds out as a test row
    for numbers, message in ((y, "must vary outside the test set; all 16 are 0.1"), (1e200 * x[:, 0], "another unit")):
        np.savez(tmp_path / "d.npz", x=x, y=numbers)
        assert run(tmp_path / "d.npz", "--model", model, "--numbers", "--steps", 5, "--out", tmp_path / "r") == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_the_test_rows_of_a_table_have_each_class_in_its_share(model, tmp_path, capsys, monkeypatch):
    draw = np.random.default_rng(0)
    y = draw.permutation(np.repeat([0, 1, 2], [70, 25, 5]))
    np.savez(tmp_path / "d.npz", x=draw.normal(size=(100, 3)) + y[:, None], y=y)
    seen = []
    for name in ("_linear", "_network"):
        plain = getattr(tuned_table, name)
        monkeypatch.setattr(tuned_table, name, lambda data, *a, p=plain, **o: seen.append(data) or p(data, *a, **o))
    tuned = []
    plain_tune = tuned_table.tune
    monkeypatch.setattr(tuned_table, "tune", lambda *a, **o: tuned.append(a) or plain_tune(*a, **o))
    assert run(tmp_path / "d.npz", "--model", model, "--steps", 2, "--out", tmp_path / "r", "--json") == 0
    (data,) = seen
    assert np.bincount(data.part("test")[1]).tolist() == [14, 5, 1]
    assert np.bincount(data.y).tolist() == [56, 20, 4]
    if model == "mlp":  # and so have the rows that it is tuned on
        assert np.bincount(tuned[0][2][1]).tolist() == [11, 4, 1]
    assert "of each class (20) is held out" in " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_a_class_of_too_few_rows_is_refused(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(20, 2))
    for rare in (1, 2):  # two stay in the rows that are tuned on
        np.savez(tmp_path / "d.npz", x=x, y=(np.arange(20) < rare).astype(int))
        assert run(tmp_path / "d.npz", "--steps", 2, "--out", tmp_path / "r") == 2 - rare
        assert ("of the rarest 1. Leave rare classes out." in capsys.readouterr().err) == (rare == 1)


def test_ctrl_c_ends_with_one_sentence_and_resume_ends_as_if_nothing_had_happened(tmp_path, capsys):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=draw.normal(size=(400, 40)), y=draw.integers(0, 4, 400))
    options = [str(tmp_path / "d.npz"), "--caution", "0.1", "--steps", "12", "--out"]
    command = [sys.executable, "-m", "bilevel", "tune", *options, str(tmp_path / "r")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    wait_for(lambda: list((tmp_path / "r").glob("checkpoint/tuning/one-penalty/*")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Stopped by Ctrl-C. The same command with --resume continues the run in" in err
    assert "Traceback" not in err
    assert not (tmp_path / "r" / "result.json").exists()
    assert run(*options, tmp_path / "r") == 2
    assert "holds a stopped run. Continue it by --resume" in capsys.readouterr().err
    assert run(*options, tmp_path / "r", "--resume") == run(*options, tmp_path / "straight") == 0
    # Last bits can differ between two processes: without MKL_CBWR, MKL promises them within one.
    assert_same(tmp_path, within=1e-13)
    assert not (tmp_path / "r" / "checkpoint").exists()
    capsys.readouterr()
    assert run(*options, tmp_path / "r", "--resume", "--json") == 0
    assert "already finished" in capsys.readouterr().err


def assert_same(folder: Path, within: float = 0.0) -> None:
    """The run that was stopped and the straight one have the same files, but for the seconds."""
    for name in ("penalties.csv", "history.csv"):
        assert (folder / "r" / name).read_bytes() == (folder / "straight" / name).read_bytes()
    weights = [load_file(folder / name / "model.safetensors") for name in ("r", "straight")]
    for name in weights[1]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], rtol=0, atol=within)
    ends = [json.loads((folder / name / "result.json").read_text()) for name in ("r", "straight")]
    assert all(end.pop("seconds") > 0 for end in ends)
    for name in ("valid_loss", "test_loss"):
        assert abs(ends[0].pop(name) - ends[1].pop(name)) <= within
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("model", "stage"), [("logistic", "grid"), ("mlp", "grid"), ("mlp", "descent")])
def test_a_run_that_was_stopped_in_any_stage_goes_on_and_repeats_nothing(model, stage, tmp_path, monkeypatch):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(100, 4))
    np.savez(tmp_path / "d.npz", x=x, y=(x[:, 0] + 0.5 * draw.normal(size=100) > 0).astype(int))
    heard, plain_iterate = [], LBFGS.iterate

    @contextmanager
    def stages():
        def on_progress(name, done, total):
            heard.extend([done] * (stage in name))
            if stage in name and len(heard) == 3:
                raise KeyboardInterrupt

        yield on_progress

    monkeypatch.setattr(tune_run, "stages", stages)
    options = (tmp_path / "d.npz", "--model", model, "--caution", 1, "--steps", 30, "--out")
    options = options if model == "logistic" else (*options[:3], *options[5:])
    assert run(*options, tmp_path / "r") == 130
    again: list[object] = []
    monkeypatch.setattr(LBFGS, "iterate", lambda *given: again.append(given))
    tried: list[object] = []
    # One of them is called for each penalty of the grid, or for each training.
    for owner, name in ((tuned_table, "held_out_loss"), (UnrolledTraining, "train")):
        plain_one = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, p=plain_one, **o: tried.append(a) or p(*a, **o))
    assert run(*options, tmp_path / "r", "--resume") == 0
    assert not again  # the tuning was finished: it is read, and no step is made again
    resumed = len(tried)
    tried.clear()
    monkeypatch.setattr(tune_run, "stages", lambda: nullcontext(lambda *_: None))
    monkeypatch.setattr(LBFGS, "iterate", plain_iterate)
    assert run(*options, tmp_path / "straight") == 0
    done = len(tried) - resumed
    # Those before the stop are read; the state that the descent needs of the best of them is trained once more.
    assert done == 3 if stage == "grid" and model == "logistic" else done >= 3
    assert_same(tmp_path)


def test_a_finished_run_is_not_written_over(table, tmp_path, capsys):
    command = (table, "--label", "price", "--steps", 2, "--out", tmp_path / "r", "--model", "ridge")
    assert run(*command, "--penalty", "single") == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir()}
    assert run(*command, "--penalty", "per-layer") == 2
    assert "one layer" in capsys.readouterr().err
    assert run(*command, "--penalty", "single", "--seed", 1) == 2
    assert f"{tmp_path / 'r'} holds a finished run. Use another --out, or delete the folder." in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir()} == before


def test_data_that_changed_between_two_runs_is_refused(tmp_path, monkeypatch, capsys):
    draw = np.random.default_rng(2)
    x, y = draw.normal(size=(60, 3)), draw.normal(size=60)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    options = (tmp_path / "d.npz", "--model", "ridge", "--steps", 5, "--out", tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(tune_run, "stages", lambda: nullcontext(stopped))
        assert run(*options) == 130
    x[0, 0] += 1e-3
    np.savez(tmp_path / "d.npz", x=x, y=y)
    assert run(*options, "--resume") == 1
    err = capsys.readouterr().err
    assert "is of another run: its rows differ" in err
    assert "is kept" in err


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


# -- what the result says of a single penalty that does better ---------------------------------------------------------


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """Labels that have nothing to do with the inputs: whatever is tuned fits the rows that it is tuned on."""
    draw = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("noise") / "noise.npz"
    np.savez(path, x=draw.normal(size=(120, 30)), y=draw.integers(0, 2, 120))
    return path


def test_penalties_that_fit_the_rows_they_are_tuned_on_come_with_a_caution_and_the_remedy(noise, tmp_path, capsys):
    assert run(noise, "--caution", 0, "--out", tmp_path, "--json") == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["valid_loss"] < found["best_single"]["valid_loss"]
    assert found["test_loss"] > found["best_single"]["test_loss"]
    assert found["worse_than_single"]
    advice = "More --folds, more --caution, or --penalty single can help."
    assert advice in told.err
    assert advice in re.sub("</?span[^>]*>", "", (tmp_path / "report.html").read_text())


def test_rows_that_ask_for_a_single_penalty_get_one_and_the_message_says_so(noise, tmp_path, capsys):
    assert run(noise, "--out", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["caution"] is None
    assert found["penalties"] == 1
    assert found["message"].startswith("Tuned 1 penalty:")
    assert len({row["penalty"] for row in rows_of(tmp_path / "penalties.csv")}) == 1
    assert any("This is the single penalty" in note for note in found["notes"])
