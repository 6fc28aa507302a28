"""`bilevel compare`: the same starts and budget for every method, a table, a plot, and sentences for wrong use."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from bilevel import Penalty, Problem
from bilevel.applications.comparison import METHODS, Start, Subject, compare, cost_of, synthetic
from bilevel.applications.synthetic import examples, nth
from bilevel.cli import compare as command
from bilevel.cli.main import main

FILE = """
import torch
from bilevel import Problem

problem = Problem(lambda u, v, batch: ((v - 2) ** 2).sum(), lambda u, v, batch: ((v - u) ** 2).sum())
u, v = (torch.full((3,), x, dtype=torch.float64).requires_grad_() for x in (1.0, -1.0))

def started(seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    start = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return problem, start[0].clone().requires_grad_(), start[1].clone().requires_grad_()

as_dict = {"problem": problem, "u": u, "v": v}
two = (problem, u)
wrong = ("no problem", u, v)

def broken():
    raise ValueError("no data here. Look elsewhere")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def run(capsys, *arguments):
    code = main(["compare", *map(str, arguments)])
    output, errors = capsys.readouterr()
    return code, output, " ".join(re.sub(r"[│╭╮╰╯─]", " ", errors).split())


def test_every_method_has_the_same_starts_and_keeps_to_the_budget(tmp_path, capsys):
    names = ",".join(METHODS)
    code, output, errors = run(
        capsys, "sum", "--methods", names, "--evaluations", 120, "--trials", 2, "--out", tmp_path, "--json"
    )
    assert (code, errors) == (0, "")
    result = json.loads(output)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [row["method"] for row in result["methods"]] == list(METHODS)
    starts = [examples(seed=nth(0, k))[0] for k in range(2)]
    first = sum(e.error(*e.start(nth(0, k))) for k, e in enumerate(starts)) / 2
    for row in result["methods"]:
        assert row["curve"][0] == [0, pytest.approx(first)]
        # The last step may end a little above; the penalty method also measures its scales.
        assert 0 < row["evaluations"] <= 120 * 1.5
        assert row["curve"][-1][1] == pytest.approx(row["error"])
        assert row["memory"] > 0
        assert row["residual"] >= 0
    penalty = result["methods"][0]
    assert penalty["error"] < 1e-2 < first
    assert (tmp_path / "compare.png").stat().st_size > 1000


def test_a_file_with_problem_u_and_v_is_compared_by_f(file, tmp_path, capsys):
    before = file.read_text()
    code, output, _ = run(
        capsys, file, "--methods", "penalty,value-gap", "--steps", 20, "--out", tmp_path, "--plot", tmp_path / "a.svg"
    )
    assert code == 0
    assert "penalty" in output
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["measure"], result["methods"][0]["error"]) == ("f", None)
    assert result["methods"][0]["upper"] < 1e-6  # v = u = 2
    assert result["methods"][1]["steps"] == 20
    assert file.read_text() == before


@pytest.mark.parametrize(("name", "trials"), [("as_dict", 1), ("started", 3)])
def test_a_name_in_a_file_may_be_an_object_or_a_function_of_the_seed(name, trials, file, tmp_path, capsys):
    code, output, errors = run(
        capsys, f"{file}:{name}", "--methods", "penalty", "--trials", trials, "--out", tmp_path, "--json"
    )
    assert code == 0, errors
    assert json.loads(output)["methods"][0]["upper"] < 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sumn"], "Did you mean 'sum'?"),
        (["nothing-like-it"], "It is one of sum, difference"),
        (["sum", "--methods", "penalti"], "Did you mean 'penalty'?"),
        (["sum", "--methods", ","], "at least one method"),
        (["sum", "--methods", "reverse-mode:lower_stepz=3"], "lower_stepz"),
        (["sum", "--methods", "reverse-mode:lower_steps=0"], "lower_steps must be at least 1"),
        (["sum", "--methods", "reverse-mode:lower_steps"], "option=value"),
        (["sum", "--steps", "3", "--evaluations", "3"], "give one of them"),
        (["sum", "--plot", "plot.txt"], "--plot must end in"),
        (["sum", "--trials", "0"], "--trials"),
        (["missing.py"], "there is no file missing.py"),
        (["FILE:nothing"], "does not define 'nothing'"),
        (["FILE:two"], "got 2 values"),
        (["FILE:wrong"], "must be a bilevel.Problem"),
        (["FILE:broken"], "ValueError: no data here. Look elsewhere."),
        (["FILE", "--trials", "2"], "name(seed)"),
        (["BAD"], "could not be run: SyntaxError"),
        (["EMPTY"], "must define 'problem'"),
        (["FILE", "--methods", "forward-mode:memory_limit=0"], "memory_limit=0: ForwardMode keeps a matrix"),
    ],
)
def test_wrong_use_gets_a_sentence_and_code_2(arguments, words, file, tmp_path, capsys):
    (tmp_path / "bad.py").write_text("u = (")
    (tmp_path / "empty.py").write_text("")
    names = {"FILE": str(file), "BAD": str(tmp_path / "bad.py"), "EMPTY": str(tmp_path / "empty.py")}
    arguments = [re.sub("FILE|BAD|EMPTY", lambda found: names[found[0]], text) for text in arguments]
    code, output, errors = run(capsys, *arguments, "--out", tmp_path / "out")
    assert (code, output) == (2, "")
    assert words in errors
    assert "Traceback" not in errors


