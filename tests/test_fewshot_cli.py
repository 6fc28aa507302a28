"""`bilevel fewshot` on small data."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from common import needs
from forked import PATIENCE, wait_for
from PIL import Image
from safetensors.numpy import load_file

from bilevel import ProblemError
from bilevel.applications.few_shot import embed
from bilevel.applications.networks import few_shot_cnn
from bilevel.cli import fewshot_run
from bilevel.cli import progress as bar
from bilevel.cli.fewshot_output import WEIGHTS
from bilevel.cli.main import main
from bilevel.data import class_images
from bilevel.data.class_images import load_classes


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


SAME = "All tasks have the same 2 classes, as there are no more: the interval is for their images."


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "fewshot",
        str(folder),
        "--ways",
        "2",
        "--shots",
        "1",
        "--queries",
        "3",
        "--meta-batch",
        "2",
        "--steps",
        "8",
        "--tasks",
        "20",
        "--device",
        "cpu",
        "--out",
        str(out),
        *more,
    ]


def test_a_run_writes_its_files_and_is_evaluated_and_embeds(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(bar, "EVERY", 0.0)
    assert main(arguments(folder, out, "--json")) == 0
    rows = list(csv.DictReader((out / "accuracy.csv").read_text().splitlines()))
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert {
        "learning from 64 images of 8 classes, 16x16: 8 steps of 16 images each",
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
    evaluate = fewshot_run.adapt_and_evaluate
    monkeypatch.setattr(
        fewshot_run, "adapt_and_evaluate", lambda *a, **given: called.append(given["scale"]) or evaluate(*a, **given)
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
    assert "already finished" in captured.err
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
    assert result["notes"][1:] == [SAME]
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
        wait_for((out / "checkpoint" / "solve" / "state.safetensors").exists, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"bilevel: Stopped by Ctrl-C. The same command with --resume continues the run in {out}.\n" in told
    assert "Traceback" not in told
    assert not (out / "result.json").exists()


def test_ctrl_c_in_the_evaluation_keeps_the_training_and_a_checkpoint_that_is_no_good_stays(
    folder, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr("bilevel.cli.fewshot_run.adapt_and_evaluate", stopped)
        assert main(arguments(folder, out)) == 130
    assert f"The same command with --resume continues the run in {out}." in capsys.readouterr().err
    state = out / "checkpoint" / "solve" / "state.safetensors"
    whole = state.read_bytes()
    for file in state.parent.glob("*.safetensors"):
        file.write_bytes(whole[:100])
    assert main(arguments(folder, out, "--resume")) == 1
    told = capsys.readouterr().err
    assert "truncated or altered" in told
    assert "is kept. Continue the run with --resume, or use another --out" in told
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
    again = ["fewshot", "--evaluate", str(tmp_path / "a"), "--device", "cpu"]
    file.rename(tmp_path / "moved.py")
    assert main(again) == 2
    assert f"must say where the run's network is now; there is no file {file}." in capsys.readouterr().err
    assert main([*again, "--backbone", f"{tmp_path / 'moved.py'}:make"]) == 0
    capsys.readouterr()
    (tmp_path / "moved.py").write_text(file_text := (tmp_path / "moved.py").read_text().replace(", 7)", ", 8)"))
    assert main([*again, "--backbone", f"{tmp_path / 'moved.py'}:make"]) == 1
    told = capsys.readouterr().err
    assert "does not fit the network: the file is damaged, or the network has changed" in told
    assert len(told.splitlines()) == 1
    file.write_text(file_text)
    assert main(arguments(folder, tmp_path / "b", "--backbone", f"{file}:wrong")) == 2
    assert "must return an nn.Module; got int" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "c", "--backbone", "conv5")) == 2
    assert "Did you mean 'conv4'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ProblemError, RuntimeError])
def test_too_little_memory_names_the_option_that_helps(folder, tmp_path, capsys, monkeypatch, kind):
    def fails(*args, **options):
        raise kind("prepare failed with RuntimeError: DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(fewshot_run, "meta_train", fails)
    assert main(arguments(folder, tmp_path / "x")) == 1
    assert "tasks needs more memory than is available. Use a smaller --meta-batch." in capsys.readouterr().err


def test_wrong_use_is_told_before_anything_is_run(folder, tmp_path, capsys):
    assert main(["fewshot"]) == 2
    assert "DATA is needed" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "x", "--ways", "9")) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"--ways must be at most the number of classes .*, 8 .* got 9\. Use more classes", told)
    assert main(["fewshot", "--evaluate", str(tmp_path)]) == 2
    assert "must name the folder of a finished run of `bilevel fewshot`" in capsys.readouterr().err
    assert main(["fewshot", "--evaluate", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["fewshot", "--embed", str(folder)]) == 2
    assert "--embed also works without DATA, with --evaluate RUN." in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "x", "--embed", str(tmp_path / "none"))) == 2
    assert "--embed must name a folder with images" in capsys.readouterr().err
    for c in range(4):
        (tmp_path / "small" / str(c)).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (8, 8), 60 * c).save(tmp_path / "small" / str(c) / f"{i}.png")
    assert main(arguments(tmp_path / "small", tmp_path / "x")) == 2
    assert "they need at least 16x16 pixels; these have 8x8." in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "none").exists()


def test_options_that_a_finished_run_has_no_use_for_are_refused(tmp_path, capsys):
    call = ["fewshot", "--evaluate", str(tmp_path)]
    assert main([*call, "--steps", "10000", "--meta-batch", "30"]) == 2  # though both are the defaults
    assert "--meta-batch and --steps must be left out with --evaluate: the run is finished" in capsys.readouterr().err
    for option in (
        "--train-ways 3",
        "--scale 5",
        "--meta-batch 2",
        "--rotations",
        "--resume",
        "--out x",
    ):
        assert main([*call, *option.split()]) == 2
        assert f"{option.split()[0]} must be left out with --evaluate" in capsys.readouterr().err
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert main([*call, "--embed", str(tmp_path), "--tasks", "20"]) == 2
    assert "--tasks must be left out with --evaluate and --embed" in capsys.readouterr().err


def test_a_run_is_evaluated_where_its_data_are_now_and_on_others(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "here")
    assert main(arguments(tmp_path / "here", tmp_path / "run", "--json")) == 0
    first = json.loads(capsys.readouterr().out)
    (tmp_path / "here").rename(tmp_path / "there")
    call = ["fewshot", "--evaluate", str(tmp_path / "run"), "--device", "cpu", "--json"]
    assert main(call) == 1
    assert "does not exist; `bilevel fewshot DATA --evaluate" in " ".join(capsys.readouterr().err.split())
    assert main([*call, str(tmp_path / "there")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["accuracy"] == first["accuracy"]
    assert again["notes"] == [f"The run was trained on {tmp_path / 'here'}.", SAME]
    assert "on classes that were not seen" in again["message"]
    for c in range(8):
        (tmp_path / "large" / str(c)).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (32, 32), 30 * c).save(tmp_path / "large" / str(c) / f"{i}.png")
    assert main([*call, str(tmp_path / "large")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["notes"][1] == "64 of 64 images were resized, and cut at the middle if needed, to 16x16 pixels."
    assert "on classes of large" in told["message"], "which the run does not know"
    assert main([*call, str(tmp_path / "there"), "--embed", str(tmp_path / "large" / "0")]) == 2
    assert "DATA must be left out with --evaluate and --embed" in capsys.readouterr().err


def test_all_classes_of_another_folder_are_tried_on_for_none_is_needed_to_learn_from(folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path / "run")) == 0
    rng = np.random.default_rng(1)
    for c in range(4):
        (tmp_path / "new" / f"new {c}").mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 256, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "new" / f"new {c}" / f"{i}.png")
    capsys.readouterr()
    call = ["fewshot", "--evaluate", str(tmp_path / "run"), "--device", "cpu", "--tasks", "20", "--json"]
    assert main([*call, str(tmp_path / "new"), "--ways", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"] == 4
    (tmp_path / "parts").mkdir()
    (tmp_path / "new").rename(tmp_path / "parts" / "test")
    assert main([*call, str(tmp_path / "parts")]) == 1
    assert "has class folders in test, and none in train. Give both" in " ".join(capsys.readouterr().err.split())


@needs("cifar100")
def test_a_named_set_whose_test_has_classes_that_a_run_has_learnt_from_is_refused(tmp_path, capsys):
    theirs, rng = load_classes("cifar-fs").test.names[:3], np.random.default_rng(0)
    for part, names in (("train", theirs), ("test", ("one", "two"))):
        for name in names:
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{i}.png")
    assert main(arguments(tmp_path / "data", tmp_path / "run")) == 0
    capsys.readouterr()
    assert main(["fewshot", "--evaluate", str(tmp_path / "run"), "cifar-fs", "--device", "cpu"]) == 1
    assert "cifar-fs shares classes with the run, but lacks one, two of its test classes." in capsys.readouterr().err


@needs("cifar100")
def test_a_run_on_a_named_set_knows_its_classes_in_a_folder(tmp_path, capsys):
    call = ["fewshot", "cifar-fs", "--ways", "2", "--queries", "2", "--meta-batch", "1", "--steps", "1", "--tasks", "2"]
    assert main([*call, "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    for name in load_classes("cifar-fs").train.names[:10]:
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (32, 32), (i, i, i)).save(tmp_path / "data" / name / f"{i}.png")
    capsys.readouterr()
    assert main(["fewshot", "--evaluate", str(tmp_path / "run"), str(tmp_path / "data"), "--device", "cpu"]) == 1
    assert "data has classes of the run, but not" in capsys.readouterr().err


def test_classes_that_were_learnt_from_are_not_tried_on_when_the_data_have_changed(folder, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    assert main(arguments(data, tmp_path / "run")) == 0
    before = json.loads((tmp_path / "run" / "config.json").read_text())["classes"]
    gone = min(before["train"])
    (data / gone).rename(tmp_path / gone)
    capsys.readouterr()
    found = load_classes(data, seed=0)
    call = ["fewshot", "--evaluate", str(tmp_path / "run"), "--device", "cpu"]
    assert set(found.test.names) & set(before["train"]), "other names, another split"
    assert main(call) == 0
    assert f"evaluation: {tmp_path / 'run' / 'evaluation.json'}" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())

    def accuracy() -> float:
        return json.loads((tmp_path / "run" / "evaluation.json").read_text())["accuracy"]

    assert accuracy() == result["accuracy"], "on the classes that the run was tried on"
    (tmp_path / gone).rename(data / gone)
    shutil.copytree(data / gone, data / "another")
    assert set(load_classes(data, seed=0).test.names) != set(before["test"]), "a class more, another split"
    assert main(call) == 0
    assert accuracy() == result["accuracy"]
    tried = min(before["test"])
    (data / tried / "7.png").unlink()
    capsys.readouterr()
    assert main(call) == 0
    (data / tried).rename(tmp_path / tried)
    assert main(call) == 1
    assert f"data shares classes with the run, but lacks {tried} of its test classes." in capsys.readouterr().err


def test_drawings_are_read_as_omniglots_by_a_run_on_omniglot(tmp_path, monkeypatch, capsys):
    rng, home = np.random.default_rng(0), tmp_path / "data" / "omniglot"
    home.mkdir(parents=True)

    def drawing() -> bytes:
        """Black on white, 105x105, as published."""
        pixels = np.kron(rng.integers(0, 2, (5, 5)), np.ones((21, 21))).astype(bool)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    for part, names in (("images_background", "abcdefgh"), ("images_evaluation", "ijklmnop")):
        with zipfile.ZipFile(home / f"{part}.zip", "w") as archive:
            for name in names:
                for i in range(4):
                    archive.writestr(f"{part}/alphabet/{name}/{i}.png", drawing())
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    small = ["--ways", "2", "--queries", "2", "--meta-batch", "2", "--steps", "2", "--tasks", "4", "--device", "cpu"]
    run = str(tmp_path / "run")
    assert main(["fewshot", "omniglot", *small, "--out", run]) == 0
    for c in range(4):
        (tmp_path / "mine" / str(c)).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "mine" / str(c) / f"{i}.png").write_bytes(drawing())
    seen, evaluate = [], fewshot_run.adapt_and_evaluate
    monkeypatch.setattr(
        fewshot_run, "adapt_and_evaluate", lambda n, test, **b: seen.append(test.classes) or evaluate(n, test, **b)
    )
    again = ["fewshot", "--evaluate", run, "--device", "cpu"]
    assert main([*again, str(tmp_path / "mine")]) == 0
    files = sorted((tmp_path / "mine").rglob("*.png"))
    assert len(seen[0].names) == 4
    pixels = {seen[0].images[i, 0].numpy().tobytes() for i in range(12)}
    assert pixels == {class_images.ink(file).tobytes() for file in files}
    capsys.readouterr()
    assert main([*again, "--embed", str(tmp_path / "mine")]) == 0
    network = few_shot_cnn()
    network.load_state_dict({name: torch.from_numpy(x) for name, x in load_file(f"{run}/{WEIGHTS}").items()})
    with np.load(f"{run}/embeddings.npz") as kept:
        own = embed(network, torch.from_numpy(class_images.ink(files[0]))[None, None])[0].numpy()
        assert np.allclose(kept["features"][kept["files"].tolist().index("0/0.png")], own, atol=1e-5)


def test_a_stopped_run_does_not_go_on_with_data_that_have_changed(folder, tmp_path, capsys, monkeypatch):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(folder, data)

    def stop(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fewshot_run, "meta_train", stop)
        assert main(arguments(data, run)) == 130
    name = min(path.name for path in data.iterdir())
    image = min((data / name).iterdir())
    image.rename(tmp_path / "image.png")
    assert main(arguments(data, run, "--resume")) == 2
    assert "was run with other classes. --resume needs the same." in capsys.readouterr().err
    (tmp_path / "image.png").rename(image)
    (data / name).rename(data / "another")
    assert main(arguments(data, run, "--resume")) == 2
    assert "was run with other classes. --resume needs the same." in capsys.readouterr().err
    (data / "another").rename(data / name)
    assert main(arguments(data, run, "--resume")) == 0


def test_the_scale_is_that_of_the_command_or_of_the_network(folder, tmp_path, capsys):
    for more, scale in (((), 10.0), (("--scale", "5"), 5.0)):
        assert main(arguments(folder, tmp_path / str(scale), *more)) == 0
        assert json.loads((tmp_path / str(scale) / "config.json").read_text())["scale"] == scale
    assert main(arguments(folder, tmp_path / "no", "--scale", "0")) == 2
    assert "--scale must be above 0" in capsys.readouterr().err


def test_too_few_validation_classes_are_told_and_every_class_is_in_the_legend(folder, tmp_path, capsys, monkeypatch):
    evaluate, found = fewshot_run.adapt_and_evaluate, []
    monkeypatch.setattr(fewshot_run, "adapt_and_evaluate", lambda *a, **b: found.append(evaluate(*a, **b)) or found[-1])
    for c in range(12):
        name = "_$12 <b> 種類" if c == 11 else f"pattern {c:02d}"
        part = "train" if c < 6 else "val" if c < 8 else "test"
        shutil.copytree(folder / f"pattern {c:02d}", tmp_path / "parts" / part / name)
    assert main(arguments(tmp_path / "parts", tmp_path / "run", "--ways", "3", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["classes"], result["validation_accuracy"]) == ([6, 2, 4], None)
    assert result["notes"] == [
        "No accuracy on meta-validation classes was measured: there are 2, fewer than a task needs. "
        "The last step is kept."
    ]
    page = (tmp_path / "run" / "report.html").read_text()
    assert " _$12 &lt;b&gt; 種類</text>" in page
    assert all(f">pattern {c:02d}</text>" in page for c in range(8, 11))
    order = re.findall(r"queries at most\. In order: ([^<]*)\.<", page)
    classes = load_classes(str(tmp_path / "parts")).test
    of = [name for name, count in zip(classes.names, classes.counts, strict=True) for _ in range(count)]
    ranked = torch.argsort(found[0].accuracies, stable=True).tolist()
    shown = dict.fromkeys([ranked[len(ranked) // 2], *ranked[:2]])
    assert [html.unescape(names).split(", ") for names in order] == [
        [of[image] for image in found[0].index[task][:, 0].tolist()] for task in shown
    ]


def test_too_many_ways_in_training_and_weights_that_are_not_finite_are_told(folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path / "a", "--train-ways", "40")) == 2
    assert "--train-ways must be at most the number of classes to learn from, 8; got 40." in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "b", "--decay", "1e12")) == 1
    assert "not finite after training" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "b").iterdir())
