"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bilevel._util.atomic_files import atomic_write, write_whole
from bilevel.errors import WriteError


def half(path):
    path.write_text("half")
    raise ZeroDivisionError


def test_file_that_was_there_stays_where_the_new_one_fails(tmp_path):
    write_whole(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "a") as temporary:
        half(temporary)
    with (
        pytest.raises(WriteError, match=r"a cannot be written \(No space left\)\..*untouched"),
        atomic_write(tmp_path / "a"),
    ):
        raise OSError(28, "No space left")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_cleared_away_and_what_a_living_one_writes_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".a.{dead.pid}.tmp").write_text("half")
    (tmp_path / f".a.{os.getppid()}.tmp").write_text("half")
    (tmp_path / f".b.{dead.pid}.tmp").write_text("another")
    write_whole(tmp_path / "a", "new\n\udcff")
    assert (tmp_path / "a").read_bytes() == b"new\n\xff"
    assert sorted(os.listdir(tmp_path)) == sorted([f".a.{os.getppid()}.tmp", f".b.{dead.pid}.tmp", "a"])


def test_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(WriteError, match="No such file"):
        write_whole(tmp_path / "none" / "a", "text")


def test_others_may_read_what_the_mask_lets_them(tmp_path):
    """Whoever writes may make the temporary file private, as safetensors does."""
    plain = tmp_path / "plain"
    plain.touch()
    with atomic_write(tmp_path / "weights") as temporary:
        temporary.touch(0o600)
    assert (tmp_path / "weights").stat().st_mode == plain.stat().st_mode
