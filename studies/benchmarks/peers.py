"""Hyper-cleaning side by side with other bilevel libraries: the tables of docs/results/peers.md.

    python studies/benchmarks/peers.py setup                    build/peers-env with the peers in it
    python studies/benchmarks/peers.py run                      all runs that are not made yet, the tables' order first
    python studies/benchmarks/peers.py run --only bilevel --again
    python studies/benchmarks/peers.py memory                   peak memory for T = 1 to 100
    python studies/benchmarks/peers.py --write                  the page, from the results so far

Results go to `build/peers.jsonl` as they come, one JSON object a line; a run that is there already is not made again.
The task and the methods are in `peers_methods.py`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from environment import commit, in_environment
from store import Store, write_tables

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "peers-env"
RESULTS = ROOT / "build" / "peers.jsonl"
SUMMARY = ROOT / "studies" / "results" / "peers.json"
DATA = Path(os.environ.get("BILEVEL_DATA", ROOT.parent / "shared" / "data"))
TORCH = "2.13.0"

CHOOSE, SEEDS = 100, (0, 1, 2)
RATES = (0.03, 0.1, 0.3)
"""Of the upper Adam, for every method that takes one."""
BUDGET = {"mlp": 12.0, "linear": 5.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "bilevel": {"rates": False},
    "bilevel, lower_steps=1": {"rates": False, "lower_steps": 1},
}
"""Options of our method, with or instead of the rates; `rates=False` leaves both rates and T at their defaults."""
LOWER_STEPS = (1, 5)
"""For each upper step: chosen together with the rate."""
SINGLE_LOOP = ("boat meso",)
"""Methods that have one lower step by construction."""
Choice = tuple[float, int] | None
"""An upper rate and a number of lower steps; None if the method chooses them."""
OURS = ("bilevel", "bilevel, lower_steps=1")
FIRST = (*OURS, "value penalty", "boat pgdo", "higher", "torchopt", "betty neumann")
LATER = ("betty darts", "betty sama", "boat meso", "betty cg", "boat vfo", "boat rad")
REFERENCES = ("trusted only", "plain", "clean labels known")
MEMORY = ("bilevel", "value penalty", "higher", "torchopt", "betty darts", "betty neumann", "boat pgdo", "boat rad")
MEMORY_STEPS = (1, 10, 100)


def key(method: str, model: str, trusted: int, seed: int, choice: Choice) -> str:
    return f"{method}/{model}/{trusted}/{seed}/{'-' if choice is None else f'{choice[0]:g},T={choice[1]}'}"


def choices(method: str) -> Sequence[Choice]:
    if not OPTIONS.get(method, {}).get("rates", True):
        return (None,)
    return tuple(itertools.product(RATES, LOWER_STEPS[:1] if method in SINGLE_LOOP else LOWER_STEPS))


def chosen(store: Store, method: str, model: str, *, by_test: bool = False) -> tuple[bool, Choice]:
    """Whether a choice could be made, and which: the best held-out accuracy on seed 100, then the least loss.

    The choice made with 500 trusted is used with 5,000 too. `by_test`: the best test accuracy instead.
    """
    found = {r: store.results.get(key(method, model, 500, CHOOSE, r)) for r in choices(method)}
    if len(found) == 1:
        return True, next(iter(found))
    if any(v is None for v in found.values()):
        return False, None
    good = {r: v for r, v in found.items() if v.get("finite")}
    if not good:
        return False, None
    if by_test:
        return True, max(good, key=lambda r: good[r]["accuracy"])
    return True, max(good, key=lambda r: (good[r]["held_accuracy"], -good[r]["held_loss"]))


# -- setup -------------------------------------------------------------------------------------------------------------


def setup() -> None:
    """Make the peers' own environment. torch never leaves the pinned version."""
    lines = (Path(__file__).with_name("peers_requirements.txt")).read_text().splitlines()
    blank = lines.index("")
    ordinary, bare = ([n for n in part if n and not n.startswith("#")] for part in (lines[:blank], lines[blank:]))
    if not (ENVIRONMENT / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pins = ROOT / "build" / "peers-constraints.txt"
    pins.write_text(f"torch=={TORCH}\n")
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(pins)]
    subprocess.run([*pip, *ordinary], check=True)
    for name in bare:
        subprocess.run([*pip, "--no-deps", "--ignore-requires-python", name], check=True)
    for module in ("betty", "higher", "torchopt", "boat_torch"):
        code = subprocess.run([str(ENVIRONMENT / "bin" / "python"), "-c", f"import {module}"], capture_output=True)
        print(f"{module}: {'imported' if code.returncode == 0 else code.stderr.decode().splitlines()[-1]}")


