"""`bilevel poison` as a user runs it: all attacks, files and tables, wrong input, Ctrl-C and --resume, the page."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import PATIENCE, wait_for
from sklearn.datasets import load_digits, load_iris

from bilevel.applications.default_classifier import classifier
from bilevel.applications.poisoning.setting import AttackSetting
from bilevel.cli.main import main
from bilevel.errors import OptionError
from bilevel.report.figures import amplification, comparison

auditing = importlib.import_module("bilevel.applications.poisoning.audit")  # the function has its name


def run(*arguments: object) -> int:
    return main(["poison", *map(str, arguments)])


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    """A few digits as a user would hand them in."""
    digits = load_digits()
    x, y = digits.images.astype("float32") / 16, digits.target
    path = tmp_path_factory.mktemp("arrays") / "d.npz"
    np.savez(
        path, x=x[:400], y=y[:400], x_trusted=x[400:600], y_trusted=y[400:600], x_test=x[600:900], y_test=y[600:900]
    )
    return path


def test_untargeted_run_writes_points_result_and_page_that_agree(arrays, tmp_path, capsys):
    assert run(arrays, "--fraction", 0.1, "--steps", 80, "--out", tmp_path / "r", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    folder = tmp_path / "r"
    assert printed == json.loads((folder / "result.json").read_text())
    names = {"config.json", "history.csv", "poison.npz", "report.html", "result.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert (printed["points"], printed["rows"]) == (40, 400)  # a tenth of the rows that are trained on
    assert printed["message"].startswith("Accuracy with 40 poison points (10.00% of the training rows): ")
    assert printed["poisoned_accuracy"] < printed["flipped_accuracy"] - 0.02
    points = np.load(folder / "poison.npz")
    assert points["poisoned"].shape == points["base"].shape == (40, 1, 8, 8)
    assert points["poisoned"].min() >= 0
    assert points["poisoned"].max() <= 1
    apart = (points["poisoned"].astype("float64") - points["base"]).reshape(40, -1)
    assert np.allclose(np.linalg.norm(apart, axis=1), points["l2"])
    given = np.load(arrays)
    assert (given["y"][points["rows"]].astype(str) != points["y"]).all(), "labels are wrong ones"
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 * 40
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert f"{100 * printed['poisoned_accuracy']:.1f}%" in page
    assert f"{100 * printed['flipped_accuracy']:.1f}%" in page
    assert set(printed["by_class"]["3"]) == {"clean", "flipped", "poisoned"}


def test_help_says_what_the_share_is_of(capsys):
    assert main(["poison", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a share of the training rows, which exclude the test and validation rows" in told


def test_targeted_attack_keeps_a_bound_in_steps_of_a_pixel_and_says_what_it_did(arrays, tmp_path, capsys):
    options = ["--attack", "targeted", "--target-class", 8, "--as", 3, "--points", 30, "--steps", 60]
    assert run(arrays, *options, "--epsilon", 32, "--norm", "linf", "--out", tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    points = np.load(tmp_path / "poison.npz")
    assert points["linf"].max() <= 32 / 255
    assert points["linf"].max() > 0.9 * 32 / 255
    assert set(points["y"]) == {"3", "8"}
    assert result["success"] >= result["clean_success"]
    assert result["message"].startswith("Rows of class 8 taken for 3 with 30 poison points")


def test_clean_label_attack_keeps_its_labels_and_its_l2_bound(arrays, tmp_path, capsys):
    options = ["--attack", "clean-label", "--target", 0, "--epsilon", 2, "--model", "mlp", "--points", 4, "--steps", 40]
    assert run(arrays, *options, "--out", tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    points, given = np.load(tmp_path / "poison.npz"), np.load(arrays)
    assert (given["y_trusted"][points["rows"]].astype(str) == points["y"]).all()
    assert points["l2"].max() <= 2
    assert isinstance(result["success"], bool)
    assert "last layer" in result["notes"][-1]
    assert ", only the last layer retrained: " in result["message"]
    body = {"optimizer": "adam", "steps": 500, "rate": 1e-3, "batch": 100, "decay": 5e-4, "seed": 0}
    assert result["settings"]["body_recipe"] == body
    assert result["settings"]["recipe"]["optimizer"] == "lbfgs"
    page = (tmp_path / "report.html").read_text()
    assert "Accuracy of the last layer of the network, trained from scratch" in page
    assert "<dt>Layers below trained by</dt><dd>optimizer adam, steps 500" in page
    assert page.count("data:image/png;base64,") == 3 * 4 + 1, "and one of the target"
    assert 'alt="target of the attack"' in page
    assert f"<dd>of class {points['y'][0]}</dd>" in page


def test_tables_are_poisoned_within_the_range_of_their_columns(tmp_path, capsys):
    iris = load_iris()
    rows = [",".join([*map(str, x), iris.target_names[y]]) for x, y in zip(iris.data, iris.target, strict=True)]
    (tmp_path / "iris.csv").write_text("a,b,c,d,kind\n" + "\n".join(rows) + "\n")
    assert run(tmp_path / "iris.csv", "--label", "kind", "--points", 8, "--steps", 40, "--out", tmp_path / "r") == 0
    points = np.load(tmp_path / "r" / "poison.npz")
    assert np.abs(points["poisoned"]).max() < 4, "deviations of a column"
    page = (tmp_path / "r" / "report.html").read_text()
    assert "data:image/png" not in page
    assert '<th scope="row">' in page
    assert "held out as the test set" in capsys.readouterr().err


def test_page_and_points_name_columns_and_rows_as_the_table_does(tmp_path):
    random = np.random.default_rng(0)
    size = random.normal(size=120)
    lines = [f"{'red' if s > 0 else 'blue'},7,{s:.6f},{'p' if s + 0.5 * random.normal() > 0 else 'q'}" for s in size]
    (tmp_path / "t.csv").write_text("colour,constant,size,kind\n" + "\n".join(lines) + "\n")
    assert run(tmp_path / "t.csv", "--label", "kind", "--points", 6, "--steps", 5, "--out", tmp_path / "r") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    shown = set(re.findall(r'<th scope="row">([^<]*)', page))
    assert {"colour = red", "colour = blue", "size"} <= shown
    assert "constant" not in shown
    assert "in deviations of a column" in page
    points = np.load(tmp_path / "r" / "poison.npz")
    scaled = (size - size.mean()) / size.std()
    assert np.allclose(points["base"][:, 0], scaled[points["rows"]], atol=1e-4), "rows of the file"


@pytest.mark.parametrize("audit", [[], ["--audit"]])
def test_clean_label_target_that_is_wrong_without_poison_is_no_success(arrays, tmp_path, capsys, monkeypatch, audit):
    """And an audit looks for no bound: none could flip it."""
    monkeypatch.setattr(auditing, "detection_auc", lambda *_, **__: 0.5)
    given = dict(np.load(arrays))
    given["y_test"][0] = (given["y_test"][0] + 1) % 10
    np.savez(tmp_path / "wrong.npz", **given)
    wanted = (int(given["y_test"][0]) - 1) % 10
    options = ["--attack", "clean-label", "--target", 0, "--as", wanted, "--epsilon", 0.1, "--steps", 3]
    assert run(tmp_path / "wrong.npz", *options, *audit, "--out", tmp_path / "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["clean_success"]
    assert result["message"].startswith(f"Test row 0 taken for class {wanted} with 1 poison point")
    assert result["message"].endswith("without: yes.")
    page = (tmp_path / "r" / "report.html").read_text()
    assert 'class="outcome good"' in page
    assert ("AUC of 0.500" in page) is bool(audit)
    if audit:
        assert (result["audit"]["least"], result["audit"]["values"], result["audit"]["runs"]) == (None, [], [])


NETWORKS = """
from torch import nn
def normed(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))
def dead(shape, classes):
    last = nn.Linear(64, classes)
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Flatten(), last, nn.ReLU())
"""


def test_victim_with_a_scale_beside_its_one_matrix_learns_from_its_own_first_weights(arrays, tmp_path, capsys):
    (tmp_path / "n.py").write_text(NETWORKS)
    options = ["--fraction", 0.05, "--steps", 2, "--model", f"{tmp_path / 'n.py'}:normed"]
    assert run(arrays, *options, "--out", tmp_path / "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["recipe"]["optimizer"] == "adam"
    assert result["clean_accuracy"] > 0.7
    assert not any("most frequent class" in note for note in result["notes"])


def test_victim_that_learns_nothing_has_a_note_and_no_green_page(arrays, tmp_path, capsys):
    (tmp_path / "n.py").write_text(NETWORKS)
    options = ["--fraction", 0.05, "--steps", 2, "--model", f"{tmp_path / 'n.py'}:dead"]
    assert run(arrays, *options, "--out", tmp_path / "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    most = np.bincount(np.load(arrays)["y_test"]).max() / 300
    assert result["constant_accuracy"] == pytest.approx(most)
    assert result["clean_accuracy"] <= most
    assert f"Always predicting the most frequent class has {100 * most:.1f}%" in result["notes"][-1]
    assert 'class="outcome bad"' in (tmp_path / "r" / "report.html").read_text()


@pytest.mark.parametrize("kind", ["untargeted", "targeted", "clean-label"])
def test_attack_does_not_see_the_test_rows(arrays, tmp_path, kind):
    """Other test rows, but for the target of a clean-label attack: the same points to the last bit."""
    options = {
        "untargeted": [],
        "targeted": ["--target-class", 8, "--as", 3],
        "clean-label": ["--target", 0, "--as", 3, "--epsilon", 2],
    }[kind]
    given = dict(np.load(arrays))
    first = given["x_test"][:1].copy()
    random = np.random.default_rng(0)
    order = random.permutation(len(given["y_test"]))
    given["x_test"], given["y_test"] = random.random(given["x_test"].shape).astype("float32"), given["y_test"][order]
    given["x_test"][:1], given["y_test"][0] = first, np.load(arrays)["y_test"][0]
    np.savez(tmp_path / "other.npz", **given)
    common = ["--attack", kind, "--points", 4, "--steps", 8, *options]
    for name, path in (("a", arrays), ("b", tmp_path / "other.npz")):
        assert run(path, *common, "--out", tmp_path / name) == 0
    one, other = (np.load(tmp_path / name / "poison.npz") for name in "ab")
    assert np.abs(one["poisoned"] - one["base"]).max() > 0
    for name in ("base", "poisoned", "labels"):
        assert np.array_equal(one[name], other[name]), name
    tested = [json.loads((tmp_path / name / "result.json").read_text())["clean_accuracy"] for name in "ab"]
    assert tested[0] != tested[1], "what is measured is on the test rows"


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("epsilon", ["--attack", "clean-label", "--target", 88, "--epsilon", 2, "--points", 4, "--steps", 15]),
        pytest.param(
            "fraction",
            ["--attack", "targeted", "--target-class", 8, "--as", 3, "--points", 8, "--steps", 40],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_audit_finds_the_least_that_flips_a_target_or_a_class(arrays, tmp_path, monkeypatch, what, options):
    """And `bilevel poison` by itself, with so much, succeeds."""
    monkeypatch.setattr(auditing, "detection_auc", lambda *_, **__: 0.5)
    monkeypatch.setattr(auditing, "SUCCESS", 0.3)  # the test rows have 30 of the class
    common = [arrays, *options]
    assert run(*common, "--audit", "--out", tmp_path / "a") == 0
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    audit = result["audit"]
    enough = {r["value"]: r["enough"] for r in audit["runs"]}
    assert audit["what"] == what
    assert set(enough) <= set(audit["values"])
    assert audit["least"] is not None, "this much poison does it"
    assert enough[audit["least"]]
    below = [value for value in audit["values"] if value < audit["least"]]
    assert enough[below[-1]] is False, "the next smaller one was tried and does not"
    if what == "epsilon":
        assert audit["values"] == pytest.approx([2 * k / 16 for k in range(1, 17)])
    value = audit["least"]
    asked = ["--epsilon", value] if what == "epsilon" else ["--points", round(value * result["rows"])]
    assert run(*common, *asked, "--out", tmp_path / "b") == 0  # the last of an option counts
    success = json.loads((tmp_path / "b" / "result.json").read_text())["success"]
    assert success is True or success >= 0.3


def test_denoiser_is_given_the_whole_network_whose_last_layer_is_attacked(arrays, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(auditing, "detection_auc", lambda ground, poison, model, **_: given.append(model) or 0.5)
    monkeypatch.setattr(auditing, "PARTS_OF_EPSILON", 1)
    options = ["--attack", "clean-label", "--target", 0, "--epsilon", 2, "--model", "mlp", "--steps", 2, "--audit"]
    assert run(arrays, *options, "--out", tmp_path) == 0
    first = classifier("mlp", (1, 8, 8), 10, device=torch.device("cpu"), seed=0).network
    assert list(given[0].state_dict()) == list(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(given[0].parameters(), first.parameters(), strict=True))


@pytest.mark.slow
def test_audit_finds_the_smallest_share_and_whether_the_denoiser_notices(arrays, tmp_path, capsys):
    options = ["--points", 40, "--steps", 25, "--audit", "--cost", 3]
    assert run(arrays, *options, "--out", tmp_path, "--json") == 0
    audit = json.loads(capsys.readouterr().out)["audit"]
    assert audit["what"] == "fraction"
    assert 2 <= len(audit["runs"]) <= 5
    enough = {r["value"]: r["enough"] for r in audit["runs"]}
    assert audit["least"] is None or enough[audit["least"]]
    assert not any(ok for value, ok in enough.items() if audit["least"] is not None and value < audit["least"])
    assert 0.6 < audit["auc"] <= 1
    assert '<th scope="col">enough</th>' in (tmp_path / "report.html").read_text()


def test_audit_that_was_stopped_goes_on_with_its_runs_and_trains_the_clean_victim_once(arrays, tmp_path, monkeypatch):
    """Ctrl-C comes in the third run of the audit: the two before are kept, the end is that of a run in one piece."""
    options = ["--points", 20, "--steps", 12, "--audit", "--cost", 1]
    carried, cleans = [], []
    whole = auditing.carry_out
    clean = AttackSetting.evaluate

    def carry_out(ground, aim, **given):
        if len(carried) == 2:
            raise KeyboardInterrupt
        carried.append(aim.points)
        return whole(ground, aim, **given)

    def evaluate(ground, points):
        cleans.append(points is None)
        return clean(ground, points)

    monkeypatch.setattr(AttackSetting, "evaluate", evaluate)
    monkeypatch.setattr(auditing, "carry_out", carry_out)
    monkeypatch.setattr(auditing, "detection_auc", lambda *_, **__: 0.5)
    assert run(arrays, *options, "--out", tmp_path / "a") == 130
    assert sum(cleans) == 1
    assert not (tmp_path / "a" / "result.json").exists()
    again = []
    monkeypatch.setattr(auditing, "carry_out", lambda g, a, **k: again.append(a.points) or whole(g, a, **k))
    assert run(arrays, *options, "--out", tmp_path / "a", "--resume") == 0
    assert again
    assert not set(carried) & set(again), "a finished run is not made again"
    assert run(arrays, *options, "--out", tmp_path / "b") == 0
    resumed, straight = (json.loads((tmp_path / k / "result.json").read_text())["audit"] for k in "ab")
    assert resumed == straight


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--points", "4", "--fraction", "0.1"], "Give either --points or --fraction; got both."),
        (["--fraction", "1.5"], "--fraction must be above 0 and below 1; got 1.5."),
        (
            ["--attack", "targeted", "--target-class", "1", "--as", "2", "--audit", "--cost", "5"],
            "--cost is for --attack untargeted, whose audit counts lost accuracy; got targeted.",
        ),
        (["--attack", "targeted", "--as", "3"], "--attack targeted needs --target-class."),
        (["--attack", "clean-label", "--epsilon", "1"], "--attack clean-label needs --target."),
        (["--attack", "clean-label", "--target", "0"], "--attack clean-label needs --epsilon."),
        (["--target", "3"], "--target is for --attack clean-label; got untargeted."),
        (["--epsilon", "-1"], "--epsilon must be above 0; got -1.0."),
        (["--epsilon", "inf"], "--epsilon must be finite and above 0; got inf."),
        (["--norm", "linf"], "--norm linf says what --epsilon bounds; give --epsilon as well."),
        (["--attack", "targeted", "--as", "3", "--target-class", "x"], "--target-class must be one of 0, 1, 2"),
        (["--attack", "targeted", "--as", "3", "--target-class", "3"], "--target-class and --as must be two classes"),
        (["--attack", "clean-label", "--target", "9999", "--epsilon", "1"], "--target must be a row of the test set"),
        (["--points", "400"], "points must be below the 400 examples of the training set"),
        (["--model", "lineer"], "got 'lineer'. Did you mean 'linear'?"),
    ],
)
def test_wrong_use_is_refused_with_a_sentence_and_writes_nothing(arrays, tmp_path, capsys, options, sentence):
    assert run(arrays, *options, "--out", tmp_path / "r") == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_run_that_was_stopped_goes_on_and_ends_with_the_same_points(arrays, tmp_path):
    arguments = [str(arrays), "--points", "20", "--steps", "300"]
    command = [sys.executable, "-m", "bilevel", "poison", *arguments, "--out", str(tmp_path / "a")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: list((tmp_path / "a").glob("checkpoint/attack/*")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Stopped by Ctrl-C" in err
    assert not (tmp_path / "a" / "result.json").exists()
    assert run(*arguments, "--out", tmp_path / "a") == 2, "a stopped run is not begun over"
    assert run(*arguments, "--out", tmp_path / "a", "--resume") == 0
    assert run(*arguments, "--out", tmp_path / "b") == 0
    resumed, whole = (np.load(tmp_path / name / "poison.npz")["poisoned"] for name in "ab")
    assert np.array_equal(resumed, whole)
    assert run(*arguments, "--out", tmp_path / "a", "--resume") == 0, "and is finished"


def test_differences_are_amplified_so_that_the_largest_fills_the_range():
    base = np.full((4, 4), 100, np.uint8)
    assert amplification([(base, base + np.uint8(10))]) == 10
    assert amplification([(base, base)]) == 1
    assert amplification([]) == 1
    shown = comparison("<p>", (base, base + np.uint8(10)), 10)
    assert re.findall('alt="(.*?)"', shown) == [f"{name} of &lt;p&gt;" for name in ("base", "poison", "difference")]
    with pytest.raises(OptionError, match="uint8 of one shape"):
        comparison("p", (base, base[:2]), 1)


def test_one_point_has_a_row_of_every_array(arrays, tmp_path):
    assert run(arrays, "--points", 1, "--steps", 3, "--out", tmp_path / "one") == 0
    with np.load(tmp_path / "one" / "poison.npz") as found:
        assert {name: len(found[name]) for name in ("y", "labels", "base", "poisoned", "rows", "l2", "linf")} == (
            dict.fromkeys(("y", "labels", "base", "poisoned", "rows", "l2", "linf"), 1)
        )


def test_a_run_of_another_command_is_not_written_over(arrays, tmp_path, capsys):
    (tmp_path / "r").mkdir()
    before = '{"command": "fewshot", "versions": {}}'
    (tmp_path / "r" / "config.json").write_text(before)
    assert run(arrays, "--points", 1, "--steps", 3, "--out", tmp_path / "r") == 2
    assert "already has a config.json, which is not overwritten. Use another --out." in capsys.readouterr().err
    assert (tmp_path / "r" / "config.json").read_text() == before
