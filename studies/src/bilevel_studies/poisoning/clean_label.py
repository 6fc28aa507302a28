"""The clean-label study (Section 3.4, Appendix E.4, Figures 3 and 6(a)): settings, and one cell.

There is one poison point per target, with a label of its class, on features that the victim does not train. Each test
image that the clean victim classifies correctly is a target. Bisection finds the smallest epsilon from 1 to 16 (l2 over
pixels in [-1, 1]) whose point flips the target after training from scratch. The paper's dog-fish set is not available;
dog and fish photographs of other sources replace it. A cell is some targets with one method, in one tensor
(`clean_label_batch`).
"""

from __future__ import annotations

import base64
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from bilevel._util.random_state import seeded
from bilevel.applications.poisoning.goals import norms
from bilevel.applications.poisoning.victims import mapped
from bilevel_studies import plots
from bilevel_studies.poisoning import clean_label_batch as batch
from bilevel_studies.poisoning.clean_label_features import CLASSES, FEATURES, SIDES, photos
from bilevel_studies.statistics import Numbers, alone, chosen, values
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings, device_name, table

EPSILONS = tuple(range(1, 17))
METHODS = ("penalty", "feature-collision", "collision-adam")
TITLES = {
    "penalty": "Penalty",
    "feature-collision": "Algorithm 1 of Shafahi et al.",
    "collision-adam": "only the collision term",
}
# K of the paper, and its steps of Algorithm 1.
PAPER_STEPS = {"penalty": 200, "feature-collision": 2000, "collision-adam": 200}
# T, gamma_0, lam_0, rho_0 and the weight of the collision term as in the paper. `rate` is for the points and a
# direction of length one over all pixels: the paper's 0.01 per pixel would leave a ball of 1 to 5 in one step.
PAPER: dict[str, Any] = {"T": 10, "gamma": 1.0, "lam": 1.0, "lower_rate": 0.001, "collision": 1.0, "rate": 0.3}
# Move the points by steepest descent in the norm of their bound, as Algorithm 1 does, instead of Adam.
STEEPEST: dict[str, Any] = PAPER | {"rate": 1.0, "points": "steepest"}
# The settings to choose from. In the last two, the training of the victim counts for more.
CANDIDATES: tuple[dict[str, Any], ...] = (
    PAPER,
    STEEPEST,
    STEEPEST | {"collision": 0.1, "gamma": 10.0},
    STEEPEST | {"collision": 0.01, "gamma": 100.0},
)
# Targets of a cell.
CHUNK = 32
# On a GPU, the number of targets in one tensor is filled up to a multiple of this.
MULTIPLE = 8
CHOICE = "choice"
# Training of a victim: Adam on all rows, whose rate falls to zero. The paper: RMSProp, 1,000 epochs.
STEPS, RATE = 1000, 1e-3
# How many points of a cell of Penalty are stored as pictures, and their width in pixels.
SHOWN, SHOWN_SIDE = 6, 96


