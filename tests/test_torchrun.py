"""The command under torchrun: one folder, written by the first rank; a killed rank, and a restart that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import wait_for
from ranks import free_port

COMMAND = ["denoise", "digits", "--noise", "0.3", "--no-baselines", "--json"]


def torchrun(folder: Path, *words: str, restarts: int = 0) -> subprocess.Popen[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return subprocess.Popen(
        [*start, "--max-restarts", str(restarts), "-m", "bilevel", *COMMAND, "--out", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def children(parent: int) -> list[int]:
    """The processes that torchrun has started by now."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.slow
def test_two_ranks_write_one_folder_with_the_importances_of_one_process(tmp_path):
    process = torchrun(tmp_path / "two", "--steps", "40")
    out, err = process.communicate()
    assert process.returncode == 0, err
    result = json.loads(out)  # one object alone: the other rank says nothing
    assert result["ranks"] == 2
    assert result["bytes_per_step"] > 0
    alone = [sys.executable, "-m", "bilevel", *COMMAND, "--out", str(tmp_path / "one"), "--steps", "40"]
    subprocess.run(alone, check=True, capture_output=True)
    columns = []
    for name in ("one", "two"):
        rows = (tmp_path / name / "importance.csv").read_text().splitlines()[1:]
        columns.append([float(row.split(",")[2]) for row in rows])
    # float32, and 40 steps of Adam.
    assert columns[1] == pytest.approx(columns[0], abs=2e-3)
    assert not (tmp_path / "two" / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
def test_torchrun_names_a_killed_rank_and_restarts_from_the_last_checkpoint(tmp_path):
    process = torchrun(tmp_path, "--steps", "400", restarts=1)
    wait_for((tmp_path / "checkpoint" / "importance" / "state.safetensors").exists, process)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["ranks"] == 2
    assert "rank" in err
    assert "exitcode: -9" in err.replace(" :", ":") or "SIGKILL" in err
