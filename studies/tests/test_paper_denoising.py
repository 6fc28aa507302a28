"""The denoising study: its cells, its store, and its runs at a tiny size."""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bilevel_studies.denoising import cells as denoising_cells
from bilevel_studies.denoising import runs as denoising_runs
from bilevel_studies.denoising import small as denoising_small
from bilevel_studies.denoising import speed as denoising_speed
from bilevel_studies.denoising import study as denoising
from bilevel_studies.denoising import wide as denoising_wide
from bilevel_studies.denoising.speed import METHODS
from bilevel_studies.study import Deadline, FiledStore, Sitting
from denoised import digits

from bilevel.applications.training import Trainer, accuracy, probabilities
from bilevel.data import Labelled, corrupt, load, split_trusted
from bilevel.errors import DataError
from bilevel.methods.penalty import Penalty
from bilevel.running.run_many import RunItem, run_items

CPU = torch.device("cpu")


# -- cells -----------------------------------------------------------------------------------------------------------


def test_a_cell_has_the_settings_under_which_results_are_kept():
    cell = denoising.cells(["mnist"], [(0.25, "symmetric")], ["ours"], 1)[0]
    assert cell.name == "mnist-0.25-symmetric-ours-0-12-20"
    assert cell.settings == {
        "dataset": "mnist",
        "noise": 0.25,
        "kind": "symmetric",
        "column": "ours",
        "seed": 0,
        "passes": [12, 20],
    }


def test_cells_are_ranked_ours_then_cheap_columns_then_approx_grad_then_the_papers():
    cells = denoising.cells(["mnist", "cifar10"], denoising.NOISES, list(denoising.COLUMNS), 2)
    ordered = [cell.settings["column"] for cell in sorted(cells, key=lambda cell: -cell.weight)]
    assert set(ordered[:12]) == {"ours"}  # 2 sets, 3 noises, 2 seeds
    assert ordered[-18:] == ["approx-grad"] * 12 + ["algorithm-2"] * 6  # one seed of the last
    clean = [cell.settings for cell in cells if cell.settings["column"] == "clean"]
    assert [(s["dataset"], s["noise"], s["seed"]) for s in clean] == [
        (name, 0.0, seed) for seed in (0, 1) for name in ("mnist", "cifar10")
    ]


def test_cells_are_those_of_the_noises_and_kinds_that_were_asked_for():
    def pairs(noises, kind):
        return {
            (c.settings["noise"], c.settings["kind"])
            for c in denoising_cells.cells(["digits"], noises, kind, ["ours"], 1)
        }

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
    cell, other = RunItem(digits("ours"), 1), RunItem(digits("oracle"), 0)
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
    cell = RunItem(digits("ours"), 1)
    store = FiledStore(tmp_path, tmp_path / "page.json")
    store.put(cell, {"partial": True, "steps": 5})
    assert store.get(cell) is None
    assert store.all() == [(cell.settings, {"partial": True, "steps": 5})]
    store.put(cell, {"partial": True, "steps": 3})
    assert store.kept(cell)["steps"] == 5
    store.put(cell, {"partial": False, "steps": 9})
    assert store.get(cell)["steps"] == 9


def test_cells_run_in_their_rank_and_none_begins_after_the_deadline(tmp_path):
    cells = [RunItem(digits("ours", seed=seed), weight) for seed, weight in enumerate((1.0, 3.0, 2.0))]
    ran = []

    def run(settings):
        ran.append(settings["seed"])
        return {"accuracy": 1.0}

    store = FiledStore(tmp_path, tmp_path / "page.json")
    assert run_items(cells, store, run, deadline=time.monotonic() - 1)
    assert ran == []
    assert run_items(cells, store, run)
    assert ran == [1, 2, 0]
    assert not run_items([RunItem(digits("plain"), 0)], store, lambda settings: None)


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", list(denoising.COLUMNS))
def test_every_column_runs(column):
    found = denoising_runs.run(digits(column, passes=(0.3, 1)), CPU)
    assert found["seconds"] >= 0  # it is rounded
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

    def fit(model, x, y, *, steps, on_progress, **rest):
        seen.update(rows=len(y), steps=steps)
        on_progress(steps)

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

    def fit(model, x, y, *, steps, on_progress, **rest):
        for done in range(1, 4 * each + 1):
            if done % each == 0:
                epochs.append(done // each)
            on_progress(done)

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


PAPER = {
    "lower_steps": 20,
    "gamma": 0.01,
    "epsilon": 0.01,
    "lam": 0.01,
    "multipliers": True,
    "_average_residual": False,
    "gamma_factor": 1.1,
    "lam_factor": 0.9,
    "epsilon_factor": 0.9,
    "decay": "constant",
    "joint": False,
    "lower_batches": "shared",
}
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
    assert ours == Penalty(lower_steps=5, cotangent="same", decay="linear")
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
    settings = {
        "part": "speed",
        "dataset": "digits",
        "network": "mlp",
        "rows": 400,
        "trusted": 200,
        "noise": 0.25,
        "method": name,
        "T": 2,
        "passes": 1,
        "seed": 0,
        "steps": 100,
    }
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
    return {
        "part": part,
        "dataset": "digits",
        "network": network,
        "rows": 300,
        "trusted": trusted,
        "noise": 0.4,
        "seed": 1,
        "steps": 30,
    }


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
            importance=importance,
            quality=importance,
            suspect=importance < 0.5,
            noise_rate=0.5,
            settings={"final_steps": 3, "batch": 10, "rate": 1e-3},
        )

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
    return Labelled(
        "colour",
        "images",
        x,
        data.y[:400],
        data.classes,
        data.keys[:400],
        test=(test[0][:50].expand(-1, 3, -1, -1), test[1][:50]),
    )


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
    settings = {
        "part": "speed",
        "dataset": "digits",
        "network": "mlp",
        "rows": 400,
        "trusted": 200,
        "noise": 0.25,
        "method": name,
        "T": 2,
        "passes": 1,
        "seed": 0,
        "steps": 4,
    }
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
