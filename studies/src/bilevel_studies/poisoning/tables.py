"""The tables and numbers of the poisoning study, next to the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bilevel_studies import plots
from bilevel_studies.poisoning.study import (
    CANDIDATES,
    CHOICE_PERCENTS,
    CHOICE_SEED,
    COLUMNS,
    EFFECT,
    EFFECT_STEPS,
    HYPER,
    HYPERPARAMETERS,
    LOWER_STEPS,
    MEASURES,
    OTHER_CANDIDATES,
    OTHERS,
    PAPER,
    PAPER_CLEAN,
    PAPER_WEIGHT,
    PERCENTS,
    SEEDS,
    SHOWN,
    SPLITS,
    STEPS,
    TABLE,
    TARGETED,
    UNTARGETED,
    WEIGHT,
    WEIGHT_PERCENTS,
    WEIGHTS,
    Choice,
    best,
    current,
    mean_of,
    tried,
)
from bilevel_studies.statistics import Numbers, chosen, numbers, percent
from bilevel_studies.study import Kept, Report, table

# Pixels of a row of an MNIST image.
SIDE = 28


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables."""
    kept = current(kept)
    for attack in MEASURES:
        found = [one["pictures"] for _, one in chosen(kept, part=TABLE, attack=attack) if "pictures" in one]
        for pictures in found[:1]:
            pairs = zip(pictures["poison"], pictures["base"], strict=True)
            columns = [[np.array(pixels, dtype=np.uint8).reshape(SIDE, SIDE) for pixels in pair] for pair in pairs]
            plots.images(columns, folder / f"poisoning-{attack}.png", [str(y) for y in pictures["labels"]])
    if effect := chosen(kept, part=EFFECT):
        plots.against_lower_steps(effect, "column", COLUMNS, folder / "poisoning-effect-of-T.png")
    tables = {title: body for title, body in all_tables(kept).items() if body}
    return Report({"cells": len(kept), "reached": reached(kept)}, tables)


def all_tables(kept: Sequence[Kept]) -> dict[str, str]:
    """Return every table by its name; empty text if nothing was run."""
    taken = best(kept)
    tables: dict[str, str] = {}
    for attack in MEASURES:
        tables |= {
            attack: table_5(kept, attack),
            f"choice {attack}": choice_table(kept, attack, taken),
            f"other choice {attack}": other_choice_table(kept, attack, taken),
        }
    return tables | {"weight": weight_table(kept), "table 6": table_6(kept), "effect of T": effect_table(kept)}


def page(kept: Sequence[Kept]) -> dict[str, Any]:
    """Return what the template of the page needs: tables by name, and numbers."""
    kept = current(kept)
    taken = best(kept)
    return {
        "tables": all_tables(kept),
        "taken": {attack: taken[attack, "penalty"] for attack in MEASURES},
        "reached": {attack: sum(map(bool, found.values())) for attack, found in reached(kept).items()},
        "gap": {attack: {column: gap(kept, attack, column) for column in SHOWN[2:-1]} for attack in MEASURES},
        "short": {attack: {column: short(kept, attack, column) for column in SHOWN[2:-1]} for attack in MEASURES},
        "weighted": {a: {n: values(kept, a, "penalty", n, WEIGHTS) for n in WEIGHT_PERCENTS} for a in MEASURES},
        "paper": {attack: dict(zip(PERCENTS, PAPER[attack]["penalty"].means, strict=True)) for attack in MEASURES},
        "beyond": {a: sum(_beyond(kept, a, at) for at in PERCENTS) for a in MEASURES},
        "below_flipping": [
            at
            for at in PERCENTS
            if behind(values(kept, TARGETED, "algorithm-2", at), values(kept, TARGETED, "flipping", at).mean, TARGETED)
        ],
        "unlike_flipping": [at for at in PERCENTS if _unlike(kept, UNTARGETED, at)],
        "slower": _slower(kept),
        "splits": SPLITS,
        "steps": STEPS,
        "weight": WEIGHT,
        "paper_weight": PAPER_WEIGHT,
        "seeds": SEEDS,
        "choice_seed": CHOICE_SEED,
        "effect_steps": EFFECT_STEPS,
        "hyper": {value: percent(chosen(kept, part=HYPER, varied="gamma_0", value=value)) for value in ("1", "10")},
    }


