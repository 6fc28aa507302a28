"""That few-shot learning has the settings it is said to have: a change to one of them fails here."""

from __future__ import annotations

import base64
import importlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bilevel_studies.few_shot import runs as few_shot_runs
from bilevel_studies.few_shot import study
from PIL import Image
from torch import nn

from bilevel.applications.augmentation import crop_and_flip, crop_flip_and_erase
from bilevel.applications.few_shot import TRAINING, Episodes, TaskSampler, Training, backbone, meta_train
from bilevel.applications.few_shot import evaluation as few_shot_evaluation
from bilevel.cli import fewshot_run
from bilevel.cli.fewshot_output import write_embeddings
from bilevel.cli.main import main
from bilevel.data import class_images
from bilevel.data.class_images import ClassSplits, ImageClasses, ink, load_classes
from bilevel.errors import DataError
from bilevel.report.figures import CELL, FIELD, GAP, RIGHT, WRONG, plane, task_picture
from bilevel.results import History
from bilevel.running.callbacks import Run

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
    assert given["log_every"] == 1, "on a CPU a step may take seconds"


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
        assert held != "accuracy" or method == "prototypes", "what is seen at the test favours a baseline alone"
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
    assert [s for s in kept if s["part"] == study.TABLE and {**s, "seed": None} not in wanted] == [], "worse ones, too"
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


def test_options_of_meta_train_reach_the_tasks(monkeypatch):
    sampler = TaskSampler(classes(6), 3, 1, 2, tasks=2)

    def fails(*args, **options):
        kept.update(options)
        raise InterruptedError

    kept, network = {}, nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    monkeypatch.setattr(few_shot, "Episodes", fails)
    with pytest.raises(InterruptedError):
        meta_train(network, sampler, steps=1, proximity=0.5, start="random", augment=crop_and_flip)
    found = [kept[name] for name in ("proximity", "start", "augment")]
    assert found == [0.5, "random", crop_and_flip]
    monkeypatch.setattr(few_shot, "CosineClassifier", fails)
    monkeypatch.setattr(few_shot, "Episodes", Episodes)
    with pytest.raises(InterruptedError):
        meta_train(network, sampler, steps=1, scale=7.0)
    assert kept["scale"] == 7.0


