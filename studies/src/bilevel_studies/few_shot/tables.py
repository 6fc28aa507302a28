"""The tables of the few-shot study: which cells they show, with which times, and the settings that were compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bilevel_studies import plots
from bilevel_studies.few_shot.study import (
    ALSO_RUN,
    ALSO_SEEDS,
    BACKBONES,
    CHOICE_SEEDS,
    CHOICES,
    CIFAR,
    DATASETS,
    EFFECT,
    KIND,
    MEETS,
    METHODS,
    NETWORKS,
    OMNIGLOT,
    PAPER,
    PAPER_MINI,
    TABLE,
    TASKS,
    TIME,
    WANTED,
    chosen_for,
    study_choices,
    table_settings,
    timed_as,
    trained_for,
)
from bilevel_studies.statistics import NOT_RUN, Numbers, chosen, percent, values
from bilevel_studies.study import Found, Kept, Report, Settings, key_of, table

# The column of the paper's table for a method, if it has another name there.
LIKE = {"paper": "penalty"}
# The methods that Penalty is compared with.
OTHERS = ("approx-grad", "rmd", "prototypes", "cosines")


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables. The numbers of a `--quick` run mean nothing."""
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
    """Return accuracies, with the half-width of the 95% interval over tasks (one seed) or the deviation of seeds."""
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
    """Return the steps of a method, if Penalty has another number."""
    mine, ours = (values(chosen(finished(cells), method=name), "steps") for name in (method, "penalty"))
    return f" ({' or '.join(f'{n:,}' for n in sorted(mine))} steps)" if mine and ours and mine != ours else ""


def _shown(place: Sequence[Kept]) -> str:
    some = finished(place) or place[:1]
    if not some:
        return NOT_RUN
    text = percent(some).show(usual=1)
    return text if len(some) > 1 else f"{text} ± {100 * some[0][1]['interval']:.2f}{_steps(some[0][1])}"


def _steps(found: Found) -> str:
    """Return the progress of a run that a time limit ended."""
    return f" ({found['steps']:,} of {found['of']:,} steps)" if found.get("partial") else ""


def mini_table() -> str:
    rows = [[f"5-way {n}-shot", *(f"{accuracy:.2f}" for accuracy in found.values())] for n, found in PAPER_MINI.items()]
    return table(["mini-ImageNet, the paper", "Penalty", "ApproxGrad", "RMD", "ProtoNet"], rows)


