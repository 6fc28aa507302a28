"""The page of the clean-label study: success against distortion, and the difference of the two methods by pairs."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from bilevel._util.atomic_files import write_whole
from bilevel_studies.denoising.numbers import Numbers, alone, chosen, devices, values
from bilevel_studies.figures import STYLE, new_figure, save_figure
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table
from bilevel_studies.poisoning.clean_label import (
    CANDIDATES,
    CHOICE,
    EPSILONS,
    METHODS,
    PAPER,
    RATE,
    STEPS,
    TITLES,
    best,
    earlier,
    in_table,
)

BEYOND = EPSILONS[-1] + 1
"""What a target that no epsilon flips counts as in medians and differences."""
MAPS = {
    "inception": "Inception-V3",
    "efficientnet": "EfficientNet-Lite0",
    "small": "a small network, for a look on a CPU",
}


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figures and the page; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"cells": len(kept)}
    parts = [
        "# One clean-label poison point for a target",
        "Written by `bilevel reproduce clean-label` (Section 3.4, Appendix E.4 and Figure 3 of the paper); all numbers "
        "are in `clean-label.json`, from which the command goes on. **The photographs are a stand-in**: dogs and fish "
        "of other sources than the paper's dog-fish set, which cannot be had.",
        "For each test photograph that the clean victim has right: the smallest epsilon of 1 to 16, in l2 over pixels "
        "in [-1, 1], at which one poison point flips it after training the last layer anew "
        f"({STEPS:,} steps of Adam on all rows, rate {RATE:g}; the paper has RMSProp), by bisection (8 first: an "
        "epsilon that was not tried is taken to behave like its neighbours). The base is the nearest "
        "test photograph of the other class, in the features; the point keeps its label. Penalty solves Eq. 12 with "
        "the collision term squared, as in Section 3.4, not plain, as Eq. 12 is printed; K = 200, the bound as an "
        "inequality with a multiplier. Algorithm 1 of Shafahi et al. has beta 0.1 and rate 0.01, 2,000 steps, and is "
        "projected into the same bound, with the same target and base. The third method is for comparison: the "
        "collision term alone, with Penalty's optimizer, rate and number of steps, and no lower level.",
    ]
    for name in values(kept, "features"):
        mine = in_table(kept, name)
        parts += [f"## {MAPS.get(name, name)}", _choice(kept, name)]
        if not mine:
            continue
        found = compared(mine)
        summary[name] = found
        figure = f"clean-label-{name}.png"
        success(mine, folder / figure)
        stand_in = "Dog and fish photographs, a stand-in for the paper's set."
        before = earlier(kept, name)
        parts += [
            _table(mine, before),
            sentence(found),
            _as_in_the_paper(mine, before),
            sentence(compared(mine, "collision-adam"), "collision-adam"),
            _worth(mine),
            _fresh(mine, before),
            f"![Success against epsilon (Figure 3). {stand_in}]({figure})",
            f"*Success against epsilon (Figure 3). {stand_in}*",
        ]
        if pictures := shown(mine):
            points(pictures, folder / f"clean-label-{name}-points.png")
            said = f"Target, base and poison point of Penalty at the smallest epsilon (Figure 6(a)). {stand_in}"
            parts += [f"![{said}](clean-label-{name}-points.png)", f"*{said}*"]
    parts += ["## To run it again", "```bash\nbilevel reproduce clean-label --device cuda --page docs/results\n```"]
    write_whole(folder / "clean-label.md", "\n\n".join(part for part in parts if part) + "\n")
    return summary


def needed(kept: Sequence[Kept], method: str) -> dict[int, int]:
    """The smallest epsilon of each target that was not skipped; BEYOND where none was enough."""
    return {
        int(one["target"]): one["epsilon"] or BEYOND
        for _, found in chosen(kept, method=method)
        for one in found["targets"]
        if not one.get("skipped")
    }


def common(kept: Sequence[Kept]) -> set[int]:
    """The targets that all methods have of which there is anything."""
    return set.intersection(*(set(found) for method in METHODS if (found := needed(kept, method))))


def compared(kept: Sequence[Kept], other: str = "feature-collision", one: str = "penalty") -> dict[str, Any]:
    """Medians, and the mean difference by pairs with its 95% confidence interval (Student's t)."""
    by_method = {method: needed(kept, method) for method in (one, other)}
    both = sorted(set.intersection(*(set(found) for found in by_method.values())))
    gaps = [by_method[other][t] - by_method[one][t] for t in both]
    return {
        "targets": len(both),
        "mean_difference": statistics.fmean(gaps) if gaps else None,
        "interval": Numbers(tuple(gaps)).interval,
        "medians": {m: statistics.median([f[t] for t in both]) if both else None for m, f in by_method.items()},
        "less": sum(gap > 0 for gap in gaps),
        "more": sum(gap < 0 for gap in gaps),
    }


def sentence(found: Mapping[str, Any], other: str = "feature-collision", ours: str = "Penalty") -> str:
    if found["interval"] is None:
        few = f"{found['targets']} targets were run with both: too few to compare it with Penalty."
        return f"{TITLES[other][0].upper()}{TITLES[other][1:]}: {few if found['targets'] else 'not run yet.'}"
    low, high = found["interval"]
    more = "more" if found["mean_difference"] >= 0 else "less"
    text = (
        f"Over {found['targets']} targets, {TITLES[other]} needs {abs(found['mean_difference']):.2f} {more} epsilon "
        f"than {ours} in the mean (95% interval of the difference {low:.2f} to {high:.2f}; Penalty needs less for "
        f"{found['less']}, more for {found['more']}); a target that was not flipped counts as {BEYOND}. "
    )
    verdict = "needs less" if low > 0 else "needs more" if high < 0 else "cannot be told from it in"
    return text + f"Penalty {verdict} distortion."


def _as_in_the_paper(mine: Sequence[Kept], before: Sequence[Kept]) -> str:
    """Penalty as the paper has it beside Algorithm 1, where the settings that are taken are others."""
    cells = [*chosen(before, method="penalty", options=PAPER), *chosen(mine, method="feature-collision")]
    found = compared(cells)
    return sentence(found, ours="Penalty with the paper's settings") if found["targets"] else ""


def _worth(mine: Sequence[Kept]) -> str:
    """What Penalty's gain is due to, where it has one and the control has it, too."""
    gain, control = compared(mine)["interval"], compared(mine, "collision-adam")["interval"]
    if gain is None or control is None or gain[0] <= 0 or control[0] > 0:
        return ""
    without = compared(mine, one="collision-adam")
    low, high = without["interval"]
    return (
        f"Of what Penalty gains beside Algorithm 1, {without['mean_difference']:.2f} ({low:.2f} to {high:.2f}) is had "
        "without a lower level, by the collision term alone, moved in the same way; what the lower level adds cannot "
        "be told from nothing."
    )


def _fresh(mine: Sequence[Kept], before: Sequence[Kept]) -> str:
    """Penalty on targets that were in no run before its settings were chosen; empty where nothing was run before."""
    seen = set(needed(before, "penalty"))
    if not seen:
        return ""
    text = (
        f"The first {len(seen)} targets were run with other settings before those that are taken were among the "
        "candidates."
    )
    rest = [
        (settings, {**found, "targets": [one for one in found["targets"] if int(one["target"]) not in seen]})
        for settings, found in mine
    ]
    found, single = compared(rest), list(needed(rest, "penalty").values())
    if found["targets"]:
        return f"{text} On the others: {sentence(found)}"
    if single:
        flipped = sum(epsilon < BEYOND for epsilon in single)
        text += f" On {len(single)} others only Penalty was run: it flips {flipped}, with a median epsilon of "
        return f"{text}{statistics.median(single):g}. They are not in the table."
    return f"{text} No others have been run."


def _choice(kept: Sequence[Kept], name: str) -> str:
    tried = chosen(kept, part=CHOICE, features=name)
    if not tried:
        return "Penalty has the paper's gamma, lam, T and lower rate; nothing was chosen."
    taken, rows = best(kept, name), []
    shown: list[Mapping[str, Any]] = list(CANDIDATES)
    shown += [settings["options"] for settings, _ in tried if settings["options"] not in shown]
    for options in shown:
        found = list(needed(chosen(tried, options=options), "penalty").values())
        mark = " (taken)" if options == taken else ""
        said = ", ".join(f"{key} {value if isinstance(value, str) else f'{value:g}'}" for key, value in options.items())
        rows.append([f"{said}{mark}", f"{statistics.fmean(found):.2f}" if found else "not run"])
    count = len(needed(tried, "penalty"))
    text = f"The settings of Penalty, chosen on {count} targets that are not among those below, by the mean epsilon:"
    return text + "\n\n" + table(["settings", "mean epsilon"], rows)


def shown(kept: Sequence[Kept]) -> list[list[str]]:
    """[target, base, point] of some targets."""
    cells = chosen(kept, method="penalty")
    return [one["pictures"] for _, found in cells for one in found["targets"] if "pictures" in one][:8]


@matplotlib.rc_context(STYLE)
def points(pictures: Sequence[Sequence[str]], path: Path) -> None:
    """Targets above their bases above their points."""
    figure = new_figure(0.9 * len(pictures), 2.9)
    places = figure.subplots(3, len(pictures), squeeze=False)
    for column, images in enumerate(pictures):
        for row, image in enumerate(images):
            places[row, column].imshow(np.asarray(Image.open(io.BytesIO(base64.b64decode(image)))))
            places[row, column].set_axis_off()
    save_figure(figure, path)


def _table(kept: Sequence[Kept], before: Sequence[Kept] = ()) -> str:
    rows, targets = [], common(kept)
    shown = [(TITLES[method], method, kept) for method in METHODS]
    for options in CANDIDATES:
        title = "with the paper's settings" if options == PAPER else f"with {options}"
        shown.append((f"{TITLES['penalty']} {title}", "penalty", chosen(before, options=options)))
    for title, method, cells in shown:
        found = [epsilon for target, epsilon in needed(cells, method).items() if target in targets]
        if not found:
            continue
        flipped = [e for e in found if e < BEYOND]
        shares = [f"{sum(e <= at for e in found) / len(found):.0%}" if found else "" for at in (2, 4, 8, 16)]
        median = f"{statistics.median(found):g}" if found else ""
        timed = [cell for _, cell in alone(chosen(cells, method=method))]
        count = sum(not one.get("skipped") for cell in timed for one in cell["targets"])
        each = f"{sum(cell['seconds'] for cell in timed) / count:.1f}" if count else ""
        rows.append([title, f"{len(flipped)} of {len(found)}", median, *shares, each])
    return table(["method", "flipped", "median epsilon", "by 2", "by 4", "by 8", "by 16", "seconds a target"], rows) + (
        f"\n\nOn {devices(kept)}; on a GPU, convolutions are in TF32. The seconds are of all epsilons that were tried, "
        "and of training the victims anew; those of cells that shared the GPU with others are not shown."
    )


@matplotlib.rc_context(STYLE)
def success(kept: Sequence[Kept], path: Path) -> None:
    """The share of targets that are flipped by each epsilon."""
    figure = new_figure(4.4, 2.8)
    axes, targets = figure.subplots(), common(kept)
    for method, color in zip(METHODS, ("#1f77b4", "#ff7f0e", "#2ca02c"), strict=True):
        found = [epsilon for target, epsilon in needed(kept, method).items() if target in targets]
        if found:
            shares = [100 * sum(e <= at for e in found) / len(found) for at in EPSILONS]
            axes.plot(EPSILONS, shares, "o-", ms=3, lw=1.2, color=color, label=TITLES[method])
    axes.set(xlabel="epsilon, l2", ylabel="targets flipped, percent", ylim=(0, 102))
    axes.legend(frameon=False)
    save_figure(figure, path)