def test_start_and_augment_change_what_a_meta_batch_is():
    sampler = TaskSampler(classes(6), 3, 1, 2, tasks=2)
    index = sampler.draw(2, torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    plain = Episodes(sampler, torch.device("cpu"))
    dark = Episodes(sampler, torch.device("cpu"), augment=torch.zeros_like, start="random")
    with torch.no_grad():
        a, b = plain.prepare(network, (index, None)), dark.prepare(network, (index, None))
        assert torch.equal(b[0][0, 0], network[1].bias)
        assert not torch.equal(a[0], b[0])
        v = few_shot.CosineClassifier(2, 4, 3)
        plain.start_lower(v, a)
        means = v.weight.clone()
        dark.start_lower(v, a)
    assert not torch.equal(v.weight, means)


def test_the_bar_has_the_last_accuracy_on_meta_validation_classes():
    watch = few_shot.Validation(nn.Linear(1, 1), TaskSampler(classes(4), 2, 1, 1), every=1)
    bar, run = fewshot_run._Bar(watch), Run("stochastic", 10, 1, History(), seconds=1.0)
    bar.log(run)
    assert bar.label == "learning"
    watch.rows.append({"step": 1, "seconds": 1.0, "accuracy": 0.756})
    bar.log(run)
    assert bar.label == "learning, validation 75.6%"


@pytest.mark.parametrize(("seconds", "said"), [(30.0, True), (1.0, False)])
def test_a_run_that_takes_many_hours_says_so_once_and_what_takes_less(seconds, said, capsys):
    bar = fewshot_run._Bar(None)
    for step in (3, 4):
        bar.log(Run("stochastic", 10_000, step, History(), seconds=seconds * step))
    err = capsys.readouterr().err
    assert err.count("10,000 such steps take about 83 hours here. A smaller --meta-batch") == said
    assert bar.said == said
    fewshot_run._Bar(None).log(Run("stochastic", 300, 2, History(), seconds=seconds * 1.2))
    assert ("300 such steps take about 90 minutes here." in capsys.readouterr().err) == said


def test_a_task_is_drawn_with_right_answers_in_one_colour_and_wrong_ones_in_another():
    support, queries = np.zeros((2, 8, 8), np.uint8), np.zeros((2, 2, 8, 8), np.uint8)
    text = task_picture(support, queries, np.array([[0, 1], [1, 1]]), label="a task")
    data = re.search(r"base64,([^\"]+)", text).group(1)
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    side = FIELD * CELL + GAP

    def field(row: int, column: int) -> list[int]:
        return sheet[(row + 1) * side + GAP, (column + 1) * side + GAP].tolist()

    assert field(0, 0) == field(1, 1) == list(RIGHT)
    assert field(0, 1) == list(WRONG)
    assert field(1, 0) not in ([*RIGHT], [*WRONG])


def test_a_long_name_of_a_class_shows_that_it_is_cut():
    names = ["Alphabet_of_the_Magi/character01 90°", "Greek/character02 0°"]
    page = plane("p", np.eye(2), names, label="classes")
    assert f">…{names[0][-23:]}<" in page
    assert ">Greek/character02 0°<" in page


def test_characters_are_embedded_as_they_were_learnt_from(tmp_path):
    drawn = np.full((105, 105), 255, np.uint8)
    drawn[30:70, 45:60] = 0
    Image.fromarray(drawn).convert("1").save(tmp_path / "a.png")
    network = nn.Flatten()
    network.register_parameter("none", nn.Parameter(torch.zeros(())))
    write_embeddings(network, tmp_path, [tmp_path / "a.png"], (1, 28, 28), True, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as kept:
        pixels = kept["features"].reshape(28, 28)
    learnt = ink(tmp_path / "a.png")
    assert learnt.max() == 255, "ink is 255"
    assert np.allclose(pixels, learnt / 255.0, atol=1e-6)


def test_images_of_other_sizes_are_brought_to_that_of_training_with_a_note(tmp_path):
    for name, side in (("a", 16), ("b", 40)):
        Image.new("L", (side, side), 90).save(tmp_path / f"{name}.png")
    network = nn.Flatten()
    network.register_parameter("none", nn.Parameter(torch.zeros(())))
    found = write_embeddings(
        network, tmp_path, sorted(tmp_path.glob("*.png")), (1, 16, 16), False, tmp_path / "out.npz"
    )
    assert found["notes"] == ["1 image was resized to 16x16 pixels, as in training."]


@pytest.mark.parametrize("name", ["omniglot", "cifar-fs"])
def test_lists_are_refused_where_the_set_has_a_split(name, tmp_path):
    with pytest.raises(DataError, match="has a split of its own"):
        load_classes(name, lists=tmp_path)


def test_the_command_learns_on_mini_imagenets_form_and_embeds(tmp_path, monkeypatch, capsys):
    home, rng = tmp_path / "data" / "mini-imagenet", np.random.default_rng(0)
    (home / "images").mkdir(parents=True)
    with zipfile.ZipFile(home / "ravi_larochelle_splits.zip", "w") as archive:
        for part, labels in (("train", "abc"), ("val", "de"), ("test", "fg")):
            rows = [f"{label}{i}.jpg,{label}" for label in labels for i in range(3)]
            archive.writestr(f"{part}.csv", "\n".join(["filename,label", *rows]))
            for row in rows:
                pixels = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(home / "images" / row.split(",")[0])
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    arguments = ["--ways", "2", "--queries", "1", "--meta-batch", "1", "--steps", "2", "--tasks", "3"]
    out = str(tmp_path / "run")
    assert main(["fewshot", "mini-imagenet", *arguments, "--device", "cpu", "--out", out, "--json"]) == 0
    assert '"classes": [\n    3,\n    2,\n    2\n  ]' in capsys.readouterr().out
    assert main(["fewshot", "--evaluate", out, "--embed", str(home / "images"), "--device", "cpu", "--json"]) == 0
    assert '"images": 21' in capsys.readouterr().out


def test_the_split_of_omniglot_is_the_one_that_the_results_are_of():
    order = np.random.default_rng(class_images.OMNIGLOT_SEED).permutation(1623)
    assert order[:5].tolist() == [1229, 854, 493, 864, 898], "of the characters in the order of their names"
