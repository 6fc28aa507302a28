"""The denoising study: its cells, its store, its runs at a tiny size, its pages and its commands."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bilevel.cells import Cell, run_cells
from bilevel.cli.main import main
from bilevel.data import Labelled, corrupt, load, split_trusted
from bilevel.errors import DataError
from bilevel.methods.penalty import Penalty
from bilevel.paper import (
    denoising,
    denoising_cells,
    denoising_page,
    denoising_runs,
    denoising_small,
    denoising_small_page,
    denoising_speed,
    denoising_speed_page,
    denoising_wide,
)
from bilevel.paper.denoising_numbers import Numbers
from bilevel.paper.denoising_speed import METHODS
from bilevel.paper.filed import FiledStore
from bilevel.paper.sittings import Deadline, Sitting
from bilevel.training import Trainer, accuracy, probabilities

CPU = torch.device("cpu")


def digits(column, noise=0.25, seed=0, kind="symmetric", passes=(1, 1)):
    return {"dataset": "digits", "noise": noise, "kind": kind, "column": column, "seed": seed, "passes": list(passes)}


# -- cells -----------------------------------------------------------------------------------------------------------


def test_a_cell_has_the_settings_under_which_results_are_kept():
    cell = denoising.cells(["mnist"], [(0.25, "symmetric")], ["ours"], 1)[0]
    assert cell.name == "mnist-0.25-symmetric-ours-0-12-20"
    assert cell.settings == {
        "dataset": "mnist", "noise": 0.25, "kind": "symmetric", "column": "ours", "seed": 0, "passes": [12, 20],
    }  # fmt: skip


def test_cells_are_ranked_ours_then_cheap_columns_then_approx_grad_then_the_papers():
    cells = denoising.cells(["mnist", "cifar10"], denoising.NOISES, list(denoising.COLUMNS), 2)
    ordered = [cell.settings["column"] for cell in sorted(cells, key=lambda cell: -cell.weight)]
    assert set(ordered[:12]) == {"ours"}  # 2 sets, 3 noises, 2 seeds
    assert ordered[-12:] == ["approx-grad"] * 6 + ["algorithm-2"] * 6  # one seed each
    clean = [cell.settings for cell in cells if cell.settings["column"] == "clean"]
    assert [(s["dataset"], s["noise"], s["seed"]) for s in clean] == [
        (name, 0.0, seed) for seed in (0, 1) for name in ("mnist", "cifar10")
    ]


def test_cells_are_those_of_the_noises_and_kinds_that_were_asked_for():
    def pairs(noises, kind):
        return {(c.settings["noise"], c.settings["kind"])
                for c in denoising_cells.cells(["digits"], noises, kind, ["ours"], 1)}  # fmt: skip

    assert pairs(None, None) == set(denoising.NOISES)
    assert pairs(None, "asymmetric") == {(0.4, "asymmetric")}
    assert pairs([0.1], "asymmetric") == {(0.1, "asymmetric")}
    assert pairs([0.5], "symmetric") == {(0.5, "symmetric")}
    for noise in (0.3, 0.4, 0.5):
        assert pairs([noise], None) == {(noise, "symmetric"), (noise, "asymmetric")}


def test_cells_of_approx_grad_name_their_linear_solver_and_no_others_have_one():
    table = denoising.cells(["mnist", "digits"], denoising.NOISES, list(denoising.COLUMNS), 1)
    figures = [cell for part in ("speed", "steps") for cell in denoising_speed.cells(part, "cnn")]
    solvers = {(c.settings.get("column") or c.settings["method"], c.settings.get("solver")) for c in (*table, *figures)}
    assert {name for name, solver in solvers if solver == "adam"} == {"approx-grad", "ApproxGrad"}
    assert ("approx-grad", None) not in solvers
    assert ("ApproxGrad", None) not in solvers
    assert len([solver for _, solver in solvers if solver]) == 2


@pytest.mark.parametrize(("dataset", "tests"), [("digits", 400), ("mnist", 10_000), ("cifar10", 10_000)])
def test_the_size_of_a_test_set_is_that_of_its_data(dataset, tests):
    assert denoising.STUDIES[dataset].tests == tests
    try:
        data = denoising_runs.loaded(dataset)
    except DataError:
        pytest.skip(f"{dataset} is not here.")
    assert len(data.part("test")[1]) == tests


# -- the store -------------------------------------------------------------------------------------------------------


def test_a_fresh_folder_goes_on_from_the_file_beside_the_page(tmp_path):
    cell, other = Cell(digits("ours"), 1), Cell(digits("oracle"), 0)
    first = FiledStore(tmp_path / "a", tmp_path / "page.json")
    first.put(cell, {"accuracy": 0.5})
    first.write()
    fresh = FiledStore(tmp_path / "b", tmp_path / "page.json")
    assert fresh.get(cell) == {"accuracy": 0.5}
    assert fresh.get(other) is None
    fresh.put(other, {"accuracy": 0.75})
    fresh.write()
    third = FiledStore(tmp_path / "c", tmp_path / "page.json")
    assert [found["accuracy"] for _, found in third.all()] == [0.75, 0.5]  # by settings: oracle, ours


def test_a_partial_result_is_shown_gone_on_with_and_not_replaced_by_a_shorter_one(tmp_path):
    cell = Cell(digits("ours"), 1)
    store = FiledStore(tmp_path, tmp_path / "page.json")
    store.put(cell, {"partial": True, "steps": 5})
    assert store.get(cell) is None
    assert store.all() == [(cell.settings, {"partial": True, "steps": 5})]
    store.put(cell, {"partial": True, "steps": 3})
    assert store.kept(cell)["steps"] == 5
    store.put(cell, {"partial": False, "steps": 9})
    assert store.get(cell)["steps"] == 9


def test_cells_run_in_their_rank_and_none_begins_after_the_deadline(tmp_path):
    cells = [Cell(digits("ours", seed=seed), weight) for seed, weight in enumerate((1.0, 3.0, 2.0))]
    ran = []

    def run(settings):
        ran.append(settings["seed"])
        return {"accuracy": 1.0}

    store = FiledStore(tmp_path, tmp_path / "page.json")
    assert run_cells(cells, store, run, deadline=time.monotonic() - 1)
    assert ran == []
    assert run_cells(cells, store, run)
    assert ran == [1, 2, 0]
    assert not run_cells([Cell(digits("plain"), 0)], store, lambda settings: None)


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", list(denoising.COLUMNS))
def test_every_column_runs(column):
    found = denoising_runs.run(digits(column, passes=(0.3, 1)), CPU)
    assert found["seconds"] > 0
    assert found["device"] == "CPU"
    assert 0.05 < found["accuracy"] <= 1


def test_a_seed_gives_the_same_again():
    found, again = (denoising_runs.run(digits("ours", passes=(0.3, 0.3), seed=3), CPU) for _ in range(2))
    other = denoising_runs.run(digits("ours", passes=(0.3, 0.3), seed=4), CPU)
    for one in (found, again, other):
        del one["seconds"], one["bilevel_seconds"]
    assert found == again
    assert found != other


def test_columns_are_trained_on_what_they_are_called_after(monkeypatch):
    seen = []
    monkeypatch.setattr(denoising_runs, "fit", lambda model, x, y, **rest: seen.append(y))
    task = denoising_runs.Task(digits("oracle", noise=0.5), CPU)
    rows = len(task.y)
    for column in ("oracle", "trusted", "plain", "clean"):
        denoising_runs.COLUMN_RUNS[column](task)
    oracle, trusted, plain, clean = seen
    right = task.y == task.truth
    assert torch.equal(oracle, torch.cat([task.truth[right], task.trusted[1]]))
    assert torch.equal(trusted, task.trusted[1])
    assert int((plain[:rows] != task.truth).sum()) == round(0.5 * rows)
    assert torch.equal(clean, torch.cat([task.truth, task.trusted[1]]))


def test_the_early_stopped_column_holds_out_a_fifth_of_the_trusted_set(monkeypatch):
    seen = {}

    def fit(model, x, y, *, steps, watch, **rest):
        seen.update(rows=len(y), steps=steps)
        watch(steps)

    monkeypatch.setattr(denoising_runs, "fit", fit)
    task = denoising_runs.Task(digits("stopped", passes=(1, 2)), CPU)
    monkeypatch.setattr(task, "steps", lambda passes, rows: 7)
    assert denoising_runs.stopped(task)["epoch"] == 1
    assert seen == {"rows": len(task.y) + 80, "steps": 7}  # 100 are trusted


@pytest.mark.parametrize(
    ("held", "best"), [((0.2, 0.6, 0.4, 0.6), 2), ((0.8, 0.6, 0.4, 0.2), 1), ((0.2, 0.4, 0.6, 0.8), 4)]
)
def test_the_early_stopped_column_keeps_the_first_of_its_best_epochs(held, best, monkeypatch):
    accuracies, epochs = (0.91, 0.92, 0.93, 0.94), []
    task = denoising_runs.Task(digits("stopped", passes=(1, 4)), CPU)
    labels = task.trusted[1][::5]

    def fit(model, x, y, *, steps, watch, **rest):
        for done in range(1, 4 * each + 1):
            if done % each == 0:
                epochs.append(done // each)
            watch(done)

    def probabilities(model, x):
        right = round(held[epochs[-1] - 1] * len(x))
        classes = torch.where(torch.arange(len(x)) < right, labels, (labels + 1) % 10)
        return torch.nn.functional.one_hot(classes, 10).float()

    each = task.steps(1, len(task.y) + 80)
    assert each > 1
    monkeypatch.setattr(denoising_runs, "fit", fit)
    monkeypatch.setattr(denoising_runs, "probabilities", probabilities)
    monkeypatch.setattr(denoising_runs, "accuracy", lambda model, test: accuracies[epochs[-1] - 1])
    assert denoising_runs.stopped(task) == {"accuracy": accuracies[best - 1], "epoch": best}


class BegunError(Exception):
    """A bilevel run begins: what it was given."""


def given_to_solve(module, monkeypatch, run):
    def solve(problem, method, u, v, data, **options):
        raise BegunError(problem, method, u, v, options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "solve", solve)
        with pytest.raises(BegunError) as caught:
            run()
    return caught.value.args


PAPER = {"lower_steps": 20, "gamma": 0.01, "epsilon": 0.01, "lam": 0.01, "multipliers": True, "average_residual": False,
         "gamma_factor": 1.1, "lam_factor": 0.9, "epsilon_factor": 0.9, "decay": "constant", "joint": False,
         "lower_batches": "shared"}  # fmt: skip
"""Appendix E.2 and Algorithm 2; sigma, rho and nu are apart."""


def is_the_papers(method, nu, T=20):
    found = {name: getattr(method, name) for name in PAPER}
    assert found == PAPER | {"lower_steps": T}
    assert method.nu == nu
    assert method.upper_optimizer.func is method.lower_optimizer.func is torch.optim.Adam
    assert (method.upper_optimizer.keywords, method.lower_optimizer.keywords) == ({"lr": 3.0}, {"lr": 1e-5})


def is_approx_grad(method, rate, T=20):
    assert (method.lower_steps, method.linear_steps, method.linear_solver, method.damping) == (T, T, "adam", 0.1)
    assert method.lower_optimizer.func is torch.optim.Adam
    assert method.lower_optimizer.keywords == {"lr": rate}


@pytest.mark.parametrize(("dataset", "nu"), [("mnist", 1e-6), ("cifar10", 1e-4), ("svhn", 0.0)])
def test_algorithm_2_has_the_constants_of_the_appendix(dataset, nu, monkeypatch):
    task = denoising_runs.Task(digits("algorithm-2"), CPU)
    task.study = replace(task.study, paper_nu=denoising.STUDIES[dataset].paper_nu)
    is_the_papers(given_to_solve(denoising_runs, monkeypatch, lambda: denoising_runs.algorithm_2(task))[1], nu)


def test_approx_grad_has_twenty_steps_of_each_kind_and_adam_for_the_linear_system(monkeypatch):
    task = denoising_runs.Task(digits("approx-grad"), CPU)
    is_approx_grad(given_to_solve(denoising_runs, monkeypatch, lambda: denoising_runs.approx_grad(task))[1], 3e-3)


def test_the_figures_have_the_papers_constants_too():
    ours, papers, approx_grad = (denoising_speed.method(name, 5) for name in METHODS)
    assert ours == Penalty(lower_steps=5)
    is_the_papers(papers, 1e-6, 5)
    is_approx_grad(approx_grad, 1e-3, 5)


def lower_loss(w, model, x, y):
    """Eq. 3 as written."""
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    return (w * losses).sum() / w.sum()


@pytest.mark.parametrize("column", ["approx-grad", "algorithm-2"])
def test_importances_start_at_the_probabilities_of_the_pretrained_network(column, monkeypatch):
    task = denoising_runs.Task(digits(column, passes=(1, 92)), CPU)
    run = denoising_runs.COLUMN_RUNS[column]
    problem, _, u, v, _ = given_to_solve(denoising_runs, monkeypatch, lambda: run(task))
    x, y = task.x, task.y
    p = probabilities(v, x)[torch.arange(len(y)), y].clamp(1e-3, 1 - 1e-3)
    assert p.std() > 0.1
    torch.testing.assert_close((torch.tanh(u.values) + 1) / 2, p)
    assert accuracy(v, task.trusted) > 0.8  # it was trained
    rows = torch.arange(50)
    found = problem.lower(u, v.eval(), (x[:50], y[:50], rows))
    torch.testing.assert_close(found, lower_loss(p[:50], v, x[:50], y[:50]))


@pytest.mark.parametrize("name", METHODS)
def test_the_figures_start_importances_as_the_table_does_and_ours_at_one_half(name, monkeypatch):
    settings = {"part": "speed", "dataset": "digits", "network": "mlp", "rows": 400, "trusted": 200, "noise": 0.25,
                "method": name, "T": 2, "passes": 1, "seed": 0, "steps": 100}  # fmt: skip
    problem, _, u, v, _ = given_to_solve(denoising_speed, monkeypatch, lambda: denoising_speed.run(settings))
    data = split_trusted(load("digits"), 200, 0)
    data = data.select(np.sort(np.random.default_rng(0).permutation(data.count)[:400]))
    x, y = data.x[:50], corrupt(data.y, 0.25, 10, 0)[:50]
    if name == METHODS[0]:
        assert not u.values.any()
        u.values.copy_(torch.linspace(-3, 3, 400))
        w = torch.sigmoid(u.values[:50])
    else:
        w = probabilities(v, x)[torch.arange(50), y].clamp(1e-3, 1 - 1e-3)
        torch.testing.assert_close((torch.tanh(u.values[:50]) + 1) / 2, w)
    found = problem.lower(u, v.eval(), (x, y, torch.arange(50)))
    torch.testing.assert_close(found, lower_loss(w, v, x, y))


def sittings(settings, place, monkeypatch, often):
    """A cell with little time: each sitting ends when it has looked at the clock `often` times."""
    looks, found = [], []

    def late(self):
        looks.append(1)
        return len(looks) % often == 0

    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "late", late)
        while not found or found[-1].get("partial"):
            found.append(denoising_runs.run(settings, CPU, place, time.monotonic()))
            if found[-1].get("partial"):
                assert {path.name for path in place.rglob("*.safetensors")} == {"state.safetensors"}
    return found


@pytest.mark.parametrize("column", list(denoising.COLUMNS))
def test_a_cell_that_was_out_of_time_again_and_again_ends_as_the_straight_one(column, tmp_path, monkeypatch):
    passes, often = {"ours": ((2, 1), 11), "stopped": ((1, 8), 20)}.get(column, ((0.5, 2), 5))
    settings = digits(column, passes=passes)
    straight = denoising_runs.run(settings, CPU)
    found = sittings(settings, tmp_path / "a", monkeypatch, often)
    assert len(found) > 2
    steps = [one["steps"] for one in found[:-1]]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
    assert all(one["steps"] < one["of"] for one in found[:-1])
    seconds = [one["seconds"] for one in found]
    assert seconds == sorted(seconds)  # of all sittings
    assert straight["seconds"] > 0
    for one in (straight, found[-1]):
        for name in ("seconds", "bilevel_seconds"):
            one.pop(name, None)
    assert found[-1] == straight
    if column == "stopped":
        assert straight["epoch"] < 7  # measured in a sitting before the last


@pytest.mark.parametrize("column", ["approx-grad", "algorithm-2"])
def test_a_long_cell_that_was_killed_goes_on_from_its_last_tenth(column, tmp_path, monkeypatch):
    settings = digits(column, passes=(1, 1))
    straight = denoising_runs.run(settings, CPU)
    pretrained, steps = [], []

    def killed(self, run):
        steps.append(run.step)
        if steps == [1, 2, 3, 4, 5, 6, 7]:
            raise SystemExit
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Deadline, "log", killed)
        with pytest.raises(SystemExit):
            denoising_runs.run(settings, CPU, tmp_path / "a")
        again = denoising_runs.run(settings, CPU, tmp_path / "a")
    assert steps[:8] == [1, 2, 3, 4, 5, 6, 7, 7]  # saved after the sixth
    assert again | {"seconds": 0} == straight | {"seconds": 0}
    monkeypatch.setattr(Trainer, "step", lambda *rest: pretrained.append(1))
    assert denoising_runs.run(settings, CPU, tmp_path / "a")["steps"] == straight["steps"]
    assert not pretrained


def test_cells_of_seconds_are_saved_only_where_time_is_short(tmp_path):
    denoising_runs.run(digits("plain"), CPU, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    denoising_runs.run(digits("plain"), CPU, tmp_path / "a", time.monotonic() + 1000)
    assert (tmp_path / "a").exists()


def small(part, trusted, network="linear"):
    return {"part": part, "dataset": "digits", "network": network, "rows": 300, "trusted": trusted, "noise": 0.4,
            "seed": 1, "steps": 30}  # fmt: skip


def test_hyper_cleaning_has_the_papers_rule_and_how_few_has_not():
    cleaning = denoising_small.run(small(denoising_small.HYPER_CLEANING, 100))
    assert {"accuracy", "trusted", "plain", "oracle", "rule", "auc", "auc_quality", "f1"} <= set(cleaning)
    few = denoising_small.run(small(denoising_small.HOW_FEW, 50, "mlp"))
    assert {"accuracy", "trusted", "plain", "auc"} <= set(few)
    assert not {"oracle", "rule"} & set(few)


def test_the_papers_rule_trains_on_the_examples_of_importance_above_nine_tenths_and_the_trusted_ones(monkeypatch):
    seen, importance = [], torch.linspace(0, 1, 300)

    def denoise(train, trusted, model, **options):
        seen.append((*train, *trusted))
        return SimpleNamespace(
            importance=importance, quality=importance, suspect=importance < 0.5, noise_rate=0.5,
            settings={"final_steps": 3, "batch": 10, "rate": 1e-3},
        )  # fmt: skip

    monkeypatch.setattr(denoising_small, "denoise", denoise)
    monkeypatch.setattr(denoising_small, "fit", lambda model, x, y, **options: seen.append((x, y)))
    found = denoising_small.run(small(denoising_small.HYPER_CLEANING, 100))
    (x, y, x_trusted, y_trusted), *trainings = seen
    sure = importance > 0.9
    assert found["rule_rows"] == int(sure.sum()) == 30
    inputs, labels = trainings[list(found).index("rule") - 1]  # the first is the accuracy of `denoise`
    assert torch.equal(inputs, torch.cat([x[sure], x_trusted]))
    assert torch.equal(labels, torch.cat([y[sure], y_trusted]))


def test_how_few_cleans_the_same_examples_whatever_the_number_of_trusted_ones(monkeypatch):
    seen = []

    def denoise(train, trusted, *rest, **options):
        seen.append((*train, len(trusted[1])))
        raise KeyboardInterrupt

    monkeypatch.setattr(denoising_small, "denoise", denoise)
    for trusted in (50, 200):
        assert denoising_small.run(small(denoising_small.HOW_FEW, trusted)) is None
    (x, y, few), (x_again, y_again, many) = seen
    assert (few, many) == (50, 200)
    assert torch.equal(x, x_again)
    assert torch.equal(y, y_again)


def colourful(name):
    """Digits in three channels, under the name of any set."""
    data = load("digits")
    x, test = data.x[:400].expand(-1, 3, -1, -1), data.test
    return Labelled("colour", "images", x, data.y[:400], data.classes, data.keys[:400],
                    test=(test[0][:50].expand(-1, 3, -1, -1), test[1][:50]))  # fmt: skip


@pytest.mark.parametrize("column", ["ours", "algorithm-2"])
def test_a_wide_network_stops_at_the_deadline_and_goes_on_from_its_checkpoint(column, tmp_path, monkeypatch):
    monkeypatch.setattr(denoising_wide, "loaded", colourful)
    settings = dict(denoising_wide.cells((column,), 1)[0].settings)
    assert settings["network"] == [28, 10]
    settings |= {"network": [10, 1], "rows": 200, "trusted": 80, "steps": 2}
    first = denoising_wide.run(settings, CPU, tmp_path / "a", time.monotonic())
    assert (first["steps"], first["of"], first["partial"]) == (1, 2, True)
    rest = denoising_wide.run(settings, CPU, tmp_path / "a")
    assert (rest["steps"], rest["partial"]) == (2, False)
    whole = denoising_wide.run(settings, CPU, tmp_path / "b")
    for name in ("accuracy", "auc", "weights"):
        assert rest[name] == whole[name]
    assert whole["memory"] is None
    assert whole["ms_per_step"] >= 0


def test_the_wide_networks_preset_has_the_constants_of_the_appendix():
    options = denoising_wide.method("algorithm-2")
    assert (options.lower_steps, options.gamma, options.epsilon, options.lam, options.nu) == (1, 1.0, 1.0, 10.0, 0.0)
    assert options.upper_optimizer.keywords == {"lr": 3.0}
    assert options.lower_optimizer.keywords == {"lr": 1e-4}
    assert denoising_wide.method("ours").lower_steps == 1


@pytest.mark.parametrize("name", METHODS)
def test_curves_are_measured_as_a_run_goes(name):
    settings = {"part": "speed", "dataset": "digits", "network": "mlp", "rows": 400, "trusted": 200, "noise": 0.25,
                "method": name, "T": 2, "passes": 1, "seed": 0, "steps": 4}  # fmt: skip
    found = denoising_speed.run(settings)
    curves = found["curves"]
    assert {len(values) for values in curves.values()} == {5}  # before the first step, and after each
    assert curves["seconds"] == sorted(curves["seconds"])
    assert found["accuracy"] == curves["test"][-1]
    assert found["steps"] == 4


def test_the_seconds_of_a_curve_leave_out_the_measuring(monkeypatch):
    def slowly(model, pair):
        time.sleep(0.02)
        return 0.5

    monkeypatch.setattr(denoising_speed, "accuracy", slowly)
    curves = denoising_speed.Curves(None, None, None, None, offset=10.0)
    curves.measure(1.0)
    curves.measure(2.0)
    assert curves.found["seconds"][0] == 11.0
    assert curves.found["seconds"][1] <= 12.0 - 0.06


def test_our_penalty_has_its_default_steps_in_the_study_of_speed_and_every_t_in_that_of_steps():
    speed = {c.settings["method"]: c.settings["T"] for c in denoising_speed.cells("speed", "mlp")}
    assert speed == {"Penalty, ours": 0, "Penalty, the paper's": 20, "ApproxGrad": 20}
    steps = denoising_speed.cells("steps", "mlp", 2)
    assert len(steps) == 3 * 5 * 2
    assert {c.settings["T"] for c in steps} == {1, 2, 5, 10, 20}


# -- pages -----------------------------------------------------------------------------------------------------------


def test_numbers_show_mean_deviation_and_an_unusual_count():
    assert Numbers(()).show() == "not run"
    assert Numbers((1.0,)).show() == "1.00 (1 seed)"
    assert Numbers((1.0, 3.0)).show(1, 2) == "2.0 ± 1.4"


def mnist(column, accuracy, seed=0, noise=0.25, kind="symmetric"):
    settings = denoising.cells(["mnist"], [(noise, kind)], [column], 1)[0].settings | {"seed": seed}
    found = {"accuracy": accuracy, "auc": 0.9, "f1": 0.8, "noise_rate": 0.3, "seconds": 3.0, "device": "CPU"}
    return settings, found


@pytest.mark.parametrize(("accuracy", "word"), [(0.991, "met"), (0.99, "missed")])
def test_findings_follow_the_numbers(accuracy, word, tmp_path):
    kept = [mnist("ours", accuracy, seed) for seed in range(5)] + [mnist("oracle", 0.995), mnist("plain", 0.9)]
    summary = denoising_page.write(kept, tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    sentence = summary["findings"][0]
    assert f"the target of 99.05 is {word}" in sentence
    assert f"It is above Train+Val (+{100 * accuracy - 90:.2f}, 1 seed)." in sentence
    assert f"It is below Oracle ({100 * accuracy - 99.5:.2f}, 1 seed)." in sentence
    assert f"- {sentence}\n" in text
    line = next(line for line in text.splitlines() if line.startswith("| MNIST, 25% symmetric |"))
    assert line.endswith(f"| not run | {100 * accuracy:.2f} ± 0.00 |")
    assert "102 of 105 places of the table are not filled" in text
    assert "| the paper | 99.3 | 94.6 | 83.9 |  | 98.11 | 98.89 |  |" in text


def compared(ours, others, column="plain"):
    """The sentence on ours beside another column; accuracies by seed."""
    kept = [mnist("ours", value, seed) for seed, value in ours.items()]
    return denoising_page.findings([*kept, *(mnist(column, value, seed) for seed, value in others.items())])[0]


def test_ours_is_compared_on_the_seeds_that_both_columns_have():
    ours = {0: 0.90, 1: 0.99, 2: 0.99, 3: 0.99, 4: 0.99}
    assert "It is below Train+Val (-4.00, 1 seed)." in compared(ours, {0: 0.94})
    assert "It is above Train+Val (+1.50, 2 seeds)." in compared(ours, {1: 0.98, 2: 0.97})
    assert "Train+Val" not in compared(ours, {7: 0.5})


@pytest.mark.parametrize(
    ("gaps", "where"),
    [
        ((0.03, 0.01, 0.02), "above"),  # mean 2, deviation 1
        ((-0.03, -0.01, -0.02), "below"),
        ((0.02, -0.01, 0.01), "level with"),  # mean 0.67, deviation 1.5
        ((0.0, 0.0, 0.0), "level with"),
    ],
)
def test_a_gap_over_several_seeds_is_claimed_where_it_exceeds_the_deviation_of_the_differences(gaps, where):
    ours = {0: 0.90, 1: 0.95, 2: 0.85}  # of a larger deviation than the differences have
    others = {seed: ours[seed] - gap for seed, gap in enumerate(gaps)}
    assert f"It is {where} Train+Val ({100 * sum(gaps) / 3:+.2f}, 3 seeds)." in compared(ours, others)


@pytest.mark.parametrize(("gap", "where"), [(0.012, "above"), (-0.012, "below"), (0.010, "level with")])
def test_a_gap_of_one_seed_is_claimed_where_it_exceeds_its_binomial_error(gap, where):
    # 1.96 sqrt(2 * 0.8 * 0.2 / 10,000) = 0.0111
    assert f"It is {where} Train+Val ({100 * gap:+.2f}, 1 seed)." in compared({0: 0.8 + gap}, {0: 0.8})


def former(accuracy, **found):
    """A cell of ApproxGrad before its linear solver was among the settings."""
    settings, usual = mnist("approx-grad", accuracy)
    return {key: value for key, value in settings.items() if key != "solver"}, usual | found


def table_row(text, title="MNIST, 25% symmetric"):
    return next(line for line in text.splitlines() if line.startswith(f"| {title} |"))


def test_runs_of_the_former_solver_are_marked_compared_with_nothing_and_gone_where_there_are_new_ones(tmp_path):
    old, new = former(0.5, status="diverged", steps=75), mnist("approx-grad", 0.6)
    kept = [mnist("ours", 0.99), mnist("plain", 0.9), old]
    sentence = denoising_page.write(kept, tmp_path)["findings"][0]
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert "| 50.00 (1 seed) (diverged) |" in table_row(text)
    assert "ApproxGrad" not in sentence
    assert "Train+Val" in sentence
    assert "ApproxGrad with conjugate gradients in place of Adam: MNIST, 25% symmetric." in text
    summary = denoising_page.write([*kept, new], tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert "It is above Train+Val (+9.00, 1 seed); ApproxGrad (+39.00, 1 seed)." in summary["findings"][0]
    assert "| 60.00 (1 seed) |" in table_row(text)
    assert "50.00" not in text
    assert "iverged, and" not in text
    assert "conjugate" not in text
    begun = (new[0], {"partial": True, "steps": 3, "of": 9})
    assert "50.00 (1 seed) (diverged)" in table_row(denoising_page.page([*kept, begun], []))


def test_some_of_several_runs_that_diverged_are_counted():
    kept = [mnist("approx-grad", 0.5, seed) for seed in range(3)]
    kept[1][1].update(status="diverged", steps=75)
    assert "| 50.00 ± 0.00 (3 seeds) (1 of 3 diverged) |" in table_row(denoising_page.page(kept, []))


def test_noises_that_are_not_of_the_study_have_rows_of_their_own(tmp_path):
    kept = [mnist("ours", 0.98, noise=0.3), mnist("ours", 0.97, kind="asymmetric"), mnist("clean", 0.99)]
    summary = denoising_page.write(kept, tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert table_row(text, "MNIST, 30% symmetric").endswith("| 98.00 (1 seed) |")
    assert table_row(text, "MNIST, 25% asymmetric").endswith("| 97.00 (1 seed) |")
    assert [line for line in text.splitlines() if line.startswith("| MNIST, 0%")] == []
    assert "117 of 119 places of the table are not filled" in text
    assert [sentence for sentence in summary["findings"] if "the paper's" in sentence] == []  # its noise is symmetric


def test_the_page_says_how_columns_are_trained_beside_the_papers_settings():
    text = denoising_page.page([], [])
    assert (
        "| MNIST | 0.001, falling to 0 | 20 | 200 | 12 | 1 | 100 |\n| the paper | 1e-05 | 100 | 200 |  | 100 | 100 |"
        in text
    )
    assert "| CIFAR-10 | 0.001, falling to 0 | 100 | 200 | 12 | 1 | 200 |\n| the paper | 0.001 | 200 |" in text
    assert "| digits (MLP) | 0.003, falling to 0 | 92 | 100 | 92 | 10 | 100 |" in text
    assert "Only the early-stopped column has fewer steps: one in 5 trusted examples is held out" in text


def test_what_is_the_papers_alone_has_no_cell_of_ours():
    rows = denoising_small_page.rule_table([]).splitlines()
    assert [row.split("|")[4].strip() for row in rows] == ["RMD", "---", "", "90.09"]


def test_a_page_without_cells_says_so(tmp_path):
    assert denoising_page.write([], tmp_path)["findings"] == []
    assert "Nothing was run." in (tmp_path / "denoising.md").read_text(encoding="utf-8")


def test_cells_that_are_not_finished_are_named_and_in_no_table(tmp_path):
    settings, found = mnist("algorithm-2", 0.95)
    _, whole = mnist("ours", 0.99)
    ours = [(mnist("ours", 0.99, seed)[0], whole | {"seconds": 30.0 + seed}) for seed in range(4)]
    cut = (mnist("ours", 0.99, 4)[0], {"partial": True, "steps": 40, "of": 100, "seconds": 1.0, "device": "other"})
    kept = [(settings, found | {"partial": True, "steps": 1200, "of": 29_500}), *ours, cut]
    text = denoising_page.page(kept, [])
    line = next(line for line in text.splitlines() if line.startswith("| MNIST, 25% symmetric |"))
    assert line.endswith("| not run | not run | 99.00 ± 0.00 (4 seeds) |")
    assert text.count("95.00") == 1
    assert "MNIST was run on CPU (ours 32 s a run, 33 at most)." in text
    assert (
        "Begun, and in no table: MNIST, 25% symmetric, Penalty, the paper's, seed 0 (1,200 of 29,500 steps, 95.00 so "
        "far); MNIST, 25% symmetric, Penalty, ours, seed 4 (40 of 100 steps).\n"
    ) in text


def few(trusted, accuracy, alone):
    settings = {"part": "how-few", "dataset": "mnist", "network": "mlp", "rows": 5000, "trusted": trusted, "noise": 0.4,
                "seed": 0}  # fmt: skip
    return settings, {"accuracy": accuracy, "trusted": alone, "plain": 0.8, "auc": 0.9, "auc_quality": 0.95}


def test_how_few_says_where_denoising_is_worth_it(tmp_path):
    kept = [few(50, 0.85, 0.6), few(500, 0.9, 0.88), few(5000, 0.94, 0.94)]
    alone, labels = denoising_small_page.few_sentences(kept)
    assert "with 50, 500 trusted (most with 50: 25.0 points), and not with 5,000." in alone
    assert labels.endswith("with 50, 500, 5,000 trusted (most with 5,000: 14.0 points).")
    denoising_page.write(kept, tmp_path)
    assert (tmp_path / "denoising-how-few.png").stat().st_size > 1000


def test_the_wide_networks_part_is_shown_as_far_as_it_got():
    settings = denoising_wide.cells(("ours",), 1)[0].settings
    found = {"accuracy": 0.7, "auc": 0.8, "steps": 1200, "of": 1760, "partial": True, "ms_per_step": 250.0,
             "memory": 2**33, "device": "GPU"}  # fmt: skip
    text = denoising_page.page([(settings, found)], [])
    assert "| Penalty, ours | 0 | 3 | 1,200 of 1,760 | 70.00 | 0.800 | 250 | 8.0 | GPU |" in text


def curve(part, name, T, seconds, test, ms):
    settings = next(c.settings for c in denoising_speed.cells(part, "mlp") if c.settings["method"] == name)
    found = {"curves": {"seconds": seconds, "test": test, "validation": test, "train": test}, "accuracy": test[-1],
             "ms_per_step": ms, "seconds": seconds[-1], "steps": 9, "device": "CPU", "load": 0.5}  # fmt: skip
    return settings | {"T": T}, found


def test_the_page_of_speed_says_when_each_method_got_how_far(tmp_path):
    kept = [
        curve("speed", "Penalty, ours", 0, [0.0, 1.0, 2.0], [0.1, 0.93, 0.95], 1.0),
        curve("speed", "Penalty, the paper's", 20, [0.0, 3.0], [0.9, 0.91], 5.0),
        curve("speed", "ApproxGrad", 20, [0.0, 7.0], [0.85, 0.92], 9.0),
    ]
    found = denoising_speed_page.write("speed", kept, tmp_path)["findings"]
    assert found[0] == (
        "94% on the test set: Penalty, ours after 2.0 s; not reached by Penalty, the paper's and ApproxGrad."
    )
    assert found[2] == (
        "90% on the test set: Penalty, ours after 1.0 s, Penalty, the paper's after 0.0 s, ApproxGrad after 7.0 s."
    )
    text = (tmp_path / "denoising-speed.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 0 | 9 | 9.0 | 7.0 | 92.00 | 92.00 | 92.00 |" in text
    assert (tmp_path / "denoising-speed-mlp.png").stat().st_size > 1000


def test_pages_name_the_runs_that_diverged(tmp_path):
    settings, found = curve("steps", "ApproxGrad", 10, [0.0, 7.0], [0.85, 0.92], 9.0)
    denoising_speed_page.write("steps", [(settings, found | {"status": "diverged"})], tmp_path)
    said = "iverged, and shown as they last were finite:"
    assert f"D{said} ApproxGrad, T = 10, seed 0 (at step 9)." in (tmp_path / "denoising-steps.md").read_text()
    settings, found = mnist("approx-grad", 0.5)
    found |= {"status": "diverged", "steps": 75}
    assert f"MNIST: d{said} approx-grad, seed 0 (at step 75)." in denoising_page.page([(settings, found)], [])
    assert said not in denoising_page.page([(settings, found | {"status": "max_steps"})], [])


def test_a_page_says_that_times_were_taken_on_a_busy_machine(tmp_path):
    settings, found = curve("speed", "ApproxGrad", 20, [0.0, 7.0], [0.85, 0.92], 9.0)
    for share, busy in ((2.0, True), (0.5, False)):
        denoising_speed_page.write("speed", [(settings, found | {"load": share})], tmp_path)
        text = (tmp_path / "denoising-speed.md").read_text()
        assert ("busy with other work: 2.0 to 2.0" in text) == busy
        assert "is not known" not in text


@pytest.mark.parametrize("load", [{}, {"load": None}, {"load": 1.5}])
def test_ratios_of_times_are_not_told_where_the_machine_was_busy_or_nobody_knows(load, tmp_path):
    kept = [curve("steps", name, T, [0.0, 1.0], [0.5, 0.8], float(T)) for name in METHODS for T in (1, 20)]
    kept = [(settings, found | {"load": 0.5}) for settings, found in kept]
    assert "takes" in " ".join(denoising_speed_page.write("steps", kept, tmp_path)["findings"])
    settings, found = kept[0]
    kept[0] = (settings, {key: value for key, value in found.items() if key != "load"} | load)
    said = denoising_speed_page.write("steps", kept, tmp_path)["findings"]
    assert [sentence for sentence in said if "takes" in sentence] == []
    assert said[0] == "Penalty, ours: from T = 1 to 20 the accuracy goes from 80.00 to 80.00 (+0.00)."
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert ("How busy the machine was is not known of 1 of 6 runs" in text) == (load.get("load") is None)


def test_the_figures_show_no_runs_of_the_former_solver_beside_new_ones(tmp_path):
    new = curve("steps", "ApproxGrad", 1, [0.0, 1.0], [0.5, 0.81], 3.0)
    old = [curve("steps", "ApproxGrad", T, [0.0, 1.0], [0.5, 0.72], 3.0) for T in (1, 10)]
    old = [({key: value for key, value in settings.items() if key != "solver"}, found) for settings, found in old]
    old[1][1]["status"] = "diverged"
    denoising_speed_page.write("steps", old, tmp_path)
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 10 | 72.00 (diverged) |" in text
    assert "ApproxGrad was run with conjugate gradients in place of Adam." in text
    denoising_speed_page.write("steps", [*old, new], tmp_path)
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 1 | 81.00 |" in text
    assert "72.00" not in text
    assert "conjugate" not in text


def test_the_page_of_steps_says_what_a_larger_t_gains_and_costs(tmp_path):
    kept = [
        curve("steps", name, T, [0.0, 1.0], [0.5, 0.8 + T / 200], base * T)
        for name, base in zip(METHODS, (1.0, 1.0, 2.0), strict=True)
        for T in (1, 20)
    ]
    found = denoising_speed_page.write("steps", kept, tmp_path)["findings"]
    assert "from T = 1 to 20 the accuracy goes from 80.50 to 90.00 (+9.50)" in found[0]
    assert found[0].endswith("takes 20.0 times as long.")
    assert found[-1].startswith("At T = 20, an upper iteration of ApproxGrad takes 2.0 times")
    assert "| ApproxGrad | 20 | 90.00 | 40.0 |" in (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")


def test_what_the_page_beside_cleanlab_says_by_hand_is_in_its_numbers():
    page = Path(__file__).parents[1] / "docs" / "results" / "denoising-vs-cleanlab.md"
    runs = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    text = " ".join(page.read_text(encoding="utf-8").split())

    def fewer(data):
        found = [run for name, run in runs.items() if name.startswith(f"{data}/symmetric")]
        less = sum(0 < run["cleanlab, chosen"]["source"] < run["bilevel"]["settings"]["final_steps"] for run in found)
        return f"{less} of {len(found)}"

    def mean(column):
        return np.mean([run[column]["accuracy"] for name, run in runs.items() if name.startswith("cifar10/symmetric")])

    assert (
        "the folds of *cleanlab, chosen* have fewer steps than a round of ours in "
        f"{fewer('digits')} runs on digits, {fewer('mnist')} on MNIST and {fewer('cifar10')} on CIFAR-10."
    ) in text
    assert mean("cleanlab") < mean("bilevel") < mean("cleanlab, chosen")
    assert "the means of ours are behind *cleanlab, chosen* in AUC and accuracy, and ahead of *cleanlab*." in text


# -- the commands ----------------------------------------------------------------------------------------------------

ONE = ["--dataset", "digits", "--noise", "0.25", "--kind", "symmetric", "--columns", "trusted,plain", "--seeds", "1",
       "--device", "cpu"]  # fmt: skip


def test_reproduce_denoising_runs_what_is_missing_and_shows_all_that_is_there(tmp_path, capsys, monkeypatch):
    ran = []

    def run(settings, device, place, deadline):
        ran.append(settings["column"])
        return {"accuracy": 0.9, "device": "CPU"}

    monkeypatch.setattr(denoising_runs, "run", run)
    folders = ["--out", str(tmp_path / "a"), "--page", str(tmp_path / "b")]
    assert main(["reproduce", "denoising", *ONE, *folders, "--no-run"]) == 2
    assert "has no results" in " ".join(capsys.readouterr().err.split())
    assert ran == []
    assert main(["reproduce", "denoising", *ONE, *folders, "--minutes", "0"]) == 0
    assert ran == []
    assert main(["reproduce", "denoising", *ONE, *folders]) == 0
    assert ran == ["trusted", "plain"]
    assert "2 cells were run" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "b" / "denoising.json").read_text())["cells"]) == 2
    other = ["--out", str(tmp_path / "c"), "--page", str(tmp_path / "b"), "--json"]  # a fresh folder
    assert main(["reproduce", "denoising", *ONE, *other]) == 0
    assert ran == ["trusted", "plain"]
    assert json.loads(capsys.readouterr().out)["cells"] == 2
    assert "| digits (MLP), 25% symmetric | not run | 90.00 (1 seed) |" in (tmp_path / "b" / "denoising.md").read_text()


def test_a_data_set_that_cannot_be_loaded_is_named_and_the_page_is_written(tmp_path, capsys, monkeypatch):
    def loaded(name):
        raise DataError(f"{name} is not here.")

    monkeypatch.setattr(denoising_runs, "loaded", loaded)
    assert main(["reproduce", "denoising", "--dataset", "svhn", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out, errors = capsys.readouterr()
    assert "Nothing is run on svhn: svhn is not here." in " ".join(errors.split())
    assert "0 cells were run" in out
    assert (tmp_path / "denoising.md").exists()


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
    assert "2 cells were run" in (told := " ".join(capsys.readouterr().out.split()))
    assert ", 1 of them until the time was over;" in told
    assert "Begun, and in no table: digits (MLP), 25% symmetric, Val-only" in (tmp_path / "a/denoising.md").read_text()
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["digits-0.25-symmetric-trusted-0-92-1"]
    assert main(call) == 0
    assert "1 cell was run" in capsys.readouterr().out
    assert not list((tmp_path / "a/checkpoints").iterdir())
    assert main([*call[:-1], str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / x / "denoising.json").read_text())["cells"] for x in "ab")
    assert [found["accuracy"] for _, found in first] == [found["accuracy"] for _, found in second]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dataset", "minst"], "--dataset must be one of 'mnist'"),
        (["--noise", "half"], "--noise must be shares"),
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


def test_a_noise_without_a_kind_is_run_of_both_kinds_and_is_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(denoising_runs, "run", lambda *rest: {"accuracy": 0.9, "device": "CPU"})
    call = ["--dataset", "digits", "--noise", "0.3", "--columns", "plain", "--seeds", "1", "--device", "cpu"]
    assert main(["reproduce", "denoising", *call, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
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
    assert {f"denoising-{part}.md", f"denoising-{part}.json", f"denoising-{part}-mlp.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
