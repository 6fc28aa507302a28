"""`bilevel fewshot` and `bilevel reproduce fewshot` on small data."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from common import needs
from PIL import Image
from safetensors.numpy import load_file

from bilevel import ProblemError
from bilevel.applications.few_shot import embed
from bilevel.cli import bar, fewshot, fewshot_again
from bilevel.cli.fewshot_output import WEIGHTS
from bilevel.cli.main import main
from bilevel.data.class_sets import load_classes
from bilevel.models import few_shot_cnn
from bilevel.paper import few_shot as study
from bilevel.paper import few_shot_page, few_shot_runs
from bilevel.paper.few_shot_findings import beside


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of a coarse pattern each, eight noisy images of it."""
    root = tmp_path_factory.mktemp("few") / "patterns"
    rng = np.random.default_rng(0)
    for c in range(12):
        pattern = np.kron(rng.integers(0, 2, (4, 4)) * 120 + 60, np.ones((4, 4)))
        (root / f"pattern {c:02d}").mkdir(parents=True)
        for i in range(8):
            pixels = np.clip(pattern + rng.normal(size=(16, 16)) * 20, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"pattern {c:02d}" / f"{i}.png")
    return root


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "fewshot", str(folder), "--ways", "2", "--shots", "1", "--queries", "3", "--meta-batch", "2", "--steps", "8",
        "--tasks", "20", "--device", "cpu", "--out", str(out), *more,
    ]  # fmt: skip


