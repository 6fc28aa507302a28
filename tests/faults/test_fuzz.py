"""Readers of users' files: whatever is in them, the user gets data or a sentence."""

from __future__ import annotations

import importlib
import io
import json
import pickle
import resource

import fuzz
import numpy as np
import pytest
from PIL import Image

from bilevel.cli.main import main

NAMES = ["npz", "csv", "parquet", "images", "decisions", "checkpoint", "state", "config", "numbers"]


@pytest.mark.parametrize("name", NAMES)
def test_fuzzed_files_give_data_or_a_sentence(tmp_path, name):
    tally = fuzz.fuzzed(name, tmp_path, 150)
    assert tally.failures == []
    assert tally.tried >= 100
    assert tally.facts["refused with a sentence"] > 0 or name in ("config", "images")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_fuzzed_files_give_data_or_a_sentence(tmp_path, name):
    assert fuzz.fuzzed(name, tmp_path, 10_000, 1).failures == []


CLAIMS = {
    "x of 10^12 rows": ("npz", lambda: fuzz.claiming_npz((10**12,), "<f8"), "x.npy claims the shape (1000000000000,)"),
    "x of 10^12 bytes": ("npz", lambda: fuzz.claiming_npz((10**6, 10**6), "|u1"), "x.npy claims the shape"),
    "x of no size": ("npz", lambda: fuzz.claiming_npz((10**12, 0), "<f8"), "x.npy claims the shape"),
    "x that is no array": ("npz", lambda: fuzz.claiming_npz(None, ""), "must hold 'x' as an array"),
    "y of no size": ("npz", lambda: fuzz.good_npz(y=np.empty(12, "U0")), "labels are missing"),
    "a table of 10^12 rows": (
        "parquet",
        lambda: fuzz.claiming_parquet(10**12),
        "claims to hold 1,000,000,000,000 rows",
    ),
    "a table of 10^7 equal rows": ("parquet", lambda: fuzz.claiming_parquet(10**7), ""),
    "a state nested without end": ("state", lambda: b'{"list": [' * 300 + b"1", "holds no readable state"),
    "a config nested without end": ("config", lambda: b"[" * 3000, ""),
}


@pytest.mark.parametrize(("name", "make", "words"), CLAIMS.values(), ids=CLAIMS)
def test_small_file_that_claims_very_much_is_refused_without_memory(tmp_path, name, make, words):
    content = make()
    assert len(content) < 4000
    for module in ("pandas", "pyarrow.parquet", "sklearn.compose"):  # the readers import them when they are needed
        importlib.import_module(module)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = fuzz.told(fuzz.readers(tmp_path)[name][0], tmp_path, content)
    assert words in (told or "")
    assert told or not words
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 100


def test_image_that_claims_very_many_pixels_is_left_out_without_memory(tmp_path):
    """A picture of one colour, 12,000 by 12,000 pixels, in some kilobytes."""
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    reader, good = fuzz.readers(tmp_path)["images"]
    reader(tmp_path, good)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader(tmp_path, buffer.getvalue())
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 100


def test_message_that_shows_a_very_long_name_is_cut(tmp_path):
    told = fuzz.told(fuzz.read_csv, tmp_path, b"a" * 100_000 + b",b\n1,2\n")
    assert told.startswith("label must be a column of")
    assert len(told) < 3000


def test_nothing_in_a_file_is_run(tmp_path):
    marker = tmp_path / "ran"
    objects = np.empty(12, object)
    objects[:] = [fuzz.Run(marker)] * 12
    harmful = pickle.dumps(fuzz.Run(marker))
    for name, content in {
        "npz": fuzz.good_npz(y=objects),
        "checkpoint": harmful,
        "config": harmful,
        "csv": harmful,
        "images": harmful,
        "parquet": harmful,
        "decisions": harmful,
    }.items():
        fuzz.told(fuzz.readers(tmp_path)[name][0], tmp_path, content)
        assert not marker.exists(), name
    pickle.loads(harmful)
    assert marker.exists()  # so it would have been


def test_names_in_a_file_do_not_lead_out_of_the_output_folder(tmp_path, capsys):
    """Class names are no paths: a table whose labels are such is cleaned into one file."""
    inside = tmp_path / "inside"
    inside.mkdir()
    text = fuzz.good_csv().decode().replace(",u\n", ",../../out\n").replace(",v\n", ",/tmp/../etc\n")
    (inside / "data.csv").write_text(text)
    out = inside / "run"
    assert (
        main(
            [
                "denoise",
                str(inside / "data.csv"),
                "--label",
                "label",
                "--trusted",
                "3",
                "--steps",
                "3",
                "--no-baselines",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["rows"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert sorted(path.name for path in inside.iterdir()) == ["data.csv", "run"]
