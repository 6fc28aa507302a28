"""`bilevel poison`: how little poison breaks what is trained on a data set, and what it looks like."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel._util.checks import did_you_mean, in_range
from bilevel._util.parallel_map import one_thread
from bilevel._util.text import first_of
from bilevel.applications.default_classifier import KINDS
from bilevel.applications.poisoning.audit import AttackResult, Audit, audit, carry_out
from bilevel.applications.poisoning.bounds import Bound
from bilevel.applications.poisoning.setting import AttackGoal, AttackSetting, goal_of, on_features, prepare
from bilevel.cli.denoise import SMALL
from bilevel.cli.device import device_of
from bilevel.cli.model import classifier_of
from bilevel.cli.options import DataArgument, DeviceOption, JsonOption, LabelOption, ResumeOption, SeedOption
from bilevel.cli.poison_output import FILES, show, summary, write
from bilevel.cli.progress import RunBar
from bilevel.cli.run_state import begin, finished, folder_of, resumable
from bilevel.cli.telling import tell
from bilevel.data import Labelled, load
from bilevel.errors import OptionError

LEVELS = 255
"""Steps of a pixel, in which an l-infinity bound on images is given."""
COST = 5.0
"""Points of accuracy that an audit asks for by default."""


class Attack(StrEnum):
    untargeted = "untargeted"
    targeted = "targeted"
    clean_label = "clean-label"


class Norm(StrEnum):
    l2 = "l2"
    linf = "linf"


def command(
    data: DataArgument,
    attack: Annotated[
        Attack,
        typer.Option(
            help="What the attack is after: less accuracy (untargeted), one class taken for another (targeted), one "
            "test row taken for another class by points whose labels are right (clean-label)."
        ),
    ] = Attack.untargeted,
    points: Annotated[int | None, typer.Option(min=1, help="Poison points to add.")] = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="The same as a share of the training rows: of --rows, or of those that are left when the test and "
            "validation parts are taken out. Neither: 0.03, or one point of clean-label."
        ),
    ] = None,
    target_class: Annotated[str | None, typer.Option(help="Targeted: the class that is to be mistaken.")] = None,
    as_class: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="The class that --target-class, or the row of --target, is to be taken for; of a row, by default that "
            "of the nearest validation row of another class.",
        ),
    ] = None,
    target: Annotated[int | None, typer.Option(min=0, help="Clean label: a row of the test set, from 0.")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="The most that a point may be changed; no bound by default. l2: a length, of pixels in [0, 1]. linf: "
            "steps of 1/255 of a pixel. Of tables, deviations of a column."
        ),
    ] = None,
    norm: Annotated[Norm | None, typer.Option(help="What --epsilon measures.", show_default="l2")] = None,
    test: Annotated[str | None, typer.Option(help="A file or folder of the same form, which no attack sees.")] = None,
    label: LabelOption = None,
    rows: Annotated[int | None, typer.Option(min=10, help="Draw this many rows for training; all by default.")] = None,
    model: Annotated[
        str, typer.Option(help=f"The victim: {', '.join(KINDS)}, or path.py:make with make(shape, classes).")
    ] = "linear",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the attack.")] = 300,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Look for the smallest share of poison (clean label: the smallest epsilon) that does it, and whether "
            "bilevel's own denoiser notices the points.",
        ),
    ] = False,
    cost: Annotated[
        float | None,
        typer.Option(help="What --audit calls done: this many points of accuracy lost.", show_default=f"{COST:g}"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run.", show_default="runs/poison-DATA")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Find out what a few poisoned training examples can do to a classifier, on your own data.

    The attack moves points that are added to the training set. What it is worth is measured by training the victim from
    scratch on the clean rows and the points (a network under a clean-label attack: its last layer), on test rows that
    the attack never sees. The run folder has poison.npz, result.json and report.html. For audits of pipelines of your
    own: see docs/poisoning-ethics.md.
    """
    asked = {
        "command": "poison",
        "data": data,
        "attack": str(attack),
        "points": points,
        "fraction": fraction,
        "target_class": target_class,
        "as": as_class,
        "target": target,
        "epsilon": epsilon,
        "norm": str(norm or Norm.l2),
        "test": test,
        "label": label,
        "rows": rows,
        "model": model,
        "steps": steps,
        "audit": audit,
        "cost": COST if cost is None else cost,
        "seed": seed,
    }
    where = device_of(device)
    if norm is not None and epsilon is None:
        raise OptionError(f"--norm {norm} says what --epsilon measures; give --epsilon, too.")
    if cost is not None and not audit:
        raise OptionError(f"--cost {cost:g} is what --audit looks for; give --audit, too.")
    if cost is not None and attack != "untargeted":
        raise OptionError(f"--cost is for --attack untargeted, whose audit counts lost accuracy; got {attack}.")
    _refuse(asked)
    loaded = load(data, label=label, test=test)
    net = classifier_of(model, loaded, data, where, seed)
    ground = prepare(loaded, net.network, rows=rows, seed=seed)
    if net.why:
        ground = _noted(ground, net.why)
    aim = _aim(asked, ground)
    bound = _bound(epsilon, norm or Norm.l2, ground.data)
    goal_of(ground, aim, seed)  # refuses, where it cannot be, before anything is written
    folder = folder_of(out, "poison", data)
    if resume and (done := finished(folder, asked)) is not None:
        print("note: this run is finished already.", file=sys.stderr)
        tell(done, show, json=json, report=folder.path / "report.html")
        return
    checkpoint = begin(folder, asked, resume, FILES)
    began = time.perf_counter()
    small = where.type == "cpu" and sum(p.numel() for p in net.network.parameters()) < SMALL
    with resumable(checkpoint), one_thread() if small else nullcontext():
        ground, outcome, audited = _run(ground, aim, bound, asked, checkpoint, resume)
    result = summary(ground, aim, outcome, audited, net.kind, asked, time.perf_counter() - began, where)
    write(folder, ground, aim, outcome, audited, result)
    shutil.rmtree(checkpoint, ignore_errors=True)
    tell(result, show, json=json, report=folder.path / "report.html")