def test_a_run_writes_its_files_and_is_evaluated_and_embeds(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(bar, "EVERY", 0.0)
    assert main(arguments(folder, out, "--json")) == 0
    rows = list(csv.DictReader((out / "accuracy.csv").read_text().splitlines()))
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert {
        "learning: 1 of 8 steps",
        "evaluating: 0 of 16 images",
        "evaluating class means: 0 of 16 images",
    } <= set(captured.err.splitlines())
    assert result == json.loads((out / "result.json").read_text())
    assert [row["step"] for row in rows] == ["8"]  # a short run is validated once
    assert float(rows[0]["accuracy"]) == pytest.approx(result["validation_accuracy"], abs=1e-6)
    assert result["kept_step"] == 8
    assert result["classes"] == [8, 2, 2]
    assert 0 <= result["accuracy"] <= 1
    assert result["tasks"] == 20
    page = (out / "report.html").read_text()
    for words in (
        "Unseen classes",
        "A task in the middle:",
        "a field shows 4 queries at most.",
        "Accuracy on meta-validation classes",
        "step 8, the best on meta-validation classes",
        "data:image/png;base64",
    ):
        assert words in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert not (out / "checkpoint").exists()
    assert (out / "accuracy.csv").read_text().count("\n") == 2
    weights = load_file(out / "representation.safetensors")
    assert weights["0.weight"].shape == (64, 1, 3, 3)

    assert main(["fewshot", "--evaluate", str(out), "--device", "cpu", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["accuracy"], again["interval"]) == (result["accuracy"], result["interval"])
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"scale": 3.0}))
    called = []
    evaluate = fewshot_again.adapt_and_evaluate
    monkeypatch.setattr(
        fewshot_again, "adapt_and_evaluate", lambda *a, **given: called.append(given["scale"]) or evaluate(*a, **given)
    )
    assert main(["fewshot", "--evaluate", str(out), "--device", "cpu", "--json"]) == 0
    assert called == [3.0], "the scale of the run"
    (out / "config.json").write_text(json.dumps(config))
    capsys.readouterr()

    assert main(["fewshot", "--evaluate", str(out), "--embed", str(folder), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    with np.load(told["embeddings"]) as kept:
        assert kept["features"].shape == (96, 64)
        assert kept["files"][0] == "pattern 00/0.png"

    assert main(arguments(folder, out, "--resume", "--json")) == 0
    captured = capsys.readouterr()
    assert "finished already" in captured.err
    assert json.loads(captured.out) == result


def test_a_run_is_used_from_any_folder_on_other_tasks_and_embeds_without_its_data(
    folder, tmp_path, capsys, monkeypatch
):
    data = tmp_path / "mine" / "omniglot"  # a name is not the named set, whose images are inverted and turned
    shutil.copytree(folder, data)
    monkeypatch.chdir(tmp_path)
    (data / "pattern 00" / "0.png").write_bytes((data / "pattern 00" / "1.png").read_bytes()[:90])
    seed = ["--seed", "2", "--embed", str(folder), "--json"]
    assert main(arguments(Path("mine/omniglot"), Path("run"), *seed)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["classes"], result["images"]) == ([8, 2, 2], 96)
    assert "2-way 1-shot" in result["message"]
    assert "Embedded 96 images" in result["message"]
    assert "does not decode: pattern 00/0.png" in result["notes"][0]
    assert len(result["notes"]) == 1
    with np.load("run/embeddings.npz") as kept:
        first = kept["features"]
    network = few_shot_cnn()
    network.load_state_dict({name: torch.from_numpy(x) for name, x in load_file("run/" + WEIGHTS).items()})
    pixels = np.asarray(Image.open(folder / "pattern 00" / "0.png"))
    assert np.allclose(first[0], embed(network, torch.from_numpy(pixels.copy())[None, None])[0], atol=1e-5)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = ["fewshot", "--evaluate", "../run", "--device", "cpu", "--json"]
    assert main(again) == 0  # on the tasks of the run: its number of them, and its seed
    same = json.loads(capsys.readouterr().out)
    assert (same["accuracy"], same["tasks"], same["seed"]) == (result["accuracy"], 20, 2)
    # The seed of the run has split the classes: another would try the one with 7 images, where 8 are asked for.
    tests = {seed: load_classes(data, seed=seed).test.names for seed in range(30)}
    assert "pattern 00" not in tests[2]
    other = next(seed for seed, names in tests.items() if "pattern 00" in names)
    assert main([*again, "--shots", "2", "--queries", "6", "--seed", str(other)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ways"], found["shots"], found["queries"], found["seed"]) == (2, 2, 6, other)
    shutil.rmtree(data)
    assert main([*again, "--embed", str(folder), "--out", "new/e.npz"]) == 0
    with np.load("new/e.npz") as kept:
        assert np.array_equal(kept["features"], first)


def test_ctrl_c_ends_a_run_with_the_exit_code_of_ctrl_c(folder, tmp_path):
    out, words = tmp_path / "r", arguments(folder, tmp_path / "r")
    words[words.index("--steps") + 1] = "200"  # a checkpoint every 20
    command = [sys.executable, "-m", "bilevel", *words]
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 100
        while not (out / "checkpoint" / "solve" / "state.safetensors").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"bilevel: Stopped by Ctrl-C. The same command with --resume goes on from {out}.\n" in told
    assert "Traceback" not in told
    assert not (out / "result.json").exists()


def test_ctrl_c_in_the_evaluation_keeps_the_training_and_a_checkpoint_that_is_no_good_stays(
    folder, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr("bilevel.cli.fewshot.adapt_and_evaluate", stopped)
        assert main(arguments(folder, out)) == 130
    assert f"The same command with --resume goes on from {out}." in capsys.readouterr().err
    state = out / "checkpoint" / "solve" / "state.safetensors"
    whole = state.read_bytes()
    for file in state.parent.glob("*.safetensors"):
        file.write_bytes(whole[:100])
    assert main(arguments(folder, out, "--resume")) == 1
    told = capsys.readouterr().err
    assert "truncated or altered" in told
    assert "is left as it is: --resume goes on from it where it can" in told
    assert state.read_bytes() == whole[:100]
    state.write_bytes(whole)
    assert main(arguments(folder, out, "--resume")) == 0
    assert not state.exists()


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_users_network_is_taken_and_checked(folder, tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make(shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 7))\n"
        "def wrong(shape):\n    return 3\n"
    )
    assert main(arguments(folder, tmp_path / "a", "--backbone", f"{file}:make")) == 0
    assert "95% interval" in capsys.readouterr().out
    assert main(arguments(folder, tmp_path / "b", "--backbone", f"{file}:wrong")) == 2
    assert "must return an nn.Module; got int" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "c", "--backbone", "conv5")) == 2
    assert "Did you mean 'conv4'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ProblemError, RuntimeError])
def test_too_little_memory_names_the_option_that_helps(folder, tmp_path, capsys, monkeypatch, kind):
    def fails(*args, **options):
        raise kind("prepare failed with RuntimeError: DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(fewshot, "meta_train", fails)
    assert main(arguments(folder, tmp_path / "x")) == 1
    assert "tasks needs more memory than there is. Give a smaller --meta-batch." in capsys.readouterr().err


def test_wrong_use_is_told_before_anything_is_run(folder, tmp_path, capsys):
    assert main(["fewshot"]) == 2
    assert "DATA is needed" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "x", "--ways", "9")) == 2
    told = capsys.readouterr().err
    assert "ways must be at most the number of classes that tasks are drawn from, 8 " in told
    assert "got 9. Give more classes" in told
    assert main(["fewshot", "--evaluate", str(tmp_path)]) == 2
    assert "must name the folder of a run" in capsys.readouterr().err
    assert main(["fewshot", "--evaluate", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["fewshot", "--embed", str(folder)]) == 2
    assert "--embed needs --evaluate RUN" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "x", "--embed", str(tmp_path / "none"))) == 2
    assert "--embed must name a folder with images" in capsys.readouterr().err
    for c in range(4):
        (tmp_path / "small" / str(c)).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (8, 8), 60 * c).save(tmp_path / "small" / str(c) / f"{i}.png")
    assert main(arguments(tmp_path / "small", tmp_path / "x")) == 2
    assert "they need 16x16 pixels at least; these have 8x8." in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "none").exists()


