"""What the cells of the few-shot study say: whether Penalty reaches what it is to, and how it stands beside others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..cells import Settings
from .denoising_numbers import Numbers, chosen, percent, seeds
from .few_shot import BACKBONES, CIFAR, METHODS, PAPER, TASKS, WANTED
from .filed import Kept

AT_MOST = "at most"
"""Of the half-width of an interval that the tasks, taken by pairs, would make smaller."""
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}


def findings(cells: Sequence[Kept]) -> list[str]:
    """Sentences on all places that have cells."""
    found = []
    for (dataset, ways, shots), wanted in WANTED.items():
        ours = percent(chosen(cells, dataset=dataset, ways=ways, shots=shots, method="penalty"))
        if ours:
            word = "reaches" if round(ours.mean, 2) >= wanted else "does not reach"
            paper = PAPER[dataset, ways, shots]["penalty"]
            found.append(
                f"Omniglot, {ways}-way {shots}-shot: Penalty has {ours.mean:.2f} and {word} {wanted}; the paper has "
                f"{paper:.2f}."
            )
    for backbone in BACKBONES[CIFAR]:
        for ways, shots in TASKS[CIFAR]:
            place = chosen(cells, dataset=CIFAR, ways=ways, shots=shots, backbone=backbone)
            mine = chosen(place, method="penalty")
            told = [beside(mine, chosen(place, method=m)) for m in ("approx-grad", "prototypes")]
            if mine and any(told):
                found.append(
                    f"CIFAR-FS, {ways}-way {shots}-shot, {NETWORKS[backbone]}: Penalty ({mine[0][0]['steps']:,} steps) "
                    f"has {percent(mine).mean:.2f}{_over(mine)}. {' '.join(told).strip()}"
                )
    if any(AT_MOST in text for text in found):
        found.append(f"{AT_MOST.capitalize()}: all methods have the same tasks, and what each got right was not kept.")
    return found + in_the_same_seconds(cells) + _classifiers(cells)


def in_the_same_seconds(cells: Sequence[Kept]) -> list[str]:
    """Penalty beside ApproxGrad at the second at which the first of them ends, by lines between the points of Figure
    4(b)."""
    gaps, ratios = [], []
    for dataset, ways, shots, backbone in dict.fromkeys(_place(s) for s, _ in cells):
        place = chosen(cells, dataset=dataset, ways=ways, shots=shots, backbone=backbone, seed=0)
        mine, theirs = (
            [f for _, f in chosen(place, method=name) if f.get("curve")] for name in ("penalty", "approx-grad")
        )
        if mine and theirs:
            end = min(f["curve"][-1]["seconds"] for f in (mine[0], theirs[0]))
            gaps.append(100 * (_at(end, mine[0]["curve"]) - _at(end, theirs[0]["curve"])))
            ratios.append(theirs[0]["ms_per_step"] / mine[0]["ms_per_step"])
    if not gaps:
        return []
    return [
        f"In the same seconds (Figure 4(b)), Penalty is above ApproxGrad in {sum(gap > 0 for gap in gaps)} of "
        f"{len(gaps)} places where the first of them ends, by {min(gaps):+.2f} to {max(gaps):+.2f} points on the same "
        f"200 tasks: a step of ApproxGrad takes {min(ratios):.1f} to {max(ratios):.1f} times as long. Its rate has not "
        "fallen to zero by then."
    ]


def _at(seconds: float, curve: Sequence[Mapping[str, float]]) -> float:
    """The accuracy of a curve at a time, between its points."""
    return float(np.interp(seconds, [row["seconds"] for row in curve], [row["accuracy"] for row in curve]))


def _place(settings: Settings) -> tuple[str, int, int, str]:
    return settings["dataset"], settings["ways"], settings["shots"], settings["backbone"]


def _over(cells: Sequence[Kept]) -> str:
    return f" over {seeds(len(cells))}" if len(cells) > 1 else ""


def beside(ours: Sequence[Kept], theirs: Sequence[Kept]) -> str:
    """Penalty beside a method on the seeds that both have, whose tasks are the same; empty where there are none."""
    both = [(a, b) for a in ours for b in theirs if a[0]["seed"] == b[0]["seed"]]
    if not both:
        return ""
    mine, others = ([pair[k] for pair in both] for k in (0, 1))
    a, b = percent(mine).mean, percent(others).mean
    apart, s = round(a, 2) - round(b, 2), theirs[0][0]
    word = f"{abs(apart):.2f} {'above' if apart > 0 else 'below'}" if apart else "level with it"
    seed = f" on {seeds(len(both))}" if len(ours) > len(both) else ""
    set_up = ", Penalty's settings" if s["method"] == "approx-grad" and "selected" in s else ""
    who = f"{METHODS[s['method']]} ({s['steps']:,} steps{set_up})"
    return f"{who} has {b:.2f}: Penalty is {word}{seed} ({_within(both, apart)})."


def _within(both: Sequence[tuple[Kept, Kept]], apart: float) -> str:
    """What the tasks say of a difference: by pairs, where the tasks of both were kept, else the widest it can be."""
    if all("right" in cell[1] for pair in both for cell in pair):
        gaps = [
            100 * (x - y) / (a[0]["ways"] * a[1]["queries"])
            for a, b in both
            for x, y in zip(a[1]["right"], b[1]["right"], strict=True)
        ]
        interval = Numbers(tuple(gaps)).interval or (-math.inf, math.inf)
        half = (interval[1] - interval[0]) / 2
        return f"± {half:.2f}" + ("" if abs(apart) > half else ", which the tasks do not resolve")
    half = 100 * math.sqrt(sum(x[1]["interval"] ** 2 + y[1]["interval"] ** 2 for x, y in both)) / len(both)
    return f"± {AT_MOST} {half:.2f}"


def _classifiers(cells: Sequence[Kept]) -> list[str]:
    """What training the classifiers adds to class means, which are where they start."""
    some = [found for settings, found in cells if settings["method"] == "penalty" and "accuracy_of_means" in found]
    if not some:
        return []
    least, most = (pick(100 * (f["accuracy"] - f["accuracy_of_means"]) for f in some) for pick in (min, max))
    return [
        f"At the test, Penalty's trained classifiers have {least:+.2f} to {most:+.2f} points beside the class means of "
        "the support in the same representation."
    ]
