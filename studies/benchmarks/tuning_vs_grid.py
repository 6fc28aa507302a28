"""What tuning finds next to a grid of 40 values, and in which time: docs/results/tuning-vs-grid.md.

    python studies/benchmarks/tuning_vs_grid.py run                   all runs that are not made yet
    python studies/benchmarks/tuning_vs_grid.py run --only mlp/ time
    python studies/benchmarks/tuning_vs_grid.py --write               the page, from the results so far

Thirty problems: ten data sets, each with ridge regression, logistic regression and an MLP, and three seeds. Labels that
are classes are numbers for ridge regression; numbers are two classes, above the median or not, for logistic
regression. `time` measures linear models of several sizes next to scikit-learn, `speed` the estimators on few rows.

Seconds are CPU seconds of one thread. Results go to `studies/results/tuning-vs-grid.jsonl` as they come; a run that is
there is not made again. a9a, ijcnn1 and MNIST are read from the folder BILEVEL_DATA.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from store import Store

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "studies" / "results" / "tuning-vs-grid.jsonl"
PAGE = ROOT / "docs" / "results" / "tuning-vs-grid.md"
SETS = ("diabetes", "iris", "wine", "cancer", "digits", "a9a", "ijcnn1", "mnist", "friedman", "sparse")
MODELS, SEEDS, GRID, FOLDS = ("ridge", "logistic", "mlp"), 3, 40, 5
ROWS = 1000
# The training of the network, and the seeds of the trainings that measure its deviation.
STEPS, HIDDEN, AGAIN = 300, 32, 5
TIMES = {
    "442 x 10": (442, 10),
    "130 x 120": (130, 120),
    "1,000 x 100": (1000, 100),
    "10,000 x 100": (10_000, 100),
    "10,000 x 1,000": (10_000, 1000),
}
Data = tuple[np.ndarray, np.ndarray, bool]


# -- data --------------------------------------------------------------------------------------------------------------


def data_of(name: str, seed: int) -> Data:
    """Return inputs with mean 0 and deviation 1, targets, and whether these are classes."""
    from sklearn import datasets

    draw = np.random.default_rng(seed)
    if name in ("diabetes", "friedman", "sparse"):
        x, y = {
            "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
            "friedman": lambda: datasets.make_friedman1(300, 10, noise=1.0, random_state=seed),
            "sparse": lambda: datasets.make_regression(200, 100, n_informative=10, noise=50.0, random_state=seed),
        }[name]()
        classes = False
    else:
        x, y = _classes(name)
        classes = True
    order = draw.permutation(len(y))[:ROWS]
    x, y = x[order].astype(np.float64), y[order]
    x = (x - x.mean(0)) / np.where(x.std(0) > 1e-9, x.std(0), 1.0)
    return x, y, classes


def _classes(name: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    loaders: dict[str, Callable[..., Any]] = {
        "iris": datasets.load_iris,
        "wine": datasets.load_wine,
        "cancer": datasets.load_breast_cancer,
        "digits": datasets.load_digits,
    }
    if name in loaders:
        return loaders[name](return_X_y=True)  # type: ignore[no-any-return]
    folder = Path(os.environ.get("BILEVEL_DATA", "data"))
    if name == "mnist":
        with gzip.open(folder / "mnist" / "train-images-idx3-ubyte.gz") as images:
            pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 14, 2, 14, 2)
        with gzip.open(folder / "mnist" / "train-labels-idx1-ubyte.gz") as labels:
            return pixels.mean((2, 4)).reshape(-1, 196), np.frombuffer(labels.read(), np.uint8, offset=8).astype(int)
    with np.load(folder / "tabular" / f"{name}.npz") as file:
        return np.asarray(file["X_train"], dtype=np.float64), (file["y_train"] > 0).astype(int)


def targets_of(y: np.ndarray, classes: bool, model: str) -> np.ndarray:
    """Return the targets of a model: scaled numbers for ridge, class indices for logistic, either for the network."""
    if model == "ridge" or (model == "mlp" and not classes):
        return (y - y.mean()) / y.std()
    return y.astype(int) if classes else (y > np.median(y)).astype(int)


# -- linear models -----------------------------------------------------------------------------------------------------


def linear(name: str, model: str, seed: int) -> dict[str, Any]:
    """Tune as the estimators do, and next to it search scikit-learn's grid on the same folds."""
    import torch

    from bilevel.applications.tuning.folded_linear_model import Rows, folds_of
    from bilevel.applications.tuning.linear_tuning import HIGH, LOW, held_out_loss, tune_cautiously

    x, y, classes = data_of(name, seed)
    y = targets_of(y, classes, model)
    count = len(np.unique(y)) if model == "logistic" else 0
    fold, outputs = folds_of(y, count, FOLDS, seed), count if count > 2 else 1
    target = torch.from_numpy(y) if outputs > 1 else torch.from_numpy(y).double()
    rows = Rows(torch.from_numpy(x), target, fold, "squared" if model == "ridge" else "logistic", outputs)
    unit = (1.0 if model == "ridge" else 0.25) * float((x**2).mean()) * len(y)
    values = unit * np.logspace(np.log10(LOW), np.log10(HIGH), GRID)
    found: dict[str, Any] = {}
    for way, options in (("single", {"penalty": "single"}), ("per feature", {})):
        began = time.process_time()
        tuned, caution = tune_cautiously(rows, seed=seed, **options)  # type: ignore[arg-type]
        found[way] = {"loss": tuned.valid_loss, "seconds": time.process_time() - began, "caution": caution}
    began = time.process_time()
    best = sklearn_grid(x, y, fold.numpy(), model, values)
    seconds = time.process_time() - began
    loss = held_out_loss(rows, torch.full((x.shape[1],), best, dtype=torch.float64))
    return {**found, "grid": {"loss": loss, "seconds": seconds}}


