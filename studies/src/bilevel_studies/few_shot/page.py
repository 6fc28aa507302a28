"""The page of the few-shot study."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.running.run_many import Found, Settings
from bilevel_studies.denoising.numbers import NOT_RUN, chosen, devices, diverged, percent, values
from bilevel_studies.few_shot import figures as few_shot_figures
from bilevel_studies.few_shot.compared import choices
from bilevel_studies.few_shot.findings import NETWORKS, findings
from bilevel_studies.few_shot.runs import DAMPING
from bilevel_studies.few_shot.shown import apart, longest, timed
from bilevel_studies.few_shot.study import (
    APART,
    BACKBONES,
    CHOICES,
    CIFAR,
    DATASETS,
    EFFECT,
    METHODS,
    OMNIGLOT,
    PAPER,
    PAPER_MINI,
    PAPER_STEPS,
    PENALTYS,
    SELECTED,
    TABLE,
    TASKS,
    TEST_TASKS,
    TIME,
)
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table

TITLES = {OMNIGLOT: "Omniglot", CIFAR: "CIFAR-FS, in the place of mini-ImageNet"}
CUT = "Where steps stand behind a number, the limit of time has ended the run there; the same command goes on with it."
QUICK = (
    "**A quick look.** Cells here have a few steps and {} tasks, with the ways of the test: they show that it runs, "
    "and their numbers are no results."
)
OLDER = " An older run, the paper's setting, has 15 measurements on 200 tasks."
WHERE_NONE = "On CIFAR-FS, but for the paper's setting, the upper rate is 0.002 and the scale 10 where none is named:"
AGAIN_QUICK = "`bilevel reproduce fewshot --quick`; without `--quick` it is the study, for a GPU."
AGAIN = """```bash
bilevel reproduce fewshot --page docs/results
compared="--parts table --dataset cifar-fs --methods penalty,prototypes,cosines,approx-grad"
bilevel reproduce fewshot $compared --backbones resnet --seeds 5 --page docs/results
bilevel reproduce fewshot $compared --backbones conv4 --seeds 3 --page docs/results
bilevel reproduce fewshot --parts choices --page docs/results
```"""
KINDS = {"erased": "erased squares", "turned": "turned classes", "plain": "plain"}
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
        f"paper), on {devices(mine)}. Accuracies in percent, of {max(quick, default=TEST_TASKS)} tasks of classes that "
        "were not seen in training, "
        "15 queries a class, classifiers trained for 100 steps on the support (ProtoNet and class means have none); "
        "batch normalisation has its running statistics, so that no query sees another. Behind the number of one seed "
        "stands the half-width of the 95% interval over tasks, behind that of several their deviation. The interval of "
        "one seed leaves out what another training would have given.",
        *([QUICK.format(max(quick))] if quick else []),
        *(["\n".join(f"- {sentence}" for sentence in said)] if said else []),
        *_tables(cells),
        *([bad] if (bad := diverged(_named(mine), "run")) else []),
        *([CUT] if any(f.get("partial") for _, f in [*cells, *chosen(mine, part=EFFECT)]) else []),
        *([] if quick else _curves(cells, folder)),
        *([] if quick else _effect(chosen(mine, part=EFFECT), folder)),
        *choices(chosen(mine, part=CHOICES), chosen(mine, part=TABLE)),
        "## What was run",
        *([] if quick else _said(cells)),
        _what(cells),
        *_selection(cells),
        "## To run it again",
        AGAIN_QUICK if quick else AGAIN,
    ]
    write_whole(folder / "few-shot.md", "\n\n".join(text) + "\n")
    return {"cells": len(mine), "findings": said}


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
                row = [title + _fewer(some, method)]
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


def _fewer(cells: Sequence[Kept], method: str) -> str:
    """The steps of a method where they are not Penalty's."""
    mine, ours = (values(chosen(_finished(cells), method=name), "steps") for name in (method, "penalty"))
    return f" ({' or '.join(f'{n:,}' for n in sorted(mine))} steps)" if mine and ours and mine != ours else ""


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
    rows = [
        [f"5-way {shots}-shot", *(f"{found[m]:.2f}" for m in ("penalty", "approx-grad", "rmd", "prototypes"))]
        for shots, found in PAPER_MINI.items()
    ]
    return (
        "CIFAR-FS here has 300 images a class; the published set has 600. The paper's numbers are those of "
        "mini-ImageNet, another set, and stand here for orientation only:\n\n"
        + table(["mini-ImageNet, the paper", "Penalty", "ApproxGrad", "RMD", "ProtoNet"], rows)
    )


