"""Disks that are full or read-only, and checkpoints that are not whole: one clear sentence, and nothing is lost."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import disks
import kills
import pytest
from tally import outcome

from bilevel.running import checkpoints as store

mounts = pytest.mark.skipif(not disks.mounting(), reason="a tmpfs cannot be mounted here: it takes root")


@mounts
def test_full_disk_is_told_in_a_sentence_and_the_run_goes_on_with_more_room(tmp_path):
    assert disks.full(tmp_path, [120, 700]).failures == []


@mounts
@pytest.mark.slow
def test_disk_that_is_full_at_many_sizes(tmp_path):
    assert disks.full(tmp_path, disks.SIZES).failures == []


@mounts
def test_read_only_disk_is_told_in_a_sentence(tmp_path):
    tally = disks.read_only(tmp_path)
    assert tally.failures == []
    assert tally.tried == 3


def test_checkpoint_that_is_cut_off_or_altered_gives_way_to_the_one_before(tmp_path):
    tally = disks.harmed(tmp_path, flips=40, seed=0)
    assert tally.failures == []
    assert tally.tried > 60


@pytest.mark.slow
def test_checkpoint_altered_at_very_many_places(tmp_path):
    assert disks.harmed(tmp_path, flips=2000, seed=1, every=256).failures == []


@pytest.mark.filterwarnings("default::bilevel.BilevelWarning")
def test_denoise_goes_on_from_the_checkpoint_before_and_removes_none_that_is_bad(tmp_path):
    out, kept = tmp_path / "out", tmp_path / "out" / "checkpoint" / "importance"
    kills.killed_at(out, kept / store.BEFORE)
    held = {path.name: path.read_bytes() for path in kept.iterdir() if not path.name.startswith(".")}
    (kept / store.FILE).write_bytes(held[store.BEFORE][:1500])
    (kept / store.BEFORE).write_bytes(b"")
    code, told = disks.denoised(out, "--resume")
    assert code == 1
    assert f"{kept / store.FILE} cannot be read" in disks.sentence(told)
    assert "cannot be read either" in told
    assert (kept / store.FILE).read_bytes() == held[store.BEFORE][:1500]
    (kept / store.BEFORE).write_bytes(held[store.BEFORE])
    code, told = disks.denoised(out, "--resume")
    assert code == 0, told
    assert f"The one before, {kept / store.BEFORE}, of step" in told
    assert disks.denoised(tmp_path / "straight")[0] == 0
    straight, found = outcome(tmp_path / "straight"), outcome(out)
    assert [name for name in straight if straight[name] != found[name]] == []


LIMITED = """
import resource, signal, sys
sys.path[:0] = sys.argv[1:3]
import disks
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
from bilevel import CheckpointError
try:
    disks.solved(Path(sys.argv[3]), resume=True)
except CheckpointError as error:
    print(error)
    sys.exit(5)
"""


def test_save_that_meets_a_limit_of_size_leaves_the_checkpoint_of_before(tmp_path):
    """Where no disk can be mounted, too: the system refuses files above a size."""
    disks.solved(tmp_path / "state", max_steps=2)
    size = (tmp_path / "state" / store.FILE).stat().st_size
    command = [
        sys.executable,
        "-c",
        LIMITED,
        Path(__file__).parent,
        Path(__file__).parents[1],
        tmp_path / "state",
        str(size // 2),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 5, ended.stderr
    assert "cannot be written" in ended.stdout
    assert store.load(tmp_path / "state")["step"] == 2
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert signal.getsignal(signal.SIGXFSZ) is not None
