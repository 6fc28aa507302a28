"""The tables of the few-shot study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bilevel.running.run_many import Found, Settings
from bilevel_studies import plots
from bilevel_studies.few_shot.choice_tables import choice_tables
from bilevel_studies.few_shot.selection import apart, longest, timed
from bilevel_studies.few_shot.study import (
    BACKBONES,
    CHOICES,
    DATASETS,
    EFFECT,
    METHODS,
    NETWORKS,
    OMNIGLOT,
    PAPER,
    PAPER_MINI,
    TABLE,
    TASKS,
    TIME,
    WANTED,
)
from bilevel_studies.statistics import NOT_RUN, Numbers, chosen, percent, values
from bilevel_studies.study import Kept, Report, table

LIKE = {"paper": "penalty"}
"""The column of the paper's table for a method."""
OTHERS = ("approx-grad", "rmd", "prototypes", "cosines")
"""The methods that Penalty is compared with."""


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables. A `--quick` run has numbers that mean nothing."""
    mine = timed([pair for pair in kept if pair[1].get("accuracy") is not None], chosen(kept, part=TIME))
    cells, quick = longest(apart(chosen(mine, part=TABLE))), any("test_tasks" in settings for settings, _ in mine)
    tables = {
        f"{dataset}, {NETWORKS[backbone]}": task_table(chosen(cells, dataset=dataset, backbone=backbone), dataset)
        for dataset in DATASETS
        for backbone in BACKBONES[dataset]
    }
    tables["mini-ImageNet, the paper"] = mini_table()
    tables["Penalty minus the other methods, in points"] = gap_table(finished(cells))
    some = with_curves(cells)
    if some and not quick:
        plots.curves(_panels(some), folder / "few-shot-speed.png", "seconds")
        tables["Accuracy against time"] = speed_table(some)
    if (effect := chosen(mine, part=EFFECT)) and not quick:
        plots.against_lower_steps(finished(effect), "method", METHODS, folder / "few-shot-steps.png")
        tables["The effect of T"] = effect_table(effect)
    tables |= choice_tables(finished(chosen(mine, part=CHOICES)), chosen(mine, part=TABLE))
    aims = {f"{ways}-way {shots}-shot": chosen(cells, dataset=d, ways=ways, shots=shots) for d, ways, shots in WANTED}
    reached = {
        place: percent(mine).mean >= wanted
        for (place, some), wanted in zip(aims.items(), WANTED.values(), strict=True)
        if (mine := finished(chosen(some, method="penalty")))
    }
    return Report({"cells": len(kept), "quick": quick, "aims_reached": {} if quick else reached}, tables)


def finished(cells: Sequence[Kept]) -> list[Kept]:
    return [pair for pair in cells if not pair[1].get("partial")]


def task_table(some: Sequence[Kept], dataset: str) -> str:
    """Accuracies; with one seed the half-width of the 95% interval over tasks, with several their deviation."""
    rows, heads = [], ["method"]
    for method, title in METHODS.items():
        row = [title + _fewer(some, method)]
        for ways, shots in TASKS[dataset]:
            row.append(_shown(chosen(some, ways=ways, shots=shots, method=method)))
            if dataset == OMNIGLOT:
                paper = PAPER[OMNIGLOT, ways, shots].get(LIKE.get(method, method))
                row.append("" if paper is None else f"{paper:g}")
        rows.append(row)
    for ways, shots in TASKS[dataset]:
        heads += [f"{ways}-way {shots}-shot"] + (["paper"] if dataset == OMNIGLOT else [])
    return table(heads, rows)


def _fewer(cells: Sequence[Kept], method: str) -> str:
    """The steps of a method, if they are not Penalty's."""
    mine, ours = (values(chosen(finished(cells), method=name), "steps") for name in (method, "penalty"))
    return f" ({' or '.join(f'{n:,}' for n in sorted(mine))} steps)" if mine and ours and mine != ours else ""


def _shown(place: Sequence[Kept]) -> str:
    some = finished(place) or place[:1]
    if not some:
        return NOT_RUN
    text = percent(some).show(usual=1)
    return text if len(some) > 1 else f"{text} ± {100 * some[0][1]['interval']:.2f}{_steps(some[0][1])}"


def _steps(found: Found) -> str:
    """How far a run got that a limit of time ended."""
    return f" ({found['steps']:,} of {found['of']:,} steps)" if found.get("partial") else ""


def mini_table() -> str:
    names = ("penalty", "approx-grad", "rmd", "prototypes")
    rows = [[f"5-way {n}-shot", *(f"{found[m]:.2f}" for m in names)] for n, found in PAPER_MINI.items()]
    return table(["mini-ImageNet, the paper", "Penalty", "ApproxGrad", "RMD", "ProtoNet"], rows)


