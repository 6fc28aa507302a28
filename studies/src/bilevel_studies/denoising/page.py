"""The page of the denoising study: Table 2 beside what was found, and the parts that a CPU runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel_studies.denoising import figures as denoising_figures
from bilevel_studies.denoising import wide as denoising_wide
from bilevel_studies.denoising.methods import DAMPING, LOWER_RATE, PAPER_T, UPPER_RATE
from bilevel_studies.denoising.numbers import (
    SEEDS,
    Numbers,
    alone,
    chosen,
    current,
    devices,
    diverged,
    finite,
    mark,
    numbers,
    percent,
    seeds,
)
from bilevel_studies.denoising.runs import HELD_OUT
from bilevel_studies.denoising.small import CLEANING_STEPS, HOW_FEW, HYPER_CLEANING
from bilevel_studies.denoising.small_page import few_sentences, few_table, rule_sentences, rule_table, targets
from bilevel_studies.denoising.study import (
    ASYMMETRIC,
    COLUMNS,
    NOISES,
    PAPER_BATCH,
    SHOWN,
    STUDIES,
    SYMMETRIC,
    Study,
    bilevel_passes,
)
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table

TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "svhn": "SVHN",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "digits (MLP)",
}
SURE = 1.96
"""Standard errors by which two networks of one seed have to differ."""


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figure and the page into a folder; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    few = chosen(kept, part=HOW_FEW)
    if few:
        denoising_figures.how_few(few, folder / "denoising-how-few.png")
    found = findings(kept)
    write_whole(folder / "denoising.md", page(kept, found))
    return {"cells": len(kept), "findings": found, "not_run": not_run(kept)}


def row(kept: Sequence[Kept], dataset: str, noise: float, kind: str) -> dict[str, list[Kept]]:
    """The finished cells of a row of the table, by column. `trusted` sees no noise: any row's cells serve."""
    final = STUDIES[dataset].final_passes
    finished = [
        pair
        for pair in chosen(current(kept), dataset=dataset)
        if "part" not in pair[0] and pair[0]["passes"][1] == final and not pair[1].get("partial")
    ]
    mine = chosen(finished, noise=noise, kind=kind)
    found = {column: chosen(mine, column=column) for column in COLUMNS}
    by_seed = {pair[0]["seed"]: pair for pair in chosen(finished, column="trusted")}
    return found | {"trusted": list(by_seed.values())}


def places(kept: Sequence[Kept]) -> list[tuple[str, float, str]]:
    """The rows of the table: data set, noise and kind, those of the study and all others that have cells."""
    found = []
    for dataset in STUDIES:
        mine = [s for s, _ in chosen(kept, dataset=dataset) if "part" not in s and s["column"] != "clean"]
        others = sorted(
            {(s["noise"], s["kind"]) for s in mine} - set(NOISES), key=lambda pair: (pair[1] == ASYMMETRIC, pair[0])
        )
        found += [(dataset, noise, kind) for noise, kind in (*NOISES, *others)]
    return found


