"""The few-shot study: its cells, what a run of one keeps, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bilevel_studies.few_shot import runs as few_shot_runs
from bilevel_studies.few_shot import study, tables
from common import needs
from PIL import Image

from bilevel.applications.few_shot.meta_train import PROXIMITY, default_method
from bilevel.cli.main import main
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


def test_the_cells_of_the_study_are_distinct_and_the_most_wanted_come_first():
    cells = study.cells(study.PARTS[:2], study.DATASETS, tuple(study.METHODS), 2, ("conv4", "resnet"))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    first = sorted(cells, key=lambda cell: -cell.weight)[:2]
    assert all(c.settings["method"] == "penalty" and c.settings["dataset"] == "omniglot" for c in first)
    paper = [c.settings for c in cells if c.settings["method"] == "paper" and c.settings["dataset"] == "omniglot"]
    assert {(s["ways"], s["tasks"]) for s in paper} == {(5, 30), (20, 15)}


def test_tables_have_accuracies_and_differences(tmp_path):
    kept = []
    for (ways, shots), accuracy in {(5, 1): 0.9901, (20, 1): 0.9449}.items():
        settings = study.table_settings("omniglot", "conv4", ways, shots, "penalty", 0)
        curve = [{"step": 1, "seconds": 0.5, "accuracy": 0.5}, {"step": 2, "seconds": 1.0, "accuracy": accuracy}]
        kept.append(
            (
                settings,
                {
                    "accuracy": accuracy,
                    "interval": 0.001,
                    "steps": 3000,
                    "of": 3000,
                    "ms_per_step": 8.0,
                    "seconds": 24.0,
                    "curve": curve,
                    "weights": 111_936,
                    "device": "CPU",
                    "accuracy_of_means": accuracy,
                    "train_accuracy": 0.9876,
                },
            )
        )
    for network in ("resnet", "conv4"):
        for method, accuracy in {"penalty": 0.6012, "approx-grad": 0.5, "prototypes": 0.6}.items():
            place = study.table_settings("cifar-fs", network, 5, 1, method, 0)
            kept.append((place, {**kept[0][1], "accuracy": accuracy}))
    report = tables.report(kept, tmp_path)
    assert report.summary["aims_reached"] == {"5-way 1-shot": True, "20-way 1-shot": False}
    text = report.tables["omniglot, four convolutions"]
    assert "| Penalty, ours | 99.01 ± 0.10 | 97.83 | not run | 99.45 | 94.49 ± 0.10 | 94.06 | not run | 98.47 |" in text
    assert "| 99.01 | 98.76 |" in report.tables["Accuracy against time"]
    gaps = report.tables["Penalty minus the other methods, in points"]
    row = "5-way 1-shot | +10.12 ± at most 0.14 |  | +0.12 ± at most 0.14 |  |"
    assert f"| cifar-fs, four convolutions, {row}" in gaps
    assert f"| cifar-fs, the residual network, {row}" in gaps
    assert "The effect of T" not in report.tables
    assert (tmp_path / "few-shot-speed.png").stat().st_size > 1000


def test_runs_that_the_limit_of_time_has_ended_have_their_steps_next_to_them(tmp_path):
    whole = {
        "accuracy": 0.99,
        "interval": 0.001,
        "steps": 3000,
        "of": 3000,
        "seconds": 24.0,
        "weights": 111_936,
        "device": "CPU",
        "accuracy_of_means": 0.5,
        "ms_per_step": 8.0,
    }
    cut = {**whole, "accuracy": 0.9, "steps": 60, "partial": True, "ms_per_step": 99.0}
    untimed = {name: value for name, value in whole.items() if name != "ms_per_step"}
    kept = [
        (study.table_settings("omniglot", "conv4", 5, 1, "penalty", 0), cut),
        (study.table_settings("omniglot", "conv4", 5, 5, "penalty", 0), whole),
        (study.table_settings("omniglot", "conv4", 5, 5, "penalty", 1), cut),
        (study.table_settings("omniglot", "conv4", 5, 1, "prototypes", 0), untimed),
        *((cell.settings, cut) for cell in study.cells([study.CHOICES], ["omniglot"], ["penalty"], 1, ["conv4"])[:1]),
        (study.cells([study.EFFECT], ["omniglot"], ["penalty"], 1, ["conv4"])[0].settings, cut),
    ]
    text = tables.report(kept, tmp_path).text()
    row = next(line for line in text.splitlines() if line.startswith("| Penalty, ours | 90.00"))
    assert row.startswith("| Penalty, ours | 90.00 ± 0.10 (60 of 3,000 steps) | 97.83 | 99.00 ± 0.10 |")
    assert "| as the table |" not in text
    assert "| Penalty, ours | 1 | 90.00 ± 0.10 (60 of 3,000 steps) | 99.0 |" in text


def test_a_quick_look_says_so_and_has_no_figures(tmp_path):
    found = {
        "accuracy": 0.7,
        "interval": 0.1,
        "steps": 10,
        "of": 10,
        "ms_per_step": 8.0,
        "seconds": 1.0,
        "weights": 111_936,
        "device": "CPU",
    }
    kept = [(cell.settings, found) for cell in study.small_cells()]
    report = tables.report(kept, tmp_path)
    assert report.summary == {"cells": len(kept), "quick": True, "aims_reached": {}}
    assert "Accuracy against time" not in report.tables
    assert not list(tmp_path.iterdir())


def test_a_quick_look_takes_no_parts(capsys):
    assert main(["reproduce", "fewshot", "--quick", "--parts", "table", "--seeds", "2"]) == 2
    assert "--parts and --seeds must be left out with --quick" in capsys.readouterr().err


def test_differences_are_judged_by_the_tasks_that_both_methods_have():
    cells = [
        (
            study.table_settings("cifar-fs", "conv4", 5, 1, method, 0),
            {"accuracy": sum(right) / 4 / 75, "interval": 0.2, "queries": 15, "right": right},
        )
        for method, right in (("penalty", [40, 50, 60, 71]), ("prototypes", [38, 48, 58, 68]))
    ]
    # differences 2, 2, 2, 3 of 75: 3 points, half-width t(3) * 0.5 / 2 / 75
    gap, half, bound = tables.gap(cells[:1], cells[1:])
    assert (gap, half, bound) == (pytest.approx(3.0), pytest.approx(1.06, abs=0.005), "")
    cells[1][1]["right"] = [50, 40, 70, 52]
    gap, half, _ = tables.gap(cells[:1], cells[1:])
    assert abs(gap) < half, "the tasks do not resolve it"
    assert tables.gap(cells[:1], []) is None


def test_of_cells_with_other_settings_those_of_now_are_shown_alone():
    now = [study.table_settings("cifar-fs", "conv4", 5, 5, "penalty", seed) for seed in (0, 1)]
    before = [{**settings, "proximity": 2.0} for settings in now]
    partial = {"accuracy": 0.5, "partial": True}
    kept = [(before[0], {"accuracy": 0.7}), (before[1], {"accuracy": 0.8}), (now[0], partial)]
    assert tables.longest(kept) == [(now[0], partial)], "unfinished as it is"
    assert [f["accuracy"] for _, f in tables.longest(kept[:2])] == [0.7, 0.8], "if there is nothing else"


def test_changes_that_are_listed_no_more_are_left_out(tmp_path):
    found = {
        "accuracy": 0.7,
        "interval": 0.001,
        "steps": 800,
        "of": 800,
        "ms_per_step": 8.0,
        "seconds": 1.0,
        "weights": 111_936,
        "device": "CPU",
        "accuracy_of_means": 0.6,
    }
    settings = study.cells([study.CHOICES], ["omniglot"], ["penalty"], 1, ["conv4"])[0].settings
    text = tables.report([({**settings, "varied": "of another time"}, found), (settings, found)], tmp_path).text()
    assert "| as the table | 70.00 ± 0.10 | 60.00 |" in text
    assert "of another time" not in text


def test_a_cell_says_what_its_result_depends_on():
    ours = study.table_settings("omniglot", "conv4", 20, 1, "penalty", 0)
    default = default_method()
    assert ours["gamma"] == default.gamma
    assert ours["lower_rate"] == pytest.approx(default.lower_optimizer.keywords["lr"])
    assert ours["proximity"] == PROXIMITY
    made = few_shot_runs.method({**ours, "gamma": 2.0, "lower_rate": 0.5})
    assert (made.gamma, made.lower_optimizer.keywords["lr"], made.lam) == (2.0, 0.5, 0.0)
    others = study.table_settings("omniglot", "conv4", 20, 1, "approx-grad", 0)
    assert others["proximity"] == PROXIMITY
    assert "lower_rate" not in others


def test_each_method_is_compared_with_the_changes_that_concern_it():
    cells = [c.settings for c in study.cells([study.CHOICES], ["cifar-fs"], ["penalty", "prototypes"], 1, ["resnet"])]
    names = {m: {s["varied"] for s in cells if s["method"] == m} for m in ("penalty", "prototypes")}
    assert names["penalty"] | names["prototypes"] == set(study.RESNET_VARIED)
    assert not names["penalty"] & names["prototypes"]
    assert len(names["penalty"]) <= len(names["prototypes"]), "the baseline is tried with no fewer"
    loose = next(s for s in cells if s["varied"] == "proximity 1, gamma 10, lower rate 0.03")
    usual = next(s for s in cells if s["varied"] == "scale 10")
    assert [(s["proximity"], s["gamma"], s["lower_rate"]) for s in (loose, usual)] == [
        (1.0, 10.0, 0.03),
        (5.0, 4.0, 0.006),
    ]
    assert {(s["shots"], s["seed"], str(s.get("also"))) for s in cells if s["varied"] == "scale 10"} == {
        (5, 0, "[5, 1]"),
        (5, 1, "[5, 1]"),
        (1, 0, "None"),
    }


def test_class_means_by_cosines_have_what_penalty_has_but_a_lower_problem():
    ours, theirs = (study.table_settings("cifar-fs", "resnet", 5, 5, m, 0) for m in ("penalty", "cosines"))
    assert {key for key in ours if ours[key] != theirs.get(key)} == {
        "method",
        "T",
        "proximity",
        "gamma",
        "lower_rate",
    }
    assert set(theirs) < set(ours)
    means = study.table_settings("cifar-fs", "resnet", 5, 5, "prototypes", 0)
    assert study.timed_as(theirs) == study.timed_as(means)


def test_cifar_fs_is_trained_with_five_shots_and_tried_with_one_too_but_where_one_was_better():
    cells = [c.settings for c in study.cells([study.TABLE], ["cifar-fs"], list(study.METHODS), 1, ["conv4"])]
    found = {m: [(s["shots"], s.get("also")) for s in cells if s["method"] == m] for m in study.METHODS}
    assert found["penalty"] == found["rmd"] == [(5, [5, 1])]
    assert found["paper"] == [(1, None), (5, None)]
    assert study.trained_for("omniglot", "conv4", 5, 1, "prototypes") == (20, 1)
    scales = [(s["shots"], s["distances"], s.get("also")) for s in cells if s["method"] == "prototypes"]
    assert scales == [(1, 1 / 16, None), (5, 1 / 64, None), (5, 1 / 256, None)], "the last was also run at this length"


def test_what_else_has_the_length_of_the_table_comes_last_by_three_seeds_and_stands_by_itself(tmp_path):
    cells = [c.settings for c in study.cells([study.TABLE], ["cifar-fs"], ["prototypes"], 5, ["resnet"])]
    decays = {seed: [s["decay"] for s in cells if s["seed"] == seed] for seed in range(5)}
    assert decays == {seed: [0.5, 2.0, 4.0, 1.0, 2.0] if seed < 3 else [0.5] for seed in range(5)}
    assert {s["steps"] for s in cells} == {3000}
    found = {"interval": 0.01, "steps": 3000, "of": 3000, "device": "CPU", "weights": 1, "ms_per_step": 1.0}
    kept = [
        (s, {**found, "accuracy": a, "chosen_accuracy": a - 0.1, "also": {"accuracy": a - 0.2, "interval": 0.01}})
        for s in cells
        for a in (0.75 - s["decay"] / 100 + s["seed"] / 1000,)
    ]
    choice = study.cells([study.CHOICES], ["cifar-fs"], ["prototypes"], 1, ["resnet"])[0].settings
    text = tables.report([*kept, (choice, {**found, "accuracy": 0.7})], tmp_path).text()
    assert "| ProtoNet | 54.70 ± 0.16 (5 seeds) | 74.70 ± 0.16 (5 seeds) |" in text
    first, *others = text[text.index("| the residual network | ProtoNet | distances / 32 |") :].splitlines()[:5]
    three = "64.60 ± 0.10 (64.70 over 5) | 74.60 ± 0.10 (74.70 over 5) | 54.60 ± 0.10 (54.70 over 5)"
    assert first.endswith(f"| distances / 32 | {three} |"), "the one that is taken comes first"
    assert others[2:] == [
        "| the residual network | ProtoNet | distances / 32, decay 1 | 64.10 ± 0.10 | 74.10 ± 0.10 | 54.10 ± 0.10 |",
        "| the residual network | ProtoNet | distances / 32, decay 2 | 63.10 ± 0.10 | 73.10 ± 0.10 | 53.10 ± 0.10 |",
    ]
    cut = [(s, {**f, "partial": s["seed"] == 1, "accuracy": 0.1 if s["seed"] == 1 else f["accuracy"]}) for s, f in kept]
    text = tables.report([*cut, (choice, {**found, "accuracy": 0.7})], tmp_path).text()
    assert "| ProtoNet | distances / 32, decay 2 | 63.10 ± 0.14 (2 seeds) | 73.10 ± 0.14 (2 seeds) |" in text


def test_what_is_tried_on_other_tasks_too_is_tried_on_unseen_classes_with_their_shots(folder, tmp_path, monkeypatch):
    classes, seen = load_classes(folder), []
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    measured = few_shot_runs._evaluate

    def spy(settings, network, sampler, *rest):
        seen.append((sampler.classes.names, sampler.ways, sampler.shots))
        return measured(settings, network, sampler, *rest)

    monkeypatch.setattr(few_shot_runs, "_evaluate", spy)
    settings = study.table_settings("omniglot", "conv4", 2, 2, "rmd", 0) | {
        "steps": 1,
        "train_ways": 2,
        "tasks": 1,
        "queries": 2,
        "points": 1,
        "test_tasks": 4,
        "test_queries": 3,
        "also": [2, 1],
    }
    few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert seen == [(classes.test.names, 2, 2), (classes.test.names, 2, 1)]


def test_a_test_with_one_shot_is_shown_of_the_training_that_it_is_of():
    five = study.table_settings("cifar-fs", "conv4", 5, 5, "penalty", 0) | {"also": [5, 1]}
    one = study.table_settings("cifar-fs", "conv4", 5, 1, "penalty", 0)
    kept = [(one, {"accuracy": 0.5}), (five, {"accuracy": 0.7, "also": {"accuracy": 0.63}})]
    for cells in (kept, kept[::-1]):
        found = {s["shots"]: f["accuracy"] for s, f in tables.longest(tables.apart(cells))}
        assert found == {5: 0.7, 1: 0.63}


def test_of_other_meta_batches_those_of_now_are_shown_alone():
    now = study.table_settings("cifar-fs", "conv4", 5, 5, "penalty", 0)
    kept = [({**now, "train_ways": 40, "tasks": 2}, {"accuracy": 0.9}), (now, {"accuracy": 0.7})]
    for cells in (kept, kept[::-1]):
        assert [f["accuracy"] for _, f in tables.longest(cells)] == [0.7]
    both = [
        ({**now, "train_ways": ways, "steps": steps}, {"accuracy": a})
        for ways, steps, a in ((40, 9, 0.8), (30, 8, 0.9))
    ]
    assert [f["accuracy"] for _, f in tables.longest(both)] == [0.8], "one of a place and a seed"


def test_choices_of_other_settings_are_no_seeds_of_those_that_are_listed(tmp_path):
    found = {
        "accuracy": 0.7,
        "interval": 0.01,
        "steps": 1,
        "of": 1,
        "device": "CPU",
        "weights": 1,
        "also": {"accuracy": 0.6, "interval": 0.01},
    }
    cells = [c.settings for c in study.cells([study.CHOICES], ["cifar-fs"], ["penalty"], 1, ["conv4"])]
    mine = [s for s in cells if s["varied"] == "scale 5" and s["shots"] == 5]
    stale = [{**mine[0], "scale": 6.0}, {**mine[0], "seed": 7}]
    kept = [*((s, found) for s in mine), *((s, {**found, "accuracy": 0.1}) for s in stale)]
    text = tables.report(kept, tmp_path).text()
    assert "| scale 5 | 5 | Penalty, ours | 70.00 ± 0.00 | 60.00 ± 0.00 | 65.00 |" in text


def test_turned_classes_are_learnt_from_and_not_tried_on(folder, tmp_path, monkeypatch):
    classes, seen = load_classes(folder), []
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    monkeypatch.setattr(
        few_shot_runs, "_bilevel", lambda *a: seen.append([len(s.classes.names) for s in (a[2], a[3][0])])
    )
    few = {"train_ways": 2, "queries": 2, "test_queries": 3}
    for more in ({}, {"turned": True}):
        settings = study.table_settings("omniglot", "conv4", 2, 1, "penalty", 0) | few | more
        few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert seen[1] == [4 * seen[0][0], seen[0][1]]
    assert "turned" in study.KIND


def test_differences_of_several_seeds_have_the_interval_over_seeds():
    cells = {
        m: [
            (study.table_settings("cifar-fs", "conv4", 5, 1, m, seed), {"accuracy": a, "interval": 0.01})
            for seed, a in enumerate(found)
        ]
        for m, found in (("penalty", (0.6, 0.61)), ("approx-grad", (0.61, 0.58)))
    }
    # differences -1 and 3: their mean 1, half-width t(1) * sqrt(8) / sqrt(2)
    gap = tables.gap(cells["penalty"], cells["approx-grad"])
    assert gap == (pytest.approx(1.0), pytest.approx(25.41, abs=0.01), "")
    assert tables.gap(cells["penalty"][:1], cells["approx-grad"])[2] == "at most "


def test_prototypes_have_the_scale_and_the_network_of_their_cell(folder, tmp_path, monkeypatch):
    plain, usual = (few_shot_runs.representation({"backbone": "resnet", "plain": p}, 3) for p in (True, False))
    assert [sum(p.numel() for p in net.parameters()) for net in (plain, usual)] == [3_807_328, 3_809_888]
    classes, given = load_classes(folder), {}
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)

    def spy(*args, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(few_shot_runs, "train_prototypes", spy)
    settings = study.table_settings("omniglot", "conv4", 2, 1, "prototypes", 0) | {
        "train_ways": 2,
        "queries": 2,
        "test_queries": 3,
        "distances": 0.25,
    }
    with pytest.raises(KeyboardInterrupt):
        few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert (given["scale"], given["similarity"]) == (0.25, "distance")
    with pytest.raises(KeyboardInterrupt):
        few_shot_runs.run({**settings, "method": "cosines", "scale": 20.0}, torch.device("cpu"), tmp_path)
    assert (given["scale"], given["similarity"]) == (20.0, "cosine")


def test_omniglot_is_trained_once_and_tried_with_both_ways(tmp_path, folder, monkeypatch):
    cells = [c.settings for c in study.cells([study.TABLE], ["omniglot"], ["penalty", "paper"], 1, ["conv4"])]
    ours = [s for s in cells if s["method"] == "penalty"]
    assert sorted((s["ways"], s["shots"], s["also"]) for s in ours) == [(20, 1, [5, 1]), (20, 5, [5, 5])]
    assert len([s for s in cells if s["method"] == "paper"]) == 4, "whose training has the ways of the test"
    classes = load_classes(folder)
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    settings = study.table_settings("omniglot", "conv4", 2, 1, "penalty", 1) | {
        "steps": 2,
        "train_ways": 2,
        "tasks": 2,
        "queries": 2,
        "points": 1,
        "test_tasks": 10,
        "test_queries": 3,
        "also": [2, 1],
    }
    found = few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    both = ("accuracy", "interval", "right", "accuracy_of_means")
    assert found["also"] == {name: found[name] for name in both}, "the same tasks here"
    assert sum(found["right"]) == pytest.approx(10 * 2 * 3 * found["accuracy"])
    one = {
        "accuracy": 0.99,
        "interval": 0.001,
        "also": {"accuracy": 0.9, "interval": 0.002},
        "steps": 1,
        "curve": [1],
        "accuracy_of_means": 0.98,
        "train_accuracy": 1.0,
        "right": [1],
    }
    shown = tables.apart([(ours[0], one)])
    assert set(shown[1][1]) == {"accuracy", "interval", "steps"}, "the rest is of 20 ways"
    assert [(s["ways"], f["accuracy"], "also" in {**s, **f}) for s, f in shown] == [(20, 0.99, False), (5, 0.9, False)]


def test_a_cell_whose_step_is_chosen_takes_the_place_of_one_whose_is_not(tmp_path):
    found = {
        "accuracy": 0.7,
        "interval": 0.001,
        "steps": 3000,
        "of": 3000,
        "ms_per_step": 8.0,
        "seconds": 24.0,
        "weights": 3_809_888,
        "device": "CPU",
        "kept_step": 1800,
    }
    selected = study.table_settings("cifar-fs", "resnet", 5, 5, "penalty", 0)
    assert selected["decay"] > 0
    last = {key: value for key, value in selected.items() if key not in study.KIND}
    (choice, *_), others = (
        study.cells([study.CHOICES], [name], ["penalty"], 1, [network])
        for name, network in (("cifar-fs", "resnet"), ("omniglot", "conv4"))
    )
    assert {c.settings["dataset"] for c in others} == {"omniglot"}
    tried = {**found, "also": {"accuracy": 0.6, "interval": 0.001}}
    kept = [(last, {**found, "accuracy": 0.9}), (selected, found), (choice.settings, tried)]
    text = tables.report(kept, tmp_path).text()
    assert "| Penalty, ours | not run | 70.00 ± 0.10 |" in text
    assert "| scale 10 | 5 | Penalty, ours | 70.00 (1 seed) | 60.00 (1 seed) | 65.00 |" in text
    others = {**selected, "decay": 0.1}
    text = tables.report([(others, {**found, "accuracy": 0.9}), (selected, found)], tmp_path).text()
    assert "| 70.00 ± 0.10 |" in text, "the settings of now, whichever came first"


@needs("cifar100")
@pytest.mark.parametrize("method", ["penalty", "prototypes"])
def test_a_cell_is_measured_at_its_best_step_on_meta_validation_classes(tmp_path, method, monkeypatch):
    heard = []
    monkeypatch.setattr(few_shot_runs.Best, "hear", lambda self, step, accuracy: heard.append((step, accuracy)))
    monkeypatch.setattr(few_shot_runs.Best, "restore", lambda self: max(heard, key=lambda pair: pair[1]))
    monkeypatch.setattr(few_shot_runs, "CURVE_TASKS", 4)
    few = {"steps": 3, "train_ways": 3, "tasks": 1, "queries": 2, "points": 1, "test_tasks": 3, "backbone": "conv4"}
    settings = study.table_settings("cifar-fs", "resnet", 5, 1, method, 0) | few
    found = few_shot_runs.run(settings, torch.device("cpu"), tmp_path)
    assert [step for step, _ in heard] == [1, 2, 3]
    assert (found["kept_step"], found["chosen_accuracy"]) == max(heard, key=lambda pair: pair[1])


def test_a_run_that_shared_the_gpu_has_the_time_of_a_short_run_by_itself_and_no_other(tmp_path):
    curve = [{"step": 300, "seconds": 9.0, "accuracy": 0.5}, {"step": 600, "seconds": 18.0, "accuracy": 0.9}]
    found = {
        "accuracy": 0.9,
        "interval": 0.001,
        "steps": 600,
        "of": 600,
        "ms_per_step": 30.0,
        "seconds": 18.0,
        "curve": curve,
        "weights": 111_936,
        "device": "CPU",
        "beside": 3,
    }
    shared = study.table_settings("omniglot", "conv4", 5, 1, "rmd", 0)
    untimed = study.table_settings("omniglot", "conv4", 5, 5, "rmd", 0)
    alone = study.table_settings("omniglot", "conv4", 5, 1, "penalty", 0)
    own = {key: value for key, value in found.items() if key != "beside"}
    time = (shared | {"part": study.TIME, "ways": 20, "steps": study.TIME_STEPS}, {"steps": 100, "ms_per_step": 5.0})
    cells = tables.timed([(shared, found), (untimed, found), (alone, own)], [time])
    assert [one["ms_per_step"] for _, one in cells] == [5.0, None, 30.0]
    assert [[row["seconds"] for row in one["curve"]] for _, one in cells] == [[1.5, 3.0], [], [9.0, 18.0]]
    text = tables.report([(shared, found), (untimed, found), (alone, own), time], tmp_path).text()
    assert "5-way 1-shot | RMD | 600 | 5.0 | 3.0 |" in text
    assert "5-way 5-shot | RMD" not in text


def test_of_runs_of_several_lengths_the_longest_finished_one_is_shown():
    short, long = (study.table_settings("cifar-fs", "resnet", 5, 1, "penalty", 0) | {"steps": n} for n in (100, 300))
    other = study.table_settings("cifar-fs", "resnet", 5, 1, "penalty", 1)
    kept = [(short, {"accuracy": 0.5}), (long, {"accuracy": 0.6}), (other, {"accuracy": 0.7})]
    assert [f["accuracy"] for _, f in tables.longest(kept)] == [0.6, 0.7]
    kept[1] = (long, {"accuracy": 0.6, "partial": True})
    assert [f["accuracy"] for _, f in tables.longest(kept)] == [0.5, 0.7]


def test_times_are_of_every_kind_of_step_once_and_never_taken_side_by_side(tmp_path, capsys):
    cells = study.cells([study.TIME], study.DATASETS, tuple(study.METHODS), 5, ("conv4", "resnet"))
    kinds = [study.timed_as(cell.settings) for cell in cells]
    assert len(set(kinds)) == len(kinds) == 4 * 4 + 1 + 8 + 6, (
        "four methods on each training of Omniglot and each network; ProtoNet with 1 shot; the paper's setting; other T"
    )
    assert {cell.settings["steps"] for cell in cells} == {study.TIME_STEPS}
    assert main(["reproduce", "fewshot", "--parts", "time", "--workers", "2", "--out", str(tmp_path)]) == 2
    assert "It needs --workers 1." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("method", ["penalty", "prototypes"])
def test_the_time_of_a_step_is_taken_after_the_middle_of_a_short_run(method, folder, tmp_path, monkeypatch):
    classes = load_classes(folder)
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, part: classes)
    settings = study.table_settings("omniglot", "conv4", 2, 1, method, 0) | {
        "part": study.TIME,
        "steps": 10,
        "train_ways": 2,
        "tasks": 2,
        "queries": 2,
        "test_queries": 3,
    }
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
        "steps": 6,
        "train_ways": 2,
        "tasks": 2,
        "queries": 2,
        "points": 3,
        "test_tasks": 10,
        "test_queries": 3,
        "selected": True,
    }
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
    assert json.loads(capsys.readouterr().out)["message"].startswith(f"Ran {len(study.METHODS)} cells in")
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["message"].startswith("Ran 0 cells in")
