"""The command line: what it prints, writes and returns."""

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
from bilevel_studies import demo

from bilevel import OptionError, __version__
from bilevel.applications.comparison import synthetic_problems as synthetic
from bilevel.cli.main import main
from bilevel.cli.run_folder import RunFolder, to_json

FILES = {"config.json", "history.csv", "result.json", "report.html"}


def bilevel(*arguments, **options):
    """The command in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "bilevel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A demo of two starts, run once: (process, folder)."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "run"
    return bilevel("demo", "--starts", 2, "--seed", 3, "--out", folder, "--json"), folder


def run(capsys, *arguments):
    """The command in this process: (exit code, standard output, standard error)."""
    code = main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    return code, output, " ".join(re.sub(r"[│╭╮╰╯─]", " ", errors).split())


def test_json_is_the_result_and_nothing_else_is_on_standard_output(ran):
    process, folder = ran
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result == json.loads((folder / "result.json").read_text())
    told = process.stderr.splitlines()  # on a slow machine, how far it is
    assert all(re.fullmatch(r"[\w ,]+: \d+ of \d+ runs", line) for line in told)


def test_the_result_has_plain_keys_and_every_start_is_solved(ran):
    result = json.loads(ran[0].stdout)
    assert (result["method"], result["status"], result["seed"]) == ("Penalty", "converged", 3)
    assert result["seconds"] > 0
    assert [problem["name"] for problem in result["problems"]] == [e.name for e in synthetic.examples()]
    for problem in result["problems"]:
        assert problem["starts"] == problem["solved"] == 2
        assert problem["median_error"] <= problem["worst_error"] <= problem["worst_distance"] + 1e-12  # P's rounding
        assert problem["worst_distance"] <= 1e-6
        assert sum(problem["endings"].values()) == 2
    assert result["solved"] == 8


def test_the_folder_holds_the_four_files_and_no_others(ran):
    folder = ran[1]
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["starts"], config["method"]) == (3, 2, "Penalty")
    assert config["versions"]["bilevel"] == __version__


def test_the_history_has_each_step_of_each_start_and_ends_at_the_error_of_the_result(ran):
    process, folder = ran
    with open(folder / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    problems = json.loads(process.stdout)["problems"]
    for problem in problems:
        ends = []
        for start in "01":
            mine = [row for row in rows if (row["problem"], row["start"]) == (problem["name"], start)]
            assert [int(row["step"]) for row in mine] == list(range(1, len(mine) + 1))
            ends.append(float(mine[-1]["error"]))
        assert max(ends) == problem["worst_error"]


def test_the_report_shows_the_outcome_and_four_figures_and_loads_nothing(ran):
    text = (ran[1] / "report.html").read_text(encoding="utf-8")
    assert json.loads(ran[0].stdout)["message"] in text
    assert text.count("<svg") == 4
    for about in demo.DESCRIPTIONS.values():
        assert about.title in text
        assert about.f in text
    assert not re.search(r"https?:", text)
    assert __version__ in text


def test_the_same_seed_finds_the_same_errors_and_another_does_not(ran, tmp_path, capsys):
    first = json.loads(ran[0].stdout)["problems"][0]
    assert run(capsys, "demo", "--starts", 2, "--seed", 3, "--out", tmp_path, "--json")[0] == 0
    again = json.loads((tmp_path / "result.json").read_text())["problems"][0]
    assert again["worst_error"] == first["worst_error"]
    code, output, errors = run(capsys, "demo", "--starts", 1, "--seed", 4, "--out", tmp_path)
    assert code == 0, errors
    assert json.loads((tmp_path / "result.json").read_text())["problems"][0]["worst_error"] != first["worst_error"]
    assert "report.html" in output
    assert "1/1" in output


def test_version_and_help(capsys):
    assert run(capsys, "--version") == (0, f"bilevel {__version__}\n", "")
    for arguments in (["--help"], ["demo", "--help"]):
        code, output, _ = run(capsys, *arguments)
        assert code == 0
        assert "demo" in output


def test_the_installed_command_says_its_version():
    script = Path(sys.executable).with_name("bilevel")
    if not script.exists():
        pytest.skip("the package is not installed as a command")
    answer = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120)
    assert (answer.returncode, answer.stdout) == (0, f"bilevel {__version__}\n")


def test_an_unknown_command_gets_the_nearest_name(capsys):
    code, output, errors = run(capsys, "dmeo")
    assert code == 2
    assert output == ""
    assert "Did you mean 'demo'?" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "many"], "--seed"),
        (["demo", "--starts", "0"], "--starts"),
        (["demo", "--sede", "1"], "--seed"),
        (["demo", "extra"], "extra"),
        (["demo", "--json", "yes"], "yes"),
        ([], ""),
    ],
)
def test_wrong_use_ends_with_code_2_and_names_what_is_wrong(arguments, words, capsys):
    code, _, errors = run(capsys, *arguments)
    assert code == 2
    assert words in errors


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_out_that_is_a_file_gets_one_sentence_and_code_2(below, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    code, output, errors = run(capsys, "demo", "--out", tmp_path / "file" / below)
    assert (code, output) == (2, "")
    assert errors.startswith("bilevel: --out must be a folder")
    assert errors.count(".") - str(tmp_path).count(".") == 1
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_an_out_that_cannot_be_written_gets_one_sentence_and_code_2(capsys):
    code, output, errors = run(capsys, "demo", "--out", "/proc/demo")
    assert (code, output) == (2, "")
    assert "--out must be a writable folder" in errors
    assert "Traceback" not in errors


def test_a_start_that_is_not_solved_ends_the_demo_badly(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "MAX_STEPS", 2)
    code, output, errors = run(capsys, "demo", "--starts", 1, "--out", tmp_path, "--json")
    assert code == 1
    assert json.loads(output)["status"] == "unsolved"
    assert "of 4 runs ended further than 1e-6 from a solution" in errors
    assert 'class="outcome bad"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_ctrl_c_during_a_run_ends_the_demo_and_the_run_is_not_counted(tmp_path, capsys, monkeypatch):
    whole = demo.attempt
    calls = []

    def stopping(example, method, seed, **options):
        calls.append(example.name)
        found = whole(example, method, seed, **options)
        if len(calls) == 4:
            object.__setattr__(found.solution, "interrupted", True)
        return found

    monkeypatch.setattr(demo, "attempt", stopping)
    code, output, errors = run(capsys, "demo", "--starts", 2, "--out", tmp_path, "--json")
    assert code == 130
    result = json.loads(output)
    assert result["status"] == "stopped"
    assert [problem["starts"] for problem in result["problems"]] == [2, 1]
    assert "3 of 8 runs were finished, and they are kept" in errors


def test_ctrl_c_that_no_command_handles_ends_with_its_exit_code_too():
    slow = (
        "import signal, sys; from bilevel.cli import doctor, main\n"
        "doctor.versions = lambda: signal.raise_signal(signal.SIGINT); sys.exit(main.main(['doctor']))"
    )
    ended = subprocess.run([sys.executable, "-c", slow], capture_output=True, text=True, env=os.environ, timeout=120)
    assert (ended.returncode, ended.stderr.strip()) == (130, "bilevel: Stopped by Ctrl-C.")


@pytest.mark.skipif(not Path("/proc").exists(), reason="what a process has loaded is found in /proc")
def test_ctrl_c_while_a_command_imports_ends_with_one_line_and_its_exit_code():
    process = subprocess.Popen(
        [sys.executable, "-m", "bilevel", "denoise", "digits"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    maps, end = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 120
    while "libtorch" not in maps.read_text() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.strip()) == (130, "bilevel: Stopped by Ctrl-C.")


def interruptible() -> None:
    """As from a terminal: a test that itself runs in the background has SIGINT ignored, and passes that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_keeps_what_was_finished(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A pause after each run, so that the interrupt comes between a first and a last one.
    slow = (
        "import sys, time; from bilevel.cli import main; from bilevel_studies import demo\n"
        "def slowly(*a, whole=demo.attempt, **k):\n"
        "    found = whole(*a, **k); print('run', file=sys.stderr, flush=True); time.sleep(0.3); return found\n"
        "demo.attempt = slowly; sys.exit(main.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "demo", "--starts", "50", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr.readline() == "run\n"
    assert process.stderr.readline() == "run\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped by Ctrl-C" in errors
    assert "Traceback" not in errors
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "stopped"
    assert 1 <= result["problems"][0]["starts"] < 50
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write("a.txt", "old")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            folder.write("a.txt", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]
    folder.write("a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_folder_is_made_with_its_parents_and_a_file_is_refused(tmp_path):
    RunFolder(tmp_path / "a" / "b").write("c", "text")
    assert (tmp_path / "a" / "b" / "c").read_text() == "text"
    with pytest.raises(OptionError, match="--out must be a writable folder"):
        RunFolder(tmp_path / "a" / "b" / "c")


def test_json_has_null_in_place_of_what_it_cannot_say():
    text = to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1, "é")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": [1, "é"]}}
    assert "é" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("denoise table.csv --trusted 5", "--label must name the column of table.csv"),
        ("denoise table.csv --trusted 5 --label d", "--label must be a column of table.csv; got 'd'."),
        ("denoise rows.npz --trusted 5 --label c", "--label names a column of a table; rows.npz is not a table"),
        ("denoise rows.npz --trusted 5 --noise 1.5", "--noise must be at least 0 and below 1; got 1.5."),
        ("denoise rows.npz --trusted 99", "--trusted must be below the 60 rows of rows"),
        ("denoise rows.npz --trusted 5 --test digits", "--test must be of the same form as rows.npz; got 'digits'."),
        ("denoise rows.npz --apply decisions.csv --out cleaned.csv", "--out must end in .npz, the form of rows.npz"),
        ("poison rows.npz --rows 500", "--rows must be at most the 34 that are left for training; got 500."),
        ("poison rows.npz --model cnn", "--model cnn needs images of at least 16 by 16 pixels"),
        ("tune rows.npz --penalty per-layer", "--penalty per-layer is for --model mlp; logistic has one layer."),
    ],
)
def test_errors_name_the_option_rather_than_the_argument_of_a_function(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("rows.npz", x=rng.normal(size=(60, 4)), y=np.arange(60) % 2)
    Path("table.csv").write_text("a,b,c\n" + "".join(f"{i},{i * i % 7},{'xy'[i % 2]}\n" for i in range(60)))
    code, output, errors = run(capsys, *arguments.split())
    assert (code, output) == (2, "")
    assert errors.startswith(f"bilevel: {told}")
