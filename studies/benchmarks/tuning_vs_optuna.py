"""Hyper-parameters tuned, side by side with Optuna (TPE): docs/results/tuning-vs-optuna.md.

    python studies/benchmarks/tuning_vs_optuna.py setup      build/optuna-env with Optuna in it
    python studies/benchmarks/tuning_vs_optuna.py run        all runs that are not made yet
    python studies/benchmarks/tuning_vs_optuna.py run --only linear/digits network
    python studies/benchmarks/tuning_vs_optuna.py --write    the page, from the results so far

Results go to `build/tuning_vs_optuna.jsonl` as they come, one JSON object a line; a run that is there already is not
made again. Both sides have the same data and training, and one thread: on linear models for the same CPU seconds, on
the network Optuna has 50 trials, whatever they take.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import commit, in_environment, make
from store import Store, write_tables

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "optuna-env"
RESULTS = ROOT / "build" / "tuning_vs_optuna.jsonl"
SUMMARY = ROOT / "studies" / "results" / "tuning-vs-optuna.json"
OPTUNA = "4.5.0"
SEEDS, TRIALS = 3, 50
MOST_FEATURES = 500
"""Features up to which TPE is given one penalty each: its time grows with their number, and 20,000 end no trial."""


def setup() -> None:
    make(ENVIRONMENT, [f"optuna=={OPTUNA}"], "import optuna; print(optuna.__version__)")


def best_of(
    objective: Callable[[Any], float],
    seed: int,
    *,
    seconds: float | None = None,
    trials: int | None = None,
    kept: Path | None = None,
) -> Any:
    """Optuna's study with TPE, until the CPU seconds or the trials are spent.

    The trials go to the file `kept`, and a stopped study continues from there, with new draws.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = None if kept is None else f"sqlite:///{kept}"
    study = optuna.create_study(storage=storage, study_name="tuning", load_if_exists=True)
    done = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    study.sampler = optuna.samplers.TPESampler(seed=seed + 1000 * len(done))
    began = time.process_time()

    def timed(trial: Any) -> float:
        before = time.process_time()
        value = objective(trial)
        trial.set_user_attr("seconds", time.process_time() - before)
        return value

    def stop(study: Any, trial: Any) -> None:
        if seconds is not None and time.process_time() - began >= seconds:
            study.stop()

    if trials is None or len(done) < trials:
        study.optimize(timed, n_trials=None if trials is None else trials - len(done), callbacks=[stop])
    return study


def linear(dataset: str, way: str, seed: int) -> dict[str, Any]:
    """Penalties of logistic regression in the budget of `bilevel reproduce tuning`."""
    import torch
    from bilevel_studies.tuning.data import problem
    from bilevel_studies.tuning.study import BUDGETS, OURS, load_late_modules

    from bilevel.applications.tuning.folded_linear_model import FoldedModel
    from bilevel.applications.tuning.linear_tuning import HIGH, LOW, held_out_loss, loss_of, trained, tune_linear

    load_late_modules()
    rows, test = problem(dataset, seed)
    d, began, trials = rows.x.shape[1], time.process_time(), None
    if way == "bilevel":
        alpha = tune_linear(
            rows, caution=0.0, tolerance=1e-6, seconds=OURS * BUDGETS[dataset], clock=time.process_time
        ).alpha
    else:
        unit = float(FoldedModel(rows).curvature.mean()) * int((rows.fold < 0).sum())
        count = 1 if way == "optuna, single" else d
        if count > MOST_FEATURES:
            return {"left_out": f"{count:,} penalties"}

        def chosen(parameters: Any) -> Any:
            values = [parameters(f"p{j}", LOW, HIGH) for j in range(count)]
            return unit * torch.tensor(values, dtype=torch.float64).expand(d)

        study = best_of(
            lambda trial: held_out_loss(rows, chosen(lambda n, a, b: trial.suggest_float(n, a, b, log=True))),
            seed,
            seconds=BUDGETS[dataset],
        )
        alpha, trials = chosen(lambda n, a, b: study.best_params[n]), len(study.trials)
    seconds = time.process_time() - began
    test_loss = loss_of(test, *trained(rows.select(rows.fold < 0), alpha))
    return {"valid_loss": held_out_loss(rows, alpha), "test_loss": test_loss, "seconds": seconds, "trials": trials}


