"""The paper's studies: their settings, how cells are kept and counted, and pages whose claims come from data."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bilevel_studies import complexity
from bilevel_studies.cost import cost
from bilevel_studies.study import FiledStore
from bilevel_studies.synthetic import sizes, tables
from bilevel_studies.synthetic import study as synthetic
from bilevel_studies.synthetic.results import GOAL, Results
from bilevel_studies.synthetic.runs import general, run
from test_models import NETWORKS

from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel.cli.main import main
from bilevel.running.run_many import ResultFolder, RunItem, Where, run_items

TINY = replace(
    synthetic.QUICK,
    steps=4,
    trials=2,
    ablation_trials=1,
    long_steps={"plain": 2, "singular": 2},
    more_steps=6,
    clock_steps=5,
    default_steps=4,
    points=2,
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The whole synthetic study, as small as it can be: (results, store)."""
    folder = tmp_path_factory.mktemp("study")
    store = FiledStore(folder / "cells", folder / "synthetic.json")
    assert run_items(synthetic.cells(TINY), store, run)
    return Results(TINY, store.all()), store


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_protocol_is_the_papers():
    scale = synthetic.FULL
    assert (scale.steps, scale.trials) == (40_000, 20)
    method = synthetic.method("Penalty", 5, {})
    assert (method.gamma, method.lam, method.epsilon, method.lower_steps) == (1.0, 10.0, 1.0, 5)
    for name in synthetic.METHODS:
        options = synthetic.method(name, 5, {})
        assert options.upper_optimizer.keywords == {"lr": 1e-3}
        assert (options.decay, options.warm_up, options.lower_batches) == ("constant", 0.0, "shared")
        if name != "RMD":
            assert options.lower_optimizer.func is torch.optim.Adam
            assert options.lower_optimizer.keywords == {"lr": 1e-4}
    assert synthetic.method("RMD", 100, {}).lower_rate == 1e-4
    runs = {(c.settings["method"], c.settings["lower_steps"]) for c in synthetic.cells(scale) if "pair" in c.settings}
    assert runs >= {(name, T) for name in synthetic.METHODS for T in (1, 5, 10)} | {("RMD", 100)}


def test_no_two_cells_share_a_file():
    for cells in (synthetic.cells(synthetic.FULL), synthetic.cells(synthetic.QUICK), complexity.cells(complexity.FULL)):
        assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize("pair", synthetic.PAIRS)
def test_the_pair_in_one_tensor_is_the_two_problems(pair):
    trials, seed = 3, 2
    names = synthetic.PAIRS[pair]
    problem = general(names, trials, seed)
    known = {e.name: e for e in examples(synthetic.DIMENSION, seed, trials)}
    starts = [known[name].starts(trials, seed) for name in names]
    u, v = (torch.cat(part) for part in zip(*starts, strict=True))
    for level in ("upper", "lower"):
        expected = [getattr(known[n].problem, level)(*s, None) for n, s in zip(names, starts, strict=True)]
        torch.testing.assert_close(getattr(problem, level)(u, v, None), torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_a_varied_price_is_that_of_its_trials():
    base = {**synthetic.ablation(TINY, 1, True).settings, "steps": 60}
    whole = run({**base, "vary": {"lam": [0.0, 1e4]}})
    for i, lam in enumerate((0.0, 1e4)):
        alone = run({**base, "vary": {"lam": [lam]}})
        np.testing.assert_allclose(whole["errors"][-1][i], alone["errors"][-1][0], rtol=1e-5)
    assert whole["errors"][-1][0] != whole["errors"][-1][1]


# -- cells -----------------------------------------------------------------------------------------------------------


def doubled(settings):
    return {"value": 2 * settings["x"]} if settings["x"] < 10 else None


def test_finished_cells_are_not_run_again_and_others_are(tmp_path):
    cells, store = [RunItem({"x": x}, weight=x) for x in range(3)], ResultFolder(tmp_path)
    asked = []

    def counted(settings):
        asked.append(settings["x"])
        return doubled(settings)

    assert run_items(cells, store, counted)
    assert asked == [2, 1, 0]
    told = []
    assert run_items(
        [*cells, RunItem({"x": 5}, weight=1)],
        ResultFolder(tmp_path),
        counted,
        on_progress=lambda c: told.append(c.name),
    )
    assert asked == [2, 1, 0, 5]
    assert len(told) == 4
    assert store.get(cells[2]) == {"value": 4}
    (tmp_path / f"{cells[2].name}.json").write_text('{"settings": {"x": 7}, "result": {"value": 1}}')
    assert store.get(cells[2]) is None
    (tmp_path / f"{cells[2].name}.json").write_text('{"settings": ')
    assert store.get(cells[2]) is None


def test_long_settings_get_short_file_names_of_their_own(tmp_path):
    cells = [RunItem({"path": "a/very/long/path" * 40 + end}, weight=1) for end in "ab"]
    assert len(cells[0].name) < 200
    assert cells[0].name != cells[1].name
    store = ResultFolder(tmp_path)
    store.put(cells[0], {"value": 1})
    assert (store.get(cells[0]), store.get(cells[1])) == ({"value": 1}, None)


def test_a_cell_that_was_stopped_is_not_kept(tmp_path):
    cells, store = [RunItem({"x": x}, weight=-x) for x in (1, 10, 2)], ResultFolder(tmp_path)
    assert not run_items(cells, store, doubled)
    assert store.get(cells[0]) == {"value": 2}
    assert store.get(cells[1]) is None


def test_two_processes_find_what_one_finds(tmp_path):
    cells = [synthetic.protocol(TINY, "plain", name, 1) for name in ("GD", "Penalty")]
    assert run_items(cells, ResultFolder(tmp_path / "a"), run, where=Where(2))
    assert run_items(cells, ResultFolder(tmp_path / "b"), run)
    for cell in cells:
        assert ResultFolder(tmp_path / "a").get(cell)["errors"] == ResultFolder(tmp_path / "b").get(cell)["errors"]


# -- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("GD", lambda T: T + 1),
        ("RMD", lambda T: 3 * T + 1),
        ("ApproxGrad", lambda T: 3 * T + 2),
        ("Penalty", lambda T: 2 * (T + 1)),
        ("FMD", lambda T: (10 + 1) * T + 1),
        ("ValueGap", lambda T: 2 * (T + 1)),
        ("ValueFunction", lambda T: 2 * (T + 1)),
    ],
)
def test_a_step_is_worth_the_gradients_and_products_it_takes(name, gradients):
    example = examples()[2]
    for T in (1, 4):
        found = cost(example.problem, synthetic.method(name, T, {}), *example.start(0), repeats=0)
        assert found.gradients == gradients(T)


