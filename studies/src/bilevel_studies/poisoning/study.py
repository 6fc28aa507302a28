"""The poisoning study (Appendices D.2 and E.4, Tables 5 and 6, Figures 5(c) and 6): settings, and the paper's numbers.

The victim is a softmax regression without bias on 1,000 MNIST images. The paper gives a weight of 0.05, apparently of
|W|^2 / 2. The authors' published script (github.com/hammlab/bilevel-penalty, data_poisoning) has 0.5 * 0.01 = 0.005,
and only this weight gives an accuracy of clean data close to the paper's. The table has 0.005, the part `weight` 0.05.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bilevel_studies.study import Found, RunItem, Settings, key_of

UNTARGETED, TARGETED = "untargeted", "targeted"
MEASURES = {UNTARGETED: "accuracy", TARGETED: "success"}
PERCENTS = (1, 2, 3, 4, 5, 6)
SEEDS = 5
# Of |W|^2 / 2: in the table, and as the paper's text has it.
WEIGHT, PAPER_WEIGHT = 0.005, 0.05
# Eights as threes.
SOURCE, WANTED = 8, 3
# Examples for training, validation and test.
SPLITS = {UNTARGETED: (1000, 1000, 8000), TARGETED: (1000, 4000, 5000)}
# The columns by their names in cells, the most important first.
COLUMNS = {
    "penalty": "Penalty, ours",
    "flipping": "label flipping",
    "clean": "clean",
    "approx-grad": "ApproxGrad",
    "rmd": "RMD",
    "algorithm-2": "Penalty, the paper's",
}
SHOWN = ("clean", "flipping", "rmd", "approx-grad", "algorithm-2", "penalty")
# Upper steps; the steps of `penalty` are chosen. The paper's K is 5,000.
STEPS = {"approx-grad": 300, "rmd": 300, "algorithm-2": 1000, "flipping": 0, "clean": 0}
# The candidates for our Penalty: upper steps, the factor of the scores in the objective, and the number of shifts by
# one pixel that are added to each image of the objective (4: up, down, left and right).
CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    UNTARGETED: (
        {"steps": 400, "factor": 1.0, "shifts": 0},
        {"steps": 400, "factor": 1.5, "shifts": 0},
        {"steps": 600, "factor": 1.5, "shifts": 4},
        {"steps": 600, "factor": 2.0, "shifts": 4},
        {"steps": 600, "factor": 3.0, "shifts": 4},
        {"steps": 600, "factor": 4.0, "shifts": 4},
    ),
    TARGETED: (
        {"steps": 600, "factor": 1.0, "shifts": 0},
        {"steps": 600, "factor": 1.5, "shifts": 0},
        {"steps": 600, "factor": 1.0, "shifts": 4},
        {"steps": 600, "factor": 1.5, "shifts": 4},
    ),
}
OTHERS = ("approx-grad", "rmd")
# The candidates for these: the paper's objective or ours, and two upper rates (0.1 by default).
OTHER_CANDIDATES: tuple[dict[str, Any], ...] = (
    {},
    {"rate": 0.03},
    {"factor": 1.5, "shifts": 0},
    {"factor": 1.5, "shifts": 0, "rate": 0.03},
)
# One candidate for each (attack, column).
Choice = Mapping[tuple[str, str], dict[str, Any]]
# The settings until the part `choice` is finished.
BEFORE_THE_CHOICE: Choice = {
    (UNTARGETED, "penalty"): CANDIDATES[UNTARGETED][4],
    (TARGETED, "penalty"): CANDIDATES[TARGETED][0],
    **{(attack, column): {} for attack in (UNTARGETED, TARGETED) for column in OTHERS},
}
CHOICE_SEED, CHOICE_PERCENTS = 100, (1, 5)
WEIGHT_PERCENTS = (3, 6)
CHOICE, TABLE, WEIGHTS, HYPER, EFFECT = "choice", "table", "weight", "table-6", "effect-of-T"
PARTS = (CHOICE, TABLE, WEIGHTS, HYPER, EFFECT)
# T of Figure 5(c); our own setting has 0.
LOWER_STEPS = (1, 5, 10, 20)
EFFECT_STEPS = 200
# The options of both methods there: the same objective on the same images, at one upper rate.
EFFECT_OPTIONS = {"factor": 1.5, "shifts": 0, "rate": 0.03}


@dataclass(frozen=True)
class Published:
    """A column of Table 5: means and deviations by percent."""

    means: tuple[float | None, ...]
    deviations: tuple[float, ...] | None = None

    def at(self, percent: int) -> float | None:
        return self.means[PERCENTS.index(percent)]

    def known(self, percent: int) -> tuple[float, float]:
        """Return mean and deviation, for a column that has both."""
        return self.at(percent) or math.nan, (self.deviations or ())[PERCENTS.index(percent)]


# Table 5. Untargeted: test accuracy; targeted: the share of eights that are taken for threes. In percent.
PAPER: dict[str, dict[str, Published]] = {
    UNTARGETED: {
        "flipping": Published((86.71, 86.23, 85.17, 84.93, 84.39, 84.64), (0.32, 0.98, 0.96, 0.55, 1.06, 0.69)),
        "rmd": Published((85, 83, 82, 81, 80, 79)),
        "approx-grad": Published((82.09, 77.54, 74.41, 71.88, 68.69, 66.91), (0.84, 0.57, 1.14, 0.40, 0.86, 0.89)),
        "penalty": Published((83.29, 78.14, 75.14, 72.70, 69.48, 67.59), (0.43, 0.53, 1.09, 0.46, 1.93, 1.17)),
    },
    TARGETED: {
        "flipping": Published((7.76, 12.08, 18.36, 24.41, 30.41, 32.88), (1.07, 2.13, 1.23, 2.05, 4.24, 3.47)),
        "rmd": Published((10, 15, 25, 35, None, None)),
        "approx-grad": Published((18.84, 39.64, 52.76, 60.01, 65.61, 71.48), (1.90, 3.72, 2.69, 1.61, 4.01, 4.24)),
        "penalty": Published((17.40, 41.64, 51.40, 61.16, 65.52, 70.01), (3.00, 4.43, 2.72, 1.34, 2.85, 2.95)),
    },
}
PAPER_CLEAN = 87.0
# Table 6 at 60 points: the varied option, then values with their options and the paper's accuracy.
HYPERPARAMETERS: dict[str, tuple[tuple[str, dict[str, Any], float], ...]] = {
    "lam_0": (
        ("0", {"lam": 0.0}, 67.87),
        ("1", {"lam": 1.0}, 68.21),
        ("10", {"lam": 10.0}, 68.18),
        ("100", {"lam": 100.0}, 67.59),
    ),
    "nu": (("with", {}, 67.59), ("without", {"multipliers": False}, 68.82)),
    "gamma_0": (("1", {"gamma": 1.0}, 73.38), ("10", {"gamma": 10.0}, 67.59), ("100", {"gamma": 100.0}, 71.96)),
}


def best(kept: Sequence[tuple[Settings, Found]]) -> Choice:
    """Return the candidate of each attack with the strongest mean over the shares of the part `choice`."""
    out = dict(BEFORE_THE_CHOICE)
    for attack, column in product(CANDIDATES, ("penalty", *OTHERS)):
        candidates = candidates_of(attack, column)
        means = [mean_of(kept, attack, column, candidate) for candidate in candidates]
        known = [mean for mean in means if mean is not None]
        if len(known) == len(means):
            out[attack, column] = candidates[means.index(min(known) if attack == UNTARGETED else max(known))]
    return out


def candidates_of(attack: str, column: str) -> tuple[dict[str, Any], ...]:
    return CANDIDATES[attack] if column == "penalty" else OTHER_CANDIDATES


def mean_of(
    kept: Sequence[tuple[Settings, Found]], attack: str, column: str, candidate: Mapping[str, Any]
) -> float | None:
    """Return the mean result of a candidate over the shares; None if a share was not run."""
    found = [result[MEASURES[attack]] for _, result in tried(kept, attack, column, candidate)]
    return statistics.fmean(found) if len(found) == len(CHOICE_PERCENTS) else None


def tried(
    kept: Sequence[tuple[Settings, Found]], attack: str, column: str, candidate: Mapping[str, Any]
) -> list[tuple[Settings, Found]]:
    """Return the cells of a candidate."""
    wanted = [_candidate(attack, column, percent, candidate) for percent in CHOICE_PERCENTS]
    return [pair for pair in kept if dict(pair[0]) in wanted]


def _candidate(attack: str, column: str, percent: int, candidate: Mapping[str, Any]) -> dict[str, Any]:
    own = {"unseen": True} if attack == TARGETED else {}  # measured on images that the attack has not seen
    return _settings(CHOICE, attack, column, percent, CHOICE_SEED) | dict(candidate) | own


def choice_cells(attacks: Sequence[str], columns: Sequence[str] = ("penalty", *OTHERS)) -> list[RunItem]:
    """Return a cell for every candidate, on a seed that is not in the table."""
    found = [
        _candidate(attack, column, percent, candidate)
        for column in ("penalty", *OTHERS)
        if column in columns
        for percent, attack in product(CHOICE_PERCENTS, attacks)
        for candidate in candidates_of(attack, column)
    ]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def cells(
    parts: Sequence[str], attacks: Sequence[str], columns: Sequence[str], seeds: int, choice: Choice = BEFORE_THE_CHOICE
) -> list[RunItem]:
    """Return the cells of some parts except `choice`, the most important first."""
    found: list[tuple[dict[str, Any], tuple[float, ...]]] = []
    if TABLE in parts:
        found += _table(attacks, columns, seeds, choice)
    if WEIGHTS in parts:
        for seed, column, attack in product(range(seeds), ("clean", "flipping", "penalty"), attacks):
            for percent in (0,) if column == "clean" else WEIGHT_PERCENTS:
                settings = _settings(WEIGHTS, attack, column, percent, seed, choice) | {"weight": PAPER_WEIGHT}
                found.append((settings, (4.0, seed, 0.0)))
    if HYPER in parts:
        for seed, (name, values) in product(range(seeds), HYPERPARAMETERS.items()):
            for value, options, _ in values:
                settings = _settings(HYPER, UNTARGETED, "penalty", 6, seed, choice)
                found.append((settings | {"varied": name, "value": value, "options": options}, (3.0, seed, 1.0)))
    if EFFECT in parts:
        for seed, column, T in product(range(min(seeds, 2)), ("penalty", "approx-grad"), LOWER_STEPS):
            settings = _settings(EFFECT, UNTARGETED, column, 6, seed) | {"T": T, "steps": EFFECT_STEPS}
            found.append((settings | EFFECT_OPTIONS, (2.5, seed)))
    found.sort(key=lambda pair: pair[1])
    return [RunItem(settings, float(-i)) for i, (settings, _) in enumerate(found)]


def current(kept: Sequence[tuple[Settings, Found]]) -> list[tuple[Settings, Found]]:
    """Return the cells of the current study, with any seed: a file can contain results of other settings."""
    all_of_it = choice_cells(tuple(PAPER)) + cells(PARTS, tuple(PAPER), tuple(COLUMNS), 1, best(kept))
    known = {_but_the_seed(cell.settings) for cell in all_of_it}
    return [pair for pair in kept if _but_the_seed(pair[0]) in known]


def _but_the_seed(settings: Settings) -> str:
    return key_of({key: value for key, value in settings.items() if key != "seed"})


def _table(
    attacks: Sequence[str], columns: Sequence[str], seeds: int, choice: Choice
) -> list[tuple[dict[str, Any], tuple[float, ...]]]:
    ranks = {"clean": 0.5, "flipping": 0.5, "penalty": 1.0, "algorithm-2": 2.0, "approx-grad": 3.0, "rmd": 3.0}
    found: list[tuple[dict[str, Any], tuple[float, ...]]] = []
    for attack, column in product(attacks, columns):
        for percent in (0,) if column == "clean" else PERCENTS:
            for seed in range(seeds):
                first = percent in (0, 1, 3, 6)
                later = column == "algorithm-2" and (seed > 0 or not first)
                rank = 5.0 if later else ranks[column]
                found.append(
                    (_settings(TABLE, attack, column, percent, seed, choice), (rank, float(seed), float(not first)))
                )
    return found


def _settings(
    part: str, attack: str, column: str, percent: int, seed: int, choice: Choice = BEFORE_THE_CHOICE
) -> dict[str, Any]:
    common = {
        "part": part,
        "attack": attack,
        "column": column,
        "percent": percent,
        "seed": seed,
        "steps": 0,
        "weight": WEIGHT,
    }
    if column == "penalty":
        return common | choice[attack, column]
    own: dict[str, Any] = {"bases": SOURCE} if column == "flipping" and attack == TARGETED else {}
    return common | {"steps": STEPS[column]} | own | choice.get((attack, column), {})
