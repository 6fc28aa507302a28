"""The page of the denoising study: Table 2 beside what was found, and the parts that a CPU runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..whole import write_whole
from . import denoising_figures, denoising_wide
from .denoising import ASYMMETRIC, COLUMNS, NOISES, SHOWN, STUDIES, SYMMETRIC
from .denoising_numbers import Numbers, alone, chosen, devices, diverged, numbers, percent
from .denoising_small import CLEANING_STEPS, HOW_FEW, HYPER_CLEANING
from .denoising_small_page import few_sentences, few_table, rule_sentences, rule_table, targets
from .filed import Kept
from .markdown import table

TITLES = {
    "mnist": "MNIST", "cifar10": "CIFAR-10", "svhn": "SVHN", "fashion-mnist": "Fashion-MNIST", "digits": "digits (MLP)",
}  # fmt: skip
ALIKE = 0.1
"""A difference in percent that is none; nor is one below the deviation of either."""


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
        for pair in chosen(kept, dataset=dataset)
        if "part" not in pair[0] and pair[0]["passes"][1] == final and not pair[1].get("partial")
    ]
    mine = chosen(finished, noise=noise, kind=kind)
    found = {column: chosen(mine, column=column) for column in COLUMNS}
    by_seed = {pair[0]["seed"]: pair for pair in chosen(finished, column="trusted")}
    return found | {"trusted": list(by_seed.values())}


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
        "\n".join(f"- {sentence}" for sentence in found) if found else "Nothing was run.",
        "## Table 2",
        _columns(),
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
        "bilevel reproduce denoising --dataset mnist --noise 0.25 --columns ours --page docs/results\n"
        "bilevel reproduce denoising --dataset mnist --columns algorithm-2 --minutes 8 --page docs/results\n"
        "bilevel reproduce denoising --dataset cifar10-wrn --minutes 8 --page docs/results\n```\n\n"
        "`--minutes` ends a run in its midst; the same command goes on with it, from the state in `--out`.",
    ]
    return "\n\n".join(parts) + "\n"


def findings(kept: Sequence[Kept]) -> list[str]:
    """Sentences on the numbers that are there."""
    found = []
    for dataset, study in STUDIES.items():
        for noise, kind in NOISES:
            columns = {name: percent(cells) for name, cells in row(kept, dataset, noise, kind).items()}
            if columns["ours"]:
                found.append(_sentence(_title(dataset, noise, kind), columns, study.paper.get(noise, {}), _target(
                    study.target, noise, kind)))  # fmt: skip
    found += rule_sentences(chosen(kept, part=HYPER_CLEANING))
    found += few_sentences(chosen(kept, part=HOW_FEW))
    return found


def _target(target: Any, noise: float, kind: str) -> float | None:
    return None if target is None or kind == ASYMMETRIC else target.get(noise)


def _sentence(title: str, columns: dict[str, Numbers], paper: Any, target: float | None) -> str:
    ours = columns["ours"]
    text = f"{title}: our settings reach {ours.show()}"
    if "algorithm-2" in paper:
        text += f"; the paper's Penalty {paper['algorithm-2']:.2f}, its Oracle {paper['oracle']:.1f}"
    if target is not None:
        text += f"; the target of {target:.2f} is {'met' if ours.mean >= target else 'missed'}"
    text += "."
    beside: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for name in SHOWN[:-1]:
        if other := columns[name]:
            gap = ours.mean - other.mean
            alike = abs(gap) < max(ALIKE, ours.deviation, other.deviation)
            where = "level with" if alike else "above" if gap > 0 else "below"
            beside[where].append(f"{COLUMNS[name]} ({other.mean:.2f})")
    return text + "".join(f" It is {where} {'; '.join(names)}." for where, names in beside.items() if names)


def _title(dataset: str, noise: float, kind: str) -> str:
    return f"{TITLES[dataset]}, {100 * noise:g}% {kind}"


def _columns() -> str:
    said = {
        "oracle": "the right labels and the trusted set",
        "trusted": "the trusted set alone",
        "plain": "all labels as they are and the trusted set, last epoch",
        "stopped": "the same, kept at its best epoch by a fifth of the trusted set that it is not trained on",
        "approx-grad": "20 lower and 20 linear steps, one pass of upper steps over the training set, on digits "
        f"{STUDIES['digits'].implicit_passes} (the paper has 100 passes, on CIFAR-10 200)",
        "algorithm-2": "Algorithm 2 with the constants of Appendix E.2",
        "ours": "`denoise`: `Penalty()` with no option, then two rounds of training",
    }
    lines = [f"- {COLUMNS[name]}: {text}." for name, text in said.items()]
    return "\n".join(lines) + (
        "\n\nColumns without a bilevel run take as many steps as a round of ours. Below a row, where there is one, is "
        "the paper's."
    )


def _table(kept: Sequence[Kept]) -> str:
    rows = []
    for dataset, study in STUDIES.items():
        for noise, kind in NOISES:
            cells = row(kept, dataset, noise, kind)
            rows.append([_title(dataset, noise, kind), *(percent(cells[column]).show() for column in SHOWN)])
            if kind == SYMMETRIC and noise in study.paper:
                paper = study.paper[noise]
                rows.append(["the paper", *(f"{paper[name]:g}" if name in paper else "" for name in SHOWN)])
    return table(["data, noise", *(COLUMNS[name] for name in SHOWN)], rows)


def _run_on(kept: Sequence[Kept]) -> str:
    parts = []
    for dataset in STUDIES:
        mine = [pair for pair in chosen(kept, dataset=dataset) if "part" not in pair[0] and not pair[1].get("partial")]
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
    for dataset in STUDIES:
        for noise, kind in NOISES:
            for column in ("approx-grad", "algorithm-2", "ours"):
                cells = row(kept, dataset, noise, kind)[column]
                if cells:
                    quality = numbers(cells, "auc_quality")
                    rows.append([
                        _title(dataset, noise, kind), COLUMNS[column], numbers(cells, "auc").show(3),
                        quality.show(4) if quality else "", numbers(cells, "f1").show(3),
                        percent(cells, "noise_rate").show(1),
                    ])  # fmt: skip
    heads = ["data, noise", "method", "AUC of importance", "AUC of quality", "F1 of suspects", "suspects, percent"]
    return table(heads, rows) if rows else "Nothing was run."


def _clean(kept: Sequence[Kept]) -> str:
    rows = [
        [TITLES[name], percent(row(kept, name, 0.0, SYMMETRIC)["clean"]).show(),
         "" if study.paper_clean is None else f"{study.paper_clean:g}"]
        for name, study in STUDIES.items()
    ]  # fmt: skip
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
        rows.append([
            COLUMNS[settings["column"]], str(settings["seed"]), str(settings["passes"]),
            f"{found['steps']:,} of {found['of']:,}", f"{100 * found['accuracy']:.2f}", f"{found['auc']:.3f}",
            f"{found['ms_per_step']:.0f}", "" if memory is None else f"{memory / 2**30:.1f}", found["device"],
        ])  # fmt: skip
    if not rows:
        return text + "\n\nNot run."
    heads = ["method", "seed", "passes", "upper steps", "accuracy", "AUC", "ms a step", "GiB", "device"]
    return text + "\n\n" + table(heads, rows)


def not_run(kept: Sequence[Kept]) -> list[dict[str, Any]]:
    """The places of the table that have no cell."""
    found: list[dict[str, Any]] = []
    for dataset in STUDIES:
        for noise, kind in NOISES:
            cells = row(kept, dataset, noise, kind)
            left = [column for column in SHOWN if not cells[column]]
            if left:
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
    total = len(STUDIES) * len(NOISES) * len(SHOWN)
    empty = sum(len(one["columns"]) for one in left)
    text = f"{empty} of {total} places of the table are not filled" + (":\n\n" + "\n".join(lines) if lines else ".")
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
