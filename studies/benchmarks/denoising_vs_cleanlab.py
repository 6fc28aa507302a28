"""Wrong labels found and a classifier trained, side by side with cleanlab: docs/results/denoising-vs-cleanlab.md.

    python studies/benchmarks/denoising_vs_cleanlab.py setup      build/cleanlab-env with cleanlab in it
    python studies/benchmarks/denoising_vs_cleanlab.py run        all runs that are not made yet
    python studies/benchmarks/denoising_vs_cleanlab.py run --only mnist cifar10/asymmetric-40
    python studies/benchmarks/denoising_vs_cleanlab.py --write    the page, from the results so far

Results go to `build/denoising_vs_cleanlab.jsonl` as they come, one JSON object a line; a run that is there already is
not made again. A run is one data set, one noise and one seed, with all columns of the table, in one process.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environment import commit, in_environment, make
from store import Store, write_tables

if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "cleanlab-env"
RESULTS = ROOT / "build" / "denoising_vs_cleanlab.jsonl"
SUMMARY = ROOT / "studies" / "results" / "denoising-vs-cleanlab.json"
CLEANLAB = "2.9.0"

NOISES = {"symmetric-20": (0.2, "symmetric"), "symmetric-40": (0.4, "symmetric"), "asymmetric-40": (0.4, "asymmetric")}
SEEDS = {"digits": (0, 1, 2), "mnist": (0, 1, 2), "cifar10": (0, 1, 2)}
SIZES = {"digits": (1297, 100, 400), "mnist": (5000, 200, 10_000), "cifar10": (4000, 500, 2000)}
"""Noisy, trusted and test examples."""
FOLDS = 5
TURNS = {"digits": 5, "mnist": 3, "cifar10": 1}
"""How many fifths of the trusted examples are held out in turn to choose cleanlab's steps: 100, 120, 100 images."""
SHARES = (1, 1 / 3, 1 / 8)
"""Shares of the steps of one of our rounds, for the training of cleanlab's networks."""
TRUSTED = 0
"""In place of the steps of the folds' networks: one network trained on the trusted examples only, with all steps."""
DEFAULT = "prune_by_noise_rate"
FILTERS = (
    DEFAULT,
    "confident_learning",
    "predicted_neq_given",
    "both",
    "prune_by_class",
    "low_self_confidence",
    "low_normalized_margin",
)
"""All that cleanlab has."""
SCORES = ("self_confidence", "normalized_margin")

