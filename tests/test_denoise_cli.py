"""`bilevel denoise` as a user runs it: files, named sets, wrong input, Ctrl-C and --resume, the page and --apply."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from common import chromium
from forked import PATIENCE, wait_for
from PIL import Image
from safetensors import safe_open
from scipy.io import savemat
from sklearn.datasets import load_digits, load_iris

from bilevel import OptionError, Penalty
from bilevel.applications.augmentation import crop
from bilevel.applications.default_classifier import Classifier
from bilevel.applications.denoising.clean_dataset import Cleaned, Prepared
from bilevel.applications.denoising.denoise import METHOD
from bilevel.cli.denoise_run import FIT, summary
from bilevel.cli.main import main
from bilevel.cli.run_folder import RunFolder, Stopped, folder_of, run_or_resume
from bilevel.data import Labelled, load
from bilevel.data.named_sets import MAT
from bilevel.errors import ProblemError
from bilevel.results import Status

QUICK = ["--steps", "40", "--no-baselines"]


def run(*arguments: object) -> int:
    return main(["denoise", *map(str, arguments)])


def rows_of(folder: Path, name: str = "importance.csv") -> list[dict[str, str]]:
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    """Digits as a user would hand them in: every fifth label wrong, 80 trusted, 200 for the test."""
    folder = tmp_path_factory.mktemp("arrays")
    digits = load_digits()
    x, y = digits.images.astype("float32") / 16, digits.target
    wrong = y[280:].copy()
    wrong[::5] = (wrong[::5] + 3) % 10
    np.savez(
        folder / "d.npz", x=x[280:], y=wrong, x_trusted=x[:80], y_trusted=y[:80], x_test=x[80:280], y_test=y[80:280]
    )
    return folder / "d.npz"


def test_run_folder_of_an_npz_file_has_all_files_and_they_agree(arrays, tmp_path, capsys):
    assert run(arrays, "--steps", 150, "--out", tmp_path / "r", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "r" / "result.json").read_text())
    assert printed == written
    names = {"config.json", "history.csv", "importance.csv", "model.safetensors", "report.html", "result.json"}
    names |= {"preparation.json", "issues.csv"}
    assert {p.name for p in (tmp_path / "r").iterdir()} == names
    rows = rows_of(tmp_path / "r")
    assert list(rows[0])[:6] == ["index", "label", "importance", "suspect", "suggested", "confidence"]
    assert [int(row["index"]) for row in rows] == list(range(1517))
    assert sum(int(row["suspect"]) for row in rows) == written["suspects"]
    assert written["noise_rate"] == pytest.approx(written["suspects"] / 1517)
    assert written["test_accuracy"] == written["accuracies"]["denoised"] > 0.85
    assert {"labels as they are", "trusted set only"} < set(written["accuracies"])
    for name, words in {"denoised": "on the cleaned data", "labels as they are": "on the labels as they are"}.items():
        assert f"{words}: {100 * written['accuracies'][name]:.1f}%" in written["message"]
    assert written["seed"] == 0
    assert written["method"] == "penalty"
    assert len(rows_of(tmp_path / "r", "history.csv")) == 150
    with safe_open(tmp_path / "r" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classifier"])["classes"] == [str(c) for c in range(10)]
        assert any(name.endswith("weight") for name in file.keys())  # noqa: SIM118


def test_labels_made_wrong_on_purpose_are_known(tmp_path, capsys):
    assert run("digits", "--noise", 0.3, "--steps", 200, "--no-baselines", "--out", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["auc"] > 0.9
    assert found["f1"] > 0.6
    assert found["trusted"] == 100
    noisy, digits = np.load(tmp_path / "noisy.npz"), load_digits()
    assert len(noisy["x"]) == found["rows"]
    images = (digits.images / 16).astype("float32")
    right = {image.tobytes(): str(y) for image, y in zip(images, digits.target, strict=True)}
    wrong = [right[x.tobytes()] != y for x, y in zip(noisy["x"], noisy["y"], strict=True)]
    assert np.mean(wrong) == pytest.approx(0.3, abs=1e-3)
    assert len(noisy["x_trusted"]) == 100
    assert all(right[x.tobytes()] == y for x, y in zip(noisy["x_trusted"], noisy["y_trusted"], strict=True))
    assert run("digits", "--noise", 0.3, "--steps", 200, "--no-baselines", "--out", tmp_path, "--resume", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == found
    assert "already finished" in told.err
    assert run("digits", "--noise", 0.4, "--steps", 200, "--no-baselines", "--out", tmp_path, "--resume") == 2
    assert (
        "holds a finished run, with --noise 0.3; got 0.4. Use another --out, or delete the folder."
        in capsys.readouterr().err
    )
    assert json.loads((tmp_path / "result.json").read_text()) == found


def test_noise_on_a_few_rows_is_made_and_the_rows_have_the_keys_of_the_file_written(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(26, 3)), np.arange(26) % 2
    for rows, trusted in ((10, 4), (26, 6)):
        out = tmp_path / str(rows)
        np.savez(tmp_path / "few.npz", x=x[:rows], y=y[:rows])
        words = ["--trusted", trusted, "--noise", 0.3, "--steps", 5, "--out", out]
        assert run(tmp_path / "few.npz", *words) == 0
        assert len(rows_of(out)) == rows - trusted
    assert [row["key"] for row in rows_of(out)] == list(load(out / "noisy.npz").keys)


def test_the_message_has_the_accuracies_that_were_measured():
    suspect = torch.tensor([True, False])
    solution = Namespace(ranks=1, status=Status.MAX_STEPS, engine="")
    found = Namespace(suspect=suspect, noise_rate=0.5, settings={}, solution=solution)
    cleaned = Cleaned(found, {"denoised": 0.9, "trusted set only": 0.8}, None, None, ())
    pair = torch.zeros(2, 3), torch.tensor([0, 1])
    prepared = Prepared(Labelled("two", "arrays", *pair, ("a", "b"), ["0", "1"], trusted=pair))
    net = Classifier(torch.nn.Linear(3, 2), "linear")
    asked = {"method": "penalty", "seed": 0}
    assert summary(prepared, cleaned, net, asked, 1.0, torch.device("cpu"))["message"] == (
        "1 of 2 labels (50.0%) is probably wrong. Accuracy on the test set after training on the cleaned data: 90.0%, "
        "on the trusted set only: 80.0%."
    )


@pytest.mark.parametrize("name", ["config.json", "history.csv", "report.html"])
def test_files_of_others_in_the_folder_are_not_written_over(arrays, tmp_path, capsys, name):
    out = tmp_path / "mine"
    out.mkdir()
    (out / name).write_text("{}")
    assert run(arrays, "--steps", 5, "--out", out) == 2
    assert f"already has a {name}, which is not overwritten. Use another --out." in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [(name, "{}")]


def test_options_that_would_do_nothing_or_harm_are_refused(arrays, tmp_path, capsys):
    assert run(arrays, "--noise-kind", "asymmetric", "--out", tmp_path / "r") == 2
    assert "give --noise as well" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("place", ["photos", "photos/run"])
def test_no_run_is_in_the_folder_of_its_data(place, tmp_path):
    data = tmp_path / "photos"
    data.mkdir()
    with pytest.raises(OptionError, match="--out must not lie in"):
        folder_of(tmp_path / place, "poison", str(data))
    assert not list(data.iterdir())
    assert folder_of(tmp_path / "run", "poison", str(data)).path == tmp_path / "run"


@pytest.mark.parametrize(
    ("pixels", "kept"),
    [("bytes", np.uint8), ("sixteenths", np.float32), ("trusted sixteenths", np.float32)],
)
def test_pixels_made_noisy_stay_as_they_are(tmp_path, pixels, kept):
    random = np.random.default_rng(0)
    x, trusted = (random.integers(0, 17, (30, 16, 16, 3)).astype("float32") for _ in range(2))
    x /= 16 if pixels == "sixteenths" else 255
    trusted /= 255 if pixels == "bytes" else 16
    y = np.arange(30) % 2
    np.savez(tmp_path / "d.npz", x=x, y=y, x_trusted=trusted, y_trusted=y)
    out = tmp_path / "r"
    assert run(tmp_path / "d.npz", "--noise", 0.2, "--steps", 2, "--model", "linear", "--out", out) == 0
    with np.load(out / "noisy.npz") as noisy:
        assert noisy["x"].dtype == noisy["x_trusted"].dtype == kept
    source, written = load(tmp_path / "d.npz"), load(out / "noisy.npz")
    assert torch.equal(source.x, written.x)
    assert torch.equal(source.part("trusted")[0], written.part("trusted")[0])
    assert [row["key"] for row in rows_of(out)] == list(written.keys)


def test_run_that_is_refused_on_its_way_leaves_nothing_of_itself(arrays, tmp_path, capsys, monkeypatch):
    out = tmp_path / "r"

    def diverged(*_: object) -> None:
        assert (out / "noisy.npz").exists()
        raise ProblemError("it diverged.")

    monkeypatch.setattr("bilevel.cli.denoise_run._clean", diverged)
    assert run(arrays, "--noise", 0.3, *QUICK, "--out", out) == 1
    assert "it diverged." in capsys.readouterr().err
    assert not list(out.iterdir())


def test_house_numbers_are_denoised_with_the_network_of_the_paper_and_not_mirrored(tmp_path, capsys, monkeypatch):
    folder, random = tmp_path / "data" / "svhn", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, count in zip(MAT, (60, 20), strict=True):
        labels = (np.arange(count) % 10 + 1).astype("uint8")
        savemat(folder / name, {"X": random.integers(0, 256, (32, 32, 3, count), np.uint8), "y": labels[:, None]})
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    used = []
    monkeypatch.setattr("bilevel.applications.default_classifier.crop", lambda x: used.append(1) or crop(x))
    words = ["--model", "cnn", "--trusted", 20, "--noise", 0.2, "--steps", 2, "--no-baselines"]
    assert run("svhn", *words, "--device", "cpu", "--out", tmp_path / "r", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["trusted"], found["model"]) == (40, 20, "cnn")
    assert found["test_accuracy"] is not None
    with safe_open(tmp_path / "r" / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == 1_341_226  # noqa: SIM118
    assert used
    with np.load(tmp_path / "r" / "noisy.npz") as noisy:
        assert noisy["x"].dtype == np.uint8


def test_table_with_text_and_missing_values(tmp_path, capsys):
    iris = load_iris()
    lines = ["length,width,petal,other,colour,kind"]
    for i, (x, y) in enumerate(zip(iris.data, iris.target, strict=True)):
        values = [f"{v:.1f}" for v in x]
        values[1] = "" if i % 11 == 0 else values[1]
        lines.append(",".join([*values, "red" if i % 2 else "blue", iris.target_names[(y + (i % 7 == 0)) % 3]]))
    (tmp_path / "iris.csv").write_text("\n".join(lines) + "\n")
    out = tmp_path / "r"
    assert run(tmp_path / "iris.csv", "--label", "kind", "--trusted", 30, "--steps", 300, "--out", out) == 0
    assert {row["label"] for row in rows_of(out)} == set(iris.target_names)
    assert len(rows_of(out)) == 120
    assert "taken as right" in capsys.readouterr().err
    page = re.sub("</?span[^>]*>", "", (out / "report.html").read_text())
    assert f"bilevel denoise {tmp_path / 'iris.csv'} --apply decisions.csv --label kind --out cleaned.csv" in page


def test_folder_of_images(tmp_path):
    digits = load_digits()
    for i in range(120):
        folder = tmp_path / "images" / ("trusted" if i < 30 else "train") / f"digit {digits.target[i]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 15.9).astype("uint8")).save(folder / f"{i:03d}.png")
    assert run(tmp_path / "images", *QUICK, "--out", tmp_path / "r") == 0
    rows = rows_of(tmp_path / "r")
    assert len(rows) == 90
    assert {row["label"] for row in rows} == {f"digit {c}" for c in range(10)}
    assert all(row["key"].endswith(".png") for row in rows)


def test_network_of_the_users_own(arrays, tmp_path, capsys):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def make(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], classes))\n"
        "def broken(shape, classes):\n"
        "    raise KeyError('no')\n"
        "def narrow(shape, classes):\n"
        "    return torch.nn.Linear(3, classes)\n"
        "def few(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes - 1))\n"
        "class Tied(torch.nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.first = self.second = torch.nn.Linear(64, 64)\n"
        "        self.last = torch.nn.Linear(64, classes)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.second(self.first(x.flatten(1)).relu()).relu())\n"
        "def tied(shape, classes):\n"
        "    return Tied(classes)\n"
        "number = 3\n"
    )
    assert run(arrays, "--model", f"{tmp_path / 'net.py'}:make", *QUICK, "--out", tmp_path / "r", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"].endswith("net.py:make")
    assert run(arrays, "--model", f"{tmp_path / 'net.py'}:tied", *QUICK, "--out", tmp_path / "tied") == 0
    wrong = {
        "broken": "could not be run",
        "number": "must name a function",
        "none": "does not define",
        "narrow": "does not take inputs of shape (1, 8, 8)",
        "few": "one score for each of the 10 classes",
    }
    capsys.readouterr()
    for name, words in wrong.items():
        assert run(arrays, "--model", f"{tmp_path / 'net.py'}:{name}", *QUICK, "--out", tmp_path / "r") == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["digitz"], 1, "Did you mean 'digits'?"),
        (["missing.npz"], 1, "The file or folder missing.npz does not exist"),
        (["{arrays}", "--model", "cnm"], 2, "Did you mean 'cnn'?"),
        (["{arrays}", "--model", "cnn"], 2, "needs images of at least 16"),
        (["{arrays}", "--method", "penalti"], 2, "Did you mean 'penalty'?"),
        (["{arrays}", "--trusted", "50"], 2, "the data has 80 trusted ones"),
        (["{arrays}", "--trusted", "0"], 2, "at least 1; got 0"),
        (["{arrays}", "--device", "tpu9"], 2, "--device must be"),
        (["{arrays}", "--device", "cuda:77"], 2, "--device must be"),
        (["digits", "--noise", "1.5"], 2, "noise must be"),
        (["digits", "--noise", "0.1", "--trusted", "5"], 1, "every class"),
        (["{arrays}", "--pick-trusted", "5"], 2, "--pick-trusted must be left out"),
        (["{plain}", "--pick-trusted", "5"], 2, "--pick-trusted must be at least 10 and below 1517"),
        (["{same}"], 1, "all its 1,517 rows are"),
        (["{cut}"], 1, "cut.npz"),
        (["{arrays}", "--apply", "decisions.csv"], 2, "--apply needs --out"),
        (["{arrays}", "--apply", "nowhere.csv", "--out", "{tmp}/c.npz"], 1, "nowhere.csv"),
    ],
)
def test_wrong_input_is_answered_with_one_sentence_and_nothing_is_written(
    arrays, tmp_path, capsys, monkeypatch, arguments, code, words
):
    monkeypatch.chdir(tmp_path)
    held = np.load(arrays)
    np.savez(tmp_path / "plain.npz", x=held["x"], y=held["y"])
    parts = {name: held[name] for name in ("x", "y", "x_trusted", "y_trusted")}
    np.savez(tmp_path / "same.npz", **parts, x_test=held["x"], y_test=held["y"])
    (tmp_path / "cut.npz").write_bytes(arrays.read_bytes()[:20_000])
    before = sorted(p.name for p in tmp_path.rglob("*"))
    paths = {name: tmp_path / f"{name}.npz" for name in ("plain", "same", "cut")}
    paths |= {"arrays": arrays, "tmp": tmp_path}
    assert run(*(a.format(**paths) for a in arguments)) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("result.json"))
    assert not list(tmp_path.rglob("report.html"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def command(arrays: Path, out: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "bilevel", "denoise", str(arrays), "--steps", "200", "--no-baselines"]
    return [*start, "--out", str(out), *more]


def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=ONE_THREAD, capture_output=True, text=True, timeout=PATIENCE)  # type: ignore[arg-type]


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def straight(arrays, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("straight")
    assert ended(arrays, folder).returncode == 0
    return (folder / "importance.csv").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_run_that_was_stopped_goes_on_and_ends_as_the_straight_one(arrays, straight, tmp_path, sent):
    out = tmp_path / "r"
    with subprocess.Popen(command(arrays, out), env=ONE_THREAD, stderr=subprocess.PIPE, text=True) as process:
        wait_for((out / "checkpoint" / "importance" / "state.safetensors").exists, process)
        process.send_signal(sent)
        _, told = process.communicate(timeout=PATIENCE)
    assert not (out / "result.json").exists()
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "The same command with --resume continues the run in" in told
        for more, words in (([], "Continue it by --resume"), (["--resume", "--seed", "3"], "with --seed 0; got 3")):
            refused = ended(arrays, out, *more)
            assert refused.returncode == 2
            assert words in refused.stderr
    assert ended(arrays, out, "--resume").returncode == 0
    assert (out / "importance.csv").read_text() == straight
    assert not (out / "checkpoint").exists()


def written(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """200 digits, every fifth label wrong, in a form of file, and the words that a run of it takes."""
    digits = load_digits()
    images, right = (digits.images[:200] * 15.9).astype("uint8"), digits.target[:200]
    names = np.array([f"digit {(c + 3 * (i % 5 == 0)) % 10}" for i, c in enumerate(right)])
    source = folder / (f"set.{kind}" if kind != "folder" else "images")
    if kind == "npz":
        np.savez(source, x=images, y=names)
        return source, ["--trusted", "40"]
    if kind == "folder":
        for i, image in enumerate(images):
            place = source / ("train" if i >= 40 else "trusted") / (names[i] if i >= 40 else f"digit {right[i]}")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{i:03d}.png")
        return source, []
    table = pd.DataFrame(images.reshape(200, 64), columns=[f"p{i}" for i in range(64)]).assign(kind=names)
    if kind == "csv":
        table.to_csv(source, index=False)
        return source, ["--label", "kind", "--trusted", "40"]
    table[40:].to_parquet(source)
    table[:40].assign(kind=[f"digit {c}" for c in right[:40]]).to_parquet(folder / "checked.parquet")
    return source, ["--label", "kind", "--trusted", str(folder / "checked.parquet")]


def test_the_page_of_a_table_with_noise_names_a_command_that_works(tmp_path, capsys, monkeypatch):
    source, words = written("csv", tmp_path)
    assert run(source, *words, "--noise", 0.2, *QUICK, "--out", tmp_path / "r") == 0
    row = rows_of(tmp_path / "r")[3]
    (tmp_path / "decisions.csv").write_text(f"index,key,decision,label\n{row['index']},{row['key']},drop,\n")
    page = html.unescape(re.sub(r"</?span[^>]*>", "", (tmp_path / "r" / "report.html").read_text()))
    command = shlex.split(re.search(r"bilevel (denoise [^<]*? --apply decisions.csv [^<]*?--out [\w.]+)", page)[1])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == 1
    assert main([*command, "--noise", "0.3", "--resume"]) == 2
    assert "--noise and --resume must be left out with --apply, which runs nothing." in capsys.readouterr().err
    assert run(source, "--label", "kind", "--apply", "decisions.csv") == 2
    assert "--out cleaned.csv" in capsys.readouterr().err


def test_a_label_that_only_drawn_rows_have_has_a_note(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = np.arange(60) % 3
    y[7] = -1
    np.savez(tmp_path / "one.npz", x=x, y=y)
    assert run(tmp_path / "one.npz", "--trusted", 12, *QUICK, "--out", tmp_path / "r", "--json") == 0
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "All rows labelled -1 are drawn as trusted, so none is left to clean" in notes
    rows = json.loads((tmp_path / "r" / "result.json").read_text())["trusted_rows"]
    assert len(rows) == 12
    assert 7 in rows
    assert sorted([*rows, *(int(row["index"]) for row in rows_of(tmp_path / "r"))]) == list(range(60))


def test_a_folder_has_one_run_that_is_resumed_or_kept(tmp_path, capsys):
    folder, asked = RunFolder(tmp_path), {"command": "denoise", "seed": 0}

    def once(work, resume=False, **changes):
        return run_or_resume(folder, asked | changes, work, resume=resume, files=("a.txt", "result.json"))

    def stopped(checkpoint):
        folder.write("a.txt", "part")
        raise KeyboardInterrupt

    def finished(checkpoint):
        assert (tmp_path / "a.txt").read_text() == "part"
        return {"found": 1}, "<html></html>"

    def never(checkpoint):
        raise AssertionError

    with pytest.raises(Stopped, match="with --resume continues the run in"):
        once(stopped)
    with pytest.raises(OptionError, match=r"holds a stopped run. Continue it by --resume"):
        once(never)
    with pytest.raises(OptionError, match=r"was run with --seed 0; got 1. --resume needs the same."):
        once(never, resume=True, seed=1)
    assert once(finished, resume=True) == {"found": 1}
    assert not (tmp_path / "checkpoint").exists()
    assert once(never, resume=True) == {"found": 1}
    assert "already finished" in capsys.readouterr().err
    with pytest.raises(OptionError, match=r"holds a finished run. Use another --out"):
        once(never)
    with pytest.raises(OptionError, match="holds a finished run, with --seed 0; got 1"):
        once(never, resume=True, seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "config.json", "report.html", "result.json"}


def test_the_docs_way_to_use_a_classifier_on_new_rows_works(tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "denoising.md").read_text()
    code = textwrap.dedent(re.search(r"\n((?:    .*\n|\n)*    classes = .*\n)", text)[1])
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = rng.normal(size=(200, 3)) + 4 * y[:, None]
    np.savez(tmp_path / "data.npz", x=x[60:], y=y[60:], x_trusted=x[40:60], y_trusted=y[40:60])
    np.savez(tmp_path / "new.npz", x=x[:40], y=np.zeros(40, int))
    monkeypatch.chdir(tmp_path)
    assert run("data.npz", *QUICK, "--out", "runs/denoise-data") == 0
    names: dict = {}
    exec(compile(code, "docs", "exec"), names)
    assert np.mean(np.array(names["classes"]).astype(int) == y[:40]) > 0.9


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet", "folder"])
def test_decisions_on_a_run_are_applied_by_the_command_that_its_page_names(kind, tmp_path, capsys, monkeypatch):
    source, words = written(kind, tmp_path)
    label = words[:2] if "--label" in words else []
    assert run(source, *words, *QUICK, "--out", tmp_path / "r") == 0
    rows = rows_of(tmp_path / "r")
    assert len(rows) == 160
    dropped, moved, kept = rows[3], rows[70], rows[159]
    with open(tmp_path / "decisions.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["index", "key", "decision", "label"])
        for row, decision, name in (
            (dropped, "drop", ""),
            (moved, "relabel", "digit 7"),
            (kept, "keep", kept["label"]),
        ):
            out.writerow([row["index"], row["key"], decision, name])
    page = html.unescape(re.sub(r"</?span[^>]*>", "", (tmp_path / "r" / "report.html").read_text()))
    command = shlex.split(re.search(r"bilevel (denoise [^<]*? --apply decisions.csv [^<]*?--out [\w.]+)", page)[1])
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dropped"], told["relabelled"]) == (1, int(moved["label"] != "digit 7"))
    before, after = (load(path, label=label[-1] if label else None) for path in (source, Path(command[-1])))
    names = [[data.classes[c] for c in data.y] for data in (before, after)]
    if kind == "folder":  # whose rows are in the order of their classes
        renamed = {Path(key).name: name for key, name in zip(before.keys, names[0], strict=True)}
        del renamed[Path(dropped["key"]).name]
        renamed[Path(moved["key"]).name] = "digit 7"
        assert {Path(key).name: name for key, name in zip(after.keys, names[1], strict=True)} == renamed
    else:
        expected = names[0].copy()
        expected[int(moved["index"])] = "digit 7"
        del expected[int(dropped["index"])]
        assert names[1] == expected
    assert run(Path(command[-1]), *words, *QUICK, "--out", tmp_path / "again") == 0


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_suspects_reviewed_in_a_browser_make_cleaned_data(tmp_path, capsys):
    """From the command to the cleaned file: filter, relabel, undo, drop, export, apply."""
    from playwright.sync_api import sync_playwright

    out = tmp_path / "r"
    assert run("digits", "--noise", 0.4, "--steps", 200, "--no-baselines", "--out", out) == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((out / "report.html").as_uri())
        page.get_by_label("Given label").select_option("3")
        page.keyboard.press("n")
        page.keyboard.press("r")
        page.keyboard.press("u")
        page.keyboard.press("r")
        page.keyboard.press("d")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save decisions").first.click()
        download.value.save_as(tmp_path / "decisions.csv")
        browser.close()
    decisions = rows_of(tmp_path, "decisions.csv")
    assert sorted(row["decision"] for row in decisions) == ["drop", "relabel"]
    capsys.readouterr()
    cleaned = tmp_path / "cleaned.npz"
    assert run(out / "noisy.npz", "--apply", tmp_path / "decisions.csv", "--out", cleaned, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dropped"], told["relabelled"]) == (1, 1)
    before, after = np.load(out / "noisy.npz"), np.load(cleaned)
    dropped = next(int(row["index"]) for row in decisions if row["decision"] == "drop")
    moved = next(row for row in decisions if row["decision"] == "relabel")
    expected = before["y"].copy()
    expected[int(moved["index"])] = moved["label"]
    assert before["y"][int(moved["index"])] == "3"
    assert list(after["y"]) == list(np.delete(expected, dropped))
    assert np.array_equal(after["x"], np.delete(before["x"], dropped, axis=0))


def test_cards_of_a_table_have_short_numbers_and_the_word_missing(tmp_path):
    iris, rng = load_iris(), np.random.default_rng(0)
    wrong = np.where(rng.random(150) < 0.3, (iris.target + 1) % 3, iris.target)
    lines = ["length,width,petal,place,class"]
    for i, (x, y) in enumerate(zip((iris.data / 3).tolist(), wrong, strict=True)):
        width, place = "" if i % 2 else x[2], "" if i % 3 else "here"
        lines.append(f"{x[0]},{width},{x[3]},{place},{iris.target_names[y]}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert run(tmp_path / "t.csv", "--label", "class", "--trusted", 30, *QUICK, "--out", tmp_path / "r") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    cards = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])["fields"]
    assert len(cards) > 3
    by_column = {name: {text for card in cards for field, text in card if field == name} for name in dict(cards[0])}
    numbers = (by_column["length"] | by_column["width"] | by_column["petal"]) - {"missing"}
    assert max(len(number.replace(".", "").lstrip("0")) for number in numbers) == 6
    assert "missing" in by_column["width"]
    assert by_column["place"] == {"here", "missing"}


def test_the_command_runs_the_method_of_the_function():
    assert FIT["penalty"]() == METHOD == Penalty(cotangent="same", decay="linear")