def _run(
    ground: AttackSetting,
    aim: AttackGoal,
    bound: Bound | None,
    asked: Mapping[str, Any],
    checkpoint: Path,
    resume: bool,
) -> tuple[AttackSetting, AttackResult, Audit | None]:
    if aim.kind == "clean-label":
        ground = on_features(ground)
    outcome = carry_out(
        ground,
        aim,
        bound=bound,
        steps=asked["steps"],
        seed=asked["seed"],
        checkpoint=checkpoint / "attack",
        resume=resume,
        callbacks=[RunBar("moving points")],
    )
    found = None
    if asked["audit"]:
        found = audit(
            ground,
            aim,
            bound,
            outcome,
            steps=asked["steps"],
            cost=asked["cost"],
            checkpoint=checkpoint,
            seed=asked["seed"],
            callbacks=lambda label: [RunBar(label)],
        )
    return ground, outcome, found


# -- what was asked for ------------------------------------------------------------------------------------------------


def _refuse(asked: Mapping[str, Any]) -> None:
    """Options that do not go together."""
    attack = asked["attack"]
    if asked["points"] is not None and asked["fraction"] is not None:
        raise OptionError("Give either --points or --fraction; got both.")
    fraction = asked["fraction"]
    if fraction is not None and not 0 < fraction < 1:
        raise OptionError(f"--fraction must be above 0 and below 1; got {fraction:g}.")
    in_range("--epsilon", asked["epsilon"], above=0)
    needed = {"targeted": ("target_class", "as"), "clean-label": ("target", "epsilon")}.get(attack, ())
    for name in needed:
        if asked[name] is None:
            raise OptionError(f"--attack {attack} needs --{name.replace('_', '-')}.")
    for name, attacks in (
        ("target_class", ("targeted",)),
        ("as", ("targeted", "clean-label")),
        ("target", ("clean-label",)),
    ):
        if asked[name] is not None and attack not in attacks:
            raise OptionError(f"--{name.replace('_', '-')} is for --attack {' or '.join(attacks)}; got {attack}.")
    if not 0 < asked["cost"] <= 100:
        raise OptionError(f"--cost must be above 0 and at most 100 points; got {asked['cost']:g}.")


def _aim(asked: Mapping[str, Any], ground: AttackSetting) -> AttackGoal:
    classes = ground.data.classes
    points = asked["points"]
    if points is None:
        fraction = asked["fraction"]
        if fraction is None:
            points = 1 if asked["attack"] == "clean-label" else max(1, round(0.03 * ground.data.count))
        else:
            points = max(1, round(fraction * ground.data.count))
    source, wanted = (
        None if asked[name] is None else _class(option, asked[name], classes)
        for name, option in (("target_class", "--target-class"), ("as", "--as"))
    )
    if source is not None and source == wanted:
        raise OptionError(f"--target-class and --as must be two classes; both are {asked['as']!r}.")
    return AttackGoal(asked["attack"], points, source, wanted, asked["target"])


def _class(option: str, name: str, classes: tuple[str, ...]) -> int:
    if name not in classes:
        shown = first_of(classes, 20)
        raise OptionError(f"{option} has no class {name!r}.{did_you_mean(name, classes)} The classes are {shown}.")
    return classes.index(name)


def _bound(epsilon: float | None, norm: Norm, data: Labelled) -> Bound | None:
    if epsilon is None:
        return None
    steps = LEVELS if norm is Norm.linf and data.kind == "images" else 1
    return Bound(epsilon / steps, norm.value)


def _noted(ground: AttackSetting, note: str) -> AttackSetting:
    return replace(ground, notes=(*ground.notes, note))
