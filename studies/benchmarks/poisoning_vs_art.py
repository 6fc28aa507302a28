"""Compare clean-label poison with the Adversarial Robustness Toolbox.

    python studies/benchmarks/poisoning_vs_art.py setup            make build/art-env with the toolbox
    python studies/benchmarks/poisoning_vs_art.py run --targets 10 make all runs without a result
    python studies/benchmarks/poisoning_vs_art.py --write          write the tables of the results so far

The page is docs/results/poisoning-vs-art.md. All methods have the same victim, bases, bound and retraining: a
784-100-10 network on 1,000 MNIST images and some points of one class, with their correct label, each changed by at most
a share of a pixel's range; `SETTINGS` has the number of points and the share. All runs take one thread of a CPU.
Results go to `build/poisoning_vs_art.jsonl`. `--write` writes `build/poisoning_vs_art.md` and
studies/results/poisoning-vs-art.json, from which a fresh copy continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environment import commit, in_environment, make
from store import Store, write_tables

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bilevel.applications.poisoning.goals import Goal

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "art-env"
RESULTS = ROOT / "build" / "poisoning_vs_art.jsonl"
SUMMARY = ROOT / "studies" / "results" / "poisoning-vs-art.json"
ART = "1.20.1"
ROWS, TARGETS = 1000, 10
SETTINGS = ((10, 0.2), (10, 0.4), (50, 0.2))
"""(points, epsilon), in the order in which they are run."""
STEPS = 300
"""Of the feature collisions."""
RATES = (0.001, 0.01, 0.1)
"""Learning rates of feature collision; each target takes the one that brings the features nearest: no label is seen."""
ART_SETTINGS = {
    "ART, feature collision": ((0.01, 256.0), (0.1, 256.0), (1.0, 256.0)),
    "ART, feature collision, similarity 0.01 or 1": ((0.1, 0.01), (1.0, 1.0)),
}
"""(learning rate, similarity coefficient) of the toolbox's feature collision; its default coefficient is 256."""
TRIALS = {"ART, gradient matching, 1 trial": 1, "ART, gradient matching, 8 trials": 8}
"""Eight are the toolbox's default."""
METHODS = (
    "bilevel, Penalty",
    *reversed(TRIALS),
    "bilevel, feature collision",
    *ART_SETTINGS,
    "unmoved",
)
VICTIMS = (0, 1, 2)
"""First weights of the victims, by seed; the attacks know the weights of seed 0."""


def setup() -> None:
    make(ENVIRONMENT, ["six", "tqdm", "setuptools"], "import six")
    make(ENVIRONMENT, ["--no-deps", f"adversarial-robustness-toolbox=={ART}"], "import art; print(art.__version__)")


# -- the task ----------------------------------------------------------------------------------------------------------


