"""That few-shot learning has the settings it is said to have: a change of one of them fails here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bilevel_studies.few_shot import runs as few_shot_runs
from bilevel_studies.few_shot import study

from bilevel.applications.augmentation import crop_and_flip, crop_flip_and_erase
from bilevel.applications.few_shot import TRAINING, Training, backbone
from bilevel.applications.few_shot import evaluation as few_shot_evaluation
from bilevel.cli import fewshot_run
from bilevel.cli.main import main
from bilevel.data.class_images import ClassSplits, ImageClasses

few_shot = importlib.import_module("bilevel.applications.few_shot.meta_train")  # the package has its function


def classes(count: int, shape: tuple[int, int, int] = (1, 16, 16), prefix: str = "c") -> ImageClasses:
    rng = np.random.default_rng(count)
    images = torch.from_numpy(rng.integers(0, 256, (4 * count, *shape), dtype=np.uint8))
    return ImageClasses(images, (4,) * count, tuple(f"{prefix}{i}" for i in range(count)))


def splits(shape: tuple[int, int, int] = (1, 16, 16)) -> ClassSplits:
    parts = (classes(n, shape, name) for n, name in ((6, "train"), (4, "held"), (5, "test")))
    return ClassSplits("omniglot", *parts)


def test_networks_by_name_have_the_papers_numbers_of_weights():
    sizes = [sum(p.numel() for p in backbone(name, 3).parameters()) for name in ("conv4", "resnet")]
    assert sizes == [113_088, 3_809_888]
    assert sum(p.numel() for p in backbone("conv4", 1).parameters()) == 111_936


def test_omniglot_has_turned_classes_in_the_command_and_in_the_study(monkeypatch):
    monkeypatch.setattr(fewshot_run, "load_classes", lambda *a, **b: splits())
    monkeypatch.setattr(few_shot_runs, "load_classes", lambda *a, **b: splits())
    asked = {"data": "omniglot", "seed": 0, "rotations": None}
    assert len(fewshot_run.load(asked).test.names) == 20
    assert len(fewshot_run.load({**asked, "rotations": False}).test.names) == 5
    assert len(fewshot_run.load({**asked, "data": "cifar-fs"}).test.names) == 5
    few_shot_runs.loaded.cache_clear()
    assert len(few_shot_runs.loaded("omniglot", study.TABLE).test.names) == 20
    assert len(few_shot_runs.loaded("cifar-fs", study.TABLE).test.names) == 5
    few_shot_runs.loaded.cache_clear()


def test_meta_validation_is_on_its_own_classes():
    asked = {"ways": 2, "shots": 1, "queries": 1, "train_ways": 3, "meta_batch": 2}
    train, valid, test = fewshot_run.samplers_of(splits(), asked)
    assert [s.classes.names[0] for s in (train, valid, test)] == ["train0", "held0", "test0"]
    assert (train.ways, valid.ways, test.ways) == (3, 2, 2)
    assert (train.shots, valid.shots, test.shots) == (1, 1, 1)


@pytest.mark.parametrize(("part", "tried"), [(study.CHOICES, "held"), (study.TABLE, "test")])
def test_choices_are_tried_on_meta_validation_classes_and_the_table_on_test_classes(part, tried, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(few_shot_runs, "loaded", lambda dataset, which: splits())
    monkeypatch.setattr(few_shot_runs, "_bilevel", lambda *a: seen.append(a[3][0].classes.names[0][:4]))
    settings = study.table_settings("omniglot", "conv4", 2, 1, "penalty", 0) | {
        "part": part,
        "train_ways": 2,
        "queries": 2,
        "test_queries": 2,
    }
    assert few_shot_runs.run(settings, torch.device("cpu"), tmp_path) is None
    assert seen == [tried]


def test_the_papers_setting_has_the_papers_constants():
    settings = study.table_settings("omniglot", "conv4", 20, 1, "paper", 0)
    found = few_shot_runs.method(settings)
    assert (found.gamma, found.epsilon, found.lam, found.nu, found.lower_steps) == (0.01, 0.01, 0.01, 0.0001, 20)
    assert few_shot_runs.classifiers(settings) == {
        "scale": 1.0,
        "start": "random",
        "proximity": 0.0,
    }
    assert (settings["tasks"], settings["queries"], settings["train_ways"]) == (15, 15, 20)
    assert study.table_settings("omniglot", "conv4", 5, 1, "paper", 0)["tasks"] == 30
    ours = few_shot_runs.classifiers(study.table_settings("omniglot", "conv4", 20, 1, "penalty", 0))
    assert ours == {"scale": few_shot.SCALE, "start": "means", "proximity": few_shot.PROXIMITY}


def test_the_test_is_that_of_the_paper():
    assert (study.TEST_TASKS, few_shot_evaluation.ADAPT_STEPS) == (600, 100)
    assert study.PAPER["omniglot", 20, 5]["penalty"] == 98.47
    assert study.PAPER["omniglot", 5, 1] == {"penalty": 97.83, "approx-grad": 97.75, "rmd": 98.6, "prototypes": 98.8}


def test_images_in_colour_are_moved_in_the_study_and_in_the_command(monkeypatch, tmp_path):
    for dataset, wanted in (("cifar-fs", crop_and_flip), ("omniglot", None)):
        settings = study.table_settings(dataset, "conv4", 5, 1, "penalty", 0)
        assert few_shot_runs.augmentation(settings) is wanted
    given = {}

    def spy(*args, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(fewshot_run, "meta_train", spy)
    for shape, wanted in (((3, 16, 16), crop_and_flip), ((1, 16, 16), None)):
        monkeypatch.setattr(fewshot_run, "load", lambda asked, shape=shape: splits(shape))
        arguments = ["fewshot", "omniglot", "--ways", "2", "--queries", "2", "--decay", "0.25", "--device", "cpu"]
        assert main([*arguments, "--out", str(tmp_path / str(shape[0]))]) == 130
        assert given["augment"] is wanted
        assert given["method"].upper_optimizer.keywords["weight_decay"] == 0.25
    assert given["log_every"] == 1, "on a CPU a step can take seconds"


def test_the_residual_network_is_trained_as_the_study_chose(monkeypatch, tmp_path):
    given, evaluated = {}, {}

    def spy(*args, **options):
        given.update(options)
        raise KeyboardInterrupt

    assert TRAINING["conv4"] == Training(rate=2e-3, decay=0.0, scale=10.0, erase=False)
    plan = TRAINING["resnet"]
    made = {"decay": plan.decay, "erased": plan.erase, "upper_rate": plan.rate, "scale": plan.scale}
    assert made == study.RESNET_VARIED[study.CHOSEN["resnet", "penalty"]]
    assert few_shot_runs.augmentation({"dataset": "cifar-fs", "erased": True}) is crop_flip_and_erase
    monkeypatch.setattr(fewshot_run, "load", lambda asked: splits((3, 16, 16)))
    monkeypatch.setattr(fewshot_run, "meta_train", spy)
    monkeypatch.setattr(fewshot_run, "Validation", lambda *args, **options: evaluated.update(options))
    arguments = ["fewshot", "cifar-fs", "--ways", "2", "--queries", "2", "--backbone", "resnet", "--device", "cpu"]
    for more, decay in ((), plan.decay), (("--decay", "0"), 0.0):
        assert main([*arguments, *more, "--out", str(tmp_path / str(decay))]) == 130
        assert given["augment"] is crop_flip_and_erase
        assert [each["scale"] for each in (given, evaluated)] == [plan.scale] * 2
        moved = given["method"].upper_optimizer.keywords
        assert (moved["lr"], moved["weight_decay"]) == (plan.rate, decay)


BETTER_APART = {("conv4", "prototypes"): "distances / 64"}
"""Settings that are better than `APART` by a comparison after which no table was run."""


def kept_cells() -> list[Any]:
    return json.loads((Path(__file__).parents[1] / "results" / "few-shot.json").read_text())["cells"]


def test_the_settings_on_cifar_fs_are_the_best_that_were_compared():
    kept = kept_cells()
    tried = [pair for pair in kept if pair[0]["part"] == study.CHOICES and pair[0]["dataset"] == "cifar-fs"]
    for place, taken in study.CHOSEN.items():
        mine: dict[str, dict[int, tuple[float, float]]] = {}
        alone = {}
        for s, f in tried:
            if (s["backbone"], s["method"]) == place and s["shots"] == 5:
                mine.setdefault(s["varied"], {})[s["seed"]] = (f["accuracy"], f["also"]["accuracy"])
            elif (s["backbone"], s["method"]) == place:
                alone[s["varied"]] = f["accuracy"]
        assert all(len(seeds) == study.CHOICE_SEEDS for seeds in mine.values())
        best = max(mine, key=lambda varied: sum(map(sum, mine[varied].values())))
        assert best in (taken, *study.ALSO_RUN.get(place, ())), place
        one_shot = max(alone, key=lambda varied: alone[varied])
        better = alone[one_shot] > sum(one for _, one in mine[taken].values()) / study.CHOICE_SEEDS
        assert BETTER_APART.get(place, study.APART.get(place)) == (one_shot if better else None), place


def test_of_settings_that_have_the_length_of_the_table_the_best_on_meta_validation_classes_is_taken():
    kept = kept_cells()
    for (network, method), others in study.ALSO_RUN.items():
        held = "chosen_accuracy" if network == "resnet" else "accuracy"
        assert held != "accuracy" or method == "prototypes", (
            "a choice made on the test classes can favour only a baseline"
        )
        taken, means = study.chosen_for(network, method), {}
        for name in (taken, *others):
            wanted = [study.table_settings("cifar-fs", network, 5, 5, method, i, name) for i in range(study.ALSO_SEEDS)]
            found = [f[held] for s, f in kept if any(one.items() <= s.items() for one in wanted)]
            assert len(found) == study.ALSO_SEEDS, (network, method, name)
            means[name] = sum(found)
        assert max(means, key=lambda name: means[name]) == taken, (network, method)


def test_all_that_was_run_on_cifar_fs_is_shown_and_all_choices_were_run():
    kept = [s for s, _ in kept_cells() if s["dataset"] == "cifar-fs" and s["method"] != "paper"]
    asked = study.cells([study.TABLE], ["cifar-fs"], list(study.METHODS), 5, ["conv4", "resnet"])
    wanted = [{**c.settings, "seed": None} for c in asked]
    assert [s for s in kept if s["part"] == study.TABLE and {**s, "seed": None} not in wanted] == [], "also worse ones"
    assert [s for s in study.study_choices("cifar-fs") if s not in kept] == []


def test_the_page_gives_the_commands_of_its_seeds():
    page = (Path(__file__).parents[2] / "docs" / "results" / "few-shot.md").read_text()
    by = {
        network: {
            s["seed"]
            for s, _ in kept_cells()
            if s["dataset"] == "cifar-fs" and s["backbone"] == network and s["part"] == study.TABLE
        }
        for network in ("conv4", "resnet")
    }
    for network, found in by.items():
        assert f"--backbones {network} --seeds {len(found)} " in page
