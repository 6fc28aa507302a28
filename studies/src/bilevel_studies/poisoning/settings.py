"""The settings of the poisoning study on its page: the paper's beside ours, and how ours were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bilevel_studies.denoising.numbers import chosen, percent
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table
from bilevel_studies.poisoning.study import (
    CANDIDATES,
    CHOICE,
    CHOICE_PERCENTS,
    CHOICE_SEED,
    COLUMNS,
    MEASURES,
    OTHER_CANDIDATES,
    OTHERS,
    STEPS,
    TARGETED,
    UNTARGETED,
    WEIGHT,
    Choice,
    best,
    mean_of,
    tried,
)

SCRIPT = "github.com/hammlab/bilevel-penalty, data_poisoning"


def compared(kept: Sequence[Kept]) -> str:
    chosen_ones = best(kept)
    others = "; ".join(
        f"{COLUMNS[column]}, {attack}: {_other(chosen_ones[attack, column])}"
        for column in OTHERS
        for attack in (UNTARGETED, TARGETED)
    )
    wide, narrow = (chosen_ones[attack, "penalty"] for attack in (UNTARGETED, TARGETED))
    rows = [
        [
            "the victim",
            f"weight of |W|² 0.05 in the text, 0.005 of |W|²/2 in the published script ({SCRIPT}); Adam, "
            "10,000 epochs, rate 0.001",
            f"weight {WEIGHT:g} of |W|²/2; L-BFGS to the minimum, and there is one",
        ],
        [
            "the attack minimises",
            "minus the cross entropy of the validation images (untargeted), their cross entropy "
            "with the wanted label (targeted)",
            "the mean probability of the right class (untargeted), one less that of "
            f"the wanted class (targeted), of scores times {wide['factor']:g} and "
            f"{narrow['factor']:g}; both are bounded, which minus the cross entropy is not. Its images: "
            f"{_images(wide)} (untargeted), {_images(narrow)} (targeted)",
        ],
        ["coordinates of v", "W", "whitened: W = P z, P = (0.03 X'X/n + weight I)^(-1/2)"],
        [
            "steps",
            "K = 5,000, T = 20; rates 0.1 and 0.001",
            f"{wide['steps']} (untargeted) or "
            f"{narrow['steps']} joint steps, no lower ones; rates 0.03 and 0.01, falling to zero",
        ],
        ["prices", "gamma 10, lam 100 (untargeted) or 1 (targeted), epsilon 1, nu 0", "from the sizes of f and g"],
        ["pixels", "clipped to [0, 1] in the published script", "projected to [0, 1]"],
    ]
    text = table(["", "the paper", "ours"], rows)
    return text + (
        f"\n\nApproxGrad here has 5 lower and 5 linear steps (the paper 20 and 20) and {STEPS['approx-grad']} upper "
        f"steps, RMD 10 lower steps and {STEPS['rmd']} upper ones, in the whitened coordinates. {others}. The paper's "
        "RMD column is that of Muñoz-González et al. 2017. Label flipping takes validation images with other labels; "
        "targeted, eights with the label three: with threes and eights in equal number, as the text can be read, its "
        "success is far below the published one. `Penalty, the paper's` is Algorithm 2 with the paper's constants, "
        f"objective and coordinates, {STEPS['algorithm-2']:,} upper steps of the paper's 5,000."
    )


def _other(candidate: Mapping[str, Any]) -> str:
    objective = "our objective without shifts" if "factor" in candidate else "the paper's objective"
    return f"{objective}, rate {candidate.get('rate', 0.1):g}"


def _images(candidate: Mapping[str, Any]) -> str:
    if not candidate["shifts"]:
        return "the validation images as they are"
    return "the validation images, as they are and shifted by one pixel in four ways"


def choice(kept: Sequence[Kept]) -> str:
    """What was tried on a seed of its own, and whether what the table has is the best of it."""
    if not chosen(kept, part=CHOICE):
        return "Not run."
    parts = [
        f"Every candidate was run on seed {CHOICE_SEED}, which is not in the table, and measured on 5,000 images "
        "(targeted: eights) that the attack has not seen, of the part of MNIST that no test image of the table comes "
        "from. The table has the one that is best in the mean over the shares."
    ]
    taken = best(kept)
    for attack, candidates in CANDIDATES.items():
        rows = []
        for candidate in candidates:
            mine, mean = tried(kept, attack, "penalty", candidate), mean_of(kept, attack, "penalty", candidate)
            mark = " (in the table)" if candidate == taken[attack, "penalty"] else ""
            rows.append(
                [
                    f"{candidate['factor']:g}{mark}",
                    "yes" if candidate["shifts"] else "no",
                    str(candidate["steps"]),
                    *(percent(chosen(mine, percent=at), MEASURES[attack]).show(usual=1) for at in CHOICE_PERCENTS),
                    "" if mean is None else f"{100 * mean:.2f}",
                ]
            )
        heads = ["factor of the scores", "shifted images, too", "steps", *(f"{at}%" for at in CHOICE_PERCENTS), "mean"]
        what = "accuracy" if attack == UNTARGETED else "success"
        parts += [f"{attack.capitalize()}: {what}.", table(heads, rows)]
        if any(mean_of(kept, attack, "penalty", candidate) is None for candidate in candidates):
            parts.append("Not all of them were run: the table's was set before.")
        parts.append(_others(kept, attack, taken))
    return "\n\n".join(parts)


def _others(kept: Sequence[Kept], attack: str, taken: Choice) -> str:
    """The candidates of the other methods."""
    rows = []
    for column in OTHERS:
        for candidate in OTHER_CANDIDATES:
            mine, mean = tried(kept, attack, column, candidate), mean_of(kept, attack, column, candidate)
            mark = " (in the table)" if candidate == taken[attack, column] else ""
            rows.append(
                [
                    COLUMNS[column],
                    f"{_other(candidate)}{mark}",
                    *(percent(chosen(mine, percent=at), MEASURES[attack]).show(usual=1) for at in CHOICE_PERCENTS),
                    "" if mean is None else f"{100 * mean:.2f}",
                ]
            )
    return table(["method", "candidate", *(f"{at}%" for at in CHOICE_PERCENTS), "mean"], rows)
