"""`bilevel compare`: the same starts and budget for every method, a table, a plot, and sentences for wrong use."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from bilevel import Penalty, Problem
from bilevel.applications.comparison.compare import (
    METHODS,
    Budget,
    Start,
    Subject,
    compare,
    deterministic,
    steps_of,
    synthetic,
)
from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel.cli import compare_run, progress
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
    progress._last = time.monotonic()  # as in a new process
    code = main(["compare", *map(str, arguments)])
    output, errors = capsys.readouterr()
    return code, output, " ".join(re.sub(r"[│╭╮╰╯─]", " ", errors).split())


def test_every_method_has_the_same_starts_and_keeps_to_the_budget(tmp_path, capsys):
    names = ",".join(METHODS)
    code, output, errors = run(
        capsys, "sum", "--methods", names, "--evaluations", 240, "--trials", 2, "--out", tmp_path, "--json"
    )
    assert code == 0, errors
    result = json.loads(output)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [row["method"] for row in result["methods"]] == list(METHODS)
    starts = [examples(seed=nth(0, k))[0] for k in range(2)]
    first = sum(e.error(*e.start(nth(0, k))) for k, e in enumerate(starts)) / 2
    for row in result["methods"]:
        assert row["curve"][0] == [0, pytest.approx(first)]
        assert row["curve"][-1][0] == pytest.approx(row["evaluations"], rel=0.1)
        assert row["curve"][-1][1] == pytest.approx(row["error"])
        if row["method"] != "penalty":
            assert 120 < row["evaluations"] <= 240 * 1.1  # the scales before the first step are not paid for
            assert row["status"] == "budget spent"
        assert row["residual"] >= 0
    penalty = result["methods"][0]
    assert penalty["error"] < 1e-2 < first
    assert 20 < penalty["evaluations"] <= 240 * 1.1  # the last step can end a little above
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
        (["nothing-like-it"], "PROBLEM must be one of sum, difference"),
        (["sum", "--methods", "penalti"], "Did you mean 'penalty'?"),
        (["sum", "--methods", ","], "at least one of penalty"),
        (["sum", "--methods", "reverse-mode:lower_stepz=3"], "lower_stepz"),
        (["sum", "--methods", "reverse-mode:lower_steps=0"], "lower_steps must be at least 1"),
        (["sum", "--methods", "reverse-mode:lower_steps"], "option=value"),
        (["sum", "--steps", "3", "--evaluations", "3"], "give one of them"),
        (["sum", "--steps", "3", "--seconds", "3"], "--steps and --seconds"),
        (["sum", "--seconds", "0"], "above 0"),
        (["sum", "--methods", "approx-grad:upper_rate=fast"], "upper_rate of approx-grad must be a number; got 'fast'"),
        (["sum", "--methods", "algorithm-2:lower_rate=-1"], "lower_rate of algorithm-2 must be above 0; got -1"),
        (["sum", "--methods", "penalty:upper_rate=0.1"], "mode='stochastic'"),
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
        (["FILE", "--methods", "penalty:mode=deterministic:nu=1"], "nu is not used in deterministic mode"),
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

    monkeypatch.setattr(compare_run, "compare", counted)
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
        [
            sys.executable,
            "-c",
            "import sys; from bilevel.cli import compare_run as c, main\n"
            "def told(*a, whole=c.compare, **k):\n"
            "    print('method', file=sys.stderr, flush=True); return whole(*a, **k)\n"
            "c.compare = told; sys.exit(main.main(sys.argv[1:]))",
            "compare",
            "sum",
            "--methods",
            "penalty,alternating",
            "--steps",
            "15000",
            "--out",
            str(tmp_path),
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr.readline() == "method\n"
    assert process.stderr.readline() == "method\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
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
    found = compare(subject, Penalty(lower_steps=1), Budget("steps", 5), seed=0)
    assert torch.equal(model.weight, before)
    assert u.item() == 0
    assert found.steps == 5
    assert found.error is None


def test_trials_run_at_once_and_those_of_the_default_one_after_another():
    subject = synthetic("difference", 3, 1)
    assert subject.starts(METHODS["approx-grad"]()) == [subject.together]
    assert subject.starts(METHODS["penalty"]()) == subject.singles
    assert torch.equal(subject.together.u[1], subject.singles[1].u)


@pytest.mark.parametrize("most", [1, 100, 1234])
def test_a_budget_of_evaluations_pays_for_all_steps_that_fit_and_no_more(most):
    start = synthetic("sum", 1, 0).singles[0]
    for method, each in ((METHODS["approx-grad"](lower_steps=3), 4), (METHODS["reverse-mode"](lower_steps=4), 9)):
        assert steps_of(start, method, Budget("evaluations", most)) == max(1, most // each)


def test_a_budget_of_seconds_ends_each_method_in_time():
    subject = synthetic("sum-singular", 1, 0)
    found = compare(subject, METHODS["approx-grad"](), Budget("seconds", 0.2), seed=0)
    assert found.status == "budget spent"
    assert 0.02 < found.seconds < 1
    assert compare(subject, METHODS["penalty"](), Budget("seconds", 1e-6), seed=0).steps == 1


def chosen(monkeypatch, capsys, tmp_path, *arguments):
    """The methods that `bilevel compare` would run."""
    seen = []
    monkeypatch.setattr(compare_run, "compare", lambda subject, method, budget, *, seed: seen.append(method))
    assert run(capsys, *arguments, "--out", tmp_path)[0] == 130  # as after Ctrl-C
    return seen[0]


@pytest.mark.parametrize(
    ("name", "upper", "lower"),
    [
        ("approx-grad", None, None),
        ("alternating:lower_rate=0.5:upper_rate=0.3", 0.3, 0.5),
        ("value-gap:upper_rate=0.1", 0.1, None),
        ("algorithm-1:upper_rate=1", 1.0, 1e-4),
        ("algorithm-2", 1e-3, 1e-4),
        ("penalty:mode=stochastic:upper_rate=0.3", 0.3, None),
        ("forward-mode:upper_rate=0.3:lower_rate=0.4", 0.3, 0.4),
    ],
)
def test_learning_rates_are_options_of_a_method(name, upper, lower, monkeypatch, capsys, tmp_path):
    method = chosen(monkeypatch, capsys, tmp_path, "sum", "--methods", name)
    own = getattr(method, "lower_rate", None)
    found = [x and x.keywords["lr"] for x in (method.upper_optimizer, getattr(method, "lower_optimizer", None))]
    assert (found[0], own or found[1]) == (upper, lower)


PREPARED = """
import torch
from bilevel import Problem