def test_options_that_a_finished_run_has_no_use_for_are_refused(tmp_path, capsys):
    call = ["fewshot", "--evaluate", str(tmp_path)]
    assert main([*call, "--steps", "10000", "--backbone", "conv4"]) == 2  # though both are the defaults
    assert "--backbone and --steps must be left out with --evaluate, whose run is finished" in capsys.readouterr().err
    for option in ("--train-ways 3", "--meta-batch 2", "--rotations", "--lists x", "--resume", "--out x"):
        assert main([*call, *option.split()]) == 2
        assert f"{option.split()[0]} must be left out with --evaluate" in capsys.readouterr().err
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert main([*call, "--embed", str(tmp_path), "--tasks", "20"]) == 2
    assert "--tasks must be left out with --evaluate and --embed" in capsys.readouterr().err


def test_too_few_validation_classes_are_told_and_every_class_is_in_the_legend(folder, tmp_path, capsys):
    for c in range(12):
        name = "_$12 <b> 種類" if c == 11 else f"pattern {c:02d}"
        part = "train" if c < 6 else "val" if c < 8 else "test"
        shutil.copytree(folder / f"pattern {c:02d}", tmp_path / "parts" / part / name)
    assert main(arguments(tmp_path / "parts", tmp_path / "run", "--ways", "3", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["classes"], result["validation_accuracy"]) == ([6, 2, 4], None)
    assert result["notes"] == ["No accuracy on meta-validation classes: there are 2, fewer than the ways of a task."]
    page = (tmp_path / "run" / "report.html").read_text()
    assert " _$12 &lt;b&gt; 種類</text>" in page
    assert all(f">pattern {c:02d}</text>" in page for c in range(8, 11))


def test_the_cells_of_the_study_are_distinct_and_the_most_wanted_come_first():
    cells = study.cells(study.PARTS[:2], study.DATASETS, tuple(study.METHODS), 2, ("conv4", "resnet"))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    first = sorted(cells, key=lambda cell: -cell.weight)[:4]
    assert all(c.settings["method"] == "penalty" and c.settings["dataset"] == "omniglot" for c in first)
    paper = [c.settings for c in cells if c.settings["method"] == "paper" and c.settings["dataset"] == "omniglot"]
    assert {(s["ways"], s["tasks"]) for s in paper} == {(5, 30), (20, 15)}


def test_the_page_tells_what_is_reached_and_what_is_not(tmp_path):
    kept = []
    for (ways, shots), accuracy in {(5, 1): 0.9901, (20, 1): 0.9449}.items():
        settings = study.table_settings("omniglot", "conv4", ways, shots, "penalty", 0)
        curve = [{"step": 1, "seconds": 0.5, "accuracy": 0.5}, {"step": 2, "seconds": 1.0, "accuracy": accuracy}]
        kept.append((settings, {
            "accuracy": accuracy, "interval": 0.001, "steps": 3000, "of": 3000, "ms_per_step": 8.0, "seconds": 24.0,
            "curve": curve, "weights": 111_936, "device": "CPU", "accuracy_of_means": accuracy,
            "train_accuracy": 0.9876,
        }))  # fmt: skip
    for method, accuracy in {"penalty": 0.6012, "approx-grad": 0.5, "prototypes": 0.6}.items():
        kept.append((study.table_settings("cifar-fs", "conv4", 5, 1, method, 0), {**kept[0][1], "accuracy": accuracy}))
    found = few_shot_page.write(kept, tmp_path)
    assert found["findings"][0] == "Omniglot, 5-way 1-shot: Penalty has 99.01 and reaches 98.9; the paper has 97.83."
    assert "does not reach 96.0" in found["findings"][1]
    assert found["findings"][-3] == (
        "CIFAR-FS, 5-way 1-shot, four convolutions: Penalty (2,500 steps) has 60.12. ApproxGrad (2,500 steps) has "
        "50.00: Penalty is 10.12 above (± at most 0.14). ProtoNet (5,000 steps) has 60.00: Penalty is 0.12 above "
        "(± at most 0.14)."
    )
    assert found["findings"][-2].startswith("At most: all methods have the same tasks")
    assert found["findings"][-1].startswith("At the test, Penalty's trained classifiers have")
    text = (tmp_path / "few-shot.md").read_text()
    assert "| 99.01 | 98.76 |" in text
    assert "99.01 ± 0.10" in text
    assert "not run" in text
    for part in (
        "## CIFAR-FS, in the place of mini-ImageNet, the residual network",
        "## The effect of T (Figure 5(b))",
    ):
        assert f"{part}\n\nNot run." in text
    assert "CIFAR-FS here has 300 images a class" in text
    assert (tmp_path / "few-shot-speed.png").stat().st_size > 1000


def test_runs_that_the_limit_of_time_has_ended_have_their_steps_beside_them_and_claim_nothing(tmp_path):
    whole = {"accuracy": 0.99, "interval": 0.001, "steps": 3000, "of": 3000, "seconds": 24.0, "weights": 111_936,
             "device": "CPU", "accuracy_of_means": 0.5, "ms_per_step": 8.0}  # fmt: skip
    cut = {**whole, "accuracy": 0.9, "steps": 60, "partial": True, "ms_per_step": 99.0}
    untimed = {name: value for name, value in whole.items() if name != "ms_per_step"}
    kept = [
        (study.table_settings("omniglot", "conv4", 5, 1, "penalty", 0), cut),
        (study.table_settings("omniglot", "conv4", 5, 5, "penalty", 0), whole),
        (study.table_settings("omniglot", "conv4", 5, 5, "penalty", 1), cut),
        (study.table_settings("omniglot", "conv4", 5, 1, "prototypes", 0), untimed),
        *((cell.settings, cut) for cell in study.cells([study.CHOICES], ["omniglot"], [], 1, [])[:1]),
        (study.cells([study.EFFECT], ["omniglot"], ["penalty"], 1, ["conv4"])[0].settings, cut),
    ]
    found = few_shot_page.write(kept, tmp_path)
    assert found["findings"][-1] == (
        "At the test, Penalty's trained classifiers have +49.00 to +49.00 points beside the class means of the support "
        "in the same representation."
    )
    assert found["findings"][:-1] == [
        "Omniglot, 5-way 5-shot: Penalty has 99.00 and does not reach 99.6; the paper has 99.45."
    ]
    text = (tmp_path / "few-shot.md").read_text()
    assert few_shot_page.CUT in text
    row = next(line for line in text.splitlines() if line.startswith("| Penalty, ours | 90.00"))
    assert row.startswith("| Penalty, ours | 90.00 ± 0.10 (60 of 3,000 steps) | 97.83 | 99.00 ± 0.10 |")
    assert "| as the table |" not in text
    assert "| Penalty, ours | 1 | 90.00 ± 0.10 (60 of 3,000 steps) | 99.0 |" in text
    conv = "omniglot, four convolutions"
    assert f"| {conv} | Penalty, ours | 4 tasks of 60 ways, 5 queries | 3,000 | 10 |" in text
    assert f"| {conv} | ProtoNet | 4 tasks of 60 ways, 5 queries | 3,000 |  |" in text


def test_a_quick_look_claims_nothing(tmp_path):
    found = {"accuracy": 0.7, "interval": 0.1, "steps": 10, "of": 10, "ms_per_step": 8.0, "seconds": 1.0,
             "weights": 111_936, "device": "CPU"}  # fmt: skip
    kept = [(cell.settings, found) for cell in study.small_cells()]
    assert few_shot_page.write(kept, tmp_path)["findings"] == []
    assert "**A quick look.** Cells here have a few steps and 5 tasks" in (tmp_path / "few-shot.md").read_text()


def test_too_many_ways_in_training_and_weights_that_are_not_finite_are_told(folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path / "a", "--train-ways", "40")) == 2
    assert "--train-ways must be at most the number of classes to learn from, 8; got 40." in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "b", "--decay", "1e12")) == 1
    assert "not finite after training" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "b").iterdir())


