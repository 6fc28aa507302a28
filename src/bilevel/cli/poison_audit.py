"""`bilevel poison --audit`: the least poison that is enough, by bisection over runs that are kept, and who notices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bilevel._util.parallel_map import ONCE
from bilevel.applications.poisoning.audit import (
    FRACTIONS,
    PARTS_OF_EPSILON,
    Aim,
    Ground,
    Outcome,
    carry_out,
    least,
    noticed,
)
from bilevel.applications.poisoning.bounds import Bound
from bilevel.cli.progress import RunBar
from bilevel.running.run_many import ResultFolder, RunItem, run_items

SUCCESS = 0.5
"""The share of a class that a targeted attack is to have taken for the other."""


@dataclass(frozen=True)
class Audit:
    """What was looked for among `values`, the least that is enough, and the runs that were made.

    No values: the target is given the wanted class without poison, and nothing is looked for.
    """

    what: str
    """`fraction` or `epsilon`."""
    wanted: str
    """What counts as enough, in words."""
    values: tuple[float, ...]
    least: float | None
    runs: list[dict[str, Any]]
    auc: float
    """Of the denoiser's importance as a sign of a clean row, on the set poisoned by the attack as asked for."""

    @property
    def sentence(self) -> str:
        if not self.values:
            return ""
        if self.least is None:
            return f"No {self.what} up to {shown(self.what, self.values[-1])} {self.wanted}; more --steps may."
        return f"The smallest {self.what} tried that {self.wanted}: {shown(self.what, self.least)}."


def audit_of(
    ground: Ground, aim: Aim, bound: Bound | None, outcome: Outcome, asked: Mapping[str, Any], checkpoint: Path
) -> Audit:
    """Bisect; a run that is finished is kept in the checkpoint folder, and one that was stopped goes on."""
    store = ResultFolder(checkpoint / "audit")
    clean = outcome.clean.accuracy
    by_bound = aim.kind == "clean-label" and bound is not None
    values = (
        tuple(bound.epsilon * k / PARTS_OF_EPSILON for k in range(1, PARTS_OF_EPSILON + 1))
        if by_bound and bound
        else _fractions(ground, aim)
    )

    def run(value: float) -> dict[str, Any]:
        cell = RunItem({"what": "epsilon" if by_bound else "fraction", "value": value}, 0)
        if not run_items([cell], store, lambda settings: audited(value, checkpoint / cell.name), where=ONCE):
            raise KeyboardInterrupt
        return store.get(cell) or {}

    def audited(value: float, folder: Path) -> dict[str, Any]:
        mine = aim if by_bound else replace(aim, points=max(1, round(value * ground.data.count)))
        limit = replace(bound, epsilon=value) if by_bound and bound else bound
        found = carry_out(
            ground,
            mine,
            bound=limit,
            steps=asked["steps"],
            seed=asked["seed"],
            checkpoint=folder,
            resume=True,
            clean=outcome.clean,
            callbacks=[RunBar(f"audit at {value:.3g}")],
        )
        success = found.success(ground, mine, found.poisoned)
        enough = {
            "untargeted": 100 * (clean - found.poisoned.accuracy) >= asked["cost"],
            "targeted": (success or 0.0) >= SUCCESS,
            "clean-label": bool(success),
        }[aim.kind]
        return {
            "value": value,
            "points": mine.points,
            "accuracy": found.poisoned.accuracy,
            "success": success,
            "enough": bool(enough),
        }

    if aim.kind == "clean-label" and outcome.success(ground, aim, outcome.clean):
        values = ()
    smallest, runs = least(values, run) if values else (None, [])
    bases = outcome.poison.rows if aim.kind == "clean-label" else None
    network = copy.deepcopy((ground.before or ground).model)
    auc = noticed(ground, outcome.poison, network, without=bases, seed=asked["seed"])
    wanted = {
        "untargeted": f"costs {asked['cost']:g} points of accuracy",
        "targeted": f"has {SUCCESS:.0%} of the class taken for the other",
        "clean-label": "flips the target",
    }[aim.kind]
    return Audit("epsilon" if by_bound else "fraction", wanted, values, smallest, runs, auc)


def _fractions(ground: Ground, aim: Aim) -> tuple[float, ...]:
    """The shares that are at least one point each, and that the data has bases for."""
    count = ground.data.count
    most = count - 1
    if aim.kind == "targeted":
        most = 2 * min(ground.train[1].tolist().count(c) for c in (aim.source, aim.wanted))
    fitting = [f for f in FRACTIONS if 1 <= round(f * count) <= most]
    different = {round(f * count): f for f in reversed(fitting)}
    return tuple(sorted(different.values())) or (1 / count,)


def shown(what: str, value: float) -> str:
    return f"{100 * value:.3g}%" if what == "fraction" else f"{value:.4g}"
