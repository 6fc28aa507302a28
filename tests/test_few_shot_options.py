"""Few-shot learning: options of `meta_train`, the progress bar, pictures, embeddings and class lists."""

from __future__ import annotations

import base64
import importlib
import io
import re
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bilevel.applications.augmentation import crop_and_flip
from bilevel.applications.few_shot import Episodes, TaskSampler, meta_train
from bilevel.applications.few_shot import evaluation as few_shot_evaluation
from bilevel.cli import fewshot_run
from bilevel.cli.fewshot_output import write_embeddings
from bilevel.cli.main import main
from bilevel.cli.progress import RunBar
from bilevel.data import class_images
from bilevel.data.class_images import ImageClasses, ink
from bilevel.report.figures import CELL, FIELD, GAP, RIGHT, WRONG, plane, task_picture
from bilevel.results import History
from bilevel.running.callbacks import Run

few_shot = importlib.import_module("bilevel.applications.few_shot.meta_train")  # the package has its function


def classes(count: int, shape: tuple[int, int, int] = (1, 16, 16), prefix: str = "c") -> ImageClasses:
    rng = np.random.default_rng(count)
    images = torch.from_numpy(rng.integers(0, 256, (4 * count, *shape), dtype=np.uint8))
    return ImageClasses(images, (4,) * count, tuple(f"{prefix}{i}" for i in range(count)))


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
    watch = few_shot_evaluation.Validation(nn.Linear(1, 1), TaskSampler(classes(4), 2, 1, 1), every=1)
    bar, run = RunBar("learning", partial(fewshot_run._accuracy, watch)), Run("stochastic", 10, 1, History())
    bar.log(run)
    assert bar.label == "learning"
    watch.rows.append({"step": 1, "seconds": 1.0, "accuracy": 0.756})
    bar.log(run)
    assert bar.label == "learning, validation 75.6%"


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