def page(kept: Sequence[Kept], found: Sequence[str]) -> str:
    cleaning, few = chosen(kept, part=HYPER_CLEANING), chosen(kept, part=HOW_FEW)
    parts = [
        "# Denoising by importance learning",
        "Written by `bilevel reproduce denoising` (Section 3.2, Table 2 and Appendices D.1 and E.2 of the paper). All "
        "numbers are in `denoising.json`, from which the command goes on.",
        "A part of the training labels is made wrong: `symmetric`, any other class, each as likely; `asymmetric`, "
        "class c becomes c + 1. The trusted (validation) set has 1,000 examples, on CIFAR-10 10,000, on digits 100. "
        "Accuracies are those of the last iterate on the whole test set, in percent, as mean ± deviation over 5 seeds; "
        "where there are other than 5, their number is given. Seeds draw the split, the wrong labels, the first "
        "weights and the batches.",
        "## What was found",
        "In brackets after another column: ours less that column, in percent, on the seeds that both have, with their "
        "number where it is not 5. `above` and `below` are said where that is more than the deviation of the "
        f"differences between seeds or, of one seed, than {SURE:g} binomial standard errors on the test set; else "
        "`level with`. Runs that diverged are not compared.",
        "\n".join(f"- {sentence}" for sentence in found) if found else "Nothing was run.",
        "## Table 2",
        _columns(kept),
        _settings(),
        _table(kept),
        _run_on(kept),
        "## How well wrong labels are found",
        "AUC: how often the importance of a right label is above that of a wrong one; `quality` is the importance "
        "times the probability that the final classifier gives the label. F1: of the suspects, those of "
        "importance below 1/2 (of ours, those that the final classifier gives another class, too).",
        _detection(kept),
        "## Clean labels",
        "The networks on the whole training set with its own labels, as many passes as in the table.",
        _clean(kept),
        "## Hyper-cleaning: 5,000 MNIST images, half of the labels wrong, 5,000 trusted (Appendix D.1.1)",
        f"`denoise(steps={CLEANING_STEPS})`, 80 passes (the paper has 100), on {devices(cleaning)}; mean ± deviation "
        "over 10 seeds. These steps are better than the default, 1,200, on seeds 100 to 102. The other columns are "
        "trained in as many steps as one of its rounds.",
        targets(cleaning),
        "The paper's rule: a softmax regression on the examples of importance above 0.9 and the trusted ones.",
        rule_table(cleaning),
        "## How few trusted examples are enough?",
        "5,000 MNIST images, 40% of the labels wrong (symmetric), the MLP 784-300-10, `denoise` with its defaults, "
        "mean ± deviation over 3 seeds. Beside it the same network on the trusted examples alone, and on all "
        "labels as they are (the trusted ones among them).",
        few_table(few),
        *(["![Accuracy and AUC against the number of trusted examples](denoising-how-few.png)"] if few else []),
        "## A network of 36 million weights (Appendix D.1.2)",
        _wide(kept),
        "## Not run",
        _left(kept),
        "## To run it again",
        "```bash\nbilevel reproduce denoising --out runs/denoising --page docs/results\n"
        "bilevel reproduce denoising --dataset mnist --noise 0.25 --kind symmetric --columns ours --page docs/results\n"
        "bilevel reproduce denoising --dataset mnist --columns algorithm-2 --minutes 8 --page docs/results\n"
        "bilevel reproduce denoising --dataset cifar10-wrn --minutes 8 --page docs/results\n```\n\n"
        "`--minutes` ends a run in its midst; the same command goes on with it, from the state in `--out`.",
    ]
    return "\n\n".join(parts) + "\n"


def findings(kept: Sequence[Kept]) -> list[str]:
    """Sentences on the numbers that are there."""
    found = []
    for dataset, noise, kind in places(kept):
        cells = row(kept, dataset, noise, kind)
        if cells["ours"]:
            found.append(_sentence(_title(dataset, noise, kind), cells, STUDIES[dataset], noise, kind))
    found += rule_sentences(chosen(kept, part=HYPER_CLEANING))
    found += few_sentences(chosen(kept, part=HOW_FEW))
    return found


def _sentence(title: str, cells: dict[str, list[Kept]], study: Study, noise: float, kind: str) -> str:
    ours = percent(cells["ours"])
    paper, target = _papers(study, noise, kind), (study.target or {}).get(noise)
    text = f"{title}: our settings reach {ours.show()}"
    if paper:
        text += f"; the paper's Penalty {paper['algorithm-2']:.2f}, its Oracle {paper['oracle']:.1f}"
    if target is not None and kind == SYMMETRIC:
        text += f"; the target of {target:.2f} is {'met' if ours.mean >= target else 'missed'}"
    text += "."
    beside: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for name in SHOWN[:-1]:
        if found := beside_ours(cells["ours"], cells[name], study.tests):
            where, gaps = found
            count = len(gaps.values)
            beside[where].append(f"{COLUMNS[name]} ({gaps.mean:+.2f}{'' if count == SEEDS else ', ' + seeds(count)})")
    return text + "".join(f" It is {where} {'; '.join(names)}." for where, names in beside.items() if names)


def _papers(study: Study, noise: float, kind: str) -> Mapping[str, float]:
    """The paper's row: its noise is symmetric."""
    return study.paper.get(noise, {}) if kind == SYMMETRIC else {}


def beside_ours(ours: Sequence[Kept], other: Sequence[Kept], tests: int) -> tuple[str, Numbers] | None:
    """Where ours is beside another column on common seeds, and by how much; None where there is none."""
    mine, theirs = ({s["seed"]: f["accuracy"] for s, f in finite(cells)} for cells in (ours, other))
    common = sorted(set(mine) & set(theirs))
    if not common:
        return None
    gaps = Numbers(tuple(100 * (mine[seed] - theirs[seed]) for seed in common))
    if len(common) > 1:
        least = gaps.deviation
    else:
        least = SURE * 100 * math.sqrt(sum(p * (1 - p) / tests for p in (mine[common[0]], theirs[common[0]])))
    return "level with" if abs(gaps.mean) <= least else "above" if gaps.mean > 0 else "below", gaps


