"""Try every fault at its full count, and write the tables of docs/reliability.md to a file.

    python studies/benchmarks/reliability.py --minutes 60
    python studies/benchmarks/reliability.py --tables runs/reliability/tables.md --only "read-only,pages"

Each fault is a cell that runs once. Its result is kept in studies/results, or next to the file of `--tables`; the same
command continues after a stop. The disks need root.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "studies" / "results" / "reliability.json"
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests")]

import torch  # noqa: E402
from bilevel_studies.study import FiledStore, table  # noqa: E402

from bilevel._util.atomic_files import write_whole  # noqa: E402
from bilevel.running.run_many import (  # noqa: E402
    ONCE,
    Found,
    RunItem,
    Settings,
    run_items,
)

READERS = {
    "npz": ".npz files",
    "csv": ".csv tables",
    "parquet": ".parquet tables",
    "images": "images in a folder",
    "decisions": "decisions applied to a table",
    "checkpoint": "checkpoints",
    "state": "checkpoints with a right digest and a wrong content",
    "config": "config.json and result.json of a run",
    "numbers": ".csv tables of numbers to predict",
}
WORDS = {
    "kills": "SIGKILL at a random moment of `bilevel denoise digits`; resumed, the same bits, every file readable",
    "kills of solve": "SIGKILL at a random moment of `solve` with data; resumed, the same bits",
    "kills of a rank": "SIGKILL of one of three ranks of `solve` at a random moment; both others end, rank 0 names it; "
    "resumed, the same bits, every file readable",
    "full": "`denoise` on a disk that is full; with more room it continues to the same bits",
    "read-only": "a read-only disk: one sentence, nothing touched",
    "harmed": "a checkpoint cut off at every 256 bytes, or with one bit flipped; the one before is resumed",
    "values": "NaN or infinity in f, g, their gradients or the data, in every method; named with its step, the last "
    "finite state back",
    "pages": "labels, columns and file names that are markup, on the page in Chromium: they stay text",
}


def cells(soak: float) -> list[RunItem]:
    """Return every fault at its full count, the quick ones first."""
    some = [
        ("pages", 0, 0),
        ("read-only", 0, 0),
        ("harmed", 2000, 1),
        ("kills of solve", 50, 1),
        ("kills", 50, 1),
        ("full", 0, 0),
        ("values", 300, 1),
        ("kills of a rank", 50, 1),
    ]
    found = [
        RunItem({"fault": name, "count": count, "seed": seed}, 100 - i) for i, (name, count, seed) in enumerate(some)
    ]
    found += [RunItem({"fault": f"fuzz {name}", "count": 10_000, "seed": 1}, 50 - i) for i, name in enumerate(READERS)]
    return [*found, RunItem({"fault": "soak", "count": soak, "seed": 0}, 0)] if soak else found


def run(settings: Settings) -> Found:
    """Run one fault in a temporary folder."""
    import disks
    import fuzz
    import kills
    import pages
    import rank_kills
    import test_soak
    import values

    name, count, seed = settings["fault"], settings["count"], settings["seed"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found: Any
        if name == "soak":
            return {**test_soak.soaked(count), "seconds": round(time.perf_counter() - began)}
        if name.startswith("fuzz "):
            found = fuzz.fuzzed(name.removeprefix("fuzz "), folder, count, seed)
        elif name == "kills of solve":
            found = _solve_kills(folder, count, seed)
        else:
            found = {
                "kills": lambda: kills.killed(folder, count, seed),
                "kills of a rank": lambda: rank_kills.killed(folder, count, seed),
                "full": lambda: disks.full(folder, disks.SIZES),
                "read-only": lambda: disks.read_only(folder),
                "harmed": lambda: disks.harmed(folder, count, seed, every=256),
                "values": lambda: values.injected(count, seed),
                "pages": lambda: pages.shown(folder),
            }[name]()
    return {**found.result(), "seconds": round(time.perf_counter() - began)}


def _solve_kills(folder: Path, count: int, seed: int) -> Any:
    import test_kill_solve
    from tally import Tally

    tally = Tally()
    with tally.attempt("the run that was killed"):
        test_kill_solve.check("stochastic", steps=250, kills=count, seed=seed, every=2, folder=folder, last=220)
    tally.tried = count
    return tally


def tables(kept: list[tuple[Settings, Found]]) -> str:
    """Return the tables of the faults and the soak, and lists of what has not run or failed."""
    by_name = {settings["fault"]: found for settings, found in kept}
    names = [*WORDS, *(f"fuzz {name}" for name in READERS)]
    rows = []
    for name in names:
        if name in by_name:
            found = by_name[name]
            known = ("tried", "survived", "failures", "seconds")
            others = "; ".join(f"{key}: {value}" for key, value in found.items() if key not in known)
            words = WORDS.get(name) or f"fuzzed {READERS[name.removeprefix('fuzz ')]}: data or one sentence, no hang"
            rows.append([words, f"{found['tried']:,}", f"{found['survived']:,}", others])
    machine = [f"{os.cpu_count()}", platform.machine(), platform.python_version(), torch.__version__]
    parts = [table(["fault", "tried", "survived", "other counts"], rows)]
    if "soak" in by_name:
        found = by_name["soak"]
        parts.append(table(list(found), [[f"{value:g}" for value in found.values()]]))
    if missing := [[name] for name in [*names, "soak"] if name not in by_name]:
        parts.append(table(["not run"], missing))
    if failed := [[name, text] for name, found in by_name.items() for text in found.get("failures", ())]:
        parts.append(table(["not survived", "failure"], failed))
    return "\n\n".join([*parts, table(["cores", "machine", "Python", "torch"], [machine])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/reliability"), help="the folder of the cells")
    parser.add_argument("--tables", type=Path, help="the file of the tables; by default in --out")
    parser.add_argument("--results", type=Path, help="the file of all results; by default next to a file of --tables")
    parser.add_argument("--minutes", type=float, help="start no fault after this time")
    parser.add_argument("--soak", type=float, default=30, help="minutes of the soak; 0: none")
    parser.add_argument("--only", help="faults, with commas")
    options = parser.parse_args()
    shown = options.tables or options.out / "tables.md"
    usual = RESULTS if options.tables is None else shown.with_suffix(".json")
    store = FiledStore(options.out / "cells", options.results or usual)
    names = [cell.settings["fault"] for cell in cells(options.soak)]
    wanted = names if options.only is None else options.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"--only must be of {', '.join(names)}; got {', '.join(sorted(unknown))}")
    some = [cell for cell in cells(options.soak) if cell.settings["fault"] in wanted]
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    began = time.monotonic()

    def on_progress(cell: RunItem) -> None:
        print(f"{cell.name}: {time.monotonic() - began:.0f} s, {store.get(cell)}", file=sys.stderr, flush=True)
        store.write()
        write_whole(shown, tables(store.all()))

    complete = run_items(some, store, run, where=ONCE, deadline=deadline, on_progress=on_progress)
    write_whole(shown, tables(store.all()))
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
