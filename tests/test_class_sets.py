"""Images by class: named sets, mini-ImageNet's form, and folders."""

from __future__ import annotations

import csv
import os
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from common import needs
from PIL import Image

from bilevel import DataError
from bilevel.data.class_images import ImageClasses, load_classes, split_classes


def draw(path: Path, shade: int, size: tuple[int, int] = (20, 20), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 255 - shade)).save(path)


def write_lists(folder: Path, rows: dict[str, list[tuple[str, str]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, pairs in rows.items():
        with open(folder / f"{part}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([("filename", "label"), *pairs])


ROWS = {
    part: [(f"{label}{i:08d}.jpg", label) for label in labels for i in range(3)]
    for part, labels in (("train", ("n01", "n02", "n03")), ("val", ("n04",)), ("test", ("n05", "n06")))
}


@pytest.mark.parametrize("place", ["images/{file}", "{file}", "{label}/{file}", "images/{label}/{file}"])
def test_mini_imagenet_is_read_from_any_usual_place_of_its_images(tmp_path, place):
    write_lists(tmp_path, ROWS)
    for pairs in ROWS.values():
        for file, label in pairs:
            draw(tmp_path / place.format(file=file, label=label), 40 * int(label[1:]), (120, 90))
    splits = load_classes(tmp_path)
    assert splits.train.names == ("n01", "n02", "n03")
    assert (splits.validation.names, splits.test.names) == (("n04",), ("n05", "n06"))
    assert splits.train.images.shape == (9, 3, 84, 84)
    assert splits.train.counts == (3, 3, 3)
    for i, shade in enumerate((40, 80, 120)):  # JPEG is off by a little
        assert (splits.train.images[3 * i : 3 * i + 3, 0].int() - shade).abs().max() <= 3


def test_mini_imagenet_by_name_takes_the_published_lists_from_their_archive(tmp_path, monkeypatch):
    write_lists(tmp_path / "lists", ROWS)
    home = tmp_path / "data" / "mini-imagenet"
    home.mkdir(parents=True)
    with zipfile.ZipFile(home / "ravi_larochelle_splits.zip", "w") as archive:
        for part in ROWS:
            archive.write(tmp_path / "lists" / f"{part}.csv", f"{part}.csv")
    for pairs in ROWS.values():
        for file, _ in pairs:
            draw(home / "images" / file, 90)
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    assert load_classes("mini-imagenet").test.names == ("n05", "n06")
    (home / "images" / "n0500000001.jpg").unlink()
    with pytest.raises(DataError, match=r"images/n0500000001\.jpg, .* do not exist"):
        load_classes("mini-imagenet")
    (home / "images" / "n0500000001.jpg").write_text("no image")
    with pytest.raises(DataError, match=r"n0500000001\.jpg cannot be read"):
        load_classes("mini-imagenet")


@needs("mini_imagenet")
def test_the_published_lists_have_64_16_and_20_classes_of_600(tmp_path, monkeypatch):
    home = tmp_path / "mini-imagenet"
    home.mkdir()
    (archive,) = (Path(os.environ["BILEVEL_DATA"]) / "mini_imagenet").glob("*.zip")
    shutil.copy(archive, home / "ravi_larochelle_splits.zip")
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"images/n0153282900000005\.jpg, .* do not exist"):  # the first image is named
        load_classes("mini-imagenet")
    with zipfile.ZipFile(archive) as lists:
        for part, count in (("train", 64), ("val", 16), ("test", 20)):
            rows = list(csv.DictReader(lists.read(f"{part}.csv").decode().splitlines()))
            assert set(Counter(row["label"] for row in rows).values()) == {600}
            assert len({row["label"] for row in rows}) == count


def test_class_folders_are_split_by_class_and_none_is_in_two_parts(tmp_path):
    for c in range(10):
        for i in range(4):
            draw(tmp_path / f"class {c}" / f"{i}.png", 20 * c, (24, 24), "L")
    splits = load_classes(tmp_path, seed=3)
    parts = [splits.train, splits.validation, splits.test]
    assert [len(part.names) for part in parts] == [6, 2, 2]
    assert sorted(name for part in parts for name in part.names) == [f"class {c}" for c in range(10)]
    for part in parts:
        for name, image in zip(part.names, part.images[::4], strict=True):
            assert image.unique().tolist() == [20 * int(name[-1])]
    assert load_classes(tmp_path, seed=3).test.names == splits.test.names
    assert any(load_classes(tmp_path, seed=s).test.names != splits.test.names for s in range(4, 8))


def test_class_folders_follow_folders_of_parts(tmp_path):
    for part, names in (("train", "ab"), ("val", "cd"), ("test", "ef")):
        for c in names:
            for i in range(5):
                draw(tmp_path / part / c / f"{i}.png", 50, (24, 24), "L")
    splits = load_classes(tmp_path)
    assert (splits.train.names, splits.validation.names, splits.test.names) == (("a", "b"), ("c", "d"), ("e", "f"))
    (tmp_path / "train").rename(tmp_path / "other")
    with pytest.raises(DataError, match=r"class folders in val and test, and none in train\."):
        load_classes(tmp_path)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="Did you mean 'omniglot'"):
        load_classes("omnigot")
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"put it into a folder omniglot, and .* BILEVEL_DATA \(it is "):
        load_classes("omniglot")
    for part, names in (("train", "xy"), ("test", "xz")):
        for c in names:
            for i in range(5):
                draw(tmp_path / "all" / part / c / f"{i}.png", 50, (24, 24), "L")
    with pytest.raises(DataError, match="the class 'x' is in two parts, train and test"):
        load_classes(tmp_path / "all")
    with pytest.raises(DataError, match="at least 3 classes are needed"):
        split_classes("two", ImageClasses(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), (1, 1), ("a", "b")))


@pytest.mark.slow
@needs("omniglot")
def test_omniglot_has_1200_and_423_characters_of_20_drawers():
    splits = load_classes("omniglot", validation=50)
    assert [len(part.names) for part in (splits.train, splits.validation, splits.test)] == [1150, 50, 423]
    assert set(splits.train.counts) == {20}
    assert splits.train.shape == (1, 28, 28)
    # Ink is bright and rare: a stroke is some 3 of 105 pixels wide.
    assert 0.03 < splits.train.images.double().mean().item() / 255 < 0.15
    alphabets = {name.split("/")[0] for name in splits.train.names}
    assert len(alphabets) == 50


@needs("cifar100")
def test_cifar_fs_has_64_16_and_20_classes_and_says_how_many_images():
    splits = load_classes("cifar-fs")
    assert [len(part.names) for part in (splits.train, splits.validation, splits.test)] == [64, 16, 20]
    assert set(splits.test.counts) == {300}
    assert "300 images a class; the published set has 600" in splits.notes[0]
    assert np.isclose(splits.train.images[:, 0].double().mean() / 255, 0.507, atol=0.03)