# -- run ---------------------------------------------------------------------------------------------------------------


def plan(store: Store) -> Iterator[tuple[str, str, int, int, Choice]]:
    """The runs in the order of their worth: 500 trusted first, the first methods first."""
    for methods, trusted in itertools.product((FIRST, LATER), (500, 5000)):
        for model in ("mlp", "linear"):
            for name in REFERENCES if methods is FIRST else ():
                yield from ((name, model, trusted, seed, None) for seed in SEEDS)
            for method in methods:
                if trusted == 500 and len(choices(method)) > 1:
                    yield from ((method, model, trusted, CHOOSE, choice) for choice in choices(method))
                for by_test in (False, True) if trusted == 500 else (False,):
                    ready, choice = chosen(store, method, model, by_test=by_test)
                    if ready:
                        yield from ((method, model, trusted, seed, choice) for seed in SEEDS)


def run(given: argparse.Namespace) -> None:
    in_environment(ENVIRONMENT, given.source.resolve())
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import peers_methods as peers

    torch.set_num_threads(1)
    store = Store(RESULTS)
    mnist = peers.read_mnist(DATA / "mnist")
    known = (*FIRST, *LATER, *REFERENCES)
    wanted = {method for method in known for name in given.only or known if method.startswith(name)}
    if not wanted:
        sys.exit(f"--only must name methods, or how they begin ({', '.join(known)}); got {' '.join(given.only)}.")
    version, made, started = commit(given.source), set[str](), time.perf_counter()
    for method, model, trusted, seed, choice in plan(store):
        name = key(method, model, trusted, seed, choice)
        if method not in wanted or model not in given.models or trusted not in given.trusted:
            continue
        if name in made or (name in store.results and not given.again):
            continue
        made.add(name)
        task = peers.make_task(mnist, model, trusted, seed)
        try:
            if method in REFERENCES:
                ((_, value),) = peers.references([method], task)
            else:
                value = peers.measure(task, method.split(",")[0], setting(peers, method, choice), BUDGET[model])
        except Exception as error:  # a peer that cannot run is a result
            value = {"error": f"{type(error).__name__}: {error}"[:500]}
        if method in OURS:
            value["commit"] = version
        value["torch"] = torch.__version__
        store.put(name, value)
        shown = {k: round(v, 4) for k, v in value.items() if isinstance(v, float)} or value
        print(f"{time.perf_counter() - started:6.0f} s  {name}  {shown}", file=sys.stderr, flush=True)


def setting(peers: Any, method: str, choice: Choice, steps: int = 5) -> Any:
    """`steps` are the lower steps where nothing else says how many."""
    options = dict(OPTIONS.get(method, {}))
    steps = options.pop("steps", steps)
    rate, steps = choice or (0.1, steps)
    return peers.Setting(upper=rate, steps=steps, options=options)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(given: argparse.Namespace) -> None:
    """Measure the peak memory of three upper steps on the MLP, minus the memory before them; each in a process."""
    in_environment(ENVIRONMENT, given.source.resolve())
    store = Store(RESULTS)
    for method, steps in itertools.product(MEMORY, MEMORY_STEPS):
        name = f"memory/{method}/{steps}"
        if name in store.results and not given.again:
            continue
        command = [sys.executable, str(Path(__file__)), "memory-of", method, str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        value = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.splitlines()[-1][:300]}
        store.put(name, value)
        print(f"{name}  {value}", file=sys.stderr, flush=True)


