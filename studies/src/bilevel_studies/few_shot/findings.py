"""What the cells of the few-shot study say: whether Penalty reaches what it is to, and how it stands beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bilevel_studies.denoising.numbers import Numbers, chosen, percent, seeds
from bilevel_studies.few_shot.study import BACKBONES, CIFAR, CURVE_TASKS, METHODS, PAPER, TASKS, WANTED, T
from bilevel_studies.filed import Kept

AT_MOST = "at most"
"""Of the half-width of an interval that the tasks, taken by pairs, would make smaller."""
OTHERS = ("approx-grad", "rmd", "prototypes", "cosines")
"""What Penalty is compared with."""
AIMED = "resnet"
"""The network of CIFAR-FS that stands for the paper's on mini-ImageNet."""
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}


def findings(cells: Sequence[Kept]) -> list[str]:
    """Sentences on all places that have cells, what they come to first."""
    found = _aims(cells) + _without_lower_problem(cells)
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
                    f"has {percent(mine).mean:.2f}{_over(mine)}. {' '.join(filter(None, told))}"
                )
    found += _last_steps(cells)
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


def _aims(cells: Sequence[Kept]) -> list[str]:
    """In how many places of CIFAR-FS what is aimed at is reached, that of the aim first."""
    found = []
    for backbone in sorted(BACKBONES[CIFAR], key=lambda name: name != AIMED):
        of = "Our aim on CIFAR-FS" if backbone == AIMED else "The same"
        over_approx, over_prototypes = (_leads(cells, backbone, m) for m in ("approx-grad", "prototypes"))
        places = over_approx.keys() & over_prototypes.keys()
        if not places:
            continue
        reached = sum(over_approx[place][0] > 0 and over_prototypes[place][0] >= 0 for place in places)
        text = (
            f"{of} with {NETWORKS[backbone]}, the mean above that of ApproxGrad and not below that of ProtoNet, is "
            f"reached in {reached} of {len(places)} places."
        )
        for name, leads in (("ApproxGrad", over_approx), ("ProtoNet", over_prototypes)):
            above = [(gap, half) for gap, half in leads.values() if gap > 0]
            if backbone == AIMED and above:
                text += f" Resolved of the leads over {name}: {sum(gap > half for gap, half in above)} of {len(above)}."
        found.append(text)
    return found


def _leads(cells: Sequence[Kept], backbone: str, method: str) -> dict[tuple[int, int], tuple[float, float]]:
    """By how much Penalty is above a method in each place of CIFAR-FS, and half the interval of that."""
    found = {}
    for ways, shots in TASKS[CIFAR]:
        place = chosen(cells, dataset=CIFAR, backbone=backbone, ways=ways, shots=shots)
        both = _both(chosen(place, method="penalty"), chosen(place, method=method))
        if (apart := _apart(both)) is not None:
            found[ways, shots] = apart, _half(both)[0]
    return found


def _without_lower_problem(cells: Sequence[Kept]) -> list[str]:
    """Whether the lead over ProtoNet is there without the lower problem, too."""
    over_prototypes, over_cosines = (_leads(cells, AIMED, m) for m in ("prototypes", "cosines"))
    leads = [place for place, (gap, half) in over_prototypes.items() if gap > half and place in over_cosines]
    if not leads or any(over_cosines[place][0] > 0 for place in leads):
        return []
    return [
        f"{METHODS['cosines']}, which is Penalty without its lower problem, is not below it where Penalty's lead over "
        f"ProtoNet with {NETWORKS[AIMED]} is resolved: that lead is not due to the lower problem."
    ]


def _last_steps(cells: Sequence[Kept]) -> list[str]:
    """Where the step is chosen on meta-validation classes, what the last one has instead."""
    some = [pair for pair in cells if "kept_step" in pair[1] and pair[1].get("curve")]
    means = {m: [pair[1]["curve"][-1]["accuracy"] for pair in chosen(some, method=m)] for m in ("penalty", *OTHERS)}
    if not means["penalty"]:
        return []
    shown = [f"{METHODS[m]} has {100 * sum(found) / len(found):.2f}" for m, found in means.items() if found]
    return [
        f"The residual network at its last step, not at the one that was kept, 5 shots, {CURVE_TASKS} tasks of each "
        f"seed: {'; '.join(shown)}."
    ]


