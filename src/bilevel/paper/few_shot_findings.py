"""What the cells of the few-shot study say: whether Penalty reaches what it is to, and how it stands beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .denoising_numbers import Numbers, chosen, percent, seeds
from .few_shot import BACKBONES, CIFAR, METHODS, PAPER, TASKS, WANTED, T
from .filed import Kept

AT_MOST = "at most"
"""Of the half-width of an interval that the tasks, taken by pairs, would make smaller."""
OTHERS = ("approx-grad", "same-seconds", "prototypes")
"""What Penalty is compared with."""
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}


def findings(cells: Sequence[Kept]) -> list[str]:
    """Sentences on all places that have cells."""
    found = []
    for (dataset, ways, shots), wanted in WANTED.items():
        place = chosen(cells, dataset=dataset, ways=ways, shots=shots)
        mine = chosen(place, method="penalty")
        if mine:
            ours = percent(mine).mean
            word = "reaches" if round(ours, 2) >= wanted else "does not reach"
            told = [beside(mine, chosen(place, method=m)) for m in OTHERS]
            found.append(
                f"Omniglot, {ways}-way {shots}-shot: Penalty has {ours:.2f} and {word} our aim of {wanted}; the paper "
                f"has {PAPER[dataset, ways, shots]['penalty']:.2f}. {' '.join(filter(None, told))}".strip()
            )
    for backbone in BACKBONES[CIFAR]:
        for ways, shots in TASKS[CIFAR]:
            place = chosen(cells, dataset=CIFAR, ways=ways, shots=shots, backbone=backbone)
            mine = chosen(place, method="penalty")
            told = [beside(mine, chosen(place, method=m)) for m in OTHERS]
            if mine and any(told):
                found.append(
                    f"CIFAR-FS, {ways}-way {shots}-shot, {NETWORKS[backbone]}: Penalty ({mine[0][0]['steps']:,} steps) "
                    f"has {percent(mine).mean:.2f}{_over(mine)}. {' '.join(filter(None, told))}{_verdict(*told)}"
                )
    if any(AT_MOST in text for text in found):
        found.append(
            f"{AT_MOST.capitalize()}: all methods have the same tasks, and what was right in each was not kept for all."
        )
    return found + times_of_a_step(cells) + _classifiers(cells)


def times_of_a_step(cells: Sequence[Kept]) -> list[str]:
    """How much longer a step of ApproxGrad takes than one of Penalty, where both were measured."""
    by: dict[tuple[Any, ...], dict[str, float]] = {}
    for settings, found in cells:
        if settings["method"] in ("penalty", "approx-grad") and found.get("ms_per_step"):
            place = (settings["dataset"], settings["backbone"], settings["shots"])
            by.setdefault(place, {})[settings["method"]] = found["ms_per_step"]
    ratios = [pair["approx-grad"] / pair["penalty"] for pair in by.values() if len(pair) == 2]
    if not ratios:
        return []
    return [
        f"A step of ApproxGrad (T = {T['approx-grad']}) takes {min(ratios):.1f} to {max(ratios):.1f} times as long as "
        f"one of Penalty (T = {T['penalty']})."
    ]


def _verdict(approx: str, seconds: str, prototypes: str) -> str:
    """Whether Penalty is where it is to be: above ApproxGrad, and not below ProtoNet."""
    if not (approx and prototypes):
        return ""
    above = [
        words for told, words in ((approx, "with as many steps"), (seconds, "in as many seconds")) if " above" in told
    ]
    is_above = f"is above ApproxGrad {' and '.join(above)}" if above else "is not above ApproxGrad"
    level = "below" if " below" in prototypes else "not below"
    return f" Penalty is to be above ApproxGrad and not below ProtoNet; it {is_above}, and {level} ProtoNet."


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
    set_up = ", Penalty's settings" if s["method"] == "approx-grad" else ", the plain network" * s.get("plain", False)
    who = f"{METHODS[s['method']]} ({s['steps']:,} steps{set_up})"
    return f"{who} has {b:.2f}: Penalty is {word}{seed} ({_within(both, apart)}{_by_seed(both)})."


def _by_seed(both: Sequence[tuple[Kept, Kept]]) -> str:
    """The difference of each seed, where there are several: another training gives another."""
    if len(both) < 2:
        return ""
    gaps = ", ".join(f"{100 * (a[1]['accuracy'] - b[1]['accuracy']):+.2f}" for a, b in both)
    return f"; by seeds {gaps}"


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
