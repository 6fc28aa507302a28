"""The commands of the denoising studies, on digits."""

import json
from dataclasses import replace

import pytest
import torch
from bilevel_studies import study
from bilevel_studies.denoising import runs as denoising_runs
from bilevel_studies.denoising import speed as denoising_speed
from bilevel_studies.denoising import study as denoising
from bilevel_studies.study import Sitting
from denoised import curve, table_row

from bilevel.cli.main import main
from bilevel.errors import DataError

CPU = torch.device("cpu")


ONE = [
    "--dataset",
    "digits",
    "--noise",
    "0.25",
    "--kind",
    "symmetric",
    "--columns",
    "trusted,plain",
    "--seeds",
    "1",
    "--device",
    "cpu",
]


def test_reproduce_denoising_runs_what_is_missing_and_shows_all_that_is_there(tmp_path, capsys, monkeypatch):
    ran = []

    def run(settings, device, place, deadline):
        ran.append(settings["column"])
        return {"accuracy": 0.9, "device": "CPU"}

    monkeypatch.setattr(denoising_runs, "run", run)
    folders = ["--out", str(tmp_path / "a"), "--results", str(tmp_path / "b")]
    assert main(["reproduce", "denoising", *ONE, *folders, "--no-run"]) == 2
    assert "--no-run needs results" in " ".join(capsys.readouterr().err.split())
    assert ran == []
    assert main(["reproduce", "denoising", *ONE, *folders, "--minutes", "0"]) == 0
    assert ran == []
    assert main(["reproduce", "denoising", *ONE, *folders]) == 0
    assert ran == ["trusted", "plain"]
    assert "Ran 2 cells in" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "b" / "denoising.json").read_text())["cells"]) == 2
    other = ["--out", str(tmp_path / "c"), "--results", str(tmp_path / "b"), "--json"]  # a fresh folder
    assert main(["reproduce", "denoising", *ONE, *other]) == 0
    assert ran == ["trusted", "plain"]
    assert json.loads(capsys.readouterr().out)["cells"] == 2
    assert "| digits (MLP), 25% symmetric | not run | 90.00 (1 seed) |" in (tmp_path / "c" / "tables.md").read_text()


def test_a_data_set_that_cannot_be_loaded_is_named_and_the_tables_are_written(tmp_path, capsys, monkeypatch):
    def loaded(name):
        raise DataError(f"{name} is not here.")

    monkeypatch.setattr(denoising_runs, "loaded", loaded)
    assert main(["reproduce", "denoising", "--dataset", "svhn", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out, errors = capsys.readouterr()
    assert "Nothing runs on svhn: svhn is not here." in " ".join(errors.split())
    assert "Ran 0 cells" in out
    assert (tmp_path / "tables.md").exists()


def test_ctrl_c_ends_the_command_and_keeps_what_is_finished(tmp_path, capsys, monkeypatch):
    results = iter([{"accuracy": 0.9}, None])
    monkeypatch.setattr(denoising_runs, "run", lambda *arguments: next(results))
    assert main(["reproduce", "denoising", *ONE, "--out", str(tmp_path)]) == 130
    assert "1 of 2 cells are finished" in " ".join(capsys.readouterr().err.split())
    assert len(list((tmp_path / "cells").glob("*.json"))) == 1


def test_cells_side_by_side_are_those_of_one_after_another_but_for_their_seconds(tmp_path):
    call = ["reproduce", "denoising", *ONE, "--device", "cpu", "--out"]
    assert main([*call, str(tmp_path / "a"), "--workers", "2"]) == 0
    assert main([*call, str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / x / "denoising.json").read_text())["cells"] for x in "ab")
    assert [found["accuracy"] for _, found in first] == [found["accuracy"] for _, found in second]
    assert [found.get("beside") for _, found in (*first, *second)] == [1, 1, None, None]


def test_results_name_the_commit_of_their_code(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_COMMIT", "abc1234")
    monkeypatch.setattr(denoising_runs, "run", lambda *arguments: {"accuracy": 0.9})
    assert main(["reproduce", "denoising", *ONE, "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "denoising.json").read_text())["cells"]
    assert [found["commit"] for _, found in cells] == ["abc1234"] * 2
    monkeypatch.delenv("BILEVEL_COMMIT")
    monkeypatch.setattr(study, "__file__", str(tmp_path / "study.py"))  # which is in no checkout
    assert study.commit() is None


def test_minutes_end_a_cell_in_its_midst_and_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(denoising.STUDIES, "digits", replace(denoising.STUDIES["digits"], final_passes=1))
    call = ["reproduce", "denoising", *ONE, "--out", str(tmp_path / "a")]
    looks = []

    def late(self):
        looks.append(1)
        return len(looks) == 3

    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "late", late)
        assert main([*call, "--minutes", "5"]) == 0
    assert "Ran 2 cells (1 of them not to the end) in" in " ".join(capsys.readouterr().out.split())
    assert "| digits (MLP), 25% symmetric | Val-only | 0 |" in (tmp_path / "a/tables.md").read_text()
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["digits-0.25-symmetric-trusted-0-92-1"]
    assert main(call) == 0
    assert "Ran 1 cells" in capsys.readouterr().out
    assert not list((tmp_path / "a/checkpoints").iterdir())
    assert main([*call[:-1], str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / x / "denoising.json").read_text())["cells"] for x in "ab")
    assert [found["accuracy"] for _, found in first] == [found["accuracy"] for _, found in second]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dataset", "minst"], "--dataset must be one of 'mnist'"),
        (["--noise", "half"], "--noise must be numbers"),
        (["--noise", "1.5"], "--noise must be above 0 and below 1; got 1.5"),
        (["--kind", "pair"], "--kind must be one of"),
        (["--columns", "our"], "--columns must be one of"),
        (["--parts", "all"], "--parts must be one of"),
        (["--device", "gpu"], "--device must be auto"),
    ],
)
def test_wrong_options_are_named(words, says, tmp_path, capsys):
    assert main(["reproduce", "denoising", *words, "--out", str(tmp_path)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_noise_without_a_kind_is_run_of_both_kinds_and_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(denoising_runs, "run", lambda *rest: {"accuracy": 0.9, "device": "CPU"})
    call = ["--dataset", "digits", "--noise", "0.3", "--columns", "plain", "--seeds", "1", "--device", "cpu"]
    assert main(["reproduce", "denoising", *call, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    for kind in ("symmetric", "asymmetric"):
        assert "| 90.00 (1 seed) |" in table_row(text, f"digits (MLP), 30% {kind}")


@pytest.mark.parametrize("part", ["speed", "steps"])
def test_the_figures_have_commands_of_their_own(part, tmp_path, monkeypatch):
    def run(settings, device):
        return curve(part, settings["method"], settings["T"], [0.0, 1.0], [0.5, 0.9], 3.0)[1]

    monkeypatch.setattr(denoising_speed, "run", run)
    monkeypatch.setattr(denoising_runs, "loaded", lambda name: None)
    call = ["reproduce", f"denoising-{part}", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*call, "--minutes", "0"]) == 0
    assert not list((tmp_path / "cells").iterdir())
    assert main(call) == 0
    assert {"tables.md", f"denoising-{part}.json", f"denoising-{part}-mlp.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
