"""The page of the few-shot study."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..cells import Found, Settings
from ..whole import write_whole
from . import few_shot_figures
from .denoising_numbers import NOT_RUN, chosen, devices, diverged, percent, seeds, values
from .few_shot import (
    BACKBONES,
    CHOICES,
    CIFAR,
    DATASETS,
    EFFECT,
    KIND,
    METHODS,
    OMNIGLOT,
    PAPER,
    PAPER_MINI,
    PAPER_STEPS,
    RESNET_VARIED,
    TABLE,
    TASKS,
    TIME,
    VARIED,
    WANTED,
    table_settings,
    timed_as,
)
from .filed import Kept
from .markdown import table

TITLES = {OMNIGLOT: "Omniglot", CIFAR: "CIFAR-FS, in the place of mini-ImageNet"}
NETWORKS = {"conv4": "four convolutions", "resnet": "the residual network"}
CUT = "Where steps stand behind a number, the limit of time has ended the run there; the same command goes on with it."
QUICK = (
    "**A quick look.** Cells here have a few steps and {} tasks, with the ways of the test: they show that it runs, "
    "and their numbers are no results."
)
CLEAR = 0.5
"""Points by which trained classifiers have to be better than class means to be worth their training."""
LIKE = {"paper": "penalty"}
"""Whose column of the paper's table stands beside a method's."""


def write(kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figures and the page into a folder; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = timed([pair for pair in kept if pair[1].get("accuracy") is not None], chosen(kept, part=TIME))
    cells = longest(apart(chosen(mine, part=TABLE)))
    quick = [int(settings["test_tasks"]) for settings, _ in mine if "test_tasks" in settings]
    said = [] if quick else findings(_finished(cells))
    text = [
        "# Few-shot learning: one representation, many tasks",
        "Written by `bilevel reproduce fewshot` (Section 3.3, Appendix E.3, Table 3, Figures 4(b) and 5(b) of the "
        f"paper), on {devices(mine)}. Accuracies in percent, of 600 tasks of classes that were not seen in training, "
        "15 queries a class, classifiers trained for 100 steps on the support (ProtoNet has none); batch normalisation "
        "has its running statistics, so that no query sees another. Behind the number of one seed stands the "
        "half-width of the 95% interval over tasks, behind that of several their deviation.",
        *([QUICK.format(max(quick))] if quick else []),
        *(["\n".join(f"- {sentence}" for sentence in said)] if said else []),
        *_tables(cells),
        *([bad] if (bad := diverged(_named(mine), "run")) else []),
        *([CUT] if any(found.get("partial") for _, found in mine) else []),
        *_curves(cells, folder),
        *_effect(chosen(mine, part=EFFECT), folder),
        *_choices(chosen(mine, part=CHOICES)),
        "## What was run",
        _what(cells, chosen(mine, part=CHOICES)),
        "## To run it again",
        "```bash\nbilevel reproduce fewshot --page docs/results\n"
        "bilevel reproduce fewshot --parts table --methods penalty --dataset cifar-fs --seeds 5 --page docs/results\n"
        "bilevel reproduce fewshot --parts choices --page docs/results\n```",
    ]
    write_whole(folder / "few-shot.md", "\n\n".join(text) + "\n")
    return {"cells": len(mine), "findings": said}


def apart(cells: Sequence[Kept]) -> list[Kept]:
    """A cell for each number of ways, where one was tried with two."""
    out: list[Kept] = []
    for settings, found in cells:
        own = {key: value for key, value in settings.items() if key != "also"}
        out.append((own, {key: value for key, value in found.items() if key != "also"}))
        if "also" in found:
            kept = {key: value for key, value in found.items() if key not in ("also", "accuracy_of_means", "curve")}
            out.append((own | {"ways": settings["also"]}, kept | found["also"]))
    return out


def timed(cells: Sequence[Kept], times: Sequence[Kept]) -> list[Kept]:
    """The cells with the time of a step as a short run by itself had it, so that all are measured alike.

    Where there is none, a cell has its own if it had the GPU to itself, else no time.
    """
    by = {timed_as(s): f["ms_per_step"] for s, f in sorted(times, key=lambda pair: int(pair[0]["steps"]))}
    out: list[Kept] = []
    for settings, found in cells:
        ms = by.get(timed_as(settings))
        if ms is not None or "beside" in found or found.get("ms_per_step") is None:
            curve = [] if ms is None else [row | {"seconds": row["step"] * ms / 1000} for row in found.get("curve", [])]
            seconds = None if ms is None else found["steps"] * ms / 1000
            found = {**found, "ms_per_step": ms, "seconds": seconds, "curve": curve}
        out.append((settings, found))
    return out


def longest(cells: Sequence[Kept]) -> list[Kept]:
    """Of cells of one place and seed a finished one, with the settings of now, and of these the one with most steps."""
    found: dict[str, Kept] = {}
    for settings, one in cells:
        key = json.dumps({k: v for k, v in settings.items() if k not in ("steps", *KIND)}, sort_keys=True)
        old = found.get(key)
        if old is None or _worth(settings, one) > _worth(*old):
            found[key] = (settings, one)
    return list(found.values())


def _worth(settings: Settings, found: Found) -> tuple[bool, bool, int]:
    now = table_settings(*(settings[key] for key in ("dataset", "backbone", "ways", "shots", "method", "seed")))
    same = all(settings.get(key) == now.get(key) for key in KIND)
    return not found.get("partial"), same, int(settings["steps"])


def findings(cells: Sequence[Kept]) -> list[str]:
    """Whether our setting reaches what it is to reach, and how it stands beside the others."""
    found = []
    for (dataset, ways, shots), wanted in WANTED.items():
        ours = percent(chosen(cells, dataset=dataset, ways=ways, shots=shots, method="penalty"))
        if ours:
            word = "reaches" if round(ours.mean, 2) >= wanted else "does not reach"
            paper = PAPER[dataset, ways, shots]["penalty"]
            found.append(
                f"Omniglot, {ways}-way {shots}-shot: Penalty has {ours.mean:.2f} and {word} {wanted}; the paper has "
                f"{paper:.2f}."
            )
    for backbone in BACKBONES[CIFAR]:
        for ways, shots in TASKS[CIFAR]:
            place = chosen(cells, dataset=CIFAR, ways=ways, shots=shots, backbone=backbone)
            mine = chosen(place, method="penalty")
            told = [_beside(mine, chosen(place, method=m)) for m in ("approx-grad", "prototypes")]
            if mine and any(told):
                found.append(
                    f"CIFAR-FS, {ways}-way {shots}-shot, {NETWORKS[backbone]}: Penalty ({mine[0][0]['steps']:,} steps) "
                    f"has {percent(mine).mean:.2f}{_over(mine)}. {' '.join(told).strip()}"
                )
    return found + _classifiers(cells)


def _over(cells: Sequence[Kept]) -> str:
    return f" over {seeds(len(cells))}" if len(cells) > 1 else ""


def _beside(ours: Sequence[Kept], theirs: Sequence[Kept]) -> str:
    """Penalty beside a method on the seeds that both have, whose tasks are the same; empty where there are none."""
    both = [(a, b) for a in ours for b in theirs if a[0]["seed"] == b[0]["seed"]]
    if not both:
        return ""
    mine, others = ([pair[k] for pair in both] for k in (0, 1))
    a, b = percent(mine).mean, percent(others).mean
    wide = 100 * math.sqrt(sum(x[1]["interval"] ** 2 + y[1]["interval"] ** 2 for x, y in both)) / len(both)
    apart, s = round(a, 2) - round(b, 2), theirs[0][0]
    word = f"{abs(apart):.2f} {'above' if apart > 0 else 'below'}" if apart else "level with it"
    clear = "" if abs(apart) > wide else ", which the tasks do not resolve"
    seed = f" on {seeds(len(both))}" if len(ours) > len(both) else ""
    return f"{METHODS[s['method']]} ({s['steps']:,} steps) has {b:.2f}: Penalty is {word}{seed} (± {wide:.2f}{clear})."


def _classifiers(cells: Sequence[Kept]) -> list[str]:
    """What training the classifiers adds to class means, which are where they start."""
    some = [found for settings, found in cells if settings["method"] == "penalty" and "accuracy_of_means" in found]
    if not some:
        return []
    least, most = (pick(100 * (f["accuracy"] - f["accuracy_of_means"]) for f in some) for pick in (min, max))
    text = f"At the test, Penalty's trained classifiers have {least:+.2f} to {most:+.2f} points beside the class means "
    text += "of the support in the same representation"
    return [f"{text}: what the lower level is worth is in the representation." if most < CLEAR else f"{text}."]


def _tables(cells: Sequence[Kept]) -> list[str]:
    if not cells:
        return ["Nothing was run."]
    found = []
    for dataset in DATASETS:
        for backbone in BACKBONES[dataset]:
            some = chosen(cells, dataset=dataset, backbone=backbone)
            found.append(f"## {TITLES[dataset]}, {NETWORKS[backbone]}")
            if not some:
                found.append("Not run.")
                continue
            rows = []
            for method, title in METHODS.items():
                row = [title]
                for ways, shots in TASKS[dataset]:
                    place = chosen(some, ways=ways, shots=shots, method=method)
                    row += [_shown(place)] + ([_paper(ways, shots, method)] if dataset == OMNIGLOT else [])
                rows.append(row)
            heads = ["method"]
            for ways, shots in TASKS[dataset]:
                heads += [f"{ways}-way {shots}-shot"] + (["paper"] if dataset == OMNIGLOT else [])
            found.append(table(heads, rows))
        if dataset == CIFAR:
            found.append(_mini())
    return found


def _shown(place: Sequence[Kept]) -> str:
    if not place:
        return NOT_RUN
    some = _finished(place) or place[:1]
    text = percent(some).show(usual=1)
    if len(some) > 1:
        return text
    return f"{text} ± {100 * some[0][1]['interval']:.2f}{_steps(some[0][1])}"


def _finished(cells: Sequence[Kept]) -> list[Kept]:
    return [pair for pair in cells if not pair[1].get("partial")]


def _steps(found: Found) -> str:
    """How far a run got that the limit of time has ended."""
    return f" ({found['steps']:,} of {found['of']:,} steps)" if found.get("partial") else ""


def _ms(found: Found) -> str:
    """Of an upper step, where it was measured by itself."""
    return "" if found["ms_per_step"] is None else f"{found['ms_per_step']:.1f}"


def _paper(ways: int, shots: int, method: str) -> str:
    found = PAPER[OMNIGLOT, ways, shots].get(LIKE.get(method, method))
    return "" if found is None else f"{found:g}"


def _mini() -> str:
    rows = [[f"5-way {shots}-shot", *(f"{found[m]:.2f}" for m in ("penalty", "approx-grad", "rmd", "prototypes"))]
            for shots, found in PAPER_MINI.items()]  # fmt: skip
    return (
        "CIFAR-FS here has 300 images a class; the published set has 600. The paper's numbers are those of "
        "mini-ImageNet, another set, and stand here for orientation only:\n\n"
        + table(["mini-ImageNet, the paper", "Penalty", "ApproxGrad", "RMD", "ProtoNet"], rows)
    )


def _named(cells: Sequence[Kept]) -> list[Kept]:
    return [({**s, "run": f"{s['dataset']}, {s['ways']}-way {s['shots']}-shot, {s['method']}"}, f) for s, f in cells]


def _curves(cells: Sequence[Kept], folder: Path) -> list[str]:
    some = [pair for pair in cells if pair[0]["seed"] == 0 and pair[1].get("curve")]
    if not some:
        return []
    few_shot_figures.curves(some, folder / "few-shot-speed.png")
    return [
        "## Accuracy against time (Figure 4(b))",
        "Tasks of unseen classes, 200 at each point; seconds are those of training alone: steps times that of a short "
        "run by itself. Where there is none, they are the run's own, if it shared the GPU with no other.",
        "![Accuracy against seconds](few-shot-speed.png)",
        _speed_table(some),
    ]


def _speed_table(cells: Sequence[Kept]) -> str:
    rows = []
    for settings, found in cells:
        rows.append([
            f"{settings['dataset']}, {NETWORKS[settings['backbone']]}, {settings['ways']}-way {settings['shots']}-shot",
            METHODS[settings["method"]], f"{found['steps']:,}", f"{found['ms_per_step']:.1f}",
            f"{found['seconds']:.1f}", f"{100 * found['accuracy']:.2f}",
            *(f"{100 * found[key]:.2f}" if key in found else "" for key in ("accuracy_of_means", "train_accuracy")),
        ])  # fmt: skip
    heads = ["tasks", "method", "upper steps", "ms a step", "seconds", "accuracy", "of class means, untrained",
             "on training classes"]  # fmt: skip
    return table(heads, rows)


def _effect(cells: Sequence[Kept], folder: Path) -> list[str]:
    if not cells:
        return ["## The effect of T (Figure 5(b))", "Not run."]
    few_shot_figures.effect(_finished(cells), folder / "few-shot-steps.png")
    rows = [
        [METHODS[s["method"]], str(s["T"]), f"{100 * f['accuracy']:.2f} ± {100 * f['interval']:.2f}{_steps(f)}", _ms(f)]
        for s, f in sorted(cells, key=lambda pair: (pair[0]["method"] != "penalty", pair[0]["T"]))
    ]
    return [
        "## The effect of T (Figure 5(b))",
        f"Omniglot, 20-way 5-shot, {cells[0][0]['steps']:,} upper steps each; ApproxGrad takes T steps for the linear "
        "system, too.",
        "![Accuracy and time against T](few-shot-steps.png)",
        table(["method", "T", "accuracy", "ms per upper step"], rows),
    ]


def _choices(cells: Sequence[Kept]) -> list[str]:
    if not cells:
        return []
    cells = sorted(_finished(cells), key=lambda pair: [*VARIED, *RESNET_VARIED].index(pair[0]["varied"]))
    found = [
        "## What was chosen",
        "On classes of meta-validation, one seed each. The numbers of steps in the tables are not chosen so: they were "
        "set by hand, and the curves above, of test classes, were seen before.",
    ]
    if some := chosen(cells, dataset=OMNIGLOT):
        found += [
            f"Our setting and what becomes of it with changes, on Omniglot, 20-way 1-shot, {some[0][0]['steps']:,} "
            "steps, learnt on 1,100 of the 1,200 characters and measured on the other 100:",
            table(["", "accuracy", "of class means"], [
                [s["varied"], f"{100 * f['accuracy']:.2f}", f"{100 * f['accuracy_of_means']:.2f}"]
                for s, f in some
            ]),
        ]  # fmt: skip
    if some := sorted(chosen(cells, dataset=CIFAR), key=lambda pair: -int(pair[0]["shots"])):
        found += [
            f"The residual network on CIFAR-FS, 5 ways, {some[0][0]['steps']:,} steps, measured on the 16 "
            "meta-validation classes at its best step there; the decay is that of AdamW on the representation, and an "
            "erased square has half the side of the image (Cutout, DeVries and Taylor 2017):",
            table(["", "shots", "method", "accuracy", "best step"], [
                [s["varied"], str(s["shots"]), METHODS[s["method"]], f"{100 * f['accuracy']:.2f}",
                 f"{f['kept_step']:,}"]
                for s, f in some
            ]),
        ]  # fmt: skip
    return found


def _what(cells: Sequence[Kept], choices: Sequence[Kept]) -> str:
    rows = []
    for dataset in DATASETS:
        for backbone, (method, title) in product(BACKBONES[dataset], METHODS.items()):
            some = chosen(cells, dataset=dataset, backbone=backbone, method=method)
            if some:
                episodes = dict.fromkeys(
                    f"{s['tasks']} tasks of {s['train_ways']} ways, {s['queries']} queries" for s, _ in some
                )
                steps = " or ".join(f"{n:,}" for n in sorted(values(some, "steps")))
                row = [f"{dataset}, {NETWORKS[backbone]}", title, "; ".join(episodes), steps]
                rows.append([*row, str(some[0][0].get("T", ""))])
    sizes = sorted({found["weights"] for _, found in cells})
    parts = [
        "All but the paper's setting see the same meta-batches: more ways and fewer queries than at the test. Where "
        "the ways of a task are 20, the paper's setting has meta-batches of 15 (Section 3.3; Appendix E.3 says 30, and "
        f"so do the counts of Table 7). It has fewer upper steps than the paper ({PAPER_STEPS:,}), and at the test it "
        "trains the classifiers by Adam with rate 0.01, of which the paper says nothing. Of Omniglot, the 1,200 "
        "characters to learn from are drawn at random from all alphabets; the paper takes the first. Training is in "
        "bf16.",
        f"The representations have {', '.join(f'{n:,}' for n in sizes)} weights. The residual network has 3x3 "
        "convolutions and 512 features, which give the paper's count of 3.8M weights, and keeps 0.9 of the units where "
        'the paper says "dropout with rate = 0.9".',
        table(["data", "method", "meta-batch", "upper steps", "T"], rows),
        *_selection(cells, choices),
    ]
    return "\n\n".join(parts)


def _selection(cells: Sequence[Kept], choices: Sequence[Kept]) -> list[str]:
    """What is true of the cells whose step is chosen; empty where there are none."""
    some = [pair for pair in cells if "selected" in pair[0]]
    if not some:
        return []
    tried = values(chosen(choices, dataset=CIFAR), "shots")
    shots = sorted(values(some, "shots"))
    rows = [
        [METHODS[m], *(_kind(mine[0][0]) if (mine := chosen(some, method=m, shots=n)) else "" for n in shots)]
        for m in METHODS
        if chosen(some, method=m)
    ]
    untried = " and ".join(f"{n} {'shot' if n == 1 else 'shots'}" for n in shots if n not in tried)
    return [
        "The residual network overfits 64 classes of 300 images. There, the representation is that of the step "
        "with the best accuracy on tasks of the 16 meta-validation classes, for every method, and AdamW moves it. Its "
        "settings are the best above for Penalty and for ProtoNet; ApproxGrad and RMD have Penalty's, which may not be "
        "their best"
        + (f"; with {untried} nothing was compared, and the settings are those of the others." if untried else "."),
        table(["method", *(f"{n} {'shot' if n == 1 else 'shots'}" for n in shots)], rows),
    ]


def _kind(settings: Settings) -> str:
    """What a cell has beside the others of its place, as `RESNET_VARIED` names it."""
    parts = [f"decay {settings['decay']:g}" if settings.get("decay") else "no decay"]
    parts += ["erased squares"] * settings.get("erased", False)
    parts += [f"{name.replace('_', ' ')} {settings[name]:g}" for name in ("upper_rate", "scale") if name in settings]
    return ", ".join(parts)