def values(kept: Sequence[Kept], attack: str, column: str, at: int, part: str = TABLE) -> Numbers:
    """Return the measure of an attack at a share of poison, in percent."""
    return percent(chosen(kept, part=part, attack=attack, column=column, percent=at), MEASURES[attack])


def reached(kept: Sequence[Kept]) -> dict[str, dict[str, bool | None]]:
    """Return whether Penalty reaches the paper's at each share, within one deviation over seeds; None: not run."""
    out: dict[str, dict[str, bool | None]] = {attack: {} for attack in MEASURES}
    for attack, at in product(MEASURES, PERCENTS):
        ours, (goal, _) = values(kept, attack, "penalty", at), PAPER[attack]["penalty"].known(at)
        out[attack][str(at)] = not behind(ours, goal, attack) if ours else None
    return out


def _beyond(kept: Sequence[Kept], attack: str, at: int) -> bool:
    """Whether the mean of Penalty is at least as strong as the paper's."""
    ours, goal = values(kept, attack, "penalty", at).mean, PAPER[attack]["penalty"].known(at)[0]
    return ours >= goal if attack == TARGETED else ours <= goal


def _unlike(kept: Sequence[Kept], attack: str, at: int) -> bool:
    """Whether label flipping, which has no settings, differs from the paper's by more than both deviations."""
    ours, (mean, spread) = values(kept, attack, "flipping", at), PAPER[attack]["flipping"].known(at)
    return abs(ours.mean - mean) > ours.deviation + spread


def behind(ours: Numbers, goal: float, attack: str) -> bool:
    """Return whether the mean is weaker than `goal` by more than one deviation over seeds."""
    return (goal - ours.mean if attack == TARGETED else ours.mean - goal) > ours.deviation


def short(kept: Sequence[Kept], attack: str, column: str) -> list[int]:
    """Return the shares at which our run of a column is weaker than the published one."""
    paper = PAPER[attack]["penalty" if column == "algorithm-2" else column]
    pairs = [(at, values(kept, attack, column, at), paper.at(at)) for at in PERCENTS]
    return [at for at, ours, goal in pairs if ours and goal is not None and behind(ours, goal, attack)]


def gap(kept: Sequence[Kept], attack: str, column: str) -> Numbers:
    """Return by how much Penalty is stronger than a column, in points, for each seed that has both."""
    by_place = [
        {(s["percent"], s["seed"]): 100 * found[MEASURES[attack]] for s, found in chosen(kept, **some)}
        for some in ({"part": TABLE, "attack": attack, "column": name} for name in ("penalty", column))
    ]
    sign = 1 if attack == TARGETED else -1
    by_seed: dict[int, list[float]] = {}
    for place in by_place[0].keys() & by_place[1].keys():
        by_seed.setdefault(place[1], []).append(sign * (by_place[0][place] - by_place[1][place]))
    return Numbers(tuple(statistics.fmean(gaps) for _, gaps in sorted(by_seed.items())))


def table_5(kept: Sequence[Kept], attack: str) -> str:
    clean, rows = values(kept, attack, "clean", 0), []
    for at in PERCENTS:
        ours = [clean.show() if c == "clean" else values(kept, attack, c, at).show() for c in SHOWN]
        rows += [[f"{at}%", *ours], ["the paper", *(_published(attack, column, at) for column in SHOWN)]]
    return table(["poison", *(COLUMNS[column] for column in SHOWN)], rows)


def _published(attack: str, column: str, at: int) -> str:
    if column == "clean":
        return f"{PAPER_CLEAN:g}" if attack == UNTARGETED else ""
    if column == "penalty":
        return "(as to its left)"
    found = PAPER[attack]["penalty" if column == "algorithm-2" else column]
    mean, deviations = found.at(at), found.deviations
    spread = "" if deviations is None else f" ± {deviations[PERCENTS.index(at)]:.2f}"
    return "" if mean is None else f"{mean:.2f}{spread}"


