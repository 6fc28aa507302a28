"""The values with the least held-out loss among those that were tried, each by a training from scratch.

First the defaults, values of the caller and a grid of single values are tried. The grid moves one hyperparameter at a
time; if its best value is at an end of the default range, the range grows. Then a descent starts from the best values
so far: each of its points is a training as well. So no result is above the grid's best, and its loss belongs to a model
trained as the user will train it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bilevel._util.checks import ShortRepr
from bilevel.applications.tuning.knob import Knob
from bilevel.optim.lbfgs import LBFGS
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare, digest_of

Values = Mapping[str, Tensor]
# How often a range grows at the most, and by which factor.
GROWTHS, FACTOR = 4, 10.0
# A range grows only if its end is better than the next value by more than this share.
SAME = 1e-3
# The first step of the descent and the least one; every range is WIDTH wide.
WIDTH, RADIUS, LEAST = 10.0, 1.0, 0.05
# The factor from each pair of values around the best to the next, nearer pair.
NEARER = 0.6
START, GRID, DESCENT = "start", "grid", "descent"


def comparable(loss: float) -> float:
    """Return the loss to compare: a NaN is as bad as infinity."""
    return math.inf if math.isnan(loss) else loss


def folder_name(values: Values, more: str = "") -> str:
    """Return a name that belongs to these values, and to `more`."""
    text = f"{' '.join(values)} {digest_of(values.values())} {more}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, repr=False)
class Candidate(ShortRepr):
    """Values that `tune` tried.

    Fields:
        stage: "start", "grid", "descent", "run on minibatches", or a name of `candidates` of `tune`.
        values: The values by the names of their knobs.
        valid_loss: The validation loss of the model that was trained from scratch with them.
        moved: The hyperparameter that the grid moved, with its value. Default: "".
        measured: What `measure` of `tune` returned for this model. None if a training has no minimum. Default: None.

    >>> Candidate("grid", {"decay": torch.tensor([0.01])}, 0.5, "decay = 0.01").name
    'grid, decay = 0.01'
    """

    stage: str
    values: dict[str, Tensor]
    valid_loss: float
    moved: str = ""
    measured: Any = None

    @property
    def name(self) -> str:
        """Return the stage, with the value that the grid moved."""
        return f"{self.stage}, {self.moved}" if self.moved else self.stage


class _HasLoss(Protocol):
    @property
    def valid_loss(self) -> float: ...


Found = TypeVar("Found", bound=_HasLoss)


def least(candidates: Sequence[Found]) -> Found:
    """Return the one with the least validation loss; the first of them if several have it."""
    return min(candidates, key=lambda found: comparable(found.valid_loss))


def comparison(candidates: Sequence[Candidate], unit: float = 1.0) -> str:
    """Say which candidate won, and what the others of its stage and of the other stages have; losses times `unit`."""
    stages = dict[str, Candidate]()
    for found in candidates:
        stages[found.stage] = least([stages.get(found.stage, found), found])
    best = least(candidates)
    rest = [f"{other.name}: {unit * other.valid_loss:.4g}" for other in stages.values() if other.stage != best.stage]
    beside = f" The best of the other stages: {'; '.join(rest)}." if rest else ""
    return (
        f"Of {len(candidates)} candidates, each trained from scratch, the values of this one have the least validation "
        f"loss: {best.name}: {unit * best.valid_loss:.4g}.{beside}"
    )


class Trial(NamedTuple):
    """What a training shows: the loss, what the caller measured, the model's state; the derivative on request."""

    valid_loss: float
    measured: Any
    state: dict[str, Tensor]
    slope: Callable[[], dict[str, Tensor]]


# Trains from scratch with these values.
Attempt = Callable[[Values], Trial]