def memory_of(method: str, steps: int) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import peers_methods as peers

    torch.set_num_threads(1)
    task = peers.make_task(peers.read_mnist(DATA / "mnist"), "mlp", 500, 0)
    method_setting = setting(peers, method, None, steps)

    def status(field: str) -> float:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) / 1024

    package = {"value": "torch", "boat": "boat_torch"}.get(first := method.split()[0], first)
    importlib.import_module(package)
    model = task.network()  # one plain step, for the buffers that torch keeps
    torch.nn.functional.cross_entropy(model(task.x[:100]), task.y[:100]).backward()
    del model
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    peers.METHODS[method](task, method_setting, peers.Watch(task.wrong, 1e9, every=1e9, most_steps=3))
    print(json.dumps({"megabytes": round(status("VmHWM") - before, 1)}))


# -- the page ----------------------------------------------------------------------------------------------------------


def seconds_to(value: dict[str, Any], level: float) -> float | None:
    return next((s for s, f1, _ in value.get("curve", ()) if f1 >= level), None)


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    """mean (least to most)"""
    values = [v * scale for v in values]
    return f"{sum(values) / len(values):{unit}} ({min(values):{unit}} to {max(values):{unit}})" if values else ""


def reached(times: Sequence[float | None]) -> str:
    there = [t for t in times if t is not None]
    if not there:
        return "never"
    return f"{sum(there) / len(there):.1f}" + (f" ({len(there)} of {len(times)})" if len(there) < len(times) else "")


