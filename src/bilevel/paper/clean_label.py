"""The clean-label study (Section 3.4, Appendix E.4, Figures 3 and 6(a)): settings, data, and one cell.

One poison point for a target, with its own label, on features that the victim does not train. For each test image that
the clean victim has right: the smallest epsilon of 1 to 16, of l2 over pixels in [-1, 1], that flips it after training
anew. The dog-fish set of the paper cannot be had; dog and fish photographs of other sources stand in for it.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..applications.bounds import Bound
from ..applications.feature_collision import collide
from ..applications.poisoning import Poison, attack
from ..applications.poisoning_goals import Goal, clean_label
from ..applications.victims import Recipe, mapped, trained
from ..cells import Cell, Found, Settings
from ..errors import DataError
from ..methods.penalty import Penalty
from ..replay import seeded
from .clean_label_features import FEATURES, side_of

CLASSES = ("dog", "fish")
EPSILONS = tuple(range(1, 17))
METHODS = ("penalty", "feature-collision")
TITLES = {"penalty": "Penalty", "feature-collision": "Algorithm 1 of Shafahi et al."}
PAPER_STEPS = {"penalty": 200, "feature-collision": 2000}
LOWER_STEPS = 10
"""T of the paper."""
RECIPE = Recipe(optimizer="adam", steps=1000, rate=1e-3, batch=10**6)
"""The paper: RMSProp at this rate for 1,000 epochs; here Adam on all rows, whose rate falls to zero."""
ARCHIVE = Path("photos") / "photos256.zip"


def cells(features: str, targets: Sequence[int], steps: dict[str, int] | None = None) -> list[Cell]:
    """One for each target and method, both methods of a target side by side."""
    counts = steps or PAPER_STEPS
    found = [
        {"features": features, "target": target, "method": method, "steps": counts[method]}
        for target in targets
        for method in METHODS
    ]
    return [Cell(settings, float(-i)) for i, settings in enumerate(found)]


def run(settings: Settings, device: torch.device | None = None) -> Found | None:
    """The smallest epsilon that flips a target, tried from below; None where Ctrl-C came."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    scene = _scene(settings["features"], str(where))
    target = int(settings["target"])
    x, y = scene.test
    label = int(y[target])
    if scene.predicted(scene.clean, x[target]) != label:
        return {"skipped": True, "label": label}
    goal = clean_label((x, y), x[target], 1 - label, features=scene.features, device=where)
    tried: list[dict[str, Any]] = []
    for epsilon in EPSILONS:
        try:
            poison = scene.attack(goal, settings, float(epsilon))
        except KeyboardInterrupt:
            return None
        flips = scene.flips(poison, x[target], label)
        tried.append({"epsilon": epsilon, "l2": float(poison.l2.max()), "flips": flips})
        if flips:
            break
    last = tried[-1]
    return {
        "epsilon": last["epsilon"] if last["flips"] else None, "l2": last["l2"] if last["flips"] else None,
        "label": label, "base": int(goal.rows[0]), "tried": tried, "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


class Scene:
    """The photographs on a device, their features, and the victim trained on clean ones."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        side = side_of(name)
        self.train, self.test = (photos(part, side) for part in ("train", "test"))
        self.features = FEATURES[name](self.train, device)
        self.rows = mapped(self.features, self.train[0], device)
        with seeded(0):
            self.first = nn.Linear(self.rows.shape[1], len(CLASSES)).to(device)
        self.clean = self._trained(None)

    def attack(self, goal: Goal, settings: Settings, epsilon: float) -> Poison:
        bound, steps = Bound(epsilon), int(settings["steps"])
        if settings["method"] == "feature-collision":
            return collide(goal, features=self.features, box=(-1.0, 1.0), bound=bound, steps=steps, device=self.device)
        method = Penalty(
            mode="stochastic", warm_up=0.0, lower_steps=LOWER_STEPS, gamma_h=1.0,
            upper_optimizer=partial(torch.optim.Adam, lr=0.01), lower_optimizer=partial(torch.optim.Adam, lr=1e-3),
        )  # fmt: skip
        return attack(
            goal, self.train, self.first, recipe=RECIPE, features=self.features, method=method, box=(-1.0, 1.0),
            bound=bound, steps=steps,
        )  # fmt: skip

    def flips(self, poison: Poison, target: Tensor, label: int) -> bool:
        """Whether a victim trained anew on clean photographs and the poison gives the target another class."""
        return self.predicted(self._trained(poison), target) != label

    def _trained(self, poison: Poison | None) -> nn.Module:
        rows, labels = self.rows, self.train[1]
        if poison is not None:
            rows = torch.cat([rows, mapped(self.features, poison.x, self.device)])
            labels = torch.cat([labels, poison.labels])
        return trained(self.first, rows, labels, RECIPE)

    @torch.no_grad()
    def predicted(self, victim: nn.Module, x: Tensor) -> int:
        return int(victim(mapped(self.features, x[None], self.device)).argmax(1))


@cache
def _scene(name: str, device: str) -> Scene:
    return Scene(name, torch.device(device))


@cache
def photos(part: str, side: int) -> tuple[Tensor, Tensor]:
    """Dogs (0) and fish (1) of a part, resized, in [-1, 1]."""
    folder = os.environ.get("BILEVEL_DATA")
    path = None if folder is None else Path(folder) / ARCHIVE
    if path is None or not path.is_file():
        raise DataError(f"the photographs are not here: put {ARCHIVE.name} into $BILEVEL_DATA/{ARCHIVE.parent}.")
    inputs, labels = [], []
    with zipfile.ZipFile(path) as archive:
        for label, name in enumerate(CLASSES):
            for entry in sorted(
                n for n in archive.namelist() if n.startswith(f"{part}/{name}/") and n.endswith(".jpg")
            ):
                with archive.open(entry) as file:
                    picture = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
                inputs.append(np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1)
                labels.append(label)
    return torch.from_numpy(np.stack(inputs)).clamp(-1, 1), torch.tensor(labels)
