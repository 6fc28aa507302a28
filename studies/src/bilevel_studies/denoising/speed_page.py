"""The pages of Figures 4(a) and 5(a)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel_studies.denoising import figures as denoising_figures
from bilevel_studies.denoising.numbers import (
    chosen,
    current,
    devices,
    diverged,
    finite,
    mark,
    numbers,
    percent,
    seeds,
    values,
)
from bilevel_studies.denoising.speed import METHODS, PRETRAINING, SPEED, STEPS
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table

NETWORKS = {"mlp": "an MLP 784-300-10", "cnn": "the paper's convolutional network"}
LEVELS = (0.90, 0.92, 0.94, 0.96, 0.98)
"""Test accuracies of which it is told when they were reached."""


def write(part: str, kept: Sequence[Kept], folder: Path) -> dict[str, Any]:
    """Write the figures and the page of a part into a folder; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = current(chosen(kept, part=part))
    sections, said = [], []
    for network in values(mine, "network"):
        cells = chosen(mine, network=network)
        image = f"denoising-{part}-{network}.png"
        (denoising_figures.speed if part == SPEED else denoising_figures.steps)(cells, folder / image)
        found = speed_sentences(cells) if part == SPEED else step_sentences(cells)
        said += found
        sections += [
            f"## {NETWORKS[network][0].upper()}{NETWORKS[network][1:]}, on {devices(cells)}",
            f"{cells[0][0]['rows']:,} examples to clean, {_runs(cells)} a method{_iterations(cells)}."
            + _solver(cells)
            + _busy(cells),
            "\n".join(f"- {sentence}" for sentence in found),
            f"![{HEADS[part][0]}]({image})",
            _speed_table(cells) if part == SPEED else _step_table(cells),
            *([bad] if (bad := _diverged(cells)) else []),
        ]
    text = [
        f"# {HEADS[part][0]}",
        f"Written by `bilevel reproduce denoising-{part}` ({HEADS[part][1]} of the paper). MNIST, 25% of the labels "
        "wrong (symmetric), 1,000 trusted, batches of 200. Accuracies are those of the lower variable as the run goes, "
        "without training after it. Seconds count all but the measuring.",
        "The paper's Penalty is Algorithm 2 with the constants of Appendix E.2; it and ApproxGrad start from "
        f"{PRETRAINING} steps of training on the trusted set, whose seconds count. Ours is `Penalty` with "
        "no other option than T. " + HEADS[part][2],
        *(sections or ["Nothing was run."]),
        "## To run it again",
        f"```bash\nbilevel reproduce denoising-{part} --page docs/results\n```",
    ]
    write_whole(folder / f"denoising-{part}.md", "\n\n".join(text) + "\n")
    return {"cells": len(mine), "findings": said}


HEADS = {
    SPEED: (
        "Denoising: accuracy against time",
        "Figure 4(a)",
        "Here it has no lower steps, its default, and as many passes as `denoise` gives it; the others have T = 20, "
        "ApproxGrad with as many steps of Adam for the linear system. "
        "The paper takes 75% on the training labels and 100% on the trusted ones as a sign that the problem is solved.",
    ),
    STEPS: (
        "Denoising: the effect of T",
        "Figure 5(a)",
        "All have the same number of upper iterations; ApproxGrad takes T steps of Adam for the linear system, too.",
    ),
}


def _runs(cells: Sequence[Kept]) -> str:
    return seeds(len(values(cells, "seed")))


def _iterations(cells: Sequence[Kept]) -> str:
    """How many there are, where all runs have as many."""
    counts = {found["steps"] for _, found in cells if found.get("status") != "diverged"}
    return f", {counts.pop():,} upper iterations" if len(counts) == 1 else ""


def _diverged(cells: Sequence[Kept]) -> str:
    return diverged([({**s, "run": f"{s['method']}, T = {s['T']}"}, found) for s, found in cells], "run")


def quiet(cells: Sequence[Kept]) -> bool:
    """Whether it is known of all runs that no other work took their time."""
    return all(found.get("load") is not None and found["load"] <= 1 for _, found in cells)


def _busy(cells: Sequence[Kept]) -> str:
    load = numbers(cells, "load")
    unknown, said = len(cells) - len(load.values), ""
    if load and max(load.values) > 1:
        said += (
            f" The machine was busy with other work: {min(load.values):.1f} to {max(load.values):.1f} programs a core, "
            "so that times are too long, and their ratios are rough."
        )
    if unknown:
        said += (
            f" How busy the machine was is not known of {unknown} of {len(cells)} runs: their times may be too long, "
            "and their ratios are rough."
        )
    return said