def test_differences_are_judged_by_the_tasks_that_both_methods_have():
    cells = [
        (study.table_settings("cifar-fs", "conv4", 5, 1, method, 0),
         {"accuracy": sum(right) / 4 / 75, "interval": 0.2, "queries": 15, "right": right})
        for method, right in (("penalty", [40, 50, 60, 71]), ("prototypes", [38, 48, 58, 68]))
    ]  # fmt: skip
    # differences 2, 2, 2, 3 of 75: 3 points, half-width t(3) * 0.5 / 2 / 75
    assert beside(cells[:1], cells[1:]) == "ProtoNet (5,000 steps) has 70.67: Penalty is 3.00 above (± 1.06)."
    cells[1][1]["right"] = [50, 40, 70, 52]
    assert "which the tasks do not resolve" in beside(cells[:1], cells[1:])


def test_omniglots_further_seeds_are_trained_once_and_tried_with_both_ways(tmp_path, folder, monkeypatch):
    cells = study.cells([study.TABLE], ["omniglot"], ["penalty", "paper"], 2, ["conv4"])
    later = [c.settings for c in cells if c.settings["seed"] == 1]
    assert sorted((s["method"], s["ways"], s["shots"], s.get("also")) for s in later if s["method"] == "penalty") == [
        ("penalty", 5, 1, 20), ("penalty", 5, 5, 20),
    ]  # fmt: skip
    assert len([s for s in later if s["method"] == "paper"]) == 4, "whose training has the ways of the test"
    classes = load_classes(folder)
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    settings = study.table_settings("omniglot", "conv4", 2, 1, "penalty", 1) | {
        "steps": 2, "train_ways": 2, "tasks": 2, "queries": 2, "points": 1, "test_tasks": 10, "test_queries": 3,
        "also": 2,
    }  # fmt: skip
    found = few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert found["also"] == {"accuracy": found["accuracy"], "interval": found["interval"]}, "the same tasks here"
    one = {"accuracy": 0.99, "interval": 0.001, "also": {"accuracy": 0.9, "interval": 0.002}, "steps": 1}
    shown = few_shot_page.apart([(later[0], one)])
    assert [(s["ways"], f["accuracy"], "also" in {**s, **f}) for s, f in shown] == [(5, 0.99, False), (20, 0.9, False)]