def order(count: int) -> list[int]:
    """Return the random order in which test photographs are targets."""
    return [int(i) for i in torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def choice_cells(features: str, targets: Sequence[int], steps: Mapping[str, int] = PAPER_STEPS) -> list[RunItem]:
    """Return a cell for every candidate of Penalty, on the same few targets, which are in no other cell."""
    found = [
        {"part": CHOICE, **_settings(features, targets, "penalty", steps), "options": options} for options in CANDIDATES
    ]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def cells(
    features: str,
    targets: Sequence[int],
    options: Mapping[str, Any] = PAPER,
    *,
    chunk: int = CHUNK,
    steps: Mapping[str, int] = PAPER_STEPS,
) -> list[RunItem]:
    """Return a cell for each chunk of targets and method, chunk by chunk."""
    chunks = [targets[k : k + chunk] for k in range(0, len(targets), chunk)]
    found = [_settings(features, some, method, steps) | _own(method, options) for some in chunks for method in METHODS]
    return [RunItem(settings, float(-i)) for i, settings in enumerate(found)]


def _settings(features: str, targets: Sequence[int], method: str, steps: Mapping[str, int]) -> dict[str, Any]:
    return {"features": features, "targets": list(targets), "method": method, "steps": steps[method]}


def _own(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Penalty that a method also has."""
    names = {"penalty": tuple(options), "collision-adam": ("rate", "points")}.get(method, ())
    return {"options": {name: options[name] for name in names if name in options}} if names else {}


def in_table(kept: Sequence[tuple[Settings, Found]], features: str) -> list[tuple[Settings, Found]]:
    """Return the cells of a feature map to compare: without the choice, and only with the chosen options."""
    taken = best(kept, features)
    return [
        (settings, found)
        for settings, found in kept
        if settings["features"] == features
        and "part" not in settings
        and settings.get("options") == _own(settings["method"], taken).get("options")
    ]


def earlier(kept: Sequence[tuple[Settings, Found]], features: str) -> list[tuple[Settings, Found]]:
    """Return the cells of Penalty with options that were not chosen, without the choice."""
    taken = _own("penalty", best(kept, features))["options"]
    return [
        (settings, found)
        for settings, found in kept
        if settings["features"] == features
        and "part" not in settings
        and settings["method"] == "penalty"
        and settings["options"] != taken
    ]


def best(kept: Sequence[tuple[Settings, Found]], features: str) -> dict[str, Any]:
    """Return the candidate whose smallest epsilons have the least mean; the paper's if not all were run."""
    means = []
    for options in CANDIDATES:
        mine = [f for s, f in kept if s.get("part") == CHOICE and s["features"] == features and s["options"] == options]
        known = [one["epsilon"] or EPSILONS[-1] + 1 for f in mine for one in f["targets"] if not one.get("skipped")]
        if not known:
            return PAPER
        means.append(sum(known) / len(known))
    return CANDIDATES[means.index(min(means))]


def run(settings: Settings, device: torch.device | None = None) -> Found | None:
    """Return the smallest epsilons that flip the targets of a cell; None after Ctrl-C."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scene = scene_of(settings["features"], where)
    began = time.perf_counter()  # photographs and the clean victim, made once for all cells, do not count
    rows = torch.tensor(settings["targets"], device=where)
    right = scene.right[rows]
    out: list[dict[str, Any]] = [{"target": int(i), "skipped": True} for i in rows[~right].tolist()]
    chosen = rows[right]
    if len(chosen):
        try:
            out += _search(scene, scene.targets(chosen), settings)
        except KeyboardInterrupt:
            return None
    return {"targets": out, "seconds": round(time.perf_counter() - began, 2), "device": device_name(where)}


def _search(scene: Scene, targets: batch.Targets, settings: Settings) -> list[dict[str, Any]]:
    last: dict[int, tuple[Tensor, float]] = {}  # the point that flipped a target, and its distance

    def flips(which: Tensor, epsilons: Tensor) -> Tensor:
        batch.let_go(scene.device)
        rows = batch.filled(len(which), scene.multiple)
        mine, bounds = targets.only(which[rows].to(scene.device)), epsilons[rows].to(targets.bases)
        u = batch.settled(scene.attack(mine, bounds, settings), mine.bases, bounds)
        answers = batch.flipped(mine, scene.clean, scene.features, u).cpu()
        mine, u, answers = mine.only(slice(len(which))), u[: len(which)], answers[: len(which)]
        sizes = norms(u, mine.bases, "l2").tolist()
        for i, point, size, answer in zip(which.tolist(), u, sizes, answers.tolist(), strict=True):
            if answer:
                last[i] = point, size
        return answers

    smallest, tried = batch.smallest_of_many(len(targets.labels), EPSILONS, flips)
    found: list[dict[str, Any]] = []
    shown = SHOWN if settings["method"] == "penalty" and "part" not in settings else 0
    for i, epsilon in enumerate(smallest):
        one: dict[str, Any] = {
            "target": int(targets.rows[i]),
            "label": int(targets.labels[i]),
            "base": int(targets.base_rows[i]),
            "epsilon": epsilon,
            "l2": None if epsilon is None else last[i][1],
            "tried": tried[i],
        }
        if epsilon is not None and sum("pictures" in other for other in found) < shown:
            images = (scene.test[0][one["target"]], targets.bases[i], last[i][0])
            one["pictures"] = [picture(image.cpu()) for image in images]
        found.append(one)
    return found


class Scene:
    """The photographs on a device, their features, and which targets the clean victim classifies correctly."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.train, self.test = (photos(part, SIDES[name]) for part in ("train", "test"))
        self.features = FEATURES[name](self.train, device)
        rows = mapped(self.features, self.train[0], device)
        self.test_rows = mapped(self.features, self.test[0], device)
        self.test_labels = self.test[1].to(device)
        with seeded(0):
            first = nn.Linear(rows.shape[1], len(CLASSES))
        weight, bias = (p.detach().to(device) for p in first.parameters())
        self.clean = batch.Clean(rows, self.train[1].to(device), weight.T, bias, STEPS, RATE)
        self.right = batch.scores(self.test_rows, *self.clean.victim)[0].argmax(1) == self.test_labels
        self.multiple = 1
        if device.type == "cuda":  # thousands of passes follow with few sizes: the search for kernels pays
            torch.backends.cudnn.benchmark, self.multiple = True, MULTIPLE

    def targets(self, rows: Tensor) -> batch.Targets:
        """Return targets. The base of each is the test photograph of the other class with the nearest features."""
        labels, places = self.test_labels[rows], self.test_rows[rows]
        apart = torch.cdist(places, self.test_rows)
        apart[labels[:, None] == self.test_labels[None]] = torch.inf
        bases = apart.argmin(1)
        images = self.test[0][bases.cpu()].to(self.device)
        return batch.Targets(rows, labels, places, images, bases, self.test_labels[bases])

    def attack(self, targets: batch.Targets, epsilons: Tensor, settings: Settings) -> Tensor:
        steps = int(settings["steps"])
        match settings["method"]:
            case "feature-collision":
                return batch.algorithm_1(targets, self.features, epsilons, steps=steps)
            case "collision-adam":
                options = settings["options"]
                return batch.collision_alone(targets, self.features, epsilons, steps=steps, options=options)
        return batch.penalty(targets, self.clean, self.features, epsilons, steps=steps, options=settings["options"])


scene_of = cache(Scene)


def picture(image: Tensor) -> str:
    """Return an image in [-1, 1] as a small PNG in base64."""
    pixels = ((image + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).resize((SHOWN_SIDE, SHOWN_SIDE)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


# Counts as the epsilon of a target that no epsilon flips.
BEYOND = EPSILONS[-1] + 1
SHOWN = 8


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables, for each feature map."""
    found = Report({"cells": len(kept)})
    for name in values(kept, "features"):
        mine, before = in_table(kept, name), earlier(kept, name)
        if tried := chosen(kept, part=CHOICE, features=name):
            found.tables[f"{name}: settings of Penalty"] = choice_table(tried, best(kept, name))
        if not mine:
            continue
        found.summary[name] = compared(mine)
        found.tables[f"{name}: distortion"] = method_table(mine, before)
        found.tables[f"{name}: difference by pairs"] = difference_table(mine, before)
        targets = common(mine)
        by_title = {TITLES[m]: [e for t, e in needed(mine, m).items() if t in targets] for m in METHODS}
        known = {title: epsilons for title, epsilons in by_title.items() if epsilons}
        plots.success(known, EPSILONS, folder / f"clean-label-{name}.png")
        ours = [one for _, cell in chosen(mine, method="penalty") for one in cell["targets"]]
        if pictures := [one["pictures"] for one in ours if "pictures" in one][:SHOWN]:
            columns = [[np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in row] for row in pictures]
            plots.images(columns, folder / f"clean-label-{name}-points.png")
    return found


def needed(kept: Sequence[Kept], method: str) -> dict[int, int]:
    """Return the smallest epsilon of each target that was not skipped."""
    return {
        int(one["target"]): one["epsilon"] or BEYOND
        for _, found in chosen(kept, method=method)
        for one in found["targets"]
        if not one.get("skipped")
    }


def common(kept: Sequence[Kept]) -> set[int]:
    """Return the targets that all methods have, of those methods that have any."""
    return set.intersection(*(set(found) for method in METHODS if (found := needed(kept, method))))


def compared(kept: Sequence[Kept], other: str = "feature-collision", one: str = "penalty") -> dict[str, Any]:
    """Return the medians, and the mean difference by pairs with its 95% interval (Student's t)."""
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


def difference_table(mine: Sequence[Kept], before: Sequence[Kept]) -> str:
    """By how much more epsilon a method needs than another: in all targets, and in those not run before the choice."""
    as_published = [*chosen(before, method="penalty", options=PAPER), *chosen(mine, method="feature-collision")]
    rows = []
    for title, cells, one, other in (
        ("", mine, "penalty", "feature-collision"),
        (", the paper's settings", as_published, "penalty", "feature-collision"),
        ("", mine, "penalty", "collision-adam"),
        ("", mine, "collision-adam", "feature-collision"),
        (", new targets", fresh(mine, before), "penalty", "feature-collision"),
    ):
        found = compared(cells, other, one)
        if found["interval"] is not None:
            low, high = found["interval"]
            interval = f"{low:.2f} to {high:.2f}"
            counts = [str(found[key]) for key in ("targets", "less", "more")]
            rows.append([TITLES[one] + title, TITLES[other], f"{found['mean_difference']:.2f}", interval, *counts])
    heads = ["method", "other", "the other needs more by", "95%", "targets", "needs less for", "needs more for"]
    return table(heads, rows)


def fresh(mine: Sequence[Kept], before: Sequence[Kept]) -> list[Kept]:
    """Return the cells without the targets of runs before the settings were chosen; none if there were no such runs."""
    seen = needed(before, "penalty")
    return [
        (settings, {**found, "targets": [one for one in found["targets"] if int(one["target"]) not in seen]})
        for settings, found in mine
        if seen
    ]


def choice_table(tried: Sequence[Kept], taken: Mapping[str, Any]) -> str:
    """The mean epsilon with each of the settings that were compared."""
    shown: list[Mapping[str, Any]] = list(CANDIDATES)
    shown += [settings["options"] for settings, _ in tried if settings["options"] not in shown]
    rows = []
    for options in shown:
        found = list(needed(chosen(tried, options=options), "penalty").values())
        mark = " (taken)" if options == taken else ""
        said = ", ".join(f"{key} {value if isinstance(value, str) else f'{value:g}'}" for key, value in options.items())
        rows.append([f"{said}{mark}", f"{statistics.fmean(found):.2f}" if found else "not run"])
    return table(["settings", "mean epsilon"], rows)


def method_table(kept: Sequence[Kept], before: Sequence[Kept] = ()) -> str:
    """Flipped targets, median epsilon and seconds of each method; of cells that had the GPU to themselves."""
    rows, targets = [], common(kept)
    shown = [(TITLES[method], method, kept) for method in METHODS]
    for options in CANDIDATES:
        title = "with the paper's settings" if options == PAPER else f"with {options}"
        shown.append((f"{TITLES['penalty']} {title}", "penalty", chosen(before, options=options)))
    for title, method, cells in shown:
        found = [epsilon for target, epsilon in needed(cells, method).items() if target in targets]
        if not found:
            continue
        shares = [f"{sum(e <= at for e in found) / len(found):.0%}" for at in (2, 4, 8, 16)]
        timed = [cell for _, cell in alone(chosen(cells, method=method))]
        count = sum(not one.get("skipped") for cell in timed for one in cell["targets"])
        each = f"{sum(cell['seconds'] for cell in timed) / count:.1f}" if count else ""
        flipped = f"{sum(e < BEYOND for e in found)} of {len(found)}"
        rows.append([title, flipped, f"{statistics.median(found):g}", *shares, each])
    return table(["method", "flipped", "median epsilon", "by 2", "by 4", "by 8", "by 16", "seconds a target"], rows)