def _named(cells: Sequence[Kept]) -> list[Kept]:
    return [({**s, "run": f"{s['dataset']}, {s['ways']}-way {s['shots']}-shot, {s['method']}"}, f) for s, f in cells]


def _curves(cells: Sequence[Kept], folder: Path) -> list[str]:
    some = [pair for pair in cells if pair[0]["seed"] == 0 and pair[1].get("curve")]
    ours = {_tasks(settings) for settings, _ in some if settings["method"] == "penalty"}
    some = sorted((pair for pair in some if _tasks(pair[0]) in ours), key=lambda pair: _tasks(pair[0]))
    if not some:
        return []
    few_shot_figures.curves(some, folder / "few-shot-speed.png")
    return [
        "## Accuracy against time (Figure 4(b))",
        "The figure has 200 tasks of unseen classes at each point; the accuracies of the table below are those of the "
        "tables above, with more tasks and, of the residual network, at the step that was kept, which need not be the "
        "last. Seconds are those of training alone: steps times that of a short run by itself. Where there is none, "
        "they are the run's own, if it shared the GPU with no other.",
        "![Accuracy against seconds](few-shot-speed.png)",
        _speed_table(some),
    ]


def _tasks(settings: Settings) -> tuple[Any, ...]:
    order = (DATASETS.index(settings["dataset"]), BACKBONES[settings["dataset"]].index(settings["backbone"]))
    return *order, settings["ways"], settings["shots"]


def _speed_table(cells: Sequence[Kept]) -> str:
    rows = []
    for settings, found in cells:
        rows.append(
            [
                f"{settings['dataset']}, {NETWORKS[settings['backbone']]}, {settings['ways']}-way "
                f"{settings['shots']}-shot",
                METHODS[settings["method"]],
                f"{found['steps']:,}",
                f"{found['ms_per_step']:.1f}",
                f"{found['seconds']:.1f}",
                f"{100 * found['accuracy']:.2f}",
                *(f"{100 * found[key]:.2f}" if key in found else "" for key in ("accuracy_of_means", "train_accuracy")),
            ]
        )
    heads = [
        "tasks",
        "method",
        "upper steps",
        "ms a step",
        "seconds",
        "accuracy",
        "of class means, untrained",
        "on training classes",
    ]
    return table(heads, rows)


def _effect(cells: Sequence[Kept], folder: Path) -> list[str]:
    if not cells:
        return ["## The effect of T (Figure 5(b))", "Not run."]
    few_shot_figures.effect(_finished(cells), folder / "few-shot-steps.png")
    rows = [
        [METHODS[s["method"]], str(s["T"]), f"{100 * f['accuracy']:.2f} ± {100 * f['interval']:.2f}{_steps(f)}", _ms(f)]
        for s, f in sorted(cells, key=lambda pair: (pair[0]["method"] != "penalty", pair[0]["T"]))
    ]
    by: dict[int, dict[str, float]] = {}
    for s, f in cells:
        by.setdefault(s["T"], {})[s["method"]] = f["ms_per_step"]
    times = [ms["approx-grad"] / ms["penalty"] for ms in by.values() if len(ms) == 2 and all(ms.values())]
    beside = ""
    if times:
        beside = f" With equal T, its step takes {min(times):.2f} to {max(times):.2f} times as long as Penalty's."
    return [
        "## The effect of T (Figure 5(b))",
        f"Omniglot, 20-way 5-shot, {cells[0][0]['steps']:,} upper steps each; ApproxGrad takes T steps for the linear "
        f"system, too.{beside} The price of Penalty is high, and goes with ten steps: with one, the classifiers are "
        "far from their minimum, and the representation collapses.",
        "![Accuracy and time against T](few-shot-steps.png)",
        table(["method", "T", "accuracy", "ms per upper step"], rows),
    ]


def _what(cells: Sequence[Kept]) -> str:
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
    return table(["data", "method", "meta-batch", "upper steps", "T"], rows)


