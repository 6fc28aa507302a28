"""The cells of the study: problems, methods with their step sizes, seeds and CPU seconds.

`Penalty()` has no options. The other methods start from the benchmark's own step sizes (config/*_best_params.yml of
github.com/benchopt/benchmark_bilevel), which are for longer runs. A small grid around these is run on a seed that the
tables do not show (on ijcnn1 on two), and the best of it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from bilevel_studies.statistics import chosen
from bilevel_studies.study import Kept, RunItem, Settings

RUN, CHOICE, BEST = "run", "choice", "best"
CLEANING = ("cleaning 0.5", "cleaning 0.7", "cleaning 0.9")
PROBLEMS = {
    "cleaning 0.5": "data cleaning, p = 0.5",
    "cleaning 0.7": "data cleaning, p = 0.7",
    "cleaning 0.9": "data cleaning, p = 0.9",
    "ijcnn1": "ijcnn1",
    "quadratics": "quadratics",
}
METHODS = {
    "penalty": "Penalty()",
    "soba": "SOBA",
    "srba": "SRBA",
    "amigo": "AmIGO",
    "stocbio": "StocBiO",
    "f2sa": "F2SA",
}
SEEDS, SECONDS = 3, 20.0
# The seeds and the CPU seconds of a candidate. On ijcnn1, one seed and 2 seconds take rates that diverge elsewhere.
CHOICE_SEEDS = {"cleaning": (100,), "ijcnn1": (100, 101), "quadratics": (100,)}
CHOICE_SECONDS = {"cleaning": 2.0, "ijcnn1": 7.0, "quadratics": 2.0}
# Batches of f and of g together.
BATCHES = {"cleaning": 392, "ijcnn1": 2215, "quadratics": 32}
# The benchmark's rates of v and of u, that is `step_size` and `step_size / outer_ratio`. It has none for F2SA on ijcnn1
# and for SOBA on the quadratics; these are 0.1. The rates of the quadratics are for another size.
TUNED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "cleaning": {
        "soba": (1.0, 1e4),
        "srba": (1e-3, 1e2),
        "amigo": (1e-3, 1e2),
        "stocbio": (1e-2, 1e3),
        "f2sa": (0.1, 1e3),
    },
    "ijcnn1": {
        "soba": (0.03125, 3.125),
        "srba": (0.5, 0.5),
        "amigo": (0.125, 1.25),
        "stocbio": (0.25, 0.25),
        "f2sa": (0.1, 0.1),
    },
    "quadratics": {
        "soba": (0.1, 0.1),
        "srba": (0.1, 0.1),
        "amigo": (0.01, 0.1),
        "stocbio": (0.1, 0.1),
        "f2sa": (0.1, 0.1),
    },
}
# Passes over all data in which SRBA takes one step on all of them, twice: `period_frac`.
PERIODS = {"cleaning": 512.0, "ijcnn1": 0.5, "quadratics": 0.5}
# The grid: factors on the rates of v and of u.
FACTORS = ((1.0, 1.0), (1.0, 8.0), (4.0, 4.0), (4.0, 32.0), (16.0, 16.0), (16.0, 64.0))
Factors = Mapping[tuple[str, str], tuple[float, float]]


def cells(
    problems: Iterable[str] = PROBLEMS,
    methods: Iterable[str] = METHODS,
    seeds: int = SEEDS,
    seconds: float = SECONDS,
    factors: Factors | None = None,
) -> list[RunItem]:
    """Return the runs of `Penalty()` and the grid; with `factors` the runs of the other methods and the best values."""
    wanted, others = list(problems), [name for name in methods if name != "penalty"]
    found: list[Settings] = []
    if factors is None:
        if "penalty" in methods:
            found += [_run(name, "penalty", seed, seconds) for seed, name in product(range(seeds), wanted)]
        families = dict.fromkeys(map(family, wanted))
        for one, name, factor in product(families, others, FACTORS):
            first = CLEANING[0] if one == "cleaning" else one
            for seed in CHOICE_SEEDS[one]:
                found.append(_run(first, name, seed, CHOICE_SECONDS[one], factor) | {"part": CHOICE})
    else:
        runs = [_run(*at, seconds, factors[family(at[0]), at[1]]) for at in product(wanted, others, range(seeds))]
        found = [*runs, *({"part": BEST, "problem": name} for name in wanted if "penalty" in methods)]
        found.sort(key=_order)
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def _order(settings: Settings) -> tuple[bool, bool, int]:
    """SOBA and SRBA come first, and last the best values of data cleaning: these take minutes."""
    slow = settings["part"] == BEST and settings["problem"] in CLEANING
    return slow, settings.get("method") not in ("soba", "srba", None), settings.get("seed", 0)


def _run(
    name: str, method: str, seed: int, seconds: float, factor: tuple[float, float] | None = None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"part": RUN, "problem": name, "method": method, "seed": seed, "seconds": seconds}
    if factor is not None:
        lower, upper = TUNED[family(name)][method]
        settings |= {"lower_rate": lower * factor[0], "upper_rate": upper * factor[1]}
    if method == "srba":
        settings["period"] = int(PERIODS[family(name)] * BATCHES[family(name)])
    return settings


def family(name: str) -> str:
    """Return the problem for which the step sizes of a problem are chosen."""
    return name.split()[0]


def best_factors(kept: Sequence[Kept]) -> Factors:
    """Return the factors with the lowest last F in the grid, for each family of problems and method.

    Of several seeds, the worst counts.
    """
    found = {}
    for one, rates in TUNED.items():
        for method, (lower, upper) in rates.items():
            tried: dict[tuple[float, float], float] = {}
            for a, b in FACTORS:
                some = chosen(kept, part=CHOICE, method=method, lower_rate=lower * a, upper_rate=upper * b)
                for settings, result in some:
                    if family(settings["problem"]) == one and settings["seconds"] == CHOICE_SECONDS[one]:
                        tried[a, b] = max(last(result), tried.get((a, b), -math.inf))
            found[one, method] = min(tried, key=lambda pair: tried[pair], default=FACTORS[0])
    return found


def last(found: Mapping[str, Any]) -> float:
    """Return the last F of a run; infinity if it diverged."""
    value = found["values"][-1] if found["values"] and found["status"] != "diverged" else math.inf
    return value if math.isfinite(value) else math.inf