def _over(cells: Sequence[Kept]) -> str:
    return f" over {seeds(len(cells))}" if len(cells) > 1 else ""


def beside(ours: Sequence[Kept], theirs: Sequence[Kept]) -> str:
    """Penalty beside a method on the seeds that both have, whose tasks are the same; empty where there are none."""
    both = _both(ours, theirs)
    apart = _apart(both)
    if apart is None:
        return ""
    s, b = theirs[0][0], percent([pair[1] for pair in both]).mean
    word = f"{abs(apart):.2f} {'above' if apart > 0 else 'below'}" if apart else "level with it"
    seed = f" on {seeds(len(both))}" if len(ours) > len(both) else ""
    set_up = ", Penalty's settings" if s["method"] != "prototypes" else ", the plain network" * s.get("plain", False)
    who = f"{METHODS[s['method']]} ({s['steps']:,} steps{set_up})"
    return f"{who} has {b:.2f}: Penalty is {word}{seed} ({_within(both, apart)})."


def _both(ours: Sequence[Kept], theirs: Sequence[Kept]) -> list[tuple[Kept, Kept]]:
    return [(a, b) for a in ours for b in theirs if a[0]["seed"] == b[0]["seed"]]


def _apart(both: Sequence[tuple[Kept, Kept]]) -> float | None:
    """Points between the means of both, as they are shown; None where there is no seed that both have."""
    return round(sum(_gaps(both)) / len(both), 2) if both else None


def _gaps(both: Sequence[tuple[Kept, Kept]]) -> list[float]:
    """Points between both, by seed."""
    return [100 * (a[1]["accuracy"] - b[1]["accuracy"]) for a, b in both]


def _within(both: Sequence[tuple[Kept, Kept]], apart: float) -> str:
    """What is known of a difference."""
    half, of = _half(both)
    if of == AT_MOST:
        return f"± {AT_MOST} {half:.2f}"
    told = "" if abs(apart) > half else f", which the {of} do not resolve"
    return f"± {half:.2f}{told}" + (f": {', '.join(f'{gap:+.2f}' for gap in _gaps(both))}" if of == "seeds" else "")


def _half(both: Sequence[tuple[Kept, Kept]]) -> tuple[float, str]:
    """Half the interval of a difference, and what it is over: seeds, where there are several, for another training
    gives another; else pairs of tasks, where those of both were kept, else the widest that it can be."""
    gaps, of = _gaps(both), "seeds"
    if len(both) == 1:
        a, b = both[0]
        if "right" not in a[1] or "right" not in b[1]:
            return 100 * math.hypot(a[1]["interval"], b[1]["interval"]), AT_MOST
        every = 100 / (a[0]["ways"] * a[1]["queries"])
        gaps, of = [every * (x - y) for x, y in zip(a[1]["right"], b[1]["right"], strict=True)], "tasks"
    interval = Numbers(tuple(gaps)).interval or (-math.inf, math.inf)
    return (interval[1] - interval[0]) / 2, of


def _classifiers(cells: Sequence[Kept]) -> list[str]:
    """What training the classifiers adds to class means, which are where they start."""
    some = [found for settings, found in cells if settings["method"] == "penalty" and "accuracy_of_means" in found]
    if not some:
        return []
    gains = [round(100 * (f["accuracy"] - f["accuracy_of_means"]), 2) + 0.0 for f in some]  # no -0.00
    least, most = min(gains), max(gains)
    return [
        f"At the test, Penalty's trained classifiers have {least:+.2f} to {most:+.2f} points beside the class means of "
        "the support in the same representation."
    ]