def _said(cells: Sequence[Kept]) -> list[str]:
    """What is true of the study."""
    sizes = {_network(settings): found["weights"] for settings, found in cells}
    return [
        "All but the paper's setting see meta-batches of one form: more ways and fewer queries than at the test. Where "
        "the ways of a task are 20, the paper's setting has meta-batches of 15 (Section 3.3; Appendix E.3 says 30, and "
        f"so do the counts of Table 7). It has fewer upper steps than the paper ({PAPER_STEPS:,}), and at the test it "
        "trains the classifiers by Adam with rate 0.01, of which the paper says nothing. Of Omniglot, the 1,200 "
        "characters to learn from are drawn at random from all alphabets; the paper takes the first. Of all but the "
        "paper's setting, tasks of 5 and of 20 ways are tried on one training, and on CIFAR-FS so are tasks of 1 and "
        f"of 5 shots, on one with 5{_but()}. Training is in bf16 on a GPU. `Class "
        "means, cosines` is Penalty without a lower problem: the classifiers stay where they start, in training and at "
        "the test. The paper's setting has fewer steps, for want of time. "
        f"ApproxGrad solves its linear system by T steps of conjugate gradients with damping {DAMPING:g}. On Omniglot, "
        "nothing was compared for the other methods: ProtoNet and they have Penalty's upper rate, and its distances "
        "are as they are. On CIFAR-FS, ApproxGrad and RMD have what was the best for Penalty, which may not be their "
        "best. With proximity 5, price and lower rate are set so that ten lower steps give the hypergradient, and not "
        "by accuracy; with proximity 1 they are less exact.",
        f"Weights: {'; '.join(f'{name} {size:,}' for name, size in sizes.items())}. The paper's text gives the "
        "residual "
        "network 1x1 convolutions and 384 features, which make 1.6M weights; its Table 7 counts 3.8M, and 5K in the "
        "classifiers of two tasks of five ways, which 3x3 convolutions and 512 features make: it has these here. "
        "Its last two convolutions, which the paper calls blocks as the others, have batch normalisation as those have "
        '(`plain`: none). Its dropout "with rate = 0.9" is read as the share that is kept, and a 2x2 pool is added '
        "after each block, of which the paper says nothing.",
    ]


def _but() -> str:
    names = [f"{METHODS[method]} with {NETWORKS[backbone]}" for backbone, method in APART]
    return f", but for {' and '.join(names)}, trained with 1 shot for tests with 1" if names else ""


def _network(settings: Settings) -> str:
    return f"{settings['dataset']}, {NETWORKS[settings['backbone']]}{', plain' * settings.get('plain', False)}"


def _selection(cells: Sequence[Kept]) -> list[str]:
    """The settings on CIFAR-FS, and what is true of the cells whose step is chosen; empty where there are none."""
    found = []
    if any("selected" in settings for settings, _ in cells):
        found.append(
            "The residual network can overfit 64 classes of 300 images. There, the representation is that of the step "
            f"with the best accuracy on {TEST_TASKS} tasks of the 16 meta-validation classes, with the shots of "
            f"training, measured {SELECTED[CIFAR, 'resnet']} times in a run, for every method."
            + OLDER
            * any(settings.get("selected") == 15 for settings, _ in cells)
        )
    some = chosen(cells, dataset=CIFAR)
    shots = sorted(values(some, "shots"))
    rows = [
        [NETWORKS[network], METHODS[m], *(_kind(one[0][0]) if (one := chosen(mine, shots=n)) else "" for n in shots)]
        for network, m in product(BACKBONES[CIFAR], METHODS)
        if (mine := chosen(some, backbone=network, method=m))
    ]
    if rows:
        heads = [f"{n} {'shot' if n == 1 else 'shots'}" for n in shots]
        found += [WHERE_NONE, table(["network", "method", *heads], rows)]
    return found


def _kind(settings: Settings) -> str:
    """What a cell has beside the others of its place."""
    parts = [f"decay {settings['decay']:g}" if settings.get("decay") else "no decay"]
    parts += [words for key, words in KINDS.items() if settings.get(key)]
    for name in ("upper_rate", "scale", "proximity", *PENALTYS):
        parts += [f"{name.replace('_', ' ')} {settings[name]:g}"] if name in settings else []
    parts += [f"distances / {1 / settings['distances']:g}"] if "distances" in settings else []
    return ", ".join(parts)
