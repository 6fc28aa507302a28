"""The page of the poisoning study: Table 5 beside what was found, and the parts around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel_studies.denoising.numbers import Numbers, chosen, numbers, percent
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table
from bilevel_studies.poisoning import figures as poisoning_figures
from bilevel_studies.poisoning import settings as poisoning_settings
from bilevel_studies.poisoning.study import (
    COLUMNS,
    EFFECT,
    EFFECT_STEPS,
    HYPER,
    HYPERPARAMETERS,
    LOWER_STEPS,
    MEASURES,
    PAPER,
    PAPER_CLEAN,
    PAPER_WEIGHT,
    PERCENTS,
    SHOWN,
    SPLITS,
    STEPS,
    TABLE,
    TARGETED,
    UNTARGETED,
    WEIGHT,
    WEIGHT_PERCENTS,
    WEIGHTS,
    current,
)

PICTURES = "poisoning-{}.png"
FURTHER = {
    "clean-label": "one clean-label point a target (Figures 3 and 6(a))",
    "deep-victim": "a deep victim",
    "poisoning-vs-art": "beside the Adversarial Robustness Toolbox",
}
"""Other pages by their names."""


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figures and the page into a folder; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = current(kept)
    shown = []
    for attack in MEASURES:
        with_pictures = [found for _, found in chosen(kept, part=TABLE, attack=attack) if "pictures" in found]
        if with_pictures:
            poisoning_figures.points(with_pictures[0]["pictures"], folder / PICTURES.format(attack))
            shown.append(attack)
    if effect := chosen(kept, part=EFFECT):
        poisoning_figures.effect(effect, folder / PICTURES.format("effect-of-T"))
    held = reached(kept)
    write_whole(folder / "poisoning.md", page(kept, shown, held, further(folder)))
    return {"cells": len(kept), "reached": held}


def values(kept: Sequence[Kept], attack: str, column: str, at: int, part: str = TABLE) -> Numbers:
    return percent(chosen(kept, part=part, attack=attack, column=column, percent=at), MEASURES[attack])


def reached(kept: Sequence[Kept]) -> dict[str, dict[str, bool | None]]:
    """Whether Penalty reaches the paper's Penalty at each share, within one deviation of its seeds; None: not run."""
    out: dict[str, dict[str, bool | None]] = {}
    for attack in MEASURES:
        out[attack] = {}
        for at in PERCENTS:
            ours = values(kept, attack, "penalty", at)
            out[attack][str(at)] = _ahead(kept, attack, at) >= -ours.deviation if ours else None
    return out


def further(folder: Path) -> str:
    """Where the other pages on poisoning are, of those that the folder has; empty where it has none."""
    there = [f"[{title}]({name}.md)" for name, title in FURTHER.items() if (folder / f"{name}.md").is_file()]
    return f"Pages of their own: {', '.join(there)}." if there else ""


