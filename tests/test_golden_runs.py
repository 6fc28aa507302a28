"""Every method repeats its recorded runs bit for bit: see `golden` for the runs, data/golden_runs.json for the record.

A change that is meant to move bits says so in its commit and renews the runs that it moves, and no other:

    python tests/test_golden_runs.py --write                  all
    python tests/test_golden_runs.py --write --only NAME ...  those with this in their name, such as "value gap"

The last bits of a sum depend on torch's release and on the instructions of the CPU. Each run is recorded with the
fingerprint of its machine: torch's version, the instructions that torch uses and the bits of a small computation. On a
machine with the same fingerprint the numbers must be equal bit for bit. On another one they must agree to 1e-8 of the
largest number of their column, or of 1 if that is larger: twenty steps in float64 multiply rounding errors of 1e-16 by
much less than 1e8, and residuals at the size of rounding are noise.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from golden import RANK_RUNS, RANKS, RUNS, differences, machine, machine_id
from ranks import on_ranks

FILE = Path(__file__).parent / "data" / "golden_runs.json"
TOLERANCE = 1e-8
"""On a machine whose last bits are others."""


@cache
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {"machines": {}, "runs": {}}


@cache
def here() -> str:
    return machine_id(machine())


def compare(name: str, found: dict[str, Any]) -> None:
    record = recorded()["runs"].get(name)
    assert record is not None, f"{name!r} is not recorded; run python tests/test_golden_runs.py --write --only {name!r}"
    tolerance = 0.0 if record["machine"] == here() else TOLERANCE
    lines = differences(record, found, tolerance)
    assert not lines, "\n".join(
        [
            f"{name!r} is not the recorded run:",
            *lines,
            f"If the commit means to change it: python tests/test_golden_runs.py --write --only {name!r}",
        ]
    )


@pytest.mark.parametrize("name", RUNS)
def test_run_is_the_recorded_one(name):
    compare(name, golden.run(name))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(RANKS, golden.on_rank, list(RANK_RUNS))


def test_runs_on_two_ranks_are_the_recorded_ones(ranks):
    for name, found in ranks[0].items():
        compare(name, found)


def test_both_ranks_end_at_the_same_bits(ranks):
    for name in RANK_RUNS:
        assert {"u", "v"}.isdisjoint(line.split()[0] for line in differences(ranks[0][name], ranks[1][name])), name


def test_there_is_one_record_for_each_run():
    assert sorted(recorded()["runs"]) == sorted([*RUNS, *RANK_RUNS])
    assert {run["machine"] for run in recorded()["runs"].values()} == set(recorded()["machines"])


def test_start_that_differs_in_the_last_bit_is_another_run():
    """The comparison sees what it is there to see, and the tolerance for other machines lets rounding pass."""

    def nudge(v: torch.Tensor) -> None:
        v.data[0] = torch.nextafter(v.data[0], torch.tensor(1.0, dtype=v.dtype))

    for name in ("stochastic, no data", "value gap, batches"):
        record = recorded()["runs"][name]
        assert differences(record, golden.run(name, nudge))
        assert not differences(record, golden.run(name, nudge), TOLERANCE)
        assert differences(record, golden.run(name, lambda v: v.data.add_(1e-5)), TOLERANCE)


def write(only: list[str]) -> None:
    """Run again what has one of these in its name, or all, and write the file."""

    def chosen(name: str) -> bool:
        return not only or any(part in name for part in only)

    old = recorded()
    names, rank_names = list(filter(chosen, RUNS)), list(filter(chosen, RANK_RUNS))
    found = {name: golden.run(name) for name in names}
    if rank_names:
        found |= on_ranks(RANKS, golden.on_rank, rank_names)[0]
    runs = {name: run for name, run in old["runs"].items() if name in RUNS or name in RANK_RUNS}
    changed = [name for name in found if name not in runs or differences(runs[name], found[name])]
    runs |= {name: found[name] | {"machine": here()} for name in found}
    known = old["machines"] | {here(): machine()}
    used = {key: known[key] for key in sorted({run["machine"] for run in runs.values()})}
    text = ['{"machines": ' + json.dumps(used, indent=1) + ",", '"runs": {']
    text.append(",\n".join(f"{json.dumps(name)}: {json.dumps(runs[name], indent=0)}" for name in sorted(runs)))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join([*text, "}}", ""]))
    print(f"{len(found)} runs, {len(changed)} of them with other numbers than before:", *changed, sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the recorded runs.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="parts of the names of runs")
    torch.set_num_threads(1)
    write(parser.parse_args().only)
