"""What `bilevel poison` does: read, attack and audit under a checkpoint, write and show the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bilevel._util.checks import did_you_mean, in_range
from bilevel._util.text import first_of
from bilevel.applications.poisoning.audit import (
    AttackGoal,
    AttackResult,
    AttackSetting,
    Audit,
    audit,
    carry_out,
    goal_of,
    on_features,
    prepare,
)
from bilevel.applications.poisoning.bounds import Bound
from bilevel.cli.denoise_run import threads_for
from bilevel.cli.options import device_of
from bilevel.cli.poison_output import FILES, show, summary, write
from bilevel.cli.progress import RunBar
from bilevel.cli.run_folder import folder_of, report_result, run_or_resume
from bilevel.cli.user_code import classifier_of
from bilevel.data import Labelled, load
from bilevel.errors import OptionError

LEVELS = 255
"""An l-infinity bound on images is given in steps of a pixel."""
FRACTION, COST = 0.03, 5.0
NEEDED = {"targeted": ("target_class", "as"), "clean-label": ("target", "epsilon")}
"""Options without which an attack is not defined."""
ONLY_FOR = {"target_class": ("targeted",), "as": ("targeted", "clean-label"), "target": ("clean-label",)}


def run(asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Attack the data, or continue a run, and show the result."""
    where = device_of(device)
    _refuse(asked)
    asked = {**asked, "cost": COST if asked["cost"] is None else asked["cost"]}
    data, seed = asked["data"], asked["seed"]
    loaded = load(data, label=asked["label"], test=asked["test"])
    net = classifier_of(asked["model"], loaded, data, where, seed)
    setting = prepare(loaded, net.network, rows=asked["rows"], seed=seed)
    setting = replace(setting, notes=(*setting.notes, *([net.why] if net.why else [])))
    aim, bound = _aim(asked, setting), _bound(asked, setting.data)
    goal_of(setting, aim, seed)  # refuses a goal that cannot be reached, before anything is written
    folder = folder_of(out, "poison", data)

    def work(checkpoint: Path) -> dict[str, Any]:
        began = time.perf_counter()
        with threads_for(net.network):
            attacked, outcome, audited = _attack(setting, aim, bound, asked, checkpoint)
        result = summary(attacked, aim, outcome, audited, net.kind, asked, time.perf_counter() - began, where)
        write(folder, attacked, aim, outcome, audited, result)
        return result

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    report_result(result, show, json=json, report=folder.path / "report.html")


def _attack(
    setting: AttackSetting, aim: AttackGoal, bound: Bound | None, asked: Mapping[str, Any], checkpoint: Path
) -> tuple[AttackSetting, AttackResult, Audit | None]:
    if aim.kind == "clean-label":
        setting = on_features(setting)
    steps, seed = asked["steps"], asked["seed"]
    outcome = carry_out(
        setting,
        aim,
        bound=bound,
        steps=steps,
        seed=seed,
        checkpoint=checkpoint / "attack",
        resume=True,
        callbacks=[RunBar("moving points")],
    )
    if not asked["audit"]:
        return setting, outcome, None
    found = audit(
        setting,
        aim,
        bound,
        outcome,
        steps=steps,
        cost=asked["cost"],
        seed=seed,
        checkpoint=checkpoint,
        callbacks=lambda label: [RunBar(label)],
    )
    return setting, outcome, found


def _refuse(asked: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    attack, cost = asked["attack"], asked["cost"]
    if asked["norm"] != "l2" and asked["epsilon"] is None:
        raise OptionError(f"--norm {asked['norm']} says what --epsilon bounds; give --epsilon as well.")
    if cost is not None and not asked["audit"]:
        raise OptionError(f"--cost {cost:g} is for --audit; give --audit as well.")
    if cost is not None and attack != "untargeted":
        raise OptionError(f"--cost is for --attack untargeted, whose audit counts lost accuracy; got {attack}.")
    if asked["points"] is not None and asked["fraction"] is not None:
        raise OptionError("Give either --points or --fraction; got both.")
    in_range("--fraction", asked["fraction"], above=0, below=1)
    in_range("--epsilon", asked["epsilon"], above=0)
    in_range("--cost", cost, above=0, most=100)
    for name in NEEDED.get(attack, ()):
        if asked[name] is None:
            raise OptionError(f"--attack {attack} needs --{name.replace('_', '-')}.")
    for name, attacks in ONLY_FOR.items():
        if asked[name] is not None and attack not in attacks:
            raise OptionError(f"--{name.replace('_', '-')} is for --attack {' or '.join(attacks)}; got {attack}.")


def _aim(asked: Mapping[str, Any], setting: AttackSetting) -> AttackGoal:
    classes = setting.data.classes
    points, fraction = asked["points"], asked["fraction"]
    if points is None and fraction is None and asked["attack"] == "clean-label":
        points = 1
    elif points is None:
        points = max(1, round((fraction or FRACTION) * setting.data.count))
    source, wanted = (_class(option, asked[option], classes) for option in ("target_class", "as"))
    if source is not None and source == wanted:
        raise OptionError(f"--target-class and --as must be two classes; both are {asked['as']!r}.")
    return AttackGoal(asked["attack"], points, source, wanted, asked["target"])


def _class(option: str, name: str | None, classes: tuple[str, ...]) -> int | None:
    if name is not None and name not in classes:
        near, shown = did_you_mean(name, classes), first_of(classes, 20)
        raise OptionError(f"--{option.replace('_', '-')} must be one of {shown}; got {name!r}.{near}")
    return None if name is None else classes.index(name)


def _bound(asked: Mapping[str, Any], data: Labelled) -> Bound | None:
    if asked["epsilon"] is None:
        return None
    steps = LEVELS if asked["norm"] == "linf" and data.kind == "images" else 1
    return Bound(asked["epsilon"] / steps, asked["norm"])