def page(kept: Sequence[Kept], shown: Sequence[str], held: dict[str, dict[str, bool | None]], more: str = "") -> str:
    weights, hyper, effect = (chosen(kept, part=part) for part in (WEIGHTS, HYPER, EFFECT))
    counts = {attack: ", ".join(f"{n:,}" for n in SPLITS[attack]) for attack in MEASURES}
    parts = [
        "# Poisoning a training set",
        "Written by `bilevel reproduce poisoning` (Appendices D.2 and E.4, Tables 5 and 6, Figures 5(c) and 6 of the "
        "paper). All numbers are in `poisoning.json`, from which the command goes on.",
        more,
        "Points are added to 1,000 MNIST images; their pixels stay in [0, 1], their labels are fixed and wrong. Every "
        "number is of a victim that is trained from scratch on the clean images and the points, on test images that "
        "the attack has not seen, in percent, as mean ± deviation over 5 seeds; where there are other than 5, their "
        "number is given. A seed draws the split, the points' bases and their labels.",
        f"- untargeted: {counts[UNTARGETED]} images for training, validation and test, all from MNIST's training part; "
        "bases from the training images, labels drawn among the wrong ones. Test accuracy: lower is stronger.",
        f"- targeted: {counts[TARGETED]} images, every class alike, those for the test from MNIST's test part; bases "
        "are eights and threes in equal number with each other's label. The share of test eights that are taken for "
        "threes: higher is stronger.",
        "## What was found",
        "\n".join(f"- {sentence}" for sentence in findings(kept, held)),
        "## Untargeted: test accuracy (Table 5, left)",
        _table(kept, UNTARGETED),
        "## Targeted: eights taken for threes (Table 5, right)",
        _table(kept, TARGETED),
        "## The paper's settings and ours",
        poisoning_settings.compared(kept),
        "## How ours were chosen",
        poisoning_settings.choice(kept),
        "## The weight of the victim's regularisation",
        _weights(kept) if weights else "Not run.",
        "## lam_0, nu and gamma_0 (Table 6)",
        _hyper(hyper),
        "## The number of lower steps (Figure 5(c))",
        _effect(effect),
        "## The points (Figure 6(b), (c))",
        _pictures(shown),
        "## To run it again",
        "```bash\nbilevel reproduce poisoning --workers 14 --out runs/poisoning --page docs/results\n"
        "bilevel reproduce poisoning --parts table --columns penalty --attacks targeted --page docs/results\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def findings(kept: Sequence[Kept], held: dict[str, dict[str, bool | None]]) -> list[str]:
    """Sentences on the numbers that are there."""
    found = []
    for attack, by_share in held.items():
        run = {at: ok for at, ok in by_share.items() if ok is not None}
        if not run:
            continue
        text = f"{attack}: Penalty reaches the paper's Penalty column, within one deviation of the seeds, at "
        good = [f"{at}%" for at, ok in run.items() if ok]
        text += f"{len(good)} of {len(run)} shares" + (f" ({', '.join(good)})." if len(good) < len(run) else ".")
        strictly = [at for at in run if _ahead(kept, attack, int(at)) >= 0]
        text += f" Its mean is at or beyond the paper's at {len(strictly)} of them."
        spread = PAPER[attack]["penalty"].known
        within = [at for at in run if _ahead(kept, attack, int(at)) >= -spread(int(at))[1]]
        text += f" Within the paper's own deviation it is at {len(within)} of them."
        found.append(text)
        found += [text for column in ("approx-grad", "rmd", "algorithm-2") if (text := _beside(kept, attack, column))]
        if unlike := _unlike(kept, attack):
            found.append(
                f"{attack}: our label flipping is not the paper's at {', '.join(f'{at}%' for at in unlike)}: the means "
                "differ by more than both deviations together."
            )
    return found + _at_the_papers_weight(kept) + _against_the_paper(kept) or ["Nothing was run."]


def _beside(kept: Sequence[Kept], attack: str, column: str) -> str:
    """Penalty beside another column, and where that is weaker than it is known to be; empty where not run."""
    gaps = _gaps(kept, attack, column)
    if not gaps:
        return ""
    shares = [at for at in PERCENTS if values(kept, attack, column, at)]
    short = [at for at in shares if _short(kept, attack, column, at)]
    below = [
        at for at in shares if _behind(values(kept, attack, column, at), values(kept, attack, "flipping", at), attack)
    ]
    by_seed = Numbers(tuple(statistics.fmean(some) for some in gaps.values()))
    mean, interval = by_seed.mean, by_seed.interval
    level = interval is None or interval[0] <= 0 <= interval[1]
    word = "level with" if level else "stronger than" if mean > 0 else "weaker than"
    return (
        f"{attack}: Penalty is {word} our run of {COLUMNS[column]}: {mean:+.1f} points of strength in the mean over "
        f"{len(gaps)} seeds"
        + (f" (95%: {interval[0]:+.1f} to {interval[1]:+.1f})." if interval else ".")
        + (f" That run is weaker than the published one at {_shares(short)}" if short else "")
        + (f"{', and' if short else ' That run is weaker'} than label flipping at {_shares(below)}" if below else "")
        + (f": {_unreproduced(column)}" if len(short) + len(below) > len(shares) / 2 else "")
        + ("." if short or below else "")
    )


def _unreproduced(column: str) -> str:
    if column == "algorithm-2":
        return f"with {STEPS[column]:,} of its 5,000 steps the paper's method is not reproduced"
    return "it is not reproduced, and the difference is no evidence for Penalty"


def _short(kept: Sequence[Kept], attack: str, column: str, at: int) -> bool:
    """Whether our run of a column is weaker than the published one by more than its deviation."""
    ours = values(kept, attack, column, at)
    published = PAPER[attack]["penalty" if column == "algorithm-2" else column].at(at)
    return published is not None and _behind(ours, Numbers((published,)), attack)


def _behind(ours: Numbers, theirs: Numbers, attack: str) -> bool:
    gap = theirs.mean - ours.mean if attack == TARGETED else ours.mean - theirs.mean
    return bool(theirs) and gap > ours.deviation


def _shares(some: Sequence[int]) -> str:
    return ", ".join(f"{at}%" for at in some)


def _at_the_papers_weight(kept: Sequence[Kept]) -> list[str]:
    """Whether the paper's column is reached with the weight of its text, too."""
    found = []
    for attack in MEASURES:
        mine = {at: values(kept, attack, "penalty", at, WEIGHTS) for at in WEIGHT_PERCENTS}
        mine = {at: numbers for at, numbers in mine.items() if numbers}
        missed = [
            at for at, ours in mine.items() if _behind(ours, Numbers((PAPER[attack]["penalty"].known(at)[0],)), attack)
        ]
        if mine:
            said = ", ".join(
                f"{n.mean:.2f} at {at}% (the paper {PAPER[attack]['penalty'].at(at):.2f})" for at, n in mine.items()
            )
            word = f"does not reach the paper's column at {_shares(missed)}" if missed else "reaches the paper's column"
            found.append(
                f"{attack}: with the weight {PAPER_WEIGHT:g} of the paper's text in the place of {WEIGHT:g}, Penalty "
                f"{word}: {said}."
            )
    return found


def _against_the_paper(kept: Sequence[Kept]) -> list[str]:
    """What the figures around the table say otherwise than the paper's."""
    found = []
    last = LOWER_STEPS[-1]
    ours, theirs = (
        numbers(chosen(kept, part=EFFECT, column=column, T=last), "ms_per_step")
        for column in ("penalty", "approx-grad")
    )
    if ours and theirs:
        found.append(
            f"the number of lower steps: at T = {last} an upper step of Penalty takes {ours.mean / theirs.mean:.1f} "
            "times as long as one of ApproxGrad; in the paper Penalty is about twice as fast."
        )
    said = [
        f"{value} has {mine.mean:.2f} (the paper {paper:.2f})"
        for value, _, paper in HYPERPARAMETERS["gamma_0"]
        if (mine := percent(chosen(kept, part=HYPER, varied="gamma_0", value=value)))
    ]
    if said:
        found.append(f"gamma_0 in the whitened coordinates is another quantity than the paper's: {', '.join(said)}.")
    return found


def _gaps(kept: Sequence[Kept], attack: str, column: str) -> dict[int, list[float]]:
    """By how much Penalty is stronger, at the shares that both have, by the seed."""
    ours, others = (
        {(s["percent"], s["seed"]): 100 * found[MEASURES[attack]] for s, found in chosen(mine, column=name)}
        for mine in [chosen(kept, part=TABLE, attack=attack)]
        for name in ("penalty", column)
    )
    sign = 1 if attack == TARGETED else -1
    found: dict[int, list[float]] = {}
    for place, value in ours.items():
        if place in others:
            found.setdefault(place[1], []).append(sign * (value - others[place]))
    return found


def _unlike(kept: Sequence[Kept], attack: str) -> list[int]:
    """Shares at which label flipping, which has nothing to tune, differs from the paper's by more than both spreads."""
    found = []
    for at in PERCENTS:
        ours, (mean, spread) = values(kept, attack, "flipping", at), PAPER[attack]["flipping"].known(at)
        if ours and abs(ours.mean - mean) > ours.deviation + spread:
            found.append(at)
    return found


def _ahead(kept: Sequence[Kept], attack: str, at: int) -> float:
    """By how much the mean of Penalty is stronger than the paper's, in points."""
    ours, (goal, _) = values(kept, attack, "penalty", at), PAPER[attack]["penalty"].known(at)
    return goal - ours.mean if attack == UNTARGETED else ours.mean - goal


def _table(kept: Sequence[Kept], attack: str) -> str:
    clean = values(kept, attack, "clean", 0)
    rows = []
    for at in PERCENTS:
        cells = [clean.show() if c == "clean" else values(kept, attack, c, at).show() for c in SHOWN]
        rows.append([f"{at}%", *cells])
        rows.append(["the paper", *(_published(attack, column, at) for column in SHOWN)])
    return table(["poison", *(COLUMNS[column] for column in SHOWN)], rows)


def _published(attack: str, column: str, at: int) -> str:
    if column == "clean":
        return f"{PAPER_CLEAN:g}" if attack == UNTARGETED else ""
    name = "penalty" if column == "algorithm-2" else column
    found = PAPER[attack].get(name)
    mean = None if found is None or column == "penalty" else found.at(at)
    if found is None or mean is None:
        return "" if column != "penalty" else "(as to its left)"
    deviations = found.deviations
    return f"{mean:.2f}" + ("" if deviations is None else f" ± {deviations[PERCENTS.index(at)]:.2f}")


def _weights(kept: Sequence[Kept]) -> str:
    rows = []
    places = [("clean", 0), *((column, at) for column in ("flipping", "penalty") for at in WEIGHT_PERCENTS)]
    for attack in MEASURES:
        for name, weight in (("in the table", WEIGHT), ("as in the paper's text", PAPER_WEIGHT)):
            part = TABLE if weight == WEIGHT else WEIGHTS
            shown = (values(kept, attack, column, at, part).show() for column, at in places)
            rows.append([attack, f"{weight:g} ({name})", *shown])
        published = [_published(attack, "clean", 0), *(_published(attack, "flipping", at) for at in WEIGHT_PERCENTS)]
        goals = [f"{PAPER[attack]['penalty'].at(at):.2f}" for at in WEIGHT_PERCENTS]
        rows.append([attack, "the paper's numbers", *published, *goals])
    heads = [f"{COLUMNS[column]}, {at}%" if at else column for column, at in places]
    return table(["", "weight of W²/2", *heads], rows)


def _hyper(hyper: Sequence[Kept]) -> str:
    if not hyper:
        return "Not run."
    rows = []
    for name, entries in HYPERPARAMETERS.items():
        for value, _, paper in entries:
            mine = chosen(hyper, varied=name, value=value)
            rows.append([name, value, percent(mine).show(), f"{paper:.2f}"])
    text = "Untargeted, 60 points, test accuracy. One price is set by hand, the others are ours."
    return text + "\n\n" + table(["varied", "value", "found", "the paper"], rows)


def _effect(effect: Sequence[Kept]) -> str:
    if not effect:
        return "Not run."
    rows = []
    for T in LOWER_STEPS:
        row = [str(T)]
        for column in ("penalty", "approx-grad"):
            mine = chosen(effect, column=column, T=T)
            row += [percent(mine).show(usual=2), numbers(mine, "ms_per_step").show(1, usual=2)]
        rows.append(row)
    heads = ["T", "Penalty, accuracy", "ms an upper step", "ApproxGrad, accuracy", "ms an upper step"]
    return (
        f"Untargeted, 60 points, {EFFECT_STEPS} upper steps at one rate, our objective on the same images, two seeds. "
        "ApproxGrad takes T steps for the linear system, too. Times are of one core each, side by side.\n\n"
        f"{table(heads, rows)}\n\n"
        f"![Accuracy and time against T]({PICTURES.format('effect-of-T')})"
    )


def _pictures(shown: Sequence[str]) -> str:
    said = {
        UNTARGETED: "Untargeted, one point for each label that was drawn: above the point, below its base.",
        TARGETED: "Targeted: labelled three (left half) and eight (right half); above the point, below its base.",
    }
    lines = [f"{said[attack]}\n\n![{said[attack]}]({PICTURES.format(attack)})" for attack in shown]
    return "\n\n".join(lines) or "Not run."
