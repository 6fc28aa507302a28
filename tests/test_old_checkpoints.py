"""Checkpoints that earlier code wrote: each resumes and ends as an uninterrupted run, or is refused in a sentence.

tests/data/checkpoints has a folder for each method, written after 10 of 20 steps, and ends.json with the u and v that
an uninterrupted run ended at. They are of `old_problem`, which must not change. `python tests/test_old_checkpoints.py
--write NAME ...` adds checkpoints of the present code; those that are there stay, as they are what is tested.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import differences, packed
from old_problem import NAMES, SEED, STEPS, STOP, case

from bilevel import Callback, CheckpointError, Rows, Run, Solution, solve

FOLDER = Path(__file__).parent / "data" / "checkpoints"
ENDS = FOLDER / "ends.json"
REFUSED = dict.fromkeys(("stochastic_rows", "stochastic_network"), "multipliers were not tracked")
"""The checkpoints that the present code refuses, with a part of the sentence."""
TOLERANCE = 1e-8
"""The checkpoints come from a machine whose last bits others do not repeat (see test_golden_runs). test_contract shows,
on one machine, that a resumed run ends at the bits of an uninterrupted one."""
PYTHON = ".".join(map(str, sys.version_info[:2]))


class StopAt(Callback):
    def log(self, run: Run) -> bool:
        return run.step >= STOP


class Began(Callback):
    """The step that a run begins at."""

    def start(self, run: Run) -> None:
        self.step = run.step


def solved(name: str, folder: Path | None, **more: Any) -> Solution:
    problem, method, u, v, data, options = case(name)
    if folder is not None:
        more |= {"checkpoint": folder, "every": STEPS}
    return solve(problem, method, u, v, data, max_steps=STEPS, seed=SEED, log_every=1, **(options | more))


def end(solution: Solution) -> dict[str, Any]:
    return {"status": solution.status.name, "steps": solution.steps, "u": packed(solution.u), "v": packed(solution.v)}


def ends() -> dict[str, Any]:
    return json.loads(ENDS.read_text()) if ENDS.exists() else {}


@pytest.mark.parametrize("name", NAMES)
def test_old_checkpoint_resumes_where_it_stood_or_is_refused_in_a_sentence(name, tmp_path):
    folder, record, began = tmp_path / name, ends()[name], Began()
    shutil.copytree(FOLDER / name, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if refused := REFUSED.get(name):
        with pytest.raises(CheckpointError, match=refused) as caught:
            solved(name, folder, resume=True)
        assert "\n" not in str(caught.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        return
    solution = solved(name, folder, resume=True, callbacks=[began])
    assert began.step == STOP
    assert len(solution.history) == solution.steps > STOP
    found = end(solution)
    assert not differences({key: record[key] for key in found}, found, TOLERANCE)


def test_each_method_has_a_checkpoint_and_they_are_small():
    assert sorted(ends()) == sorted(NAMES) == sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert REFUSED.keys() <= set(NAMES)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 300_000


def test_checkpoint_of_other_options_is_refused(tmp_path):
    """What the first test allows is seen to happen."""
    shutil.copytree(FOLDER / "alternating", tmp_path / "other")
    with pytest.raises(CheckpointError, match="is of another run"):
        solved("value_gap", tmp_path / "other", resume=True)


def test_recorded_ends_are_no_starts():
    for name in NAMES:
        _, _, u, v, _, _ = case(name)
        assert ends()[name]["v"] != packed(v)
        assert ends()[name]["u"] != packed(u) or isinstance(u, Rows)


def write(names: list[str]) -> None:
    """Write the checkpoints that are not there yet."""
    found = ends()
    for name in names:
        if (FOLDER / name).exists():
            sys.exit(f"{FOLDER / name} is there already, and is what old code wrote. Delete it first to lose that.")
        stopped = solved(name, FOLDER / name, callbacks=[StopAt()])
        assert stopped.steps == STOP, f"{name} ended after {stopped.steps} steps: {stopped}"
        found[name] = end(solved(name, None)) | {"python": PYTHON}
    ENDS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write checkpoints of the present code.")
    parser.add_argument("--write", nargs="+", required=True, metavar="NAME", help="a name of old_problem.NAMES, or all")
    torch.set_num_threads(1)
    asked = parser.parse_args().write
    write(list(NAMES) if asked == ["all"] else asked)