@pytest.mark.parametrize("name", ["FMD", "RMD", "ApproxGrad"])
def test_the_cost_of_a_step_is_not_that_of_a_warm_up(name):
    example = examples()[2]
    found = [
        cost(example.problem, replace(synthetic.method(name, 4, {}), warm_up=warm_up), *example.start(0), repeats=0)
        for warm_up in (0.0, 0.5)
    ]
    assert found[0].gradients == found[1].gradients


def test_an_exponent_holds_within_the_tolerance_above_and_below():
    for found, holds in ((1.19, True), (0.81, True), (1.21, False), (0.79, False)):
        assert complexity.Exponent("RMD", "gradients", "T", found, 1.0, []).holds == holds
    assert "TOLERANCE" in complexity.Exponent.holds.__doc__


def test_exponents_are_those_of_table_1():
    small = complexity.Sizes(T=(8, 16, 32), U=(8, 16, 32), V=(64, 128, 256), base={"T": 4, "U": 4, "V": 64})
    results = [(cell.settings, complexity.run(cell.settings)) for cell in complexity.cells(small)]
    found = complexity.exponents(small, results)
    counted = {(e.method, e.variable): e for e in found if e.quantity == "gradients"}
    assert len(counted) == 12
    for e in counted.values():
        assert e.found == pytest.approx(e.table, abs=0.2), e
    memory = {(e.method, e.variable): e.found for e in found if e.quantity == "bytes"}
    for name in ("FMD", "ApproxGrad", "Penalty"):
        assert memory[name, "T"] == pytest.approx(0, abs=0.01)
    assert memory["RMD", "T"] > 0.6
    assert memory["FMD", "U"] > 0.8
    assert max(memory[name, "U"] for name in ("RMD", "ApproxGrad", "Penalty")) < 0.5
    assert f"{counted['FMD', 'U'].found:.2f} / 1.00" in complexity.exponent_table(found)


def test_a_power_law_has_its_exponent():
    assert complexity.slope((1, 2, 4, 8), (3, 12, 48, 192)) == pytest.approx(2)


# -- numbers and claims ----------------------------------------------------------------------------------------------


def test_sizes_are_counted_and_agree_with_table_7():
    rows = {row.data: row for row in sizes.table()}
    for row in rows.values():
        assert row.u == pytest.approx(sizes.thousands(row.paper_u), rel=0.02)
        assert row.v == pytest.approx(sizes.thousands(row.paper_v), rel=0.04)
    assert rows["MNIST"].v == 1_389_578
    assert rows["MNIST (60 poison points)"].v == 7850
    assert rows["ImageNet (clean label)"].v == 4098