def gap_table(cells: Sequence[Kept]) -> str:
    """Penalty minus each other method with half the 95% interval, on the seeds that both have.

    The interval is over seeds, if there are several; else over tasks, taken by pairs, if both were kept by task. Else
    it is the widest that it can be (`at most`).
    """
    rows = []
    for dataset in DATASETS:
        for backbone, (ways, shots) in product(BACKBONES[dataset], TASKS[dataset]):
            place = chosen(cells, dataset=dataset, backbone=backbone, ways=ways, shots=shots)
            found = [gap(chosen(place, method="penalty"), chosen(place, method=m)) for m in OTHERS]
            if any(found):
                shown = ["" if one is None else f"{one[0]:+.2f} ± {one[2]}{one[1]:.2f}" for one in found]
                rows.append([f"{dataset}, {NETWORKS[backbone]}, {ways}-way {shots}-shot", *shown])
    return table(["tasks", *(METHODS[m] for m in OTHERS)], rows)


def gap(ours: Sequence[Kept], theirs: Sequence[Kept]) -> tuple[float, float, str] | None:
    """Return the difference in points, half its interval, and `at most ` if that is a bound."""
    both = [(a, b) for a in ours for b in theirs if a[0]["seed"] == b[0]["seed"]]
    if not both:
        return None
    gaps, of = [100 * (a[1]["accuracy"] - b[1]["accuracy"]) for a, b in both], ""
    apart = sum(gaps) / len(gaps)
    if len(both) == 1:
        a, b = both[0]
        if "right" not in a[1] or "right" not in b[1]:
            return apart, 100 * math.hypot(a[1]["interval"], b[1]["interval"]), "at most "
        every = 100 / (a[0]["ways"] * a[1]["queries"])
        gaps = [every * (x - y) for x, y in zip(a[1]["right"], b[1]["right"], strict=True)]
    low, high = Numbers(tuple(gaps)).interval or (-math.inf, math.inf)
    return apart, (high - low) / 2, of


def with_curves(cells: Sequence[Kept]) -> list[Kept]:
    """Return the cells of the first seed that were measured as they went, on tasks that Penalty has too."""
    some = [pair for pair in cells if pair[0]["seed"] == 0 and pair[1].get("curve")]
    ours = {_tasks(settings) for settings, _ in some if settings["method"] == "penalty"}
    return sorted((pair for pair in some if _tasks(pair[0]) in ours), key=lambda pair: _tasks(pair[0]))


def _tasks(settings: Settings) -> tuple[Any, ...]:
    order = (DATASETS.index(settings["dataset"]), BACKBONES[settings["dataset"]].index(settings["backbone"]))
    return *order, settings["ways"], settings["shots"]


def _panels(cells: Sequence[Kept]) -> dict[str, list[tuple[str, list[float], list[float]]]]:
    panels: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for s, found in cells:
        title = f"{s['dataset']}, {s['ways']}-way {s['shots']}-shot" + ", resnet" * (s["backbone"] == "resnet")
        x, y = [row["seconds"] for row in found["curve"]], [100 * row["accuracy"] for row in found["curve"]]
        panels.setdefault(title, []).append((METHODS[s["method"]], x, y))
    return panels


def speed_table(cells: Sequence[Kept]) -> str:
    """Seconds are steps times those of a short run by itself, or the run's own if it did not share the GPU."""
    rows = []
    for s, found in cells:
        tasks = f"{s['dataset']}, {NETWORKS[s['backbone']]}, {s['ways']}-way {s['shots']}-shot"
        time = [f"{found['steps']:,}", f"{found['ms_per_step']:.1f}", f"{found['seconds']:.1f}"]
        ends = [f"{100 * found[key]:.2f}" if key in found else "" for key in ("accuracy_of_means", "train_accuracy")]
        rows.append([tasks, METHODS[s["method"]], *time, f"{100 * found['accuracy']:.2f}", *ends])
    heads = ["tasks", "method", "upper steps", "ms a step", "seconds", "accuracy"]
    return table([*heads, "of class means, untrained", "on training classes"], rows)


def effect_table(cells: Sequence[Kept]) -> str:
    rows = []
    for s, found in sorted(cells, key=lambda pair: (pair[0]["method"] != "penalty", pair[0]["T"])):
        accuracy = f"{100 * found['accuracy']:.2f} ± {100 * found['interval']:.2f}{_steps(found)}"
        ms = "" if found["ms_per_step"] is None else f"{found['ms_per_step']:.1f}"
        rows.append([METHODS[s["method"]], str(s["T"]), accuracy, ms])
    return table(["method", "T", "accuracy", "ms per upper step"], rows)
