"""`bilevel doctor`: what it says is what is here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import torch
from torch._inductor import cpu_vec_isa

from bilevel.cli import doctor
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
    assert found["environment"]["python_version"].startswith(platform.python_version())
    assert found["environment"]["is_cuda_available"] == str(torch.cuda.is_available())
    compiles = found["engines"]["torch.compile"]
    assert compiles["works"] or not shutil.which("g++"), compiles["note"]
    assert found["engines"]["CUDA graph capture"]["works"] is torch.cuda.is_available()
    assert found["data"]["mnist"] == str(tmp_path / "mnist")
    assert found["data"]["digits"] == "comes with scikit-learn"
    assert found["data"]["omniglot"] == str(tmp_path / "omniglot")
    assert found["data"]["cifar-fs"] is None  # one of five files is there
    assert {"fashion-mnist", "svhn", "cifar10", "mini-imagenet"} < set(found["data"])
    assert abs(found["disk_free"] - shutil.disk_usage(".").free) < 2**31


def test_doctor_says_it_for_people_too_and_shows_on_a_terminal_what_it_waits_for(capsys, monkeypatch):
    shown, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for words in (f"PyTorch version: {torch.__version__}", "torch.compile works: ", "GiB free", "digits: comes"):
        assert words in told
    assert "trying" not in told
    assert b"trying torch.compile" in os.read(shown, 2**16)
    os.close(shown)


def test_trying_a_compiler_leaves_later_compilations_as_they_are():
    doctor.try_engine(doctor._compile)
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0


def test_doctor_says_where_data_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    lists = tmp_path / "mini-imagenet"
    lists.mkdir()
    for part in ("train", "val", "test"):
        (lists / f"{part}.csv").write_text("filename,label\na.jpg,n01\n")
    found = doctor.data_sets()
    assert found["mini-imagenet"] is None  # the images are not part of the lists
    shown = doctor.lines({"versions": {}, "data": found, "disk_free": 0})
    assert f"  mini-imagenet: not here; $BILEVEL_DATA is {tmp_path}" in shown
    (lists / "images").mkdir()
    (lists / "images" / "a.jpg").touch()
    assert doctor.data_sets()["mini-imagenet"] == str(lists)


def test_doctor_works_without_the_extras(monkeypatch, tmp_path):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    for name in ("PIL", "pooch", "sklearn", "pandas", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    found = doctor.data_sets()
    assert found["omniglot"] is None
    assert found["mnist"] in (None, "This needs pooch: pip install 'bilevel[apps]'.")


def test_what_does_not_work_is_said_with_its_reason():
    def fails() -> str:
        raise OSError("no compiler\nfound.")

    assert doctor.try_engine(fails) == {"works": False, "note": "no compiler found"}