def test_the_papers_wall_clock_is_complete_and_faster_for_penalty_from_five_steps_on():
    for problem in synthetic.PROBLEMS:
        for T in synthetic.LOWER_STEPS:
            _, rmd, approx, penalty = tables.PAPER_SECONDS[problem][T]
            assert T == 1 or penalty < min(rmd, approx)


class Made(Results):
    """Results whose last errors are given: a dict from (problem, method, T) to an error, 0.001 elsewhere."""

    def __init__(self, results, ends):
        super().__init__(results.scale, results.kept)
        self.given = ends

    def ends(self, problem, name, T, **options):
        return np.full(self.scale.trials, self.given.get((problem, name, T), 0.001))


def test_claims_follow_the_data(study):
    bad = {(p, n, T): 1.0 for p in synthetic.PROBLEMS for n, T in synthetic.RUNS if n in ("GD", "RMD")}
    bad |= {(p, "ApproxGrad", T): 1.0 for p in synthetic.PAIRS["singular"] for T in (1, 5, 10)}
    bad |= {("difference", "ApproxGrad", T): 1.0 for T in (1, 5)}
    paper = {c["says"]: c["holds"] for c in tables.claims(Made(study[0], bad))}
    as_said = [
        "GD converges to non-solution points.",
        "RMD converges to non-solution points with T = 1, 5, 10.",
        "Only Penalty and ApproxGrad converge to the solution of Examples 1 and 2.",
        "Penalty converges even with T = 1.",
        "ApproxGrad requires at least T = 10 on Example 2.",
        "With a singular g_vv only Penalty converges to the true solution.",
    ]
    assert all(paper[says] for says in as_said)
    assert not paper["A large T (100) makes RMD converge as well."]
    turned = {key: 1.0 if value == 0.001 else 0.001 for key, value in bad.items()}
    turned |= {(p, "Penalty", T): 1.0 for p in synthetic.PROBLEMS for T in (1, 5, 10)}
    other = {c["says"]: c["holds"] for c in tables.claims(Made(study[0], turned))}
    assert not any(other[says] for says in as_said)
    assert other["A large T (100) makes RMD converge as well."]
    assert not other["The solutions of Example 3 are u = v = 1/2 + p for any p with Ap = 0."]


def test_the_error_at_the_budget_is_that_of_the_last_point_within_it(study):
    results = study[0]
    assert results.budget == min(c * (2 if T == 100 else 4) for (_, T), c in results.gradients.items())
    steps, errors = results.curves("sum", "RMD", 10)
    at = int(np.flatnonzero(steps * results.gradients["RMD", 10] <= results.budget)[-1])
    assert np.array_equal(results.at_budget("sum", "RMD", 10), errors[at])


def test_other_methods_run_for_the_budget_and_no_longer(study):
    results = study[0]
    for (name, T), gradients in synthetic.OTHERS.items():
        assert results.gradients[name, T] == gradients
        for scale in (TINY, synthetic.FULL):
            steps = synthetic.budgeted(scale, "plain", name, T).settings["steps"]
            assert steps == 1 or 2 * scale.steps - gradients < steps * gradients <= 2 * scale.steps
        options = synthetic.method(name, T, {})
        assert options.upper_optimizer.keywords == {"lr": 1e-3}
        assert (options.decay, options.warm_up, options.lower_steps) == ("constant", 0.0, 10)
        lower = options.lower_rate if name == "FMD" else options.lower_optimizer.keywords["lr"]
        assert lower == 1e-4
        for problem in synthetic.PROBLEMS:
            assert results.at_budget(problem, name, T).shape == (TINY.trials,)
    made = Results(replace(TINY, steps=200), results.kept)  # a budget that lets them go to their ends
    made.__dict__ |= {"gradients": results.gradients, "budget": 400.0}
    ends = results.curves("sum", "ValueGap", 10)[1]
    made.curves = results.curves
    assert np.array_equal(made.at_budget("sum", "ValueGap", 10), ends[-1])


def test_errors_of_the_store_are_those_of_the_trials(study):
    results = study[0]
    for problem in synthetic.PROBLEMS:
        first = results.curves(problem, "Penalty", 5)[1][0]
        for k in range(TINY.trials):
            one = next(e for e in examples(seed=nth(0, k)) if e.name == problem)
            assert first[k] == pytest.approx(one.error(*one.start(nth(0, k))), rel=1e-5)
    assert results.converged("sum", "GD", 1) == 0
    errors = results.curves("sum", "GD", 1)[1]
    results = Made(results, {("sum", "GD", 1): GOAL * errors[0].mean()})
    assert results.converged("sum", "GD", 1) == int((errors[0] >= errors[0].mean()).sum())