def table(store: Store, model: str, trusted: int) -> tuple[list[str], dict[str, Any]]:
    found: dict[str, tuple[Choice, list[dict[str, Any]]]] = {}
    missing, failed = [], []
    for method, by_test in itertools.product((*FIRST, *LATER), (False, True)):
        _, choice = chosen(store, method, model, by_test=by_test)
        if by_test and choice == chosen(store, method, model)[1]:
            continue
        runs = [store.results.get(key(method, model, trusted, seed, choice)) for seed in SEEDS]
        begins = f"{method}/{model}/{trusted}/"
        errors = [v["error"] for k, v in store.results.items() if k.startswith(begins) and "error" in v]
        good = [r for r in runs if r is not None and "error" not in r]
        if good:
            found[method + ", best by test" * by_test] = (choice, good)
        if errors and not by_test:
            failed.append(f"{method}: {errors[0]}")
        elif len(good) < len(SEEDS) and not (by_test and trusted != 500):
            missing.append(f"{method} ({len(good)} of {len(SEEDS)} seeds)")
    mean = lambda runs, name: sum(r[name] for r in runs) / len(runs)  # noqa: E731
    peers = {m: mean(runs, "f1") for m, (_, runs) in found.items() if m not in OURS}
    best = max(peers, key=peers.__getitem__, default=None)
    level = peers[best] if best else 0.9
    lines = [
        f"| | upper rate, T | accuracy | F1 | AUC | seconds to F1 0.90 | seconds to F1 {level:.3f} | upper steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    summary: dict[str, Any] = {"best_peer": best, "best_peer_f1": level, "methods": {}}
    for method, (choice, runs) in found.items():
        to = [[seconds_to(r, at) for r in runs] for at in (0.9, level)]
        cells = [
            named(method, choice),
            spread([r["accuracy"] for r in runs], ".1f", 100),
            spread([r["f1"] for r in runs], ".3f"),
            spread([r["auc"] for r in runs], ".3f"),
            reached(to[0]),
            reached(to[1]),
            f"{mean(runs, 'steps'):.0f}",
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
        summary["methods"][method] = {
            "upper_rate_and_lower_steps": choice,
            **{n: [r[n] for r in runs] for n in ("accuracy", "f1", "auc", "steps", "seconds")},
            "seconds_to_f1_090": to[0],
            "seconds_to_best_peer_f1": to[1],
            "commit": runs[0].get("commit"),
        }
    for name in REFERENCES:
        runs = [store.results.get(key(name, model, trusted, seed, None)) for seed in SEEDS]
        good = [r for r in runs if r is not None]
        if good:
            lines.append(f"| *{name}* | | {spread([r['accuracy'] for r in good], '.1f', 100)} | | | | | |")
            summary["methods"][name] = {"accuracy": [r["accuracy"] for r in good]}
    if not found:
        lines = ["Not run yet."]
    elif missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    if failed:
        lines += ["", "Could not run: " + "; ".join(failed) + "."]
    return lines, summary


def memory_table(store: Store) -> list[str]:
    lines = [
        "| megabytes, T = | " + " | ".join(map(str, MEMORY_STEPS)) + " |",
        "| --- |" + " --- |" * len(MEMORY_STEPS),
    ]
    for method in MEMORY:
        values = [store.results.get(f"memory/{method}/{t}") for t in MEMORY_STEPS]
        if any(values):
            cells = ["" if v is None else f"{v['megabytes']:.0f}" if "megabytes" in v else "failed" for v in values]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else ["Not run yet."]


def named(method: str, choice: Choice) -> str:
    return "" if choice is None else f"{choice[0]:g}, {choice[1]}"


def chosen_rates(store: Store, model: str) -> list[str]:
    pairs = list(itertools.product(RATES, LOWER_STEPS))
    lines = [
        "| | " + " | ".join(f"{r:g}, {t}" for r, t in pairs) + " |",
        "| --- |" + " --- |" * len(pairs),
    ]
    for method in (*FIRST, *LATER):
        values = [store.results.get(key(method, model, 500, CHOOSE, pair)) for pair in pairs]
        if any(values):
            cells = [
                "" if v is None or "error" in v else f"{100 * v['held_accuracy']:.0f} ({v['held_loss']:.2f})"
                for v in values
            ]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def write() -> None:
    """Write the tables and the JSON file from the results so far."""
    store = Store(RESULTS)
    found = {(t, m): table(store, m, t) for t in (500, 5000) for m in ("mlp", "linear")}
    titles = {"mlp": "MLP 784-300-10", "linear": "Linear 784-10"}
    tables = {f"{trusted:,} trusted, {titles[model]}": lines for (trusted, model), (lines, _) in found.items()}
    tables["Peak memory"] = memory_table(store)
    for model in ("mlp", "linear"):
        tables[f"Held-out accuracy (loss) at upper rate, T, on seed 100, {model}"] = chosen_rates(store, model)
    summary = {
        "torch": sorted({v["torch"] for v in store.results.values() if "torch" in v}),
        "commits": sorted({v["commit"] for v in store.results.values() if "commit" in v}),
        "tables": {f"{m}/{t}": s for (t, m), (_, s) in found.items()},
        "memory": {k: v for k, v in store.results.items() if k.startswith("memory/")},
    }
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    write_tables(RESULTS.with_suffix(".md"), tables)


def shown(options: dict[str, Any]) -> str:
    given = {("lower_steps" if k == "steps" else k): v for k, v in options.items() if k != "rates"}
    return f"`Penalty({', '.join(f'{k}={v!r}' for k, v in given.items())})`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables of the results so far")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("setup", help="make build/peers-env")
    for name in ("run", "memory"):
        verb = verbs.add_parser(name)
        verb.add_argument("--again", action="store_true", help="make runs again that are there already")
        verb.add_argument(
            "--source", type=Path, default=ROOT / "src", help="folder of our package: src, or a copy of it"
        )
        if name == "run":
            verb.add_argument("--only", nargs="+", help="these methods only, by how they begin")
            verb.add_argument("--models", nargs="+", choices=list(BUDGET), default=list(BUDGET))
            verb.add_argument("--trusted", nargs="+", type=int, choices=(500, 5000), default=[500, 5000])
    one = verbs.add_parser("memory-of")
    one.add_argument("method")
    one.add_argument("steps", type=int)
    given = parser.parse_args()
    if given.write:
        write()
    elif given.verb == "setup":
        setup()
    elif given.verb == "run":
        run(given)
    elif given.verb == "memory":
        memory(given)
    elif given.verb == "memory-of":
        memory_of(given.method, given.steps)
    else:
        parser.error("say setup, run, memory or --write")


if __name__ == "__main__":
    main()