def _solver(cells: Sequence[Kept]) -> str:
    """A sentence where ApproxGrad is shown with another linear solver than it has now."""
    former = any("solver" not in settings for settings, _ in chosen(cells, method=METHODS[-1]))
    return " ApproxGrad was run with conjugate gradients in place of Adam." if former else ""


def _speed_table(cells: Sequence[Kept]) -> str:
    rows = []
    for settings, found in sorted(cells, key=lambda pair: (METHODS.index(pair[0]["method"]), pair[0]["seed"])):
        curves = found["curves"]
        rows.append(
            [
                settings["method"] + mark([(settings, found)]),
                str(settings["seed"]),
                f"{found['steps']:,}",
                f"{found['ms_per_step']:.1f}",
                f"{found['seconds']:.1f}",
                *(f"{100 * curves[key][-1]:.2f}" for key in ("test", "validation", "train")),
            ]
        )
    heads = ["method", "seed", "upper steps", "ms a step", "seconds", "test", "validation", "train"]
    return table(heads, rows)


def reached(found: dict[str, Any], level: float) -> float | None:
    """The seconds after which the test accuracy was at least the level, for the first time."""
    curves = found["curves"]
    for at, value in zip(curves["seconds"], curves["test"], strict=True):
        if value >= level:
            return float(at)
    return None


def speed_sentences(cells: Sequence[Kept]) -> list[str]:
    """The highest level that all methods reached, and when; the ends."""
    found = []
    for level in reversed(LEVELS):
        times = {name: [reached(one, level) for _, one in chosen(cells, method=name)] for name in METHODS}
        known = {name: [t for t in ts if t is not None] for name, ts in times.items()}
        there = [name for name in METHODS if times[name] and len(known[name]) == len(times[name])]
        if there:
            told = ", ".join(f"{name} after {sum(known[name]) / len(known[name]):.1f} s" for name in there)
            never = [name for name in METHODS if times[name] and name not in there]
            text = f"{100 * level:g}% on the test set: {told}"
            found.append(text + (f"; not reached by {' and '.join(never)}." if never else "."))
            if not never:
                break
    by_name = {name: chosen(cells, method=name) for name in METHODS}
    ends = [f"{name} {percent(mine).show(usual=1)}{mark(mine)}" for name, mine in by_name.items()]
    return [*found, f"At the end: {'; '.join(ends)}."]


def _step_table(cells: Sequence[Kept]) -> str:
    rows = []
    usual = len(values(cells, "seed"))
    for name in METHODS:
        for T in sorted(values(cells, "T")):
            mine = chosen(cells, method=name, T=T)
            time = numbers(mine, "ms_per_step")
            rows.append([name, str(T), percent(mine).show(usual=usual) + mark(mine), time.show(1, usual)])
    return table(["method", "T", "test accuracy", "ms per upper iteration"], rows)


def step_sentences(cells: Sequence[Kept]) -> list[str]:
    """What a larger T gains and, where times are those of the runs alone, what it costs."""
    counts = sorted(values(cells, "T"))
    found = [_gain(name, cells, counts[0], counts[-1]) for name in METHODS]
    if quiet(cells):
        found += [_cost(name, cells, counts[-1]) for name in METHODS[:-1]]
    return [sentence for sentence in found if sentence]


def _gain(name: str, cells: Sequence[Kept], least: int, most: int) -> str:
    first, last = (finite(chosen(cells, method=name, T=T)) for T in (least, most))
    if not first or not last:
        return ""
    gain = percent(last).mean - percent(first).mean
    text = (
        f"{name}: from T = {least} to {most} the accuracy goes from {percent(first).mean:.2f} to "
        f"{percent(last).mean:.2f} ({gain:+.2f})"
    )
    if not quiet(cells):
        return text + "."
    times = numbers(last, "ms_per_step").mean / numbers(first, "ms_per_step").mean
    return text + f", and an upper iteration takes {times:.1f} times as long."


def _cost(name: str, cells: Sequence[Kept], T: int) -> str:
    ours, theirs = (numbers(finite(chosen(cells, method=m, T=T)), "ms_per_step") for m in (name, METHODS[-1]))
    if not ours or not theirs:
        return ""
    return f"At T = {T}, an upper iteration of ApproxGrad takes {theirs.mean / ours.mean:.1f} times that of {name}."
