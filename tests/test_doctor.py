"""`bilevel doctor`: what it says is what is here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import torch
from torch._inductor import cpu_vec_isa

from bilevel.cli import diagnosis as doctor
from bilevel.cli.diagnosis import data, parts, tried
from bilevel.cli.doctor import lines
from bilevel.cli.main import main


def test_doctor_says_in_json_what_is_here(capsys, monkeypatch, tmp_path):
    names = [f"{part}-{file}.gz" for part in ("train", "t10k") for file in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    (tmp_path / "mnist").mkdir()
    for name in names:
        (tmp_path / "mnist" / name).touch()
    (tmp_path / "omniglot").mkdir()
    (tmp_path / "cifar100").mkdir()
    for name in ("omniglot/images_background.zip", "omniglot/images_evaluation.zip", "cifar100/train_0.webp"):
        (tmp_path / name).touch()
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["devices"][0]["name"] == "cpu"
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["engines"]["double_backward"]["works"] is True
    assert found["engines"]["compile"]["works"] or not shutil.which("g++"), found["engines"]["compile"]["note"]
    assert found["engines"]["graph"]["works"] is torch.cuda.is_available()
    assert found["data"]["mnist"] == str(tmp_path / "mnist")
    assert found["data"]["digits"] == "comes with scikit-learn"
    assert found["data"]["omniglot"] == str(tmp_path / "omniglot")
    assert found["data"]["cifar-fs"] is None  # one of five files is there
    assert {"fashion-mnist", "svhn", "cifar10", "mini-imagenet", "photos"} < set(found["data"])
    assert found["environment"]["BILEVEL_DATA"] == str(tmp_path)
    free = next(iter(found["disk_free"].values()))
    assert abs(free - shutil.disk_usage(".").free) < 2**31


def test_doctor_says_it_for_people_too_and_shows_on_a_terminal_what_it_waits_for(capsys, monkeypatch):
    shown, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for words in (f"torch {torch.__version__}", "torch.compile: ", "CUDA graph capture: ", "GiB free", "digits: comes"):
        assert words in told
    assert "trying" not in told
    assert b"trying torch.compile" in os.read(shown, 2**16)
    os.close(shown)


def test_what_takes_long_is_tried_when_all_else_is_told():
    found = parts()
    assert [next(found)[0] for _ in range(6)] == ["versions", "system", "devices", "data", "environment", "disk_free"]


def test_trying_a_compiler_leaves_later_compilations_as_they_are():
    tried(doctor._compiled)
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0


def test_doctor_says_what_brings_data_that_are_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    lists = tmp_path / "mini-imagenet"
    lists.mkdir()
    for part in ("train", "val", "test"):
        (lists / f"{part}.csv").write_text("filename,label\na.jpg,n01\n")
    assert data()["mini-imagenet"] is None  # the images are no part of the lists
    shown = lines({"data": data()})
    assert any(line.startswith("  mini-imagenet: not here; put it into $BILEVEL_DATA/mini-imagenet") for line in shown)
    assert any(line.startswith("  photos: not here; ") and "$BILEVEL_DATA/photos" in line for line in shown)
    (lists / "images").mkdir()
    (lists / "images" / "a.jpg").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "photos256.zip").touch()
    assert data()["mini-imagenet"] == str(lists)
    assert data()["photos"] == str(tmp_path / "photos" / "photos256.zip")


def test_what_does_not_work_is_said_with_its_reason():
    def fails() -> str:
        raise OSError("no compiler\nfound.")

    assert tried(fails) == {"works": False, "note": "no compiler found"}
