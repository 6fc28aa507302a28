"""The tables of the deep victim: how often each attack flips a target, and how far it moves the wanted class."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy import stats

from bilevel_studies.poisoning.deep_victim import CHOICE, METHODS, OTHERS, best, current, of, tried
from bilevel_studies.statistics import Numbers, values
from bilevel_studies.study import Kept, Report, table


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Return the tables of the cells with the settings of now."""
    kept = current(kept)
    found = {method: shares(kept, method) for method in METHODS}
    tables = {
        "Flipped targets": flip_table({method: one for method, one in found.items() if one["targets"]}),
        "Pairs of methods, over targets": pair_table(kept),
        "Settings of Penalty": tether_table(kept),
    }
    cells = [one for settings, one in kept if settings.get("part") != CHOICE]
    clean = [accuracy for one in cells for accuracy in one["clean_accuracies"]]
    summary = {
        "cells": len(kept),
        "methods": found,
        "clean_accuracy": sum(clean) / len(clean) if clean else None,
        "wanted_without_poison": [
            sum(one["clean"][i] == one["wanted"] for one in cells) for i in range(1 + len(OTHERS))
        ],
    }
    return Report(summary, tables)


def shares(kept: Sequence[Kept], method: str) -> dict[str, Any]:
    """Return how many targets are flipped with the first weights that the attack knows, and with others."""
    mine = list(of(kept, method).values())
    timed = [found["attack_seconds"] for found in mine if "beside" not in found]
    accuracies = [accuracy for found in mine for accuracy in found["accuracies"]]
    return {
        "accuracy": sum(accuracies) / len(accuracies) if mine else None,
        "targets": len(mine),
        "known": sum(found["flips"][0] for found in mine),
        "others": sum(sum(found["flips"][1:]) for found in mine),
        "of_others": len(OTHERS) * len(mine),
        "seconds": sum(timed) / len(timed) if timed else None,
    }


def flip_table(found: dict[str, dict[str, Any]]) -> str:
    """Flipped targets with 95% intervals (Clopper and Pearson); seconds of attacks that had the GPU to themselves."""
    rows = []
    for method, one in found.items():
        known, others = (_share(one[a], one[b]) for a, b in (("known", "targets"), ("others", "of_others")))
        seconds = "" if one["seconds"] is None else f"{one['seconds']:.1f}"
        rows.append([METHODS[method], str(one["targets"]), known, others, f"{one['accuracy']:.1%}", seconds])
    flipped = ["flipped, known first weights", "flipped, other first weights"]
    return table(["method", "targets", *flipped, "accuracy of victims", "seconds an attack"], rows)


def pair_table(kept: Sequence[Kept]) -> str:
    """For how many targets a method flips more victims than another (sign test), and the difference of margins.

    The margin is that of the wanted class over the best other one, in the mean of a target's victims.
    """
    rows = []
    for one, other in combinations(METHODS, 2):
        mine, theirs = of(kept, one), of(kept, other)
        both = mine.keys() & theirs.keys()
        gaps = Numbers(tuple(_mean(mine[t]["margins"]) - _mean(theirs[t]["margins"]) for t in sorted(both)))
        if gaps.interval is None:
            continue
        more = sum(sum(mine[t]["flips"]) > sum(theirs[t]["flips"]) for t in both)
        less = sum(sum(mine[t]["flips"]) < sum(theirs[t]["flips"]) for t in both)
        p = float(stats.binomtest(more, more + less).pvalue) if more + less else 1.0
        low, high = gaps.interval
        margin = f"{gaps.mean:+.2f} ({low:+.2f} to {high:+.2f})"
        rows.append([METHODS[one], METHODS[other], str(more), str(less), f"{p:.2g}", margin])
    return table(["method", "other", "flips more for", "flips fewer for", "p", "difference of margins (95%)"], rows)


def tether_table(kept: Sequence[Kept]) -> str:
    """The mean margin of the wanted class by tether, on targets that are in no other table."""
    rows = []
    for size in sorted(values(kept, "rows")):
        for tether, mean in tried(kept, size).items():
            taken = " (taken)" if tether == best(kept, size) else ""
            rows.append([f"{size:,}", f"{tether:g}{taken}", f"{mean:.2f}"])
    return table(["images", "tether", "mean margin"], rows)


def _mean(margins: Sequence[float]) -> float:
    return sum(margins) / len(margins)


def _share(some: int, of: int) -> str:
    interval = stats.binomtest(some, of).proportion_ci(0.95)
    return f"{some} of {of} ({some / of:.0%}; {interval.low:.0%} to {interval.high:.0%})"