def test_a_cell_whose_step_is_chosen_takes_the_place_of_one_whose_is_not(tmp_path):
    found = {"accuracy": 0.7, "interval": 0.001, "steps": 3000, "of": 3000, "ms_per_step": 8.0, "seconds": 24.0,
             "weights": 3_807_328, "device": "CPU", "kept_step": 1800}  # fmt: skip
    selected = study.table_settings("cifar-fs", "resnet", 5, 5, "penalty", 0)
    assert selected["decay"] > 0
    last = {key: value for key, value in selected.items() if key not in study.KIND}
    (choice, *_), others = (study.cells([study.CHOICES], [name], [], 1, []) for name in ("cifar-fs", "omniglot"))
    assert {c.settings["dataset"] for c in others} == {"omniglot"}
    kept = [(last, {**found, "accuracy": 0.9}), (selected, found), (choice.settings, found)]
    few_shot_page.write(kept, tmp_path)
    text = (tmp_path / "few-shot.md").read_text()
    assert "| Penalty, ours | not run | 70.00 ± 0.10 |" in text
    assert "| Penalty, ours | decay 0.5, erased squares, upper rate 0.001, scale 40 |" in text
    assert "shot nothing was compared" not in text
    one = study.table_settings("cifar-fs", "resnet", 5, 1, "prototypes", 0)
    few_shot_page.write([*kept, (one, found)], tmp_path)
    assert (
        "with 1 shot nothing was compared, and the settings are those of the others."
        in (tmp_path / "few-shot.md").read_text()
    )
    assert "| no decay | 5 | Penalty, ours | 70.00 |  | 1,800 |" in text
    others = {**selected, "decay": 0.1}
    few_shot_page.write([(others, {**found, "accuracy": 0.9}), (selected, found)], tmp_path)
    assert "| 70.00 ± 0.10 |" in (tmp_path / "few-shot.md").read_text(), "the settings of now, whichever came first"
    few_shot_page.write(kept[:1], tmp_path)
    assert "AdamW" not in (tmp_path / "few-shot.md").read_text()