# -- the commands ----------------------------------------------------------------------------------------------------


def test_reproduce_complexity_writes_the_tables_and_continues_from_finished_cells(tmp_path, capsys, monkeypatch):
    small = complexity.Sizes(T=(2, 4, 6), U=(2, 4, 6), V=(8, 16, 24), base={"T": 2, "U": 2, "V": 8})
    monkeypatch.setattr(complexity, "QUICK", small)
    arguments = ["reproduce", "complexity", "--quick", "--out", str(tmp_path / "a"), "--results", str(tmp_path / "b")]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["exponents"]) == 4 * 3 * 3
    assert result["message"] == f"{result['holds']} of 24 exponents agree with Table 1."
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"complexity.json"}
    assert json.loads((tmp_path / "a" / "result.json").read_text()) == result
    assert (tmp_path / "a" / "complexity.png").stat().st_size > 1000
    monkeypatch.setattr(complexity, "run", None)  # nothing is left to run
    arguments[4] = str(tmp_path / "c")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "a" / "tables.md").read_text() in out
    assert "c/tables.md" in out


def test_reproduce_synthetic_continues_and_writes_every_table_and_figure(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "QUICK", TINY)
    monkeypatch.setattr(tables, "QUICK", TINY)
    store = ResultFolder(tmp_path / "cells")
    for cell in synthetic.cells(TINY)[1:]:  # all but one are finished
        store.put(cell, study[1].get(cell))
    assert main(["reproduce", "synthetic", "--quick", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "reproduce synthetic"
    assert result["message"] == "A quick run of 4 steps. It says nothing about the paper's claims."
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert len(list(tmp_path.glob("*.png"))) == 5
    assert all(image.stat().st_size > 1000 for image in tmp_path.glob("*.png"))
    assert len(result["claims"]) == 19
    for claim in result["claims"]:
        assert f"| {claim['where']} | {claim['says']} | {claim['holds']} |" in text
    for name, _ in synthetic.OTHERS:
        assert re.search(rf"^\| {name} \| 10 \| \d+ \|", text, re.MULTILINE)
    assert len(result["runs"]) == 4 * (len(synthetic.RUNS) + len(synthetic.OTHERS))
    assert {row["method"] for row in result["runs"]} >= {name for name, _ in synthetic.OTHERS}


@pytest.mark.parametrize("words", [["sinthetic"], ["synthetic", "--workers", "0"], ["synthetic", "--out", "FILE"]])
def test_wrong_use_ends_with_code_2(words, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    assert main(["reproduce", *words]) == 2
    errors = capsys.readouterr().err
    assert any(text in errors for text in ("synthetic", "--workers", "--out must be a folder"))


def test_ctrl_c_keeps_finished_cells_and_a_rerun_goes_on(tmp_path):
    slow = (
        "import sys, time; from bilevel.cli.main import main; from bilevel_studies import complexity as c\n"
        "def slowly(settings, whole=c.run):\n"
        "    found = whole(settings); print('cell', file=sys.stderr, flush=True); time.sleep(0.2); return found\n"
        "c.run = slowly; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", slow, "reproduce", "complexity", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert process.stderr.readline() == "cell\n"
    assert process.stderr.readline() == "cell\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Run the same command to continue." in " ".join(errors.split())
    assert "Traceback" not in errors
    kept = sorted(path.name for path in Path(tmp_path / "cells").iterdir())
    assert kept
    assert all(json.loads((tmp_path / "cells" / name).read_text())["result"] for name in kept)
    left = [cell for cell in complexity.cells(complexity.QUICK) if ResultFolder(tmp_path / "cells").get(cell) is None]
    assert 0 < len(left) == len(complexity.cells(complexity.QUICK)) - len(kept)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("MNIST", "mnist_cnn"),
        ("CIFAR10 (Alexnet)", "cifar_cnn"),
        ("CIFAR10 (WRN-28-10)", "wide_resnet"),
        ("SVHN", "svhn_cnn"),
        ("Omniglot", "few_shot_cnn"),
        ("Mini-ImageNet", "mini_imagenet_resnet as counted"),
    ],
)
def test_count_of_weights_is_that_of_the_paper_to_its_two_digits(data, name):
    stated = {row.data: row.paper_u if row.experiment == "Few-shot learning" else row.paper_v for row in sizes.table()}
    # The paper cuts digits off if it does not round: 36.5M is its 36M, 111,936 its 111K.
    assert NETWORKS[name][3] == pytest.approx(sizes.thousands(stated[data]), rel=0.05)
