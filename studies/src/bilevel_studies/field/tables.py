"""The tables and figures of the study: CPU seconds until F is near the best value, and how much is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bilevel_studies import plots
from bilevel_studies.field.study import (
    BEST,
    CHOICE,
    CHOICE_SECONDS,
    CHOICE_SEEDS,
    CLEANING,
    FACTORS,
    METHODS,
    PROBLEMS,
    RUN,
    SECONDS,
    SEEDS,
    TUNED,
    best_factors,
    family,
)
from bilevel_studies.statistics import NOT_RUN, chosen
from bilevel_studies.study import Found, Kept, Report, table

# Excesses over the best value, as shares of it, and times in CPU seconds.
NEAR = (0.05, 0.01)
TIMES = (5.0, 10.0, 20.0)
# The least number in a figure with a logarithmic axis.
FLOOR = 1e-8
FEATURE_PROBLEMS = ("ijcnn1", "quadratics")
# The most that can be missing in the targets of `held`, and the seconds in which.
TARGETS = {"2% in 15 s": (0.02, 15.0), "1% in 20 s": (0.01, 20.0)}


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figure and return the tables."""
    panels = {PROBLEMS[name]: lines(kept, name) for name in PROBLEMS if best_value(kept, name) is not None}
    if panels:
        plots.curves(panels, folder / "field.png", "CPU seconds", "missing, as a share", log=True)
    tables = {title: body for title, body in all_tables(kept).items() if body}
    return Report({"cells": len(kept), "best": best_values(kept), "held": held(kept)}, tables)


def all_tables(kept: Sequence[Kept]) -> dict[str, str]:
    """Return every table by its name; empty text if nothing was run."""
    return {
        "Data cleaning": cleaning_table(kept),
        "ijcnn1 and quadratics": share_table(kept),
        "Step sizes": rates_table(kept),
        "Best values": table(
            ["problem", "best value", "of all data at once"],
            [[PROBLEMS[name], f"{value:.6f}", _alone(kept, name)] for name, value in best_values(kept).items()],
        ),
    }


def page(kept: Sequence[Kept]) -> dict[str, Any]:
    """Return the names that the template of the page uses."""
    return {
        "tables": all_tables(kept),
        "best": best_values(kept),
        "held": held(kept),
        "sooner": [sooner(kept, name) for name in CLEANING],
        "ends": [ends(kept, name) for name in FEATURE_PROBLEMS],
        "steps": {method: steps(kept, method) for method in METHODS},
        "seeds": SEEDS,
        "seconds": SECONDS,
        "choice_seeds": {name: len(seeds) for name, seeds in CHOICE_SEEDS.items()},
        "choice_seconds": CHOICE_SECONDS,
        "candidates": len(FACTORS),
    }


def best_value(kept: Sequence[Kept], name: str) -> float | None:
    """Return the lowest F that any run on a problem found; None if nothing was run."""
    found = [result["value"] for _, result in chosen(kept, part=BEST, problem=name)]
    found += [value for part in (RUN, CHOICE) for run in _runs(kept, name, part) for value in run["values"]]
    return min(filter(math.isfinite, found), default=None)


def best_values(kept: Sequence[Kept]) -> dict[str, float]:
    found = {name: best_value(kept, name) for name in PROBLEMS}
    return {name: value for name, value in found.items() if value is not None}


def _alone(kept: Sequence[Kept], name: str) -> str:
    return ", ".join(f"{found['value']:.6f} ({found['status']})" for _, found in chosen(kept, part=BEST, problem=name))


def _runs(kept: Sequence[Kept], name: str, part: str = RUN, **settings: Any) -> list[Found]:
    return [found for _, found in chosen(kept, part=part, problem=name, **settings)]


def shown(kept: Sequence[Kept], name: str, method: str) -> list[Found]:
    """Return the longest run of each seed."""
    longest: dict[int, Kept] = {}
    for pair in chosen(kept, part=RUN, problem=name, method=method):
        seed = pair[0]["seed"]
        if seed not in longest or pair[0]["seconds"] > longest[seed][0]["seconds"]:
            longest[seed] = pair
    return [longest[seed][1] for seed in sorted(longest)]


def missing(kept: Sequence[Kept], name: str, found: Found) -> list[float]:
    """Return how much F is above the best value: as a share of it (data cleaning), or of the gain from the start."""
    best = best_value(kept, name) or 0.0
    unit = best if name in CLEANING else found["start"] - best
    return [(value - best) / unit if math.isfinite(value) else math.inf for value in found["values"]]


def until(kept: Sequence[Kept], name: str, method: str, share: float) -> list[float]:
    """Return for each seed the CPU seconds until at most `share` is missing; infinity if it always is more."""
    runs = [zip(run["seconds"], missing(kept, name, run), strict=True) for run in shown(kept, name, method)]
    return [next((second for second, much in run if much <= share), math.inf) for run in runs]