class Task:
    """The images, the victim, and its features as trained on clean images."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        from bilevel.applications.poisoning.victims import Recipe, trained
        from bilevel.data import load

        data = load("mnist")
        order = torch.randperm(data.count, generator=torch.Generator().manual_seed(0))
        self.train, self.pool = ((data.x[rows], data.y[rows]) for rows in (order[:ROWS], order[ROWS : 3 * ROWS]))
        x, y = data.part("test")
        self.test = x[:1000], y[:1000]
        self.recipe = Recipe(optimizer="adam", steps=500, rate=3e-3, batch=100, decay=5e-4)
        self.clean = {seed: trained(self.first(seed), *self.train, self.recipe) for seed in VICTIMS}
        layers = copy.deepcopy(list(self.clean[0].children())[:-1])
        self.body = nn.Sequential(*layers).requires_grad_(False)

    def first(self, seed: int) -> nn.Module:
        from bilevel._util.random_state import seeded
        from bilevel.applications import networks as models

        with seeded(seed):
            return models.mlp(784, (100,), 10)

    def goal(self, k: int, points: int) -> tuple[int, int, Goal]:
        """(row of the test set, wanted class, goal) of the k-th target that all clean victims have right."""
        import torch

        from bilevel.applications.poisoning.goals import clean_label

        x, y = self.test
        with torch.no_grad():
            right = torch.stack([self.clean[seed](x).argmax(1) == y for seed in VICTIMS]).all(0)
        row = int(torch.nonzero(right)[:, 0][k])
        wanted = int((y[row] + 1 + k % 9) % 10)
        return row, wanted, clean_label(self.pool, x[row], wanted, points=points, features=self.body, collision=0.0)

    def flips(self, points: Tensor, goal: Goal, row: int, wanted: int) -> list[bool]:
        """Whether victims trained from scratch give the target the wanted class, for each first weights."""
        from bilevel.applications.poisoning.attack import evaluate

        one = (self.test[0][row : row + 1], self.test[1][row : row + 1])
        pair = (points, goal.labels)
        return [
            int(evaluate(pair, self.train, one, self.first(seed), recipe=self.recipe).predicted[0]) == wanted
            for seed in VICTIMS
        ]


def attacked(task: Task, method: str, goal: Goal, epsilon: float) -> Tensor:
    """Return the points of a method, not yet projected if the method has no bound."""
    from bilevel_studies.poisoning.clean_label_batch import collide

    from bilevel.applications.poisoning.attack import attack
    from bilevel.applications.poisoning.goals import Bound

    bound = Bound(epsilon, "linf")
    if method == "bilevel, Penalty":
        return attack(goal, task.train, task.first(0), recipe=task.recipe, bound=bound).x
    if method in TRIALS:
        return gradient_matching(task, goal, epsilon, TRIALS[method])
    if method == "unmoved":
        return goal.base
    if method in ART_SETTINGS:
        found = [art_collision(task, goal, rate, similarity) for rate, similarity in ART_SETTINGS[method]]
    else:
        found = [collide(goal, features=task.body, bound=bound, steps=STEPS, rate=rate).x for rate in RATES]
    wanted = task.body(goal.x)
    return min(found, key=lambda x: float(((task.body(settled(x, goal, epsilon)) - wanted) ** 2).sum()))


def settled(points: Tensor, goal: Goal, epsilon: float) -> Tensor:
    """The points in the pixel box and the bound."""
    from bilevel.applications.poisoning.goals import Bound, Within

    return Within(goal.base, 0.0, 1.0, Bound(epsilon, "linf")).settled(points.to(goal.base))


# -- the toolbox -------------------------------------------------------------------------------------------------------


def _classifier(task: Task) -> Any:
    from art.estimators.classification import PyTorchClassifier
    from torch import nn

    return PyTorchClassifier(
        copy.deepcopy(task.clean[0]),
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 28, 28),
        nb_classes=10,
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )


def gradient_matching(task: Task, goal: Goal, epsilon: float, trials: int) -> Tensor:
    """Witches' Brew as the toolbox has it, on the same bases: they are all of its training set."""
    import numpy as np
    import torch
    from art.attacks.poisoning import GradientMatchingAttack

    np.random.seed(0)
    torch.manual_seed(0)
    attack = GradientMatchingAttack(
        _classifier(task), percent_poison=1.0, epsilon=epsilon, max_trials=trials, batch_size=goal.points, verbose=0
    )
    found, _ = attack.poison(goal.x.numpy(), goal.y.numpy(), goal.base.numpy(), goal.labels.numpy())
    return torch.as_tensor(np.asarray(found))


def art_collision(task: Task, goal: Goal, rate: float, similarity: float) -> Tensor:
    """Poison Frogs as the toolbox has it; it knows no bound, and is drawn back at the end."""
    import numpy as np
    import torch
    from art.attacks.poisoning import FeatureCollisionAttack

    attack = FeatureCollisionAttack(
        _classifier(task),
        goal.x.numpy(),
        feature_layer=2,
        learning_rate=rate,
        max_iter=STEPS,
        similarity_coeff=similarity,
        verbose=False,
    )
    found, _ = attack.poison(goal.base.numpy().copy())
    return torch.as_tensor(np.asarray(found))


# -- run and write -----------------------------------------------------------------------------------------------------


def kept() -> Store:
    """Return the results so far: the ones in studies/results and newer ones made here."""
    store = Store(RESULTS)
    if SUMMARY.exists():
        store.results = json.loads(SUMMARY.read_text()) | store.results
    return store


def run(targets: int) -> None:
    import torch

    torch.set_num_threads(1)
    store, task = kept(), Task()
    for points, epsilon in SETTINGS:
        for k in range(targets):
            row, wanted, goal = task.goal(k, points)
            for method in METHODS:
                one = partial(_one, task, method, epsilon, row, wanted, goal)
                store.make(f"{_named(points, epsilon)}/{method}/{k}", one)