def choice_table(kept: Sequence[Kept], attack: str, taken: Choice) -> str:
    """The candidates for our Penalty."""
    rows = []
    for candidate in CANDIDATES[attack]:
        mark = " (in the table)" if candidate == taken[attack, "penalty"] else ""
        shifted = "yes" if candidate["shifts"] else "no"
        found = _tried(kept, attack, "penalty", candidate)
        rows.append([f"{candidate['factor']:g}{mark}", shifted, str(candidate["steps"]), *found])
    shares = [f"{at}%" for at in CHOICE_PERCENTS]
    return table(["factor of the scores", "shifted images too", "steps", *shares, "mean"], rows)


def other_choice_table(kept: Sequence[Kept], attack: str, taken: Choice) -> str:
    """The candidates for ApproxGrad and RMD."""
    rows = []
    for column, candidate in product(OTHERS, OTHER_CANDIDATES):
        objective = "our objective without shifts" if "factor" in candidate else "the paper's objective"
        mark = " (in the table)" if candidate == taken[attack, column] else ""
        title = f"{objective}, rate {candidate.get('rate', 0.1):g}{mark}"
        rows.append([COLUMNS[column], title, *_tried(kept, attack, column, candidate)])
    return table(["method", "candidate", *(f"{at}%" for at in CHOICE_PERCENTS), "mean"], rows)


def _tried(kept: Sequence[Kept], attack: str, column: str, candidate: Mapping[str, Any]) -> list[str]:
    mine, mean = tried(kept, attack, column, candidate), mean_of(kept, attack, column, candidate)
    found = [percent(chosen(mine, percent=at), MEASURES[attack]).show(usual=1) for at in CHOICE_PERCENTS]
    return [*found, "" if mean is None else f"{100 * mean:.2f}"]


def weight_table(kept: Sequence[Kept]) -> str:
    rows = []
    places = [("clean", 0), *((column, at) for column in ("flipping", "penalty") for at in WEIGHT_PERCENTS)]
    for attack in MEASURES:
        for name, weight, part in (("in the table", WEIGHT, TABLE), ("as in the paper's text", PAPER_WEIGHT, WEIGHTS)):
            shown = (values(kept, attack, column, at, part).show() for column, at in places)
            rows.append([attack, f"{weight:g} ({name})", *shown])
        published = [_published(attack, column, at) for column, at in places[:-2]]
        goals = [f"{PAPER[attack]['penalty'].at(at):.2f}" for at in WEIGHT_PERCENTS]
        rows.append([attack, "the paper's numbers", *published, *goals])
    heads = [f"{COLUMNS[column]}, {at}%" if at else column for column, at in places]
    return table(["", "weight of W²/2", *heads], rows) if chosen(kept, part=WEIGHTS) else ""


def table_6(kept: Sequence[Kept]) -> str:
    rows = [
        [name, value, percent(chosen(kept, part=HYPER, varied=name, value=value)).show(), f"{paper:.2f}"]
        for name, entries in HYPERPARAMETERS.items()
        for value, _, paper in entries
    ]
    return table(["varied", "value", "found", "the paper"], rows) if chosen(kept, part=HYPER) else ""


def effect_table(kept: Sequence[Kept]) -> str:
    rows = []
    for T in LOWER_STEPS:
        row = [str(T)]
        for column in ("penalty", "approx-grad"):
            mine = chosen(kept, part=EFFECT, column=column, T=T)
            row += [percent(mine).show(usual=2), numbers(mine, "ms_per_step").show(1, usual=2)]
        rows.append(row)
    heads = ["T", "Penalty, accuracy", "ms per upper step", "ApproxGrad, accuracy", "ms per upper step"]
    return table(heads, rows) if chosen(kept, part=EFFECT) else ""


def _slower(kept: Sequence[Kept]) -> float | None:
    """Return how many times longer an upper step of Penalty takes than one of ApproxGrad, at the largest T."""
    last = chosen(kept, part=EFFECT, T=LOWER_STEPS[-1])
    ours, theirs = (numbers(chosen(last, column=column), "ms_per_step") for column in ("penalty", "approx-grad"))
    return ours.mean / theirs.mean if ours and theirs else None
