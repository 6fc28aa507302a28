"""The compact forms of SVHN and mini-ImageNet, and the published form that is written from one of them."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from bilevel_studies import compact
from bilevel_studies.denoising import runs as denoising_runs
from bilevel_studies.few_shot import runs as few_shot_runs
from PIL import Image

from bilevel.data.class_images import load_classes
from bilevel.errors import DataError

SHARED = Path(os.environ.get("BILEVEL_DATA", "data"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def write_svhn(folder, train=103, test=2):
    """Write contact sheets with one grey for each image: its number. The rest of a sheet is black."""
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("test", test)):
        rows = -(-count // 100)
        greys = np.zeros(100 * rows, np.uint8)
        greys[:count] = np.arange(count)
        sheet = np.repeat(np.repeat(greys.reshape(rows, 100), 32, 0), 32, 1)
        Image.fromarray(np.stack([sheet] * 3, -1)).save(folder / f"{part}_0.webp", lossless=True)
    labels = {part: (np.arange(count) % 10).astype(np.uint8) for part, count in (("train", train), ("test", test))}
    np.savez(folder / "labels.npz", **labels)


def write_mini(folder, images=3):
    """Write two classes for each part, and the lists. An image has one grey, and differs from all others."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "ravi_larochelle_splits.zip", "w") as lists:
        for i, part in enumerate(compact.PARTS):
            wnids, codes, rows = [f"n0{i}{c}" for c in range(2)], [], []
            for j in range(2 * images):
                buffer = io.BytesIO()
                Image.new("RGB", (84, 84), (60 * i + 9 * j,) * 3).save(buffer, "WEBP", lossless=True)
                codes.append(buffer.getvalue())
                rows.append((f"{wnids[j % 2]}000{j}.jpg", wnids[j % 2]))
            (folder / f"{part}.bin").write_bytes(b"".join(codes))
            np.savez(
                folder / f"{part}.npz",
                offsets=np.cumsum([0, *map(len, codes)]),
                labels=(np.arange(2 * images) % 2).astype(np.uint8),
                wnids=np.array(wnids),
                names=np.array([name for name, _ in rows]),
            )
            lists.writestr(f"{part}.csv", "filename,label\n" + "".join(f"{name},{label}\n" for name, label in rows))


def test_svhn_is_read_from_sheets_without_the_black_images_at_their_ends(home):
    write_svhn(home / "svhn")
    data = compact.load("svhn")
    assert data.x.shape == (103, 3, 32, 32)
    assert torch.equal((255 * data.x[:, 0, 0, 0]).round().long(), torch.arange(103))
    assert torch.equal(data.x.amax((1, 2, 3)), data.x.amin((1, 2, 3)))  # each image has one grey
    assert torch.equal(data.y, torch.arange(103) % 10)
    assert len(data.part("test")[1]) == 2
    assert "coded with loss" in data.notes[0]


def test_the_denoising_study_reads_svhn_from_the_folder_of_the_data(home):
    write_svhn(home / "svhn")
    denoising_runs.loaded.cache_clear()
    assert denoising_runs.loaded("svhn").count == 103
    denoising_runs.loaded.cache_clear()


def test_a_broken_sheet_is_named(home):
    write_svhn(home / "svhn")
    (home / "svhn" / "test_0.webp").write_bytes(b"no image")
    with pytest.raises(DataError, match="svhn cannot be read"):
        compact.load("svhn")


def test_mini_imagenet_is_the_same_in_its_compact_form_and_in_the_published_one_that_is_written(home, tmp_path):
    write_mini(home / "mini_imagenet")
    compact.main(tmp_path / "published")
    few_shot_runs.loaded.cache_clear()
    stored, published = few_shot_runs.loaded("mini-imagenet", "table"), load_classes(tmp_path / "published")
    few_shot_runs.loaded.cache_clear()
    for part in ("train", "validation", "test"):
        one, other = getattr(stored, part), getattr(published, part)
        assert one.names == other.names
        assert one.counts == other.counts == (3, 3)
        assert torch.equal(one.images, other.images)
    assert len(list((tmp_path / "published" / "images").iterdir())) == 18


def test_other_sets_are_read_by_the_library(home):
    assert compact.load("digits").name == "digits"
    with pytest.raises(DataError, match="put it into a folder omniglot"):
        compact.load_classes("omniglot")


@pytest.mark.skipif(not (SHARED / "mini_imagenet").is_dir(), reason="mini_imagenet is not in $BILEVEL_DATA")
def test_names_and_labels_of_the_real_set_are_those_of_the_lists():
    with zipfile.ZipFile(SHARED / "mini_imagenet" / "ravi_larochelle_splits.zip") as lists:
        for part in compact.PARTS:
            with np.load(SHARED / "mini_imagenet" / f"{part}.npz") as index:
                rows = zip(index["names"].tolist(), index["wnids"][index["labels"]].tolist(), strict=True)
                stored = dict(rows)
            listed = dict(line.split(",") for line in lists.read(f"{part}.csv").decode().split()[1:])
            assert stored == listed