def _one(task: Task, method: str, epsilon: float, row: int, wanted: int, goal: Goal) -> dict[str, Any]:
    began = time.process_time()  # of one thread: what else the machine does is not counted
    points = settled(attacked(task, method, goal, epsilon), goal, epsilon)
    seconds = time.process_time() - began
    apart = float(((task.body(points) - task.body(goal.x)) ** 2).sum(1).mean())
    flips = task.flips(points, goal, row, wanted)
    return {
        "flips": flips,
        "seconds": round(seconds, 2),
        "clock": "CPU",
        "apart": apart,
        "commit": commit(ROOT / "src"),
    }


def _named(points: int, epsilon: float) -> str:
    return f"{points} points, {epsilon:g}"


def write() -> None:
    """Write the tables and the JSON file from the results so far."""
    results = kept().results
    tables = {"Penalty and the other methods": compared(results)}
    for points, epsilon in SETTINGS:
        mine = [line for line in (_line(results, points, epsilon, method) for method in METHODS) if line]
        tables[f"{points} points, {epsilon:g} of a pixel's range"] = [
            "| method | targets | flipped, known weights | flipped, other weights | distance of features | seconds |",
            "| --- | --- | --- | --- | --- | --- |",
            *mine,
        ]
    ordered = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
    SUMMARY.write_text("{\n" + ordered + "\n}\n", encoding="utf-8")
    write_tables(RESULTS.with_suffix(".md"), tables)


def compared(results: dict[str, Any]) -> list[str]:
    """Compare Penalty with each other method by the sign test over targets; a target counts once for all bounds."""
    names = [_named(*setting) for setting in SETTINGS]
    lines = [
        "| method | victims | Penalty flips | it flips | targets | Penalty flips more for | fewer for | p | "
        + " | ".join(f"p, {name}" for name in names)
        + " |",
        "| --- " * (8 + len(names)) + "|",
    ]
    for method in METHODS[1:-1]:
        sums: dict[str, list[int]] = {}
        victims = 0
        for ours, mine in results.items():
            if METHODS[0] in ours and (theirs := ours.replace(METHODS[0], method)) in results:
                victims += len(VICTIMS)
                by_target = sums.setdefault(ours.rsplit("/", 1)[1], [0, 0])
                for i, found in enumerate((mine, results[theirs])):
                    by_target[i] += sum(found["flips"])
        if sums:
            more, less, p = sign_test(sums.values())
            flips = [sum(pair[i] for pair in sums.values()) for i in range(2)]
            by_bound = [_pairs(results, method, name) for name in names]
            each = [f"{sign_test(pairs)[2]:.2g}" if pairs else "" for pairs in by_bound]
            cells = [method, victims, *flips, len(sums), more, less, f"{p:.2g}", *each]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _pairs(results: dict[str, Any], method: str, setting: str) -> list[tuple[int, int]]:
    """How many victims Penalty and a method flip, for each target of one bound that both have."""
    return [
        (sum(mine["flips"]), sum(results[other]["flips"]))
        for ours, mine in results.items()
        if ours.startswith(f"{setting}/{METHODS[0]}/") and (other := ours.replace(METHODS[0], method)) in results
    ]


def sign_test(pairs: Iterable[Sequence[int]]) -> tuple[int, int, float]:
    """How often the first is more and less than the second, and the p value of the sign test."""
    from scipy import stats

    pairs = list(pairs)
    more, less = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    return more, less, float(stats.binomtest(more, more + less).pvalue) if more + less else 1.0


def _line(results: dict[str, Any], points: int, epsilon: float, method: str) -> str:
    name = f"{_named(points, epsilon)}/{method}"
    mine = [value for key, value in results.items() if key.rsplit("/", 1)[0] == name]
    if not mine:
        return ""
    known, others = sum(v["flips"][0] for v in mine), sum(sum(v["flips"][1:]) for v in mine)
    means = [statistics.fmean(v[key] for v in mine) for key in ("apart", "seconds")]
    return (
        f"| {method} | {len(mine)} | {known} of {len(mine)} | {others} of {2 * len(mine)} | {means[0]:.2f} | "
        f"{means[1]:.1f}{'' if all(v.get('clock') == 'CPU' for v in mine) else ' (wall clock)'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("setup", "run"))
    parser.add_argument("--targets", type=int, default=TARGETS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.action == "setup":
        setup()
    elif arguments.action == "run":
        os.environ.setdefault("BILEVEL_DATA", str(ROOT.parent / "shared" / "data"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the toolbox's gradient matching moves to a GPU by default
        in_environment(ENVIRONMENT, ROOT / "src")
        run(arguments.targets)
    if arguments.write:
        write()


if __name__ == "__main__":
    main()