def _title(dataset: str, noise: float, kind: str) -> str:
    return f"{TITLES[dataset]}, {100 * noise:g}% {kind}"


def _columns(kept: Sequence[Kept]) -> str:
    said = {
        "oracle": "the right labels and the trusted set",
        "trusted": "the trusted set alone",
        "plain": "all labels as they are and the trusted set, last epoch",
        "stopped": "the same, kept at its best epoch by a fifth of the trusted set that it is not trained on",
        "approx-grad": f"{PAPER_T} lower steps, and {PAPER_T} of Adam on the linear system with a damping of "
        f"{DAMPING:g}; importances as in the next column",
        "algorithm-2": f"Algorithm 2 with the constants of Appendix E.2, T = {PAPER_T}; the importances start at the "
        "probabilities of a network trained on the trusted set, in a fifth of a training's steps",
        "ours": "`denoise`: `Penalty()` with no option, then two rounds of training",
    }
    lines = [f"- {COLUMNS[name]}: {text}." for name, text in said.items()]
    former = [
        _title(*place) for place in places(kept) if any("solver" not in s for s, _ in row(kept, *place)["approx-grad"])
    ]
    other = f"\n\nApproxGrad with conjugate gradients in place of Adam: {'; '.join(former)}." if former else ""
    return "\n".join(lines) + other


def _settings() -> str:
    """How the columns are trained, ours beside the paper's."""
    rows = []
    for name, study in STUDIES.items():
        passes = [str(bilevel_passes(study, column)) for column in ("ours", "approx-grad", "algorithm-2")]
        rows.append([TITLES[name], f"{study.rate:g}, falling to 0", str(study.final_passes), str(study.batch), *passes])
        if study.paper_rate is not None:
            epochs = str(study.paper_passes)
            rows.append(["the paper", f"{study.paper_rate:g}", epochs, str(PAPER_BATCH), "", epochs, epochs])
    heads = [
        "data",
        "rate of Adam",
        "passes of a training",
        "batch",
        "bilevel passes, ours",
        "ApproxGrad",
        "Penalty, the paper's",
    ]
    return (
        "How the columns are trained. A pass has as many steps as the training and the trusted set have batches: in a "
        "training of every column without a bilevel run, whatever its number of examples, and in each round of ours. "
        f"Only the early-stopped column has fewer steps: one in {HELD_OUT} trusted examples is held out of its passes. "
        "A bilevel pass has an upper step for each batch of the training set. The lower steps of ApproxGrad have the "
        f"rate of the trainings, those of the paper's Penalty {LOWER_RATE:g}, which does not fall, with {UPPER_RATE:g} "
        "for u; ours takes its rates from the scale of the problem. On a GPU networks run in bf16, with their weights "
        "in float32; on a CPU all is in float32. What the paper does not say is left empty.\n\n"
        + table(heads, rows)
        + "\n\nBelow a row, here and in the next table, is the paper's, where there is one."
    )


def _table(kept: Sequence[Kept]) -> str:
    rows = []
    for dataset, noise, kind in places(kept):
        cells = row(kept, dataset, noise, kind)
        rows.append([_title(dataset, noise, kind), *(percent(cells[c]).show() + mark(cells[c]) for c in SHOWN)])
        if paper := _papers(STUDIES[dataset], noise, kind):
            rows.append(["the paper", *(f"{paper[name]:g}" if name in paper else "" for name in SHOWN)])
    return table(["data, noise", *(COLUMNS[name] for name in SHOWN)], rows)


def _run_on(kept: Sequence[Kept]) -> str:
    parts = []
    for dataset in STUDIES:
        mine = [
            pair
            for pair in chosen(current(kept), dataset=dataset)
            if "part" not in pair[0] and not pair[1].get("partial")
        ]
        timed = alone(chosen(mine, column="ours"))
        ours = numbers(timed, "seconds")
        if mine:
            text = f"{TITLES[dataset]} was run on {devices(mine)}"
            parts.append(text + (f" (ours {ours.mean:.0f} s a run, {max(ours.values):.0f} at most)" if ours else ""))
        if bad := diverged(mine, "column"):
            parts.append(f"{TITLES[dataset]}: {bad[0].lower()}{bad[1:-1]}")
    return "; ".join(parts) + "." if parts else ""