class ValueSearch:
    """The candidates so far, and the best of them with its model.

    `folder` keeps each trial by its values, and a later search of the same task reads it. `on_trial(name, done)` is
    called after each.
    """

    def __init__(
        self,
        attempt: Attempt,
        hyper: Mapping[str, Knob],
        folder: Path | None = None,
        task: Mapping[str, Any] | None = None,
        on_trial: Callable[[str, int], object] = lambda *_: None,
    ) -> None:
        self.hyper = dict(hyper)
        self.candidates: list[Candidate] = []
        self.state: dict[str, Tensor] = {}
        self._attempt, self._folder = attempt, folder
        self._task, self._on_trial = dict(task or {}), on_trial
        self._best: Candidate | None = None
        self._slope: Callable[[], dict[str, Tensor]] = dict

    @property
    def best(self) -> Candidate:
        """Return the candidate with the least loss; the first of them if several have it."""
        if self._best is None:
            raise RuntimeError("best is known after the first attempt only.")
        return self._best

    def attempt(self, stage: str, values: Values, moved: str = "") -> Candidate:
        """Train from scratch with these values."""
        plain = torch.contiguous_format
        held = {key: value.detach().cpu().clone(memory_format=plain) for key, value in values.items()}
        place = self._folder and self._folder / folder_name(held)
        trial, kept = None, dict[str, Any]()
        if place is not None and store.exists(place):
            kept = store.load(place)
            with store.understood(place):
                compare(kept["task"], self._task, place)
        else:
            trial = self._attempt(held)
            kept = {"task": self._task, "loss": trial.valid_loss, "measured": trial.measured, "slope": {}}
            kept["state"] = {key: tensor.detach().cpu().clone() for key, tensor in trial.state.items()}
            self._save(place, kept)
        found = Candidate(stage, held, float(kept["loss"]), moved, kept["measured"])
        self.candidates.append(found)
        if self._best is None or comparable(found.valid_loss) < comparable(self._best.valid_loss):

            def slope() -> dict[str, Tensor]:
                if not kept["slope"]:
                    found = (trial or self._attempt(held)).slope()
                    kept["slope"] = {key: tensor.detach().cpu() for key, tensor in found.items()}
                    self._save(place, kept)
                return dict(kept["slope"])

            self._best, self.state, self._slope = found, kept["state"], slope
        self._on_trial(found.name, len(self.candidates))
        return found

    def grid(self, count: int) -> None:
        """Try `count` single values of each hyperparameter that has them; the others stay at their best so far."""
        for key in self.hyper if count else ():
            knob, rest = self.hyper[key], self.best.values
            tried = {value: comparable(self._single(key, value, rest).valid_loss) for value in knob.singles(count)}
            for _ in range(GROWTHS if len(tried) > 1 else 0):
                first, second = sorted(tried, key=lambda value: tried[value])[:2]
                end = knob.grown(first, FACTOR)
                if end is None or end in tried or not tried[first] < (1 - SAME) * tried[second]:
                    break
                ends = self.hyper[key]
                self.hyper[key] = replace(ends, low=min(ends.low, end), high=max(ends.high, end))
                tried[end] = comparable(self._single(key, end, rest).valid_loss)

    def descend(self, rounds: int) -> None:
        """Descend from the best candidate, by at most so many further trainings.

        L-BFGS in a trust region: a step that lowers the loss is taken, and only then the derivative is computed there.
        Trainings that are left when no step helps go to values nearby, all higher or all lower: the loss of a training
        has kinks, and its derivative does not show them.
        """
        if rounds < 1 or not math.isfinite(self.best.valid_loss):
            return
        end = len(self.candidates) + rounds
        self._follow(rounds)
        for k in range(end - len(self.candidates)):
            x = self._point(self.best.values)
            shift = RADIUS * NEARER ** (k // 2 + 1) * (1 if k % 2 else -1)
            moved = (x + shift).clamp(0.0, WIDTH)
            if not torch.equal(moved, x):
                self.attempt(DESCENT, self._values(moved))

    def _follow(self, rounds: int) -> None:
        """Follow the derivative while it leads down."""
        x, radius = self._point(self.best.values), RADIUS
        search = LBFGS(x, self.best.valid_loss, self._gradient(x), memory=10)
        for _ in range(rounds):
            d = self._direction(search, radius)
            length = float(d.abs().max())
            if not LEAST <= length < math.inf:
                return
            before = search.value
            if not self.attempt(DESCENT, self._values(search.x + d)).valid_loss < before:
                radius = length / 3
                continue
            radius, gradient = max(radius, 1.5 * length), self._gradient(search.x + d)
            bend = gradient - search.gradient
            if torch.dot(d, bend) > 0:
                search.moves.append(d)
                search.bends.append(bend)
            search.x, search.value, search.gradient = search.x + d, self.best.valid_loss, gradient

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _single(self, key: str, value: float, rest: Values) -> Candidate:
        """Try a single value of one hyperparameter, unless that was done already."""
        moved = {**rest, key: torch.full_like(rest[key], value)}
        for found in self.candidates:
            if all(torch.allclose(moved[name], found.values[name], rtol=1e-5, atol=0.0) for name in moved):
                return found
        return self.attempt(GRID, moved, f"{key} = {value:.3g}")

    @staticmethod
    def _direction(search: LBFGS, radius: float) -> Tensor:
        """Return the step, at most `radius` in each coordinate and inside the ranges; zero if there is none."""
        d = search.direction()
        if not search.moves or not torch.dot(d, search.gradient) < 0:
            search.moves, search.bends = [], []
            d = -search.gradient * (radius / search.gradient.abs().max().clamp(min=1e-300))
        d = d * min(1.0, radius / max(float(d.abs().max()), 1e-300))
        return (search.x + d).clamp(0.0, WIDTH) - search.x

    def _save(self, place: Path | None, kept: dict[str, Any]) -> None:
        if place is not None:
            store.save(place, kept)

    def _point(self, values: Values) -> Tensor:
        """Return the place of each value in its range, from 0 to WIDTH on its natural scale."""
        parts = []
        for key, value in values.items():
            low, high = self.hyper[key].natural_ends
            natural = self.hyper[key].natural(value.double())
            parts.append((WIDTH * (natural - low) / (high - low)).clamp(0.0, WIDTH).reshape(-1))
        return torch.cat(parts)

    def _values(self, x: Tensor) -> dict[str, Tensor]:
        found, like = {}, self.best.values
        for (key, value), part in zip(like.items(), torch.split(x, [v.numel() for v in like.values()]), strict=True):
            low, high = self.hyper[key].natural_ends
            natural = (low + (high - low) * part / WIDTH).view_as(value)
            found[key] = (natural.exp() if self.hyper[key].scale == "log" else natural).to(value.dtype)
        return found

    def _gradient(self, x: Tensor) -> Tensor:
        """Return the derivative of the best candidate's loss at its place x; zero for steps out of the ranges."""
        slope, parts = self._slope(), []
        for key, value in self.best.values.items():
            low, high = self.hyper[key].natural_ends
            unit = value.double() if self.hyper[key].scale == "log" else 1.0
            parts.append((slope[key].double() * unit * (high - low) / WIDTH).reshape(-1))
        found = torch.cat(parts)
        outward = ((x <= 0) & (found > 0)) | ((x >= WIDTH) & (found < 0))
        return torch.where(outward, 0.0, found)