def prepare(u, batch):
    assert batch is None
    return {"target": 2 * u}

problem = Problem(
    lambda u, v, made: ((v - 2) ** 2).sum() + 0 * made["target"].sum(),
    lambda u, v, made: ((v - made["target"]) ** 2).sum(), prepare=prepare,
)
u, v = (torch.full((3,), x, dtype=torch.float64).requires_grad_() for x in (1.5, -1.0))
"""


def test_a_problem_with_prepare_and_no_data_is_compared(tmp_path, capsys):
    (tmp_path / "prepared.py").write_text(PREPARED)
    code, output, errors = run(
        capsys, tmp_path / "prepared.py", "--methods", "penalty,approx-grad", "--steps", 60, "--out", tmp_path, "--json"
    )
    assert code == 0, errors
    penalty, approximate = json.loads(output)["methods"]
    assert penalty["upper"] < 1e-6  # v = 2 u = 2
    assert penalty["residual"] < 1e-6
    assert approximate["upper"] < 1


def test_the_table_shows_whole_names_and_numbers(capsys, tmp_path):
    names = ["value-function:lower_steps=1", "forward-mode", "approx-grad:lower_steps=1:linear_solver=neumann"]
    code, output, _ = run(capsys, "sum", "--methods", ",".join(names), "--steps", 4, "--out", tmp_path)
    assert code == 0
    title, head, *lines = output.splitlines()
    assert title == "sum, 1 start, 4 steps"
    assert re.split(r"  +", head) == ["method", "error", "f", "|grad_v g|", "ended", "evaluations", "steps", "seconds"]
    assert [line.split("  ")[0] for line in lines[:3]] == names
    row = json.loads((tmp_path / "result.json").read_text())["methods"][1]
    shown = re.split(r"  +", lines[1])
    assert {f"{row['error']:.1e}", f"{row['upper']:.4g}", f"{row['evaluations']:,.0f}", "budget spent"} <= set(shown)


def test_ctrl_c_after_the_last_step_of_a_method_is_not_forgotten(monkeypatch):
    module = sys.modules["bilevel.running.loop"]
    plain = module.certify

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return plain(*arguments, **options)

    monkeypatch.setattr(module, "certify", interrupted)
    before = signal.getsignal(signal.SIGINT)
    subject = synthetic("sum", 1, 0)
    assert deterministic(METHODS["penalty"](), subject.singles[0])
    for name in ("penalty", "alternating"):
        assert compare(subject, METHODS[name](), Budget("steps", 3), seed=0) is None
    assert signal.getsignal(signal.SIGINT) is before


def test_small_problems_run_on_one_thread(file, monkeypatch, capsys, tmp_path):
    threads = []
    monkeypatch.setattr(compare_run, "compare", lambda *arguments, **options: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    for problem in ("sum", file):
        run(capsys, problem, "--methods", "penalty", "--out", tmp_path)
    assert threads == [1, before]
    assert torch.get_num_threads() == before
