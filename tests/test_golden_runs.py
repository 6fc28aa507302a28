"""Every method repeats its recorded runs: see `golden` for the runs, data/golden_runs.json for the record.

The last bits of a sum depend on torch's release, on the CPU and on the kernels that it gets, so the numbers have to
agree to 1e-8 of the largest number of their column, or of 1 if that is larger: twenty steps in float64 multiply
rounding errors of 1e-16 by much less than 1e8, and residuals at the size of rounding are noise. `golden.UNSTABLE` has
the exceptions. Bits are compared between two commits on one machine:

    python tests/test_golden_runs.py --compare REV [--only NAME ...]

runs the code of another commit and the present code, and lists the runs that differ. A change that is meant to move
bits says so in its commit and renews the runs that it moves, and no other:

    python tests/test_golden_runs.py --write                  all
    python tests/test_golden_runs.py --write --only NAME ...  those with this in their name, such as "value gap"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import golden
import pytest
from forked import same_bits
from golden import RANK_RUNS, RUNS, UNSTABLE, differences

import bilevel

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "golden_runs.json"
TOLERANCE = 1e-8
"""More than rounding errors of other machines."""


@cache
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with same_bits() as process:
        yield process


def compare(name: str, found: dict[str, Any]) -> None:
    record = recorded().get(name)
    assert record is not None, f"{name!r} is not recorded; run python tests/test_golden_runs.py --write --only {name!r}"
    lines = differences(record, found, TOLERANCE, UNSTABLE.get(name, ()))
    assert not lines, "\n".join(
        [
            f"{name!r} is not the recorded run:",
            *lines,
            f"If the commit means to change it: python tests/test_golden_runs.py --write --only {name!r}",
        ]
    )


@pytest.mark.parametrize("name", RUNS)
def test_run_is_the_recorded_one(name, process):
    compare(name, process.submit(golden.run, name).result())


@pytest.fixture(scope="module")
def ranks(process) -> list[dict[str, Any]]:
    return process.submit(golden.rank_runs, list(RANK_RUNS)).result()


def test_runs_on_two_ranks_are_the_recorded_ones(ranks):
    for name, found in ranks[0].items():
        compare(name, found)


def test_both_ranks_end_at_the_same_bits(ranks):
    for name in RANK_RUNS:
        assert {"u", "v"}.isdisjoint(line.split()[0] for line in differences(ranks[0][name], ranks[1][name])), name


def test_there_is_one_record_for_each_run():
    assert sorted(recorded()) == sorted([*RUNS, *RANK_RUNS])


def test_start_that_differs_in_the_last_bit_is_another_run(process):
    """The comparison sees what it is there to see, and the tolerance for other machines lets rounding pass."""
    for name in ("stochastic, no data", "value gap, batches"):
        plain, nudged, shifted = (
            process.submit(golden.run, name, change).result() for change in (None, golden.nudge, golden.shift)
        )
        assert differences(plain, nudged)
        assert not differences(plain, nudged, TOLERANCE)
        assert differences(plain, shifted, TOLERANCE)


def test_a_column_that_is_unstable_is_left_out_of_no_comparison_of_bits(process):
    name, (column, *_) = next(iter(UNSTABLE.items()))
    found = process.submit(golden.run, name).result()
    part, key = column.split(".")
    other = found | {part: found[part] | {key: "0x1.0p+0"}}
    assert differences(found, other, 0.0, [column])
    assert differences(found, other, TOLERANCE)
    assert not differences(found, other, TOLERANCE, [column])


def write(only: list[str]) -> None:
    """Run again what has one of these in its name, or all, and write the file."""
    with same_bits() as process:
        found = process.submit(golden.every_run, only).result()
    runs = {name: run for name, run in recorded().items() if name in RUNS or name in RANK_RUNS}
    changed = [name for name in found if name not in runs or differences(runs[name], found[name], TOLERANCE)]
    runs |= found
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(runs[name], indent=0)}" for name in sorted(runs))
    FILE.write_text(f"{{\n{text}\n}}\n")
    print(f"{len(found)} runs, {len(changed)} of them with other numbers than before:", *changed, sep="\n  ")


def compare_with(revision: str, only: list[str]) -> None:
    """Run the code of a commit and the present code, and print which runs differ."""
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.run(["git", "archive", revision, "src", "studies/src"], cwd=ROOT, capture_output=True)
        if tree.returncode:
            sys.exit(tree.stderr.decode())
        subprocess.run(["tar", "-x", "-C", folder], input=tree.stdout, check=True)
        before, now = (_runs_of(root, only) for root in (Path(folder), ROOT))
    for name in now:
        lines = differences(before[name], now[name])
        print(*[f"{name} differs:", *lines[:3]] if lines else [f"{name} is equal"], sep="\n    ")


def _runs_of(root: Path, only: list[str]) -> dict[str, Any]:
    """Return the present runs, in the code of another folder."""
    path = os.pathsep.join(map(str, (root / "src", root / "studies" / "src", ROOT / "tests")))
    command = [sys.executable, __file__, "--print", "--only", *only]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"The runs in the code of {root} ended with an error.")
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["code"]).is_relative_to(root), f"{found['code']} is not the code of {root}"
    return found["runs"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the recorded runs, or compare them with another commit.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--compare", metavar="REV", help="list the runs that differ from those in this commit's code")
    action.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="parts of the names of runs")
    asked = parser.parse_args()
    if asked.write:
        write(asked.only)
    elif asked.compare:
        compare_with(asked.compare, asked.only)
    else:
        with same_bits() as process:
            runs = process.submit(golden.every_run, asked.only).result()
        print(json.dumps({"code": bilevel.__file__, "runs": runs}))