def sklearn_grid(x: np.ndarray, y: np.ndarray, fold: np.ndarray, model: str, values: np.ndarray) -> float:
    """Return the penalty that RidgeCV or LogisticRegressionCV chooses on these folds."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV
    from sklearn.model_selection import PredefinedSplit

    split = PredefinedSplit(fold)
    if model == "ridge":
        return float(RidgeCV(values, cv=split, scoring="neg_mean_squared_error").fit(x, y).alpha_)
    options: dict[str, Any] = {"l1_ratios": (0.0,), "use_legacy_attributes": False}
    made = LogisticRegressionCV(Cs=1 / values, cv=split, scoring="neg_log_loss", max_iter=10_000, **options)
    return 1 / float(np.ravel(made.fit(x, y).C_)[0])


# -- the network -------------------------------------------------------------------------------------------------------


def network(name: str, model: str, seed: int) -> dict[str, Any]:
    """Tune one weight decay and one for each layer; train the network of each value of the grid."""
    import torch

    from bilevel.applications.networks import mlp
    from bilevel.applications.tuning import WeightDecay, tune
    from bilevel.applications.tuning.losses import TrainingLoss
    from bilevel.applications.tuning.searches import train_with

    x, y, classes = data_of(name, seed)
    y = targets_of(y, classes, model)
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y)
    targets = targets.long() if classes else targets.float()
    part = len(y) * 3 // 4
    train, valid = (inputs[:part], targets[:part]), (inputs[part:], targets[part:])
    count = int(targets.max()) + 1 if classes else None
    torch.manual_seed(seed)
    first = mlp(x.shape[1], (HIDDEN,), count or 1)
    objective, knob = TrainingLoss({"decay": WeightDecay()}, count), WeightDecay()

    def trained(value: float, draw: int) -> float:
        rival, held = copy.deepcopy(first), {"decay": torch.tensor([value])}
        train_with(objective, held, rival, train, steps=STEPS, batch=100, rate=1e-2, seed=draw)
        return objective.measured({}, rival, valid)

    found: dict[str, Any] = {}
    trained(1e-4, 0)  # the first training loads modules
    began = time.process_time()
    losses = {value: trained(value, seed + 1) for value in np.geomspace(knob.low, 100 * knob.high, GRID)}
    best = min(losses, key=lambda value: losses[value])
    found["grid"] = {"loss": losses[best], "seconds": time.process_time() - began, "value": best}
    for way, per in (("single", "model"), ("per layer", "layer")):
        began = time.process_time()
        hyper = {"decay": WeightDecay(per=per)}  # type: ignore[arg-type]
        tuned = tune(copy.deepcopy(first), train, valid, hyper, steps=STEPS, rate=1e-2, seed=seed)
        found[way] = {"loss": tuned.valid_loss, "seconds": time.process_time() - began, "won": tuned.best.stage}
        found[way]["trainings"] = len(tuned.candidates)
    found["again"] = [trained(best, 100 + k) for k in range(AGAIN)]
    return found


# -- time --------------------------------------------------------------------------------------------------------------


def timed(size: str, model: str) -> dict[str, Any]:
    """Return the seconds of our estimator with one penalty and with many, and of scikit-learn's on 40 values."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV

    from bilevel.sklearn import TunedLogisticRegression, TunedRidge

    rows, features = TIMES[size]
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, features))
    y = x[:, : max(2, features // 10)].sum(1) + draw.normal(size=rows) * features**0.5
    values = rows * np.logspace(-5, 4, GRID)
    ours: Any = TunedRidge if model == "ridge" else TunedLogisticRegression
    y = y if model == "ridge" else (y > 0).astype(int)
    options: dict[str, Any] = {"l1_ratios": (0.0,), "use_legacy_attributes": False, "scoring": "neg_log_loss"}
    theirs: Any = {
        "RidgeCV, leave one out": lambda: RidgeCV(values),
        "RidgeCV, 5 folds": lambda: RidgeCV(values, cv=FOLDS),
        "LogisticRegressionCV": lambda: LogisticRegressionCV(Cs=1 / values, cv=FOLDS, **options),
    }
    found = {}
    ours(penalty="single", random_state=0).fit(x[:100], y[:100])  # the first fit loads modules
    for way in ("single", "per-feature"):
        began = time.process_time()
        ours(penalty=way, random_state=0).fit(x, y)
        found[way] = time.process_time() - began
    for way, make in theirs.items():
        if way.startswith("Ridge") == (model == "ridge"):
            began = time.process_time()
            make().fit(x, y)
            found[way] = time.process_time() - began
    return found


# -- the runs and the page ---------------------------------------------------------------------------------------------


def tasks() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the runs by name: model/data/seed, or time/model/size."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for seed in range(SEEDS):
        for model in MODELS:
            for name in SETS:
                part = network if model == "mlp" else linear
                found[f"{model}/{name}/{seed}"] = lambda p=part, n=name, m=model, s=seed: p(n, m, s)  # type: ignore[misc]
    for model in ("ridge", "logistic"):
        for size in TIMES:
            found[f"time/{model}/{size}"] = lambda s=size, m=model: timed(s, m)  # type: ignore[misc]
    return found


def write() -> None:
    """Write the page from the results so far."""
    kept = Store(RESULTS).results
    problems = {key: value for key, value in kept.items() if not key.startswith("time/")}
    many = {"ridge": "per feature", "logistic": "per feature", "mlp": "per layer"}
    lines = [_head("model", "kind", "runs", "at or below", "less time", "median loss", "most", "median seconds")]
    above = []
    for model in MODELS:
        for way in ("single", many[model]):
            mine = {key: value for key, value in problems.items() if key.startswith(model)}
            if not mine:
                continue
            ratios = {key: value[way]["loss"] / value["grid"]["loss"] for key, value in mine.items()}
            spent = [value[way]["seconds"] / value["grid"]["seconds"] for value in mine.values()]
            good = sum(ratio <= 1 + 1e-9 for ratio in ratios.values())
            above += [(model, way, key, ratio, mine[key]) for key, ratio in ratios.items() if ratio > 1 + 1e-9]
            lines.append(
                f"| {model} | {way} | {len(mine)} | {good} | {sum(s < 1 for s in spent)} | "
                f"{np.median(list(ratios.values())):.4f} | {max(ratios.values()):.4f} | {np.median(spent):.2f} |"
            )
    rest = [_head("run", "kind", "loss / grid's", "(loss - grid's) / deviation of retraining")]
    for _, way, key, ratio, value in above:
        gap = value[way]["loss"] - value["grid"]["loss"]
        scale = f"{gap / np.std(value['again'], ddof=1):.2f}" if "again" in value else ""
        rest.append(f"| {key} | {way} | {ratio:.6f} | {scale} |")
    times = [_head("model", "size", "one penalty", "per feature", "scikit-learn", "one penalty / scikit-learn")]
    for key, value in kept.items():
        if key.startswith("time/"):
            _, model, size = key.split("/")
            others = {way: s for way, s in value.items() if way not in ("single", "per-feature")}
            theirs = "; ".join(f"{way}: {s:.2f}" for way, s in others.items())
            ratio = "; ".join(f"{value['single'] / s:.2f}" for s in others.values())
            ours = f"{value['single']:.2f} | {value['per-feature']:.2f}"
            times.append(f"| {model} | {size} | {ours} | {theirs} | {ratio} |")
    tables = {"runs": lines, "above": rest, "times": times}
    joined = {name: "\n".join(table) for name, table in tables.items()}
    PAGE.write_text(TEXT.format(steps=STEPS, hidden=HIDDEN, **joined))
    print(PAGE)


def _head(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|"


TEXT = """# Tuning next to a grid

The numbers come from `python studies/benchmarks/tuning_vs_grid.py run`, and this page from the same command with
`--write`. Seconds are CPU seconds of one thread, measured side by side on a machine that other work shares.

There are ten data sets, at most 1,000 rows of each: diabetes, iris, wine, breast cancer, digits, a9a, ijcnn1, MNIST
(14 x 14 pixels), Friedman's regression and a sparse regression. Each is a problem for ridge regression, for logistic
regression and for an MLP, with three seeds. Losses are held-out losses: of five folds for the linear models, of a
quarter of the rows for the MLP, each of a model that is trained from scratch with the tuned values.

- **The grid** has 40 values. For linear models it is the grid of `RidgeCV` and `LogisticRegressionCV`, over the range
  that we tune in, on the same folds. For the MLP it goes from 1e-7 to 10.
- **The MLP** has {hidden} hidden units and {steps} steps of Adam. It is tuned by `tune`, with one weight decay (single)
  or one for each layer.
- **Linear models** are tuned as `TunedRidge` and `TunedLogisticRegression` do: one penalty (single), or one for each
  feature with the caution that the rows choose, which can be a single penalty.

"At or below" and "less time" count runs against the grid. The losses and seconds are divided by the grid's.

{runs}

The runs above the grid:

{above}

The deviation of retraining is that of the loss with the grid's best value over five other seeds of the training.

## Time of linear models

Rows are normal. The seconds of scikit-learn's are of its grid of 40 values.

{times}

To run it again, set `BILEVEL_DATA` to the folder of the data sets. All numbers are in
[tuning-vs-grid.jsonl](../../studies/results/tuning-vs-grid.jsonl).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page from the results so far")
    verbs = parser.add_subparsers(dest="verb")
    verb = verbs.add_parser("run")
    verb.add_argument("--only", nargs="+", help="runs whose name begins like this")
    given = parser.parse_args()
    if given.verb == "run":
        import torch

        torch.set_num_threads(1)
        store = Store(RESULTS)
        for key, task in tasks().items():
            if not given.only or any(key.startswith(word) for word in given.only):
                store.make(key, task)
    elif given.write:
        write()
    else:
        parser.error("say run or --write")


if __name__ == "__main__":
    main()
