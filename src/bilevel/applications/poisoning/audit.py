"""One poisoning attack on a labelled data set, and the least poison that is enough."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bilevel import Callback, DataError
from bilevel._util.checks import ShortRepr, require
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.poisoning.attack import Evaluation, Poison, attack, unmoved
from bilevel.applications.poisoning.goals import Bound, Goal
from bilevel.applications.poisoning.setting import AttackGoal, AttackSetting, goal_of, target_of, wanted_of
from bilevel.methods.base import Method
from bilevel.running.run_many import ONCE, Found, ResultFolder, RunItem, Settings, run_items

# The shares of poison that an audit searches.
FRACTIONS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16)
# An audit of a bound searches the multiples of epsilon / 16.
PARTS_OF_EPSILON = 16
# The share of a class that a targeted attack must turn into the other class.
SUCCESS = 0.5
WANTED = {
    "untargeted": "costs {cost:g} points of accuracy",
    "targeted": f"turns {SUCCESS:.0%} of the class into the other",
    "clean-label": "flips the target",
}


@dataclass(frozen=True, repr=False)
class AttackResult(ShortRepr):
    """An attack, and victims trained from scratch without poison, with it, and with its unmoved points.

    Fields:
        poison: The points, a `Poison`.
        goal: The points before they move, and the objective, a `Goal`.
        clean: The victim without poison, an `Evaluation`.
        poisoned: The victim with the poison.
        flipped: The victim with the points as they begin, which is label flipping. It shows what moving them adds.

    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=50)
    >>> goal = AttackGoal("targeted", points=4, source=3, wanted=8)
    >>> found = carry_out(setting, goal, steps=2)
    >>> 0 <= found.success(setting, goal, found.poisoned) <= 1  # the share of the test rows of class 3 taken for 8
    True
    """

    poison: Poison
    goal: Goal
    clean: Evaluation
    poisoned: Evaluation
    flipped: Evaluation

    def success(self, setting: AttackSetting, goal: AttackGoal, which: Evaluation) -> float | bool | None:
        """Return the share of the source's test rows that get the wanted class, or None for an untargeted attack.

        For a clean-label attack, return whether the target gets it.
        """
        if goal.kind == "targeted":
            return which.share(setting.test, *goal.pair)
        if goal.kind == "clean-label":
            return int(which.predicted[target_of(setting, goal)[0]]) == wanted_of(setting, goal)
        return None


def carry_out(
    setting: AttackSetting,
    goal: AttackGoal,
    *,
    bound: Bound | None = None,
    steps: int,
    method: Method | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    clean: Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
) -> AttackResult:
    """Run an attack, and evaluate it by training victims from scratch.

    Args:
        setting: The data and the victim, from `prepare`.
        goal: What the attack should achieve, an `AttackGoal`.
        bound: How far a point can be from its start. None (default): anywhere in the box of the inputs.
        steps: The number of steps of the attack. `attack` takes 500 if nothing is said.
        method: The method of the attack. None (default): a `Penalty` for a victim that is already trained.
        seed: The seed of all random draws. Default: 0.
        checkpoint: A folder for the state, to resume from after an interruption. None (default): nothing is written.
        resume: Whether to resume from the state in `checkpoint`. Default: False.
        clean: The evaluation without poison, if it is known: it is the same for every attack in a setting. None
            (default): it is measured.
        callbacks: Callbacks of the attack, such as `[Progress()]`. Default: none.

    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=50)
    >>> found = carry_out(setting, AttackGoal("untargeted", points=2), steps=2)
    >>> lost = found.clean.accuracy - found.poisoned.accuracy
    >>> found.poison.x.shape
    torch.Size([2, 1, 8, 8])
    """
    start = goal_of(setting, goal, seed)
    poison = attack(
        start,
        setting.train,
        setting.model,
        recipe=setting.recipe,
        features=setting.features,
        method=method,
        box=setting.box,
        bound=bound,
        steps=steps,
        seed=seed,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=callbacks,
    )
    body = setting.before and setting.before.recipe.describe()
    poison = replace(poison, settings=poison.settings | {"body_recipe": body})
    clean = clean or setting.evaluate(None)
    return AttackResult(poison, start, clean, setting.evaluate(poison), setting.evaluate(unmoved(start)))


def detection_auc(
    setting: AttackSetting,
    poison: Poison,
    model: nn.Module,
    *,
    without: Tensor | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> float:
    """Return how well `denoise` detects the poison: the AUC of its importance as a sign of a clean row.

    1 means that every point is below every clean row; 1/2 is chance.

    Args:
        setting: The data and the victim, from `prepare`. Its validation rows are the trusted set of `denoise`.
        poison: The points, a `Poison`.
        model: The network that `denoise` trains, in place.
        without: The validation rows to leave out of the trusted set. The points of a clean-label attack start there,
            and a defender has no clean copy of a point. None (default): none.
        steps: The number of steps of `denoise`. None (default): 12 passes over the rows, and at least 600,
            or 1,200 with more than 2,000 rows.
        seed: The seed of `denoise`. Default: 0.

    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=50)
    >>> found = carry_out(setting, AttackGoal("untargeted", points=2), steps=2)
    >>> 0 <= detection_auc(setting, found.poison, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), steps=5) <= 1
    True
    """
    x, y = setting.train
    inputs, labels = torch.cat([x, poison.x.to(x)]), torch.cat([y, poison.labels])
    left = torch.ones(len(setting.validation[1]), dtype=torch.bool)
    if without is not None:
        left[without] = False
    trusted = (setting.validation[0][left], setting.validation[1][left])
    known = torch.isin(labels, trusted[1])
    if not bool(known[len(y) :].any()):
        raise DataError(
            "the trusted rows must have examples of a class of the points; without the rows that the points start "
            "from, none is left."
        )
    found = denoise((inputs[known], labels[known]), trusted, model, steps=steps, seed=seed)
    clean = (torch.arange(len(labels)) < len(y))[known]
    return float(require("sklearn.metrics", "apps").roc_auc_score(clean.numpy(), found.importance.numpy()))


@dataclass(frozen=True, repr=False)
class Audit(ShortRepr):
    """The result of `audit`: the least poison that is enough, and whether it can be detected.

    Fields:
        what: What was searched: "fraction", the share of poison in the training rows, or "epsilon", the bound.
        wanted: When poison is enough, in words.
        values: The values that could be tried, from small to large. Empty if the target gets the wanted class without
            poison; then nothing is searched.
        least: The smallest value tried that is enough. None: no value is.
        runs: The runs made, each with its value, number of points, accuracy and whether it was enough.
        auc: How well the denoiser detects the poison of the attack as requested; see `detection_auc`.

    >>> Audit("fraction", "costs 5 points of accuracy", (0.01, 0.02, 0.04), least=0.02, runs=[], auc=0.9).sentence
    'The smallest fraction tried that costs 5 points of accuracy: 2%.'
    """

    what: Literal["fraction", "epsilon"]
    wanted: str
    values: tuple[float, ...]
    least: float | None
    runs: list[dict[str, Any]]
    auc: float

    @property
    def sentence(self) -> str:
        if not self.values:
            return ""
        if self.least is None:
            return f"No {self.what} up to {shown(self.what, self.values[-1])} {self.wanted}; try more --steps."
        return f"The smallest {self.what} tried that {self.wanted}: {shown(self.what, self.least)}."


def audit(
    setting: AttackSetting,
    goal: AttackGoal,
    bound: Bound | None,
    found: AttackResult,
    *,
    steps: int,
    cost: float,
    checkpoint: Path,
    seed: int = 0,
    callbacks: Callable[[str], Sequence[Callback]] = lambda label: (),
) -> Audit:
    """Search for the least poison that is enough, by bisection, and measure whether the denoiser detects it.

    Args:
        setting: The data and the victim, from `prepare`.
        goal: What the attack should achieve, an `AttackGoal`. Its number of points is not used in a search of the
            share.
        bound: How far a point can be from its start, or None. A clean-label attack with a bound searches its epsilon,
            every other attack the share of poison.
        found: The attack as requested, from `carry_out`.
        steps: The number of steps of every attack.
        cost: The points of accuracy (percent) that an untargeted attack must cost to be enough. A targeted attack must
            turn half of the class, a clean-label attack the target; they do not use it.
        checkpoint: A folder for the finished runs; a stopped run is resumed.
        seed: The seed of all random draws. Default: 0.
        callbacks: A function that returns the callbacks of a run, called with its label as `callbacks(label)`. By
            default there are none.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from bilevel.data import load
    >>> setting = prepare(load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rows=50)
    >>> goal = AttackGoal("untargeted", points=2)
    >>> found = carry_out(setting, goal, steps=2)
    >>> result = audit(setting, goal, None, found, steps=2, cost=1.0, checkpoint=Path(tempfile.mkdtemp()))
    >>> result.what, result.values
    ('fraction', (0.02, 0.03, 0.06, 0.08, 0.12, 0.16))
    """
    what: Literal["fraction", "epsilon"] = "epsilon" if goal.kind == "clean-label" and bound else "fraction"
    count, y = setting.data.count, setting.train[1]
    # Each share is at least one point, and needs no more rows than the data has.
    most = 2 * min(int((y == c).sum()) for c in goal.pair) if goal.kind == "targeted" else count - 1
    shares = {round(f * count): f for f in reversed(FRACTIONS) if 1 <= round(f * count) <= most}
    values = tuple(sorted(shares.values())) or (1 / count,)
    if what == "epsilon" and bound:
        values = tuple(bound.epsilon * k / PARTS_OF_EPSILON for k in range(1, PARTS_OF_EPSILON + 1))
    if goal.kind == "clean-label" and found.success(setting, goal, found.clean):
        values = ()
    store, runs = ResultFolder(checkpoint / "audit"), list[dict[str, Any]]()

    def enough(value: float) -> bool:
        cell = RunItem({"what": what, "value": value}, 0)
        limit = replace(bound, epsilon=value) if what == "epsilon" and bound else bound
        mine = goal if what == "epsilon" else replace(goal, points=max(1, round(value * count)))

        def attacked(settings: Settings) -> Found:
            result = carry_out(
                setting,
                mine,
                bound=limit,
                steps=steps,
                seed=seed,
                checkpoint=checkpoint / cell.name,
                resume=True,
                clean=found.clean,
                callbacks=callbacks(f"audit at {value:.3g}"),
            )
            success, accuracy = result.success(setting, mine, result.poisoned), result.poisoned.accuracy
            reached = 100 * (result.clean.accuracy - accuracy) >= cost if success is None else success >= SUCCESS
            done = {"accuracy": accuracy, "success": success, "enough": bool(reached)}
            return {"value": value, "points": mine.points} | done

        if not run_items([cell], store, attacked, where=ONCE):
            raise KeyboardInterrupt
        runs.append(store.get(cell) or {})
        return bool(runs[-1]["enough"])

    least = smallest(values, enough)
    bases = found.poison.rows if goal.kind == "clean-label" else None
    network = copy.deepcopy((setting.before or setting).model)
    auc = detection_auc(setting, found.poison, network, without=bases, seed=seed)
    return Audit(what, WANTED[goal.kind].format(cost=cost), values, least, runs, auc)


def smallest(values: Sequence[float], flips: Callable[[float], bool]) -> float | None:
    """Return the smallest of rising values for which `flips` is true, by bisection; None if it fails for the largest.

    `flips` must be true above each value for which it is true. It is called with the largest value first, and then
    about log2(len(values)) times.

    >>> smallest([1, 2, 3, 4], lambda value: value >= 3)
    3
    """
    if not values or not flips(values[-1]):
        return None
    return values[bisect_left(values, True, hi=len(values) - 1, key=flips)]


def shown(what: str, value: float) -> str:
    """Return a value as text: a fraction in percent, an epsilon as a number."""
    return f"{100 * value:.3g}%" if what == "fraction" else f"{value:.4g}"