def _detection(kept: Sequence[Kept]) -> str:
    rows = []
    for place in places(kept):
        found = row(kept, *place)
        for column in ("approx-grad", "algorithm-2", "ours"):
            if cells := found[column]:
                quality = numbers(cells, "auc_quality")
                rows.append(
                    [
                        _title(*place),
                        COLUMNS[column] + mark(cells),
                        numbers(cells, "auc").show(3),
                        quality.show(4) if quality else "",
                        numbers(cells, "f1").show(3),
                        percent(cells, "noise_rate").show(1),
                    ]
                )
    heads = ["data, noise", "method", "AUC of importance", "AUC of quality", "F1 of suspects", "suspects, percent"]
    return table(heads, rows) if rows else "Nothing was run."


def _clean(kept: Sequence[Kept]) -> str:
    rows = [
        [
            TITLES[name],
            percent(row(kept, name, 0.0, SYMMETRIC)["clean"]).show(),
            "" if study.paper_clean is None else f"{study.paper_clean:g}",
        ]
        for name, study in STUDIES.items()
    ]
    return table(["data", "found", "the paper"], rows)


def _wide(kept: Sequence[Kept]) -> str:
    others = ", ".join(f"{name} {value:g}" for name, value in denoising_wide.OTHERS.items())
    text = (
        f"WRN-28-10 on CIFAR-10, 36% symmetric noise, 44,000 examples and 1,000 trusted, T = 1, batches of 75. The "
        f"paper: {denoising_wide.PAPER:g} ± {denoising_wide.PAPER_DEVIATION:g} after 200 passes with gamma 1, epsilon "
        f"1, lam 10, nu 0, rates 3 and 1e-4 ({COLUMNS['algorithm-2']}); {others}. Importances are normalised within "
        "the batch. The accuracy is that of the lower variable, without training after it."
    )
    rows = []
    for settings, found in chosen(kept, dataset=denoising_wide.NAME):
        memory = found.get("memory")
        rows.append(
            [
                COLUMNS[settings["column"]],
                str(settings["seed"]),
                str(settings["passes"]),
                f"{found['steps']:,} of {found['of']:,}",
                f"{100 * found['accuracy']:.2f}",
                f"{found['auc']:.3f}",
                f"{found['ms_per_step']:.0f}",
                "" if memory is None else f"{memory / 2**30:.1f}",
                found["device"],
            ]
        )
    if not rows:
        return text + "\n\nNot run."
    heads = ["method", "seed", "passes", "upper steps", "accuracy", "AUC", "ms a step", "GiB", "device"]
    return text + "\n\n" + table(heads, rows)


def not_run(kept: Sequence[Kept]) -> list[dict[str, Any]]:
    """The places of the table that have no cell."""
    found: list[dict[str, Any]] = []
    for dataset, noise, kind in places(kept):
        cells = row(kept, dataset, noise, kind)
        if left := [column for column in SHOWN if not cells[column]]:
            found.append({"dataset": dataset, "noise": noise, "kind": kind, "columns": left})
    return found


def _left(kept: Sequence[Kept]) -> str:
    left = not_run(kept)
    lines = [
        f"- {_title(one['dataset'], one['noise'], one['kind'])}: "
        + ("all columns" if len(one["columns"]) == len(SHOWN) else "; ".join(COLUMNS[c] for c in one["columns"]))
        + "."
        for one in left
    ]
    total = len(places(kept)) * len(SHOWN)
    empty = sum(len(one["columns"]) for one in left)
    text = f"{empty} of {total} places of the table are not filled" + (":\n\n" + "\n".join(lines) if lines else ".")
    counts = [len(cells[c]) for place in places(kept) for cells in [row(kept, *place)] for c in SHOWN if cells[c]]
    few = sum(count < SEEDS for count in counts)
    text += f"\n\nOf the {len(counts)} others, {few} have fewer than {SEEDS} seeds: their number stands beside them."
    begun = _begun(kept)
    return text + ("\n\nBegun, and in no table: " + "; ".join(begun) + "." if begun else "")


def _begun(kept: Sequence[Kept]) -> list[str]:
    """The cells of the table that the limit of time has ended, each with how far it got."""
    found = []
    for settings, cell in kept:
        if cell.get("partial") and settings.get("dataset") in STUDIES:
            title = _title(settings["dataset"], settings["noise"], settings["kind"])
            so_far = f", {100 * cell['accuracy']:.2f} so far" if "accuracy" in cell else ""
            found.append(
                f"{title}, {COLUMNS[settings['column']]}, seed {settings['seed']} "
                f"({cell['steps']:,} of {cell['of']:,} steps{so_far})"
            )
    return found