def at(kept: Sequence[Kept], name: str, method: str, seconds: float) -> list[float]:
    """Return for each seed how much is missing in the last measurement until then; infinity after a divergence."""
    found = []
    for run in shown(kept, name, method):
        pairs = list(zip(run["seconds"], missing(kept, name, run), strict=True))
        before = [much for second, much in pairs if second <= seconds * 1.02]
        ended = run["status"] == "diverged" and (not pairs or pairs[-1][0] < seconds)
        found.append(math.inf if ended or not before else before[-1])
    return found


def median(values: Sequence[float]) -> float:
    """Return the median, or infinity without values."""
    return statistics.median(values) if values else math.inf


def spread(values: Sequence[float], number: Callable[[float], str]) -> str:
    """Return the median and the range of the seeds as text."""
    if not values:
        return NOT_RUN
    text = number(median(values))
    least, most = number(min(values)), number(max(values))
    text += "" if least == most else f" ({least} to {most})"
    return text if len(values) == SEEDS else f"{text}; {len(values)} of {SEEDS} seeds"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "not reached"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%" if math.isfinite(value) else "diverged"


def _share(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "diverged"


def cleaning_table(kept: Sequence[Kept]) -> str:
    rows = []
    for name in CLEANING:
        for method, title in METHODS.items():
            if shown(kept, name, method):
                times = [spread(until(kept, name, method, share), _seconds) for share in NEAR]
                last = [spread(at(kept, name, method, seconds), _percent) for seconds in (TIMES[0], SECONDS)]
                rows.append([PROBLEMS[name].removeprefix("data cleaning, "), title, *times, *last])
    heads = ["", "method", *(f"CPU s to {share:.0%}" for share in NEAR), "above the best after 5 s", "after 20 s"]
    return table(heads, rows) if rows else ""


def share_table(kept: Sequence[Kept]) -> str:
    rows = []
    for name in FEATURE_PROBLEMS:
        for method, title in METHODS.items():
            if shown(kept, name, method):
                rows.append([PROBLEMS[name], title, *(spread(at(kept, name, method, t), _share) for t in TIMES)])
    return table(["", "method", *(f"missing after {t:g} s" for t in TIMES)], rows) if rows else ""


def rates_table(kept: Sequence[Kept]) -> str:
    """The step sizes of the other methods: the benchmark's, and those taken."""
    rows, factors = [], best_factors(kept)
    for one, rates in TUNED.items():
        for method, (lower, upper) in rates.items():
            if any(family(s["problem"]) == one for s, _ in chosen(kept, part=CHOICE, method=method)):
                a, b = factors[one, method]
                title = "data cleaning" if one == "cleaning" else one
                rows.append([title, METHODS[method], f"{lower:g}, {upper:g}", f"{lower * a:g}, {upper * b:g}"])
    return table(["", "method", "the benchmark's rates of v and u", "ours"], rows) if rows else ""


def held(kept: Sequence[Kept]) -> dict[str, Any]:
    """Return in how many runs `Penalty()` holds each target on data cleaning, and how many there are."""
    runs = [(name, run) for name in CLEANING for run in shown(kept, name, "penalty")]
    found: dict[str, Any] = {"runs": len(runs)}
    for target, (share, seconds) in TARGETS.items():
        pairs = [zip(run["seconds"], missing(kept, name, run), strict=True) for name, run in runs]
        found[target] = sum(any(much <= share and second <= seconds for second, much in pair) for pair in pairs)
    return found


def sooner(kept: Sequence[Kept], name: str) -> tuple[str, str, str, str]:
    """Return the share of wrong labels, the method that is next to `Penalty()` at 1%, its CPU seconds, and ours."""
    times = {method: median(until(kept, name, method, NEAR[1])) for method in METHODS}
    own = times.pop("penalty")
    other = min(times, key=lambda method: times[method])
    return name.removeprefix("cleaning "), METHODS[other], _seconds(times[other]), _seconds(own)


def ends(kept: Sequence[Kept], name: str) -> tuple[str, str, str, str]:
    """Return the problem, how much is missing at the end with `Penalty()`, and the same of the best other method."""
    shares = {method: median(at(kept, name, method, SECONDS)) for method in METHODS}
    own = shares.pop("penalty")
    other = min(shares, key=lambda method: shares[method])
    return PROBLEMS[name], _share(own), METHODS[other], _share(shares[other])


def steps(kept: Sequence[Kept], method: str) -> tuple[int, int]:
    """Return the fewest and the most steps of a method in its runs on data cleaning."""
    taken = [run["steps"][-1] for name in CLEANING for run in shown(kept, name, method)]
    return min(taken, default=0), max(taken, default=0)


def lines(kept: Sequence[Kept], name: str) -> list[tuple[str, list[float], list[float]]]:
    """Return the lines of a figure: for each run its method, CPU seconds, and how much is missing."""
    found = []
    for method, title in METHODS.items():
        for run in shown(kept, name, method):
            pairs = zip(run["seconds"], missing(kept, name, run), strict=True)
            some = [(second, max(much, FLOOR)) for second, much in pairs if math.isfinite(much)]
            found.append((title, [second for second, _ in some], [much for _, much in some]))
    return found
