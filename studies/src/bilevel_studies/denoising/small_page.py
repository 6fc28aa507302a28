"""Hyper-cleaning and the number of trusted examples, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from bilevel_studies.denoising.numbers import chosen, numbers, percent, values
from bilevel_studies.denoising.small import CLEANING_SEEDS, FEW_SEEDS, NETWORKS
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table

TARGETS = {"linear": (90.1, 0.918), "mlp": (92.4, 0.921)}
"""Accuracy in percent, and F1."""
RULE_TARGET = 90.9
PAPER = {"trusted": 90.54, "plain": 86.25, "RMD": 90.09, "rule": 90.77, "oracle": 91.06}
"""Appendix D.1.1, in percent."""
NAMES = {"linear": "linear", "mlp": "MLP 784-300-10"}
CLEAR = 0.5
"""Percent by which denoising has to be better to be worth it."""


def targets(kept: Sequence[Kept]) -> str:
    """Both networks beside what they are to reach, and beside what they are compared with."""
    rows = []
    for network in NETWORKS:
        mine, (accuracy, f1) = chosen(kept, network=network), TARGETS[network]
        rows.append(
            [
                NAMES[network],
                percent(mine).show(usual=CLEANING_SEEDS),
                f"{accuracy:g}",
                numbers(mine, "f1", 100).show(1, CLEANING_SEEDS),
                f"{100 * f1:.1f}",
                numbers(mine, "auc").show(3, CLEANING_SEEDS),
                numbers(mine, "auc_quality").show(3, CLEANING_SEEDS),
                *(percent(mine, name).show(usual=CLEANING_SEEDS) for name in ("trusted", "plain", "oracle")),
            ]
        )
    heads = [
        "network",
        "accuracy",
        "target",
        "F1",
        "target",
        "AUC of importance",
        "AUC of quality",
        "Val-only",
        "Train+Val",
        "Oracle",
    ]
    return table(heads, rows)


def rule_table(kept: Sequence[Kept]) -> str:
    mine = chosen(kept, network="linear")
    found = [percent(mine, name).show(usual=CLEANING_SEEDS) for name in ("trusted", "plain", "rule", "oracle")]
    paper = [f"{PAPER[name]:g}" for name in ("trusted", "plain", "RMD", "rule", "oracle")]
    heads = ["", "Val-only", "Train+Val", "RMD", "Penalty, the rule", "Oracle"]
    return table(heads, [["found", *found[:2], "", *found[2:]], ["the paper", *paper]])


def rule_sentences(kept: Sequence[Kept]) -> list[str]:
    found = []
    for network in NETWORKS:
        mine, (accuracy, f1) = chosen(kept, network=network), TARGETS[network]
        if mine:
            right, suspects = percent(mine), numbers(mine, "f1", 100)
            found.append(
                f"Hyper-cleaning, {NAMES[network]}: accuracy {right.show(usual=CLEANING_SEEDS)} (target {accuracy:g}: "
                f"{_met(right.mean >= accuracy)}), F1 {suspects.show(1, CLEANING_SEEDS)} (target {100 * f1:.1f}: "
                f"{_met(suspects.mean >= 100 * f1)}). {_beside(mine)}"
            )
    linear = chosen(kept, network="linear")
    if rule := percent(linear, "rule"):
        gap = rule.mean - percent(linear, "trusted").mean
        found.append(
            f"Hyper-cleaning by the paper's rule: {rule.show(usual=CLEANING_SEEDS)} (target {RULE_TARGET:g}: "
            f"{_met(rule.mean >= RULE_TARGET)}; the paper {PAPER['rule']:g}), {gap:+.2f} beside our Val-only."
        )
    return found


def _beside(kept: Sequence[Kept]) -> str:
    names = {"trusted": "the trusted set alone has", "plain": "labels as they are", "oracle": "the Oracle"}
    said = ", ".join(f"{name} {percent(kept, key).mean:.2f}" for key, name in names.items() if percent(kept, key))
    return f"Beside it {said}."


def _met(holds: bool) -> str:
    return "met" if holds else "missed"


def few_table(kept: Sequence[Kept]) -> str:
    rows = []
    for count in sorted(values(kept, "trusted")):
        mine = chosen(kept, trusted=count)
        rows.append(
            [
                f"{count:,}",
                *(percent(mine, key).show(usual=FEW_SEEDS) for key in ("accuracy", "trusted", "plain")),
                numbers(mine, "auc").show(3, FEW_SEEDS),
                numbers(mine, "auc_quality").show(3, FEW_SEEDS),
            ]
        )
    heads = ["trusted", "denoise", "trusted set alone", "labels as they are", "AUC of importance", "AUC of quality"]
    return table(heads, rows) if rows else "Not run."


def few_sentences(kept: Sequence[Kept]) -> list[str]:
    """From how few trusted examples on denoising is worth it, and from how many on it is not."""
    found = []
    for key, name in (
        ("trusted", "training on the trusted set alone"),
        ("plain", "training on the labels as they are"),
    ):
        gaps = {
            count: percent(mine := chosen(kept, trusted=count)).mean - percent(mine, key).mean
            for count in sorted(values(kept, "trusted"))
        }
        better = [count for count, gap in gaps.items() if gap > CLEAR]
        if better:
            most = max(gaps, key=lambda count: gaps[count])
            text = f"How few: `denoise` is more than {CLEAR:g} points better than {name} with {_listed(better)} trusted"
            text += f" (most with {most:,}: {gaps[most]:.1f} points)"
            others = [count for count in gaps if count not in better]
            found.append(text + (f", and not with {_listed(others)}." if others else "."))
        elif gaps:
            found.append(f"How few: `denoise` is nowhere more than {CLEAR:g} points better than {name}.")
    return found


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts)