def network(way: str, seed: int) -> dict[str, Any]:
    """The network of `bilevel reproduce tuning`: Optuna has 50 trials, each a training, on the same knobs."""
    import torch
    from bilevel_studies.tuning.study import NETWORK_RATE, NETWORK_STEPS, network_knobs, network_task, tempered
    from torch.nn.functional import cross_entropy

    from bilevel.applications.training import accuracy
    from bilevel.applications.tuning.losses import TrainingLoss
    from bilevel.applications.tuning.searches import train_with
    from bilevel.applications.tuning.tune import tune

    model, train, valid, test = network_task(seed)
    hyper, began = network_knobs(), time.process_time()
    if way == "bilevel":
        tune(model, train, valid, hyper, valid_loss=tempered, steps=NETWORK_STEPS, rate=NETWORK_RATE, seed=seed)
        return {"test_accuracy": accuracy(model, test), "seconds": time.process_time() - began}
    counts = {"decay": 4, "smoothing": 1, "classes": 10}
    objective = TrainingLoss({name: hyper[name] for name in counts}, 10)
    temperatures = torch.logspace(-1.3, 1.3, 60)

    def values_of(parameters: Any) -> dict[str, Any]:
        return {
            name: torch.tensor([parameters(f"{name}{i}", hyper[name]) for i in range(count)])
            for name, count in counts.items()
        }

    def trained(values: Any) -> Any:
        fresh = network_task(seed)[0]
        train_with(objective, values, fresh, train, steps=NETWORK_STEPS, batch=100, rate=NETWORK_RATE, seed=seed + 1)
        return fresh

    def trial_loss(trial: Any) -> float:
        def suggest(name: str, knob: Any) -> float:
            return trial.suggest_float(name, knob.low, knob.high, log=knob.scale == "log")

        fresh = trained(values_of(suggest))
        with torch.no_grad():
            scores = fresh(valid[0])
            return min(cross_entropy(scores / t, valid[1]).item() for t in temperatures)

    study = best_of(trial_loss, seed, trials=TRIALS, kept=RESULTS.with_name(f"optuna-network-{seed}.db"))
    seconds = sum(trial.user_attrs.get("seconds", 0.0) for trial in study.trials)
    best = trained(values_of(lambda name, _: study.best_params[name]))
    return {"test_accuracy": accuracy(best, test), "seconds": seconds, "trials": TRIALS}


WAYS = {"linear": ("bilevel", "optuna, single", "optuna, per feature"), "network": ("bilevel", "optuna")}


def keys() -> list[str]:
    """The names of all runs: part/data/way/seed."""
    found = []
    for seed in range(SEEDS):
        found += [f"linear/{dataset}/{way}/{seed}" for dataset in ("digits", "a9a", "text") for way in WAYS["linear"]]
        found += [f"network/{way}/{seed}" for way in WAYS["network"]]
    return found


def run(given: argparse.Namespace) -> None:
    in_environment(ENVIRONMENT, given.source)
    import torch

    torch.set_num_threads(1)
    store, tasks = Store(RESULTS), {}
    for key in keys():
        part, *rest = key.split("/")
        tasks[key] = lambda p=part, r=rest: (linear if p == "linear" else network)(*r[:-1], int(r[-1]))
    for key, task in tasks.items():
        if not given.only or any(key.startswith(word) for word in given.only):
            store.make(key, lambda task=task: {**task(), "commit": commit(given.source)})


def write() -> None:
    """Write the tables and the JSON file from the results so far."""
    results = Store(RESULTS).results
    if not results:
        sys.exit(f"There are no results yet. Make them with: python {sys.argv[0]} run")
    lines = ["| run | seed | way | validation loss | test | trials | CPU seconds |", "| --- " * 7 + "|"]
    for key in sorted(results, key=lambda key: (*key.split("/")[:-2], key.split("/")[-1], key)):
        made, (*run_, way, seed) = results[key], key.split("/")
        row = f"| {'/'.join(run_)} | {seed} | {way} |"
        if "left_out" in made:
            lines.append(f"{row} left out: {made['left_out']} | | | |")
            continue
        valid = f"{made['valid_loss']:.4f}" if "valid_loss" in made else ""
        test = (
            f"loss {made['test_loss']:.4f}" if "test_loss" in made else f"accuracy {100 * made['test_accuracy']:.2f}%"
        )
        trials = "" if made.get("trials") is None else made["trials"]
        lines.append(f"{row} {valid} | {test} | {trials} | {made['seconds']:.1f} |")
    tables = {"Runs": lines, "bilevel and Optuna": compared(results)}
    if missing := [key for key in keys() if key not in results]:
        tables["Not run"] = ["| run |", "| --- |", *(f"| {key} |" for key in missing)]
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    write_tables(RESULTS.with_suffix(".md"), tables)


def compared(results: dict[str, Any]) -> list[str]:
    """Count, for each run and way of Optuna, the common seeds on which bilevel is better."""
    lines = [
        "| run | way of Optuna | better with bilevel | seconds of bilevel | seconds of Optuna |",
        "| --- " * 5 + "|",
    ]
    for key in sorted({"/".join(key.split("/")[:-2]) for key in results}):
        column, sign = ("test_accuracy", -1) if key == "network" else ("valid_loss", 1)
        for way in WAYS[key.split("/")[0]][1:]:
            pairs = [
                (ours, theirs)
                for seed in range(SEEDS)
                if (ours := results.get(f"{key}/bilevel/{seed}"))
                and (theirs := results.get(f"{key}/{way}/{seed}"))
                and column in theirs
            ]
            if pairs:
                won = sum(sign * (ours[column] - theirs[column]) < 0 for ours, theirs in pairs)
                took = " | ".join(_range([pair[i]["seconds"] for pair in pairs]) for i in (0, 1))
                lines.append(f"| {key} | {way} | {column}: {won} of {len(pairs)} seeds | {took} |")
    return lines


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables of the results so far")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("setup", help="make build/optuna-env")
    verb = verbs.add_parser("run")
    verb.add_argument("--source", type=Path, default=ROOT / "src", help="folder of our package: src, or a copy of it")
    verb.add_argument("--only", nargs="+", help="runs whose name (part/data/way/seed) begins like this")
    given = parser.parse_args()
    if given.write:
        write()
    elif given.verb == "setup":
        setup()
    elif given.verb == "run":
        run(given)
    else:
        parser.error("say setup, run or --write")


if __name__ == "__main__":
    main()