OURS, SAME, CHOSEN, BEST = "bilevel", "cleanlab", "cleanlab, chosen", "cleanlab, best by the truth"
REFERENCES = ("trusted only", "plain")
MEASURES = {
    "auc": ("AUC", ".3f", 1),
    "f1": ("F1", ".3f", 1),
    "accuracy": ("test accuracy", ".1f", 100),
    "seconds": ("CPU seconds", ".1f", 1),
}
"""The name on the page, its digits, and what a value is multiplied by there."""
TITLES = {"digits": "Digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
NOISE_TITLES = {"symmetric-20": "20% symmetric", "symmetric-40": "40% symmetric", "asymmetric-40": "40% asymmetric"}


# -- setup -------------------------------------------------------------------------------------------------------------


def setup() -> None:
    make(ENVIRONMENT, [f"cleanlab=={CLEANLAB}"], "import cleanlab; print(cleanlab.__version__)")


# -- the task ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Noisy, trusted and test examples, and the network at its first weights."""

    x: Tensor
    y: Tensor
    wrong: Tensor
    trusted: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    first: nn.Module
    seed: int

    def network(self) -> nn.Module:
        return copy.deepcopy(self.first)

    def accuracy(self, model: nn.Module) -> float:
        return scored(model, *self.test)[0]


def make_task(name: str, noise: str, seed: int) -> Task:
    import numpy as np
    import torch

    from bilevel.data import corrupt, load, split_trusted

    count, trusted, tests = SIZES[name]
    data = load(name)
    test = data.test
    assert test is not None
    random = np.random.default_rng(seed)
    if data.count > count + trusted:
        data = data.select(np.sort(random.permutation(data.count)[: count + trusted]))
    at = torch.from_numpy(random.permutation(len(test[1]))[:tests])
    data = split_trusted(data, trusted, seed)
    assert data.trusted is not None
    rate, kind = NOISES[noise]
    y = corrupt(data.y, rate, len(data.classes), seed, kind)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = network(name)
    return Task(
        x=inputs(name, data.x),
        y=y,
        wrong=y != data.y,
        trusted=(inputs(name, data.trusted[0]), data.trusted[1]),
        test=(inputs(name, test[0][at]), test[1][at]),
        first=first,
        seed=seed,
    )


def inputs(name: str, x: Tensor) -> Tensor:
    """CIFAR-10's pixels from -2 to 2; all else as `load` gives it."""
    return (x - 0.5) / 0.25 if name == "cifar10" else x


def network(name: str) -> nn.Module:
    """The MLPs that `bilevel denoise` takes, and for CIFAR-10 a CNN that is quick on one core: 38,906 weights."""
    from torch import nn

    from bilevel.applications.networks import mlp

    if name != "cifar10":
        return mlp(64, (128,)) if name == "digits" else mlp()
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def scored(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy, and minus the cross-entropy: pairs of them are compared to choose."""
    from bilevel.applications.training import probabilities

    found = probabilities(model, x)
    right = found.gather(1, y[:, None]).clamp_min(1e-12).log().mean()
    return float((found.argmax(1) == y).double().mean()), float(right)


# -- cleanlab's side ---------------------------------------------------------------------------------------------------


class Clock:
    """CPU seconds of this process by part, each part measured once however often its result is used."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, part: str, work: Any, *given: Any) -> Any:
        began = time.process_time()
        found = work(*given)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began
        return found

    def sum(self, *begins: str) -> float:
        return sum(s for part, s in self.seconds.items() if part.startswith(begins))


class Cleanlab:
    """Everything that cleanlab is given, and what it finds, for networks of any number of steps."""

    def __init__(self, task: Task, steps: int, batch: int, rate: float, turns: int) -> None:
        self.task, self.steps, self.batch, self.rate = task, steps, batch, rate
        self.clock = Clock()
        self.tried = [round(share * steps) for share in SHARES]
        self.probabilities: dict[int, Any] = {}
        self.held = list(itertools.islice(parts(task.trusted[1], task.seed), turns))

    def train(self, rows: Tensor, steps: int, out: Tensor | None = None) -> nn.Module:
        """The network on these of the noisy examples, and the trusted ones but for `out`."""
        import torch

        from bilevel.applications.training import fit

        task, model = self.task, self.task.network()
        kept = torch.ones(len(task.trusted[1]), dtype=torch.bool)
        if out is not None:
            kept[out] = False
        x = torch.cat([task.x[rows], task.trusted[0][kept]])
        y = torch.cat([task.y[rows], task.trusted[1][kept]])
        fit(model, x, y, steps=steps, batch=self.batch, rate=self.rate, seed=task.seed + 1)
        return model

    def rows(self, source: int) -> Tensor:
        """The noisy examples that the networks of a source learn from, in all."""
        import torch

        return torch.arange(0 if source == TRUSTED else len(self.task.y))

    def out_of_sample(self, source: int) -> Any:
        """Probabilities of every noisy example by a network that was not trained on it."""
        if source not in self.probabilities:
            self.probabilities[source] = self.clock.run(f"folds/{source}/", self._folds, source)
        return self.probabilities[source]

    def _folds(self, source: int) -> Any:
        import torch

        from bilevel.applications.training import probabilities

        task = self.task
        if source == TRUSTED:
            model = self.train(self.rows(source), self.steps)
            return normalised(probabilities(model, task.x))
        found = torch.zeros(len(task.y), probabilities(task.first, task.x[:1]).shape[1])
        for out in parts(task.y, task.seed):
            rest = torch.ones(len(task.y), dtype=torch.bool)
            rest[out] = False
            found[out] = probabilities(self.train(rest.nonzero().squeeze(1), source), task.x[out])
        return normalised(found)

    def issues(self, source: int, filter_by: str) -> Any:
        from cleanlab.filter import find_label_issues

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return find_label_issues(self.task.y.numpy(), self.out_of_sample(source), filter_by=filter_by, n_jobs=1)

    def aucs(self, source: int) -> dict[str, float]:
        from cleanlab.rank import get_label_quality_scores

        y, found = self.task.y.numpy(), self.out_of_sample(source)
        return {s: auc(self.task.wrong, get_label_quality_scores(y, found, method=s)) for s in SCORES}

    def kept(self, source: int, filter_by: str) -> Tensor:
        import torch

        return torch.from_numpy(~self.issues(source, filter_by)).nonzero().squeeze(1)

    def held_out(self, rows: Tensor, steps: int) -> tuple[float, float]:
        """Accuracy, then minus the loss, on fifths of the trusted examples by networks that did not see them."""
        x, y = self.task.trusted
        found = [scored(self.train(rows, steps, out), x[out], y[out]) for out in self.held]
        return sum(a for a, _ in found) / len(found), sum(b for _, b in found) / len(found)

    def choose_source(self) -> int:
        """Return the source of the probabilities: the steps of the folds' networks, or the trusted examples only."""
        return max((*self.tried, TRUSTED), key=lambda n: self.held_out(self.rows(n), n or self.steps))

    def choose_final(self, source: int) -> int:
        """The steps of the final training."""
        rows = self.kept(source, DEFAULT)
        return max(self.tried, key=lambda n: self.held_out(rows, n))


def normalised(found: Tensor) -> Any:
    found = found.double()
    return (found / found.sum(1, keepdim=True)).numpy()


def parts(y: Tensor, seed: int) -> Iterator[Tensor]:
    """Fifths of the rows, drawn by class."""
    import torch
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    return (torch.from_numpy(out) for _, out in folds.split(y, y))


# -- run ---------------------------------------------------------------------------------------------------------------


def f1(wrong: Tensor, found: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(wrong.numpy(), found))


def auc(wrong: Tensor, quality: Any) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(wrong.numpy(), -quality))


def measure(name: str, noise: str, seed: int) -> dict[str, Any]:
    """All columns for one task, one after the other."""
    from bilevel.applications.denoising.denoise import denoise
    from bilevel.applications.training import fit

    task = make_task(name, noise, seed)
    model = task.network()
    fit(task.network(), *task.trusted, steps=20)  # what torch does once is in nobody's seconds
    began = time.process_time()
    ours = denoise((task.x, task.y), task.trusted, model, seed=seed)
    seconds = time.process_time() - began
    steps, rate = ours.settings["final_steps"], ours.settings["rate"]
    value: dict[str, Any] = {
        OURS: {
            "auc": auc(task.wrong, ours.quality.numpy()),
            "auc_importance": auc(task.wrong, ours.importance.numpy()),
            "f1": f1(task.wrong, ours.suspect.numpy()),
            "f1_importance": f1(task.wrong, ours.importance.numpy() < 0.5),
            "accuracy": task.accuracy(ours.model),
            "noise_rate": ours.noise_rate,
            "seconds": seconds,
            "settings": ours.settings,
        },
    }

    theirs = Cleanlab(task, steps, ours.settings["batch"], rate, TURNS[name])
    clock = theirs.clock
    theirs.out_of_sample(steps)
    final = clock.run("same/final", lambda: theirs.train(theirs.kept(steps, DEFAULT), steps))
    value[SAME] = {
        "aucs": theirs.aucs(steps),
        "f1": f1(task.wrong, theirs.issues(steps, DEFAULT)),
        "accuracy": task.accuracy(final),
        "seconds": clock.sum("same/", f"folds/{steps}/"),
    }

    chosen = clock.run("chosen/source", theirs.choose_source)
    theirs.out_of_sample(chosen)
    final_steps = clock.run("chosen/final steps", theirs.choose_final, chosen)
    final = clock.run("last/final", lambda: theirs.train(theirs.kept(chosen, DEFAULT), final_steps))
    value[CHOSEN] = {
        "aucs": theirs.aucs(chosen),
        "f1": f1(task.wrong, theirs.issues(chosen, DEFAULT)),
        "accuracy": task.accuracy(final),
        "seconds": clock.sum("chosen/", "last/", f"folds/{chosen}/"),
        "seconds_without_choosing": clock.sum("last/", f"folds/{chosen}/"),
        "source": chosen,
        "final_steps": final_steps,
    }

    sources = (*theirs.tried, TRUSTED)
    called = {n: f"{n} steps" if n else "trusted only" for n in sources}
    aucs = {f"{called[n]}, {score}": v for n in sources for score, v in theirs.aucs(n).items()}
    f1s = {(n, by): f1(task.wrong, theirs.issues(n, by)) for n in sources for by in FILTERS}
    accuracies = {SAME: value[SAME]["accuracy"], CHOSEN: value[CHOSEN]["accuracy"]}
    for n in sources:
        _, by = max(((n, by) for by in FILTERS), key=f1s.__getitem__)
        last = n or steps
        accuracies[f"{called[n]}, {by}, at last {last}"] = task.accuracy(theirs.train(theirs.kept(n, by), last))
    value[BEST] = {"auc": max(aucs.values()), "f1": max(f1s.values()), "accuracy": max(accuracies.values())}
    value["tried"] = {
        "auc": aucs,
        "f1": {f"{called[n]}, {by}": v for (n, by), v in f1s.items()},
        "accuracy": accuracies,
    }

    for column, source in zip(REFERENCES, (TRUSTED, steps), strict=True):
        value[column] = {"accuracy": task.accuracy(theirs.train(theirs.rows(source), steps))}
    return value


def plan(only: Sequence[str] | None = None) -> Iterator[tuple[str, str, int]]:
    """The runs, a seed after the other; `only` says how their names (data/noise/seed) begin."""
    for seed, name, noise in itertools.product(range(3), SIZES, NOISES):
        if seed in SEEDS[name] and (only is None or f"{name}/{noise}/{seed}".startswith(tuple(only))):
            yield name, noise, seed


def run(given: argparse.Namespace) -> None:
    wanted = list(plan(given.only))
    if not wanted:
        sys.exit(f"--only must say how names such as mnist/symmetric-40/0 begin; got {' '.join(given.only)}.")
    in_environment(ENVIRONMENT, given.source.resolve())
    import cleanlab
    import sklearn
    import torch

    torch.set_num_threads(1)
    store, versions = Store(RESULTS), {"bilevel": commit(given.source.resolve())}
    versions |= {m.__name__: m.__version__ for m in (cleanlab, sklearn, torch)}
    for name, noise, seed in wanted:
        if given.again:
            store.results.pop(f"{name}/{noise}/{seed}", None)
        store.make(f"{name}/{noise}/{seed}", lambda: measure(name, noise, seed) | {"versions": versions})  # noqa: B023


# -- the page ----------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    """mean (least to most); of one seed its value."""
    values = [v * scale for v in values]
    if len(values) == 1:
        return f"{values[0]:{unit}}"
    return f"{mean(values):{unit}} ({min(values):{unit}} to {max(values):{unit}})"


def better_score(runs: Sequence[dict[str, Any]], column: str) -> str:
    """Of cleanlab's two scores the one with the larger AUC, by the truth."""
    return max(SCORES, key=lambda score: mean([r[column]["aucs"][score] for r in runs]))


def values_of(runs: Sequence[dict[str, Any]], column: str, measure: str) -> list[float]:
    """Return one value per run; none if the column does not have the measure."""
    if measure == "auc" and "aucs" in runs[0][column]:
        return [r[column]["aucs"][better_score(runs, column)] for r in runs]
    return [r[column][measure] for r in runs] if measure in runs[0][column] else []


def source_name(source: int) -> str:
    return f"{source}" if source else "trusted only"


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table of one data set, from its runs by noise."""
    columns = (OURS, SAME, CHOSEN, BEST, *REFERENCES)
    lines = ["| noise | | " + " | ".join(columns) + " |", "| --- |" + " --- |" * (len(columns) + 1)]
    for noise, runs in found.items():
        title = f"{NOISE_TITLES[noise]}" + (f", {len(runs)} seed{'s' * (len(runs) > 1)}")
        for measure, (name, unit, scale) in MEASURES.items():
            cells = [values_of(runs, column, measure) for column in columns]
            shown = [spread(values, unit, scale) if values else "" for values in cells]
            lines.append(f"| {title} | {name} | " + " | ".join(shown) + " |")
            if measure == "auc":
                alone = spread([r[OURS]["auc_importance"] for r in runs], unit)
                scores = [better_score(runs, column) for column in (SAME, CHOSEN)]
                lines.append(f"| | AUC of the importance only; score | {alone} | {scores[0]} | {scores[1]} | | | |")
            title = ""
        chosen = "; ".join(f"{source_name(r[CHOSEN]['source'])}, {r[CHOSEN]['final_steps']}" for r in runs)
        without = spread([r[CHOSEN]["seconds_without_choosing"] for r in runs], ".1f")
        lines.append(f"| | seconds without choosing | | | {without} | | | |")
        lines.append(f"| | steps in the folds, at last | | | {chosen} | | | |")
    return lines


def compared(results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Compare the means of ours with each column: numbers of comparisons, and the cases in which ours is not above."""
    lines = [
        "| against | above | least seed above the largest | not above | largest seed below the least | not above in |",
        "| --- " * 6 + "|",
    ]
    for column in (SAME, CHOSEN, BEST, *REFERENCES):
        above, parted, less, apart = 0, 0, [], 0
        for (data, noises), measure in itertools.product(results.items(), ("auc", "f1", "accuracy")):
            name, _, scale = MEASURES[measure]
            for noise, runs in noises.items():
                ours, theirs = values_of(runs, OURS, measure), values_of(runs, column, measure)
                if not theirs:
                    continue
                if mean(ours) > mean(theirs):
                    above += 1
                    parted += len(runs) > 1 and min(ours) > max(theirs)
                    continue
                apart += len(runs) > 1 and max(ours) < min(theirs)
                unit = ".4f" if scale == 1 else ".2f"
                numbers = f"{mean(ours) * scale:{unit}} against {mean(theirs) * scale:{unit}}"
                wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
                place = f"{TITLES[data]}, {NOISE_TITLES[noise]}, {name}"
                less.append(f"{place}: {numbers} ({wins} of {len(runs)} seeds above)")
        lines.append(f"| {column} | {above} | {parted} | {len(less)} | {apart} | {'; '.join(less)} |")
    return lines


def ratios(results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """CPU seconds of cleanlab's side for each second of bilevel, within a run."""
    columns = ((SAME, "seconds"), (CHOSEN, "seconds"), (CHOSEN, "seconds_without_choosing"))
    heads = [column + ", without choosing" * (measure != "seconds") for column, measure in columns]
    lines = [f"| data | {' | '.join(heads)} |", "| --- " * 4 + "|"]
    for data, noises in results.items():
        runs = [run for runs in noises.values() for run in runs]
        found = [[r[column][measure] / r[OURS]["seconds"] for r in runs] for column, measure in columns]
        lines.append(f"| {TITLES[data]} | {' | '.join(spread(one, '.2f') for one in found)} |")
    return lines


def write() -> None:
    """Write the tables and the JSON file from the results so far."""
    store = Store(RESULTS)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    missing = []
    for data, noise in itertools.product(SIZES, NOISES):
        keys = [f"{data}/{noise}/{seed}" for seed in SEEDS[data]]
        missing += [key for key in keys if key not in store.results]
        if runs := [store.results[key] for key in keys if key in store.results]:
            results.setdefault(data, {})[noise] = runs
    if not results:
        sys.exit(f"There are no results yet. Make them with: python {sys.argv[0]} run")
    made = [run for noises in results.values() for runs in noises.values() for run in runs]
    tables = {"Comparisons": compared(results), "Ratios of CPU seconds": ratios(results)}
    tables |= {TITLES[data]: table(noises) for data, noises in results.items()}
    if missing:
        tables["Not run"] = ["| run |", "| --- |", *(f"| {key} |" for key in missing)]
    versions = {name: sorted({run["versions"][name] for run in made}) for name in sorted(made[0]["versions"])}
    rows = [f"| {name} | {', '.join(which)} |" for name, which in versions.items()]
    tables["Versions"] = ["| package | version |", "| --- | --- |", *rows]
    SUMMARY.write_text(json.dumps(rounded(store.results), indent=1) + "\n")
    write_tables(RESULTS.with_suffix(".md"), tables)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables of the results so far")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("setup", help="make build/cleanlab-env")
    verb = verbs.add_parser("run")
    verb.add_argument("--again", action="store_true", help="make runs again that are there already")
    verb.add_argument("--source", type=Path, default=ROOT / "src", help="folder of our package: src, or a copy of it")
    verb.add_argument("--only", nargs="+", help="runs whose name (data/noise/seed) begins like this")
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