@needs("cifar100")
@pytest.mark.parametrize("method", ["penalty", "prototypes"])
def test_a_cell_is_measured_at_its_best_step_on_meta_validation_classes(tmp_path, method, monkeypatch):
    heard = []
    monkeypatch.setattr(few_shot_runs.Best, "hear", lambda self, step, accuracy: heard.append((step, accuracy)))
    monkeypatch.setattr(few_shot_runs.Best, "restore", lambda self: max(heard, key=lambda pair: pair[1]))
    monkeypatch.setattr(few_shot_runs, "POINT_TASKS", 4)
    few = {"steps": 3, "train_ways": 3, "tasks": 1, "queries": 2, "points": 1, "test_tasks": 3, "backbone": "conv4"}
    settings = study.table_settings("cifar-fs", "resnet", 5, 1, method, 0) | few
    found = few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert [step for step, _ in heard] == [1, 2, 3]
    assert (found["kept_step"], found["chosen_accuracy"]) == max(heard, key=lambda pair: pair[1])


def test_a_run_that_shared_the_gpu_has_the_time_of_a_short_run_by_itself_and_no_other(tmp_path):
    curve = [{"step": 300, "seconds": 9.0, "accuracy": 0.5}, {"step": 600, "seconds": 18.0, "accuracy": 0.9}]
    found = {"accuracy": 0.9, "interval": 0.001, "steps": 600, "of": 600, "ms_per_step": 30.0, "seconds": 18.0,
             "curve": curve, "weights": 111_936, "device": "CPU", "beside": 3}  # fmt: skip
    shared = study.table_settings("omniglot", "conv4", 5, 1, "rmd", 0)
    untimed = study.table_settings("omniglot", "conv4", 5, 5, "rmd", 0)
    alone = study.table_settings("omniglot", "conv4", 5, 1, "penalty", 0)
    own = {key: value for key, value in found.items() if key != "beside"}
    time = (shared | {"part": study.TIME, "ways": 20, "steps": study.TIME_STEPS}, {"steps": 100, "ms_per_step": 5.0})
    cells = few_shot_page.timed([(shared, found), (untimed, found), (alone, own)], [time])
    assert [one["ms_per_step"] for _, one in cells] == [5.0, None, 30.0]
    assert [[row["seconds"] for row in one["curve"]] for _, one in cells] == [[1.5, 3.0], [], [9.0, 18.0]]
    few_shot_page.write([(shared, found), (untimed, found), (alone, own), time], tmp_path)
    text = (tmp_path / "few-shot.md").read_text()
    assert "5-way 1-shot | RMD | 600 | 5.0 | 3.0 |" in text
    assert "5-way 5-shot | RMD" not in text


