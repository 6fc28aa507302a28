"""Means and deviations of cells, as pages show them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from bilevel_studies.study import Kept, Settings

NOT_RUN = "not run"
# Settings in which a newer result of ApproxGrad and the former one that it replaces can differ.
NEWER = ("solver", "passes", "seed", "T")
SEEDS = 5


@dataclass(frozen=True)
class Numbers:
    """The values of one quantity over seeds."""

    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean (Student's t); None for fewer than two values."""
        count = len(self.values)
        if count < 2:
            return None
        half = self.deviation / count**0.5 * float(stats.t.ppf(0.975, count - 1))
        return self.mean - half, self.mean + half

    def show(self, digits: int = 2, usual: int = SEEDS) -> str:
        """Return the mean and deviation as text, with the number of seeds if it is not the usual one."""
        if not self.values:
            return NOT_RUN
        text = f"{self.mean:.{digits}f}"
        if len(self.values) > 1:
            text += f" ± {self.deviation:.{digits}f}"
        if len(self.values) != usual:
            text += f" ({seeds(len(self.values))})"
        return text


def seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def chosen(kept: Iterable[Kept], **settings: object) -> list[Kept]:
    """Return the cells that have these settings, among others."""
    return [pair for pair in kept if all(pair[0].get(key) == value for key, value in settings.items())]


def numbers(kept: Sequence[Kept], key: str, scale: float = 1.0) -> Numbers:
    return Numbers(tuple(scale * found[key] for _, found in kept if found.get(key) is not None))


def percent(kept: Sequence[Kept], key: str = "accuracy") -> Numbers:
    return numbers(kept, key, 100.0)


def alone(kept: Iterable[Kept]) -> list[Kept]:
    """Return the cells that did not share the machine, so that their seconds are valid."""
    return [pair for pair in kept if "beside" not in pair[1]]


def values(kept: Iterable[Kept], key: str) -> list[Any]:
    """Return the different values of a setting, in order of appearance."""
    return list(dict.fromkeys(settings[key] for settings, _ in kept))


def current(kept: Sequence[Kept]) -> list[Kept]:
    """Return the cells without results of ApproxGrad's former linear solver that newer results replace.

    The former ones have no setting `solver`.
    """
    replaced = {_place(settings) for settings, found in kept if "solver" in settings and not found.get("partial")}
    return [pair for pair in kept if "solver" in pair[0] or _place(pair[0]) not in replaced]


def _place(settings: Settings) -> str:
    return json.dumps({key: settings[key] for key in sorted(settings) if key not in NEWER})


def finite(kept: Iterable[Kept]) -> list[Kept]:
    """Return the cells that did not diverge."""
    return [pair for pair in kept if pair[1].get("status") != "diverged"]


def mark(kept: Sequence[Kept]) -> str:
    """Return the remark after a number of cells: how many diverged."""
    bad = len(kept) - len(finite(kept))
    return "" if not bad else " (diverged)" if bad == len(kept) else f" ({bad} of {len(kept)} diverged)"