def gap_table(cells: Sequence[Kept]) -> str:
    """Return Penalty minus each other method with half the 95% interval, on the seeds that both have.

    The interval is over seeds if there are several. With one seed it is over pairs of tasks; if the results of the
    tasks were not stored, it is an upper bound (`at most`).
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
    gaps = [100 * (a[1]["accuracy"] - b[1]["accuracy"]) for a, b in both]
    mean = sum(gaps) / len(gaps)
    if len(both) == 1:
        a, b = both[0]
        if "right" not in a[1] or "right" not in b[1]:
            return mean, 100 * math.hypot(a[1]["interval"], b[1]["interval"]), "at most "
        every = 100 / (a[0]["ways"] * a[1]["queries"])
        gaps = [every * (x - y) for x, y in zip(a[1]["right"], b[1]["right"], strict=True)]
    low, high = Numbers(tuple(gaps)).interval or (-math.inf, math.inf)
    return mean, (high - low) / 2, ""


def with_curves(cells: Sequence[Kept]) -> list[Kept]:
    """Return the cells of the first seed with an accuracy curve, on tasks that Penalty also has."""
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
    """Return times and accuracies. `timed` explains the seconds."""
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


def choice_tables(cells: Sequence[Kept], run: Sequence[Kept]) -> dict[str, str]:
    """Return the tables of the compared settings. `run` has the cells of the accuracy table, with any settings."""
    found = {}
    if some := in_order(chosen(cells, dataset=OMNIGLOT), OMNIGLOT):
        rows = [
            [
                s["varied"],
                f"{100 * f['accuracy']:.2f} ± {100 * f['interval']:.2f}",
                f"{100 * f['accuracy_of_means']:.2f}",
            ]
            for s, f in some
        ]
        found["Choices on Omniglot"] = table(["", "accuracy", "of class means"], rows)
    for backbone in BACKBONES[CIFAR]:
        if some := in_order(chosen(cells, dataset=CIFAR, backbone=backbone), CIFAR):
            found[f"Choices on CIFAR-FS, {NETWORKS[backbone]}"] = tried_table(some)
    if body := length_table(run):
        found["Settings at the length of the table"] = body
    return found


def in_order(cells: Sequence[Kept], dataset: str) -> list[Kept]:
    """Return the cells of the study, those with the most shots in training first."""
    order = [key_of(settings) for settings in study_choices(dataset)]
    listed = [pair for pair in cells if key_of(pair[0]) in order]
    return sorted(listed, key=lambda pair: (-int(pair[0]["shots"]), order.index(key_of(pair[0]))))


def tried_table(cells: Sequence[Kept]) -> str:
    rows = []
    for varied, shots, method in dict.fromkeys((s["varied"], s["shots"], s["method"]) for s, _ in cells):
        some = chosen(cells, varied=varied, shots=shots, method=method)
        by = [percent(chosen(apart(some), shots=n)) for n in (5, 1)]
        mean = f"{sum(one.mean for one in by) / len(by):.2f}" if all(by) else ""
        shown = [one.show(usual=CHOICE_SEEDS) if one else "" for one in by]
        rows.append([varied, str(shots), METHODS[method], *shown, mean])
    return table(["", "shots in training", "method", "5 shots", "1 shot", "mean"], rows)


def length_table(run: Sequence[Kept]) -> str:
    """Return the settings of one place that were run with the steps of the table; the chosen one comes first."""
    rows = []
    for (backbone, method), others in ALSO_RUN.items():
        for name in (chosen_for(backbone, method), *others):
            wanted = table_settings(CIFAR, backbone, 5, 5, method, 0, name)
            del wanted["seed"]
            if mine := [pair for pair in finished(run) if wanted.items() <= pair[0].items()]:
                rows.append([NETWORKS[backbone], METHODS[method], name, *_by_seeds(mine)])
    heads = ["network", "method", "settings", "meta-validation, 5 shots", "test, 5 shots", "test, 1 shot"]
    return table(heads, rows) if rows else ""


def _by_seeds(cells: Sequence[Kept]) -> list[str]:
    """Return meta-validation and both tests over the seeds of the comparison; in brackets the mean of more seeds."""
    found = []
    for key, some in (("chosen_accuracy", cells), *(("accuracy", chosen(apart(cells), shots=n)) for n in (5, 1))):
        by = {s["seed"]: 100 * f[key] for s, f in some if key in f}
        first = Numbers(tuple(value for seed, value in by.items() if seed < ALSO_SEEDS))
        more = f" ({sum(by.values()) / len(by):.2f} over {len(by)})" if len(by) > len(first.values) else ""
        found.append(f"{first.show(usual=ALSO_SEEDS)}{more}" if first else "")
    return found


def apart(cells: Sequence[Kept]) -> list[Kept]:
    """Split each cell that was tested on two kinds of tasks into two cells."""
    out: list[Kept] = []
    for settings, found in cells:
        own = {key: value for key, value in settings.items() if key != "also"} | {"train_shots": settings["shots"]}
        out.append((own, {key: value for key, value in found.items() if key != "also"}))
        if "also" in found:
            own_tasks = ("also", "accuracy_of_means", "train_accuracy", "curve", "right")
            kept = {key: value for key, value in found.items() if key not in own_tasks}
            out.append((own | dict(zip(("ways", "shots"), settings["also"], strict=True)), kept | found["also"]))
    return out


def timed(cells: Sequence[Kept], times: Sequence[Kept]) -> list[Kept]:
    """Return the cells with the time of a step from a short run that had the GPU to itself.

    Without such a run, a cell keeps its own time if it had the GPU to itself; otherwise it has no time.
    """
    by = {timed_as(s): f["ms_per_step"] for s, f in sorted(times, key=lambda pair: int(pair[0]["steps"]))}
    out: list[Kept] = []
    for settings, found in cells:
        ms = by.get(timed_as(settings))
        if ms is not None or "beside" in found or found.get("ms_per_step") is None:
            curve = [] if ms is None else [row | {"seconds": row["step"] * ms / 1000} for row in found.get("curve", [])]
            seconds = None if ms is None else found["steps"] * ms / 1000
            found = {**found, "ms_per_step": ms, "seconds": seconds, "curve": curve}
        out.append((settings, found))
    return out


def longest(cells: Sequence[Kept]) -> list[Kept]:
    """Return one cell per place and seed: with the current settings, finished, and with the most steps, in this order.

    If a method has a cell with the current settings in a place, its other cells there are left out.
    """
    found: dict[tuple[Any, ...], Kept] = {}
    now = {_place(settings) for settings, one in cells if _worth(settings, one)[0]}
    for settings, one in cells:
        if _place(settings) in now and not _worth(settings, one)[0]:
            continue
        key = (*_place(settings), settings["seed"])
        old = found.get(key)
        if old is None or _worth(settings, one) > _worth(*old):
            found[key] = (settings, one)
    return list(found.values())


def _worth(settings: Settings, found: Found) -> tuple[bool, bool, int]:
    dataset, backbone, ways, shots, method = _place(settings)
    now = table_settings(dataset, backbone, ways, shots, method, settings["seed"])
    trained = trained_for(dataset, backbone, ways, shots, method)[1]
    same = all(settings.get(key) == now.get(key) for key in (*KIND, *MEETS))
    same = same and settings.get("train_shots", shots) == trained
    return same, not found.get("partial"), int(settings["steps"])


def _place(settings: Settings) -> tuple[Any, ...]:
    return tuple(settings[key] for key in ("dataset", "backbone", "ways", "shots", "method"))
