"""The page of the deep victim: how often a target is flipped, by each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from bilevel._util.atomic_files import write_whole
from bilevel.applications.poisoning.attack import TETHER
from bilevel_studies.denoising.numbers import Numbers, devices
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table
from bilevel_studies.poisoning.deep_victim import (
    BATCH,
    CHOICE,
    COLLISION_RATE,
    EPSILON,
    METHODS,
    OTHERS,
    POINTS,
    ROWS,
    STEPS,
    TEST,
    best,
    current,
    of,
    shares,
    tried,
)

LEVEL = 0.05
"""Of the sign test."""


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the page; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = current(kept)
    found = {method: shares(kept, method) for method in METHODS}
    rows = []
    for method, one in found.items():
        if one["targets"]:
            known, others = (_share(one[a], one[b]) for a, b in (("known", "targets"), ("others", "of_others")))
            seconds = "" if one["seconds"] is None else f"{one['seconds']:.1f}"
            rows.append([METHODS[method], str(one["targets"]), known, others, f"{one['accuracy']:.1%}", seconds])
    heads = [
        "method",
        "targets",
        "flipped, known first weights",
        "flipped, other first weights",
        "accuracy of victims",
        "seconds an attack",
    ]
    sizes = sorted({settings["rows"] for settings, _ in kept}) or [ROWS]
    parts = [
        "# A deep victim",
        "Written by `bilevel reproduce deep-victim`; all numbers are in `deep-victim.json`. It goes beyond the paper.",
        f"The paper's CIFAR-10 network without dropout, trained from scratch on {' or '.join(f'{n:,}' for n in sizes)} "
        f"images and {POINTS / ROWS:.0%} of points: rightly labelled images of one class, each changed by at most "
        f"{EPSILON * 255:g}/255 a pixel. They are to have one test image taken for that class; both are drawn at "
        "random, the class among those that are not the image's own. Penalty has all weights of the network as the "
        f"lower variable ({STEPS['penalty']} steps of {BATCH} images and all points); feature "
        "collision draws the same bases to the target's features in the network "
        f"trained on clean images ({STEPS['feature-collision']} steps at rate {COLLISION_RATE:g}, the only one tried). "
        "Both know one set of first weights. A target "
        f"counts as flipped where a network trained from scratch gives it the wanted class and the clean one does not; "
        f"with other first weights, of {len(OTHERS)} each.",
        *(chosen(kept, n) for n in sizes),
        table(heads, rows) if rows else "Of the table nothing was run.",
        stated(kept),
        flipped(kept),
        ahead(kept),
        f"Shares are with 95% intervals (Clopper and Pearson). {accuracies(kept)} On {devices(kept)}; seconds of "
        "attacks that shared the GPU with others are not shown."
        if rows
        else "",
        "```bash\nbilevel reproduce deep-victim --device cuda --page docs/results\n```",
    ]
    write_whole(folder / "deep-victim.md", "\n\n".join(part for part in parts if part) + "\n")
    return {"cells": len(kept), "methods": found}


def chosen(kept: Sequence[Kept], rows: int) -> str:
    """What the tether of Penalty is, and how it came about."""
    means = tried(kept, rows)
    if not means:
        return f"Penalty's lower variable has the default tether, {TETHER:g}; nothing was compared."
    said = ", ".join(f"{mean:.2f} with {tether:g}" for tether, mean in means.items())
    count = sum(s.get("part") == CHOICE and s["rows"] == rows for s, _ in kept)
    return (
        f"Penalty's lower variable has a tether of {best(kept, rows):g}, chosen on {count} targets that are not in the "
        f"table by how far retrained networks have the wanted class ahead: {said}."
    )


def accuracies(kept: Sequence[Kept]) -> str:
    """How good the victims are that nobody has attacked: a flip of one that has learnt nothing says nothing."""
    clean = [accuracy for _, found in kept for accuracy in found.get("clean_accuracies", [])]
    mean = sum(clean) / len(clean)
    return f"Trained on clean images alone, the victims have {mean:.1%} of {TEST:,} test images right."


def stated(kept: Sequence[Kept]) -> str:
    """Penalty beside feature collision on the targets that both have, by the sign test; empty where there are none."""
    ours, theirs = (
        {place: sum(run["flips"]) for place, run in of(kept, method).items()}
        for method in ("penalty", "feature-collision")
    )
    if not ours:
        return ""
    more, less = sum(ours[t] > theirs[t] for t in ours), sum(ours[t] < theirs[t] for t in ours)
    p = float(stats.binomtest(more, more + less).pvalue) if more + less else 1.0
    verdict = "cannot be told apart" if p > LEVEL else f"differ: {'Penalty' if more > less else 'the latter'} has more"
    return (
        f"Of {len(ours)} targets, Penalty flips more of the {1 + len(OTHERS)} victims than feature collision for "
        f"{more}, fewer for {less}: by the sign test (p = {p:.2g}) the two {verdict}."
    )


def flipped(kept: Sequence[Kept]) -> str:
    """How many targets can be flipped, and how many of the flips are of images that were right before."""
    cells = [pair for pair in current(kept) if pair[0].get("part") != CHOICE]
    if not cells:
        return ""
    already = [sum(c == f["wanted"] for _, f in cells for c in f["clean"][some]) for some in (slice(1), slice(1, None))]
    text = (
        f"Of the targets, {already[0]} of {len(cells)} are given the wanted class without poison already (with other "
        f"first weights {already[1]} of {len(OTHERS) * len(cells)}), and cannot count as flipped."
    )
    counts = []
    for method, title in METHODS.items():
        flips = [
            clean == found["label"]
            for _, found in cells
            for run in found["runs"]
            if run["method"] == method
            for flip, clean in zip(run["flips"], found["clean"], strict=True)
            if flip
        ]
        counts.append(f"{title} {sum(flips)} of {len(flips)}")
    return f"{text} Flips of images that the network had right without poison: {', '.join(counts)}."


def ahead(kept: Sequence[Kept]) -> str:
    """By how much more each attack puts the wanted class ahead than another, in the mean of a target's victims."""
    means = {
        method: {place: sum(run["margins"]) / len(run["margins"]) for place, run in of(kept, method).items()}
        for method in METHODS
    }
    found = []
    for one, other in (("penalty", "unmoved"), ("feature-collision", "unmoved"), ("penalty", "feature-collision")):
        gaps = Numbers(tuple(mean - means[other][place] for place, mean in means[one].items()))
        if gaps.interval is not None:
            low, high = gaps.interval
            found.append(f"{METHODS[one]} beside {METHODS[other]}: {gaps.mean:+.2f} ({low:+.2f} to {high:+.2f})")
    if not found:
        return ""
    return (
        "What does not flip a target may still draw it. By how much the logit of the wanted class is further ahead of "
        f"the best other one, in the mean over targets with the 95% interval: {'; '.join(found)}."
    )


def _share(some: int, of: int) -> str:
    interval = stats.binomtest(some, of).proportion_ci(0.95)
    return f"{some} of {of} ({some / of:.0%}; {interval.low:.0%} to {interval.high:.0%})"