def test_a_second_run_takes_what_is_finished_and_a_changed_file_is_run_again(file, tmp_path, capsys, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return compare(*arguments, **options)

    monkeypatch.setattr(command, "compare", counted)
    arguments = (file, "--methods", "penalty", "--out", tmp_path, "--json")
    first = run(capsys, *arguments)
    second = run(capsys, *arguments)
    assert (first, len(calls)) == (second, 1)
    file.write_text(FILE + "\n# changed\n")
    assert run(capsys, *arguments)[0] == 0
    assert len(calls) == 2
    assert run(capsys, *arguments[:2], "penalty,alternating", *arguments[3:], "--steps", 5)[0] == 0
    assert len(calls) == 4


def test_ctrl_c_keeps_finished_methods_and_a_rerun_goes_on(tmp_path, capsys):
    process = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from bilevel.cli import compare as c, main\n"
         "def told(*a, whole=c.compare, **k):\n"
         "    print('method', file=sys.stderr, flush=True); return whole(*a, **k)\n"
         "c.compare = told; sys.exit(main.main(sys.argv[1:]))",
         "compare", "sum", "--methods", "penalty,alternating", "--steps", "15000", "--out", str(tmp_path), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr.readline() == "method\n"
    assert process.stderr.readline() == "method\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 of 2 methods are finished and kept" in " ".join(errors.split())
    assert "Traceback" not in errors
    result = json.loads(output)
    assert (result["status"], [row["method"] for row in result["methods"]]) == ("stopped", ["penalty"])
    code, output, _ = run(capsys, "sum", "--methods", "penalty", "--steps", 15000, "--out", tmp_path, "--json")
    assert code == 0
    assert json.loads(output)["methods"] == result["methods"]  # seconds included: it was not run again


def test_the_users_variables_are_not_moved_and_modules_and_data_will_do():
    model = torch.nn.Linear(2, 1).double()
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    problem = Problem(
        lambda u, v, batch: ((v(batch[0]) - batch[1]) ** 2).mean(),
        lambda u, v, batch: ((v(batch[0]) - batch[1]) ** 2).mean() * u.exp() + v.weight.square().sum(),
    )
    before = model.weight.detach().clone()
    subject = Subject("mine", [Start(problem, u, model, ([(x, y)], [(x, y)]))])
    found = compare(subject, Penalty(lower_steps=1), evaluations=None, steps=5, seed=0)
    assert torch.equal(model.weight, before)
    assert u.item() == 0
    assert found.steps == 5
    assert found.error is None


def test_the_cost_of_a_step_is_not_that_of_a_warm_up():
    start = synthetic("sum", 1, 0).singles[0]
    assert cost_of(start, METHODS["reverse-mode"](lower_steps=4))[0] == 2 * 4 + 1
    few, many = (cost_of(start, METHODS["reverse-mode"](lower_steps=T))[1] for T in (4, 40))
    assert many - few == pytest.approx(36 * start.v.numel() * 8, rel=0.01)  # the iterates


def test_trials_run_at_once_and_those_of_the_default_one_after_another():
    subject = synthetic("difference", 3, 1)
    assert subject.starts(METHODS["approx-grad"]()) == [subject.together]
    assert subject.starts(METHODS["penalty"]()) == subject.singles
    assert torch.equal(subject.together.u[1], subject.singles[1].u)
