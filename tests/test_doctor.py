"""`bilevel doctor`: what it says is what is here."""

from __future__ import annotations

import json
import platform
import shutil

import torch

from bilevel.cli.main import main
from bilevel.doctor import tried


def test_doctor_says_in_json_what_is_here(capsys, monkeypatch, tmp_path):
    names = [f"{part}-{file}.gz" for part in ("train", "t10k") for file in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    (tmp_path / "mnist").mkdir()
    for name in names:
        (tmp_path / "mnist" / name).touch()
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["devices"][0]["name"] == "cpu"
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["engines"]["double_backward"]["works"] is True
    assert found["engines"]["graph"]["works"] is torch.cuda.is_available()
    assert found["data"]["mnist"] == str(tmp_path / "mnist")
    assert found["data"]["digits"] == "comes with scikit-learn"
    assert found["environment"]["BILEVEL_DATA"] == str(tmp_path)
    free = next(iter(found["disk_free"].values()))
    assert abs(free - shutil.disk_usage(".").free) < 2**31


def test_doctor_says_it_for_people_too(capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for words in (f"torch {torch.__version__}", "torch.compile: ", "CUDA graph capture: ", "GiB free", "digits: comes"):
        assert words in told


def test_what_does_not_work_is_said_with_its_reason():
    def fails() -> str:
        raise OSError("no compiler\nfound.")

    assert tried(fails) == {"works": False, "note": "no compiler found"}
