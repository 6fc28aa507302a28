"""Counts agree with their nouns and verbs, in the helper and in what users read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PIL import Image

from bilevel._util.checks import agreeing, counted
from bilevel.applications.denoising.clean_dataset import prepare
from bilevel.applications.networks import few_shot_cnn
from bilevel.cli.fewshot_output import image_files, write_embeddings
from bilevel.data import load


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 rows are"), (1, "1 row is"), (2, "2 rows are"), (1200, "1,200 rows are")]
)
def test_one_is_singular_and_every_other_number_is_not(count, said):
    assert f"{counted(count, 'row')} {agreeing(count, 'is', 'are')}" == said


def test_one_row_of_the_test_set_among_the_training_rows_is_told_in_the_singular():
    data = load("digits")
    assert data.test is not None
    x, y = data.x.clone(), data.y.clone()
    x[7], y[7] = data.test[0][0], data.test[1][0]
    notes = prepare(replace(data, x=x, y=y), trusted=100, seed=0).notes
    assert "1 row is also in the test set or the held-out part; it is left out." in notes


def test_one_embedded_image_is_told_in_the_singular(tmp_path):
    Image.new("L", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    found = write_embeddings(
        few_shot_cnn(), tmp_path, image_files(tmp_path), (1, 16, 16), False, tmp_path / "embeddings.npz"
    )
    assert found["message"] == "Embedded 1 image, 64 features each."
    assert found["notes"] == ["Left out 1 image that does not decode, such as b.png."]