def test_of_runs_of_several_lengths_the_longest_finished_one_is_shown():
    short, long = (study.table_settings("cifar-fs", "resnet", 5, 1, "penalty", 0) | {"steps": n} for n in (100, 300))
    other = study.table_settings("cifar-fs", "resnet", 5, 1, "penalty", 1)
    kept = [(short, {"accuracy": 0.5}), (long, {"accuracy": 0.6}), (other, {"accuracy": 0.7})]
    assert [f["accuracy"] for _, f in few_shot_page.longest(kept)] == [0.6, 0.7]
    kept[1] = (long, {"accuracy": 0.6, "partial": True})
    assert [f["accuracy"] for _, f in few_shot_page.longest(kept)] == [0.5, 0.7]


def test_times_are_of_every_kind_of_step_once_and_never_taken_side_by_side(tmp_path, capsys):
    cells = study.cells([study.TIME], study.DATASETS, tuple(study.METHODS), 5, ("conv4", "resnet"))
    kinds = [study.timed_as(cell.settings) for cell in cells]
    assert len(set(kinds)) == len(kinds) == 4 * 6 + 8 + 6, "methods with 1 and 5 shots; those of the paper; other T"
    assert {cell.settings["steps"] for cell in cells} == {study.TIME_STEPS}
    assert main(["reproduce", "fewshot", "--parts", "time", "--workers", "2", "--out", str(tmp_path)]) == 2
    assert "leave --workers out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("method", ["penalty", "prototypes"])
def test_the_time_of_a_step_is_taken_after_the_middle_of_a_short_run(method, folder, tmp_path, monkeypatch):
    classes = load_classes(folder)
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    settings = study.table_settings("omniglot", "conv4", 2, 1, method, 0) | {
        "part": study.TIME, "steps": 10, "train_ways": 2, "tasks": 2, "queries": 2, "test_queries": 3,
    }  # fmt: skip
    found = few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert found is not None
    assert found["steps"] == 10
    assert found["ms_per_step"] > 0
    assert "accuracy" not in found
    assert few_shot_runs._step_time([(0, 0.0), (5, 4.0), (10, 5.0)])["ms_per_step"] == 200.0


@pytest.mark.parametrize("method", list(study.METHODS))
def test_a_cell_ends_at_the_deadline_and_goes_on_to_the_same_accuracy(method, folder, tmp_path, monkeypatch):
    classes = load_classes(folder)
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    settings = study.table_settings("omniglot", "conv4", 2, 1, method, 0) | {
        "steps": 6, "train_ways": 2, "tasks": 2, "queries": 2, "points": 3, "test_tasks": 10, "test_queries": 3,
        "selected": True,
    }  # fmt: skip
    cpu = torch.device("cpu")
    straight = few_shot_runs.run(settings, cpu, tmp_path / "straight")
    for step in (1, 2, 3):  # a step each
        early = few_shot_runs.run(settings, cpu, tmp_path / "stopped", deadline=0.0)
        assert early is not None
        assert (early["partial"], early["steps"]) == (True, step)
    assert straight is not None
    assert (straight["partial"], straight["steps"]) == (False, 6)
    late = few_shot_runs.run(settings, cpu, tmp_path / "stopped")
    again = few_shot_runs.run(settings, cpu, tmp_path / "stopped")  # the state is there, the result is not
    for found in (late, again):
        assert found is not None
        assert (found["partial"], found["steps"], found["accuracy"]) == (False, 6, straight["accuracy"])
        assert [(row["step"], row["accuracy"]) for row in found["curve"]] == [
            (row["step"], row["accuracy"]) for row in straight["curve"]
        ]
        assert found["seconds"] >= early["seconds"] > 0
        assert [row["step"] for row in found["curve"]] == [2, 4, 6]


@pytest.mark.slow
@needs("omniglot")
def test_every_method_of_the_study_runs_and_a_second_call_runs_nothing(tmp_path, capsys):
    call = ["reproduce", "fewshot", "--quick", "--device", "cpu", "--out", str(tmp_path), "--json"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["message"].startswith("5 cells were run")
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["message"].startswith("0 cells were run")
