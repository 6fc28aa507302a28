"""The folder of a poisoning run: its result, its files, and the data of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bilevel import __version__
from bilevel._util.atomic_files import whole
from bilevel._util.text import agreeing, counted
from bilevel.applications.denoising.clean_dataset import thumbnails
from bilevel.applications.poisoning.audit import AttackResult, Audit, shown
from bilevel.applications.poisoning.setting import AttackGoal, AttackSetting, target_of, wanted_of
from bilevel.cli.folder import Folder
from bilevel.report.page import Table as ReportTable
from bilevel.report.poison import Point, PoisonPage, Target, render_poison

FILES = ("poison.npz", "history.csv", "result.json", "report.html")
SIDE = 128
"""The longest side of a picture on the page, in pixels."""
CHANGES = 8
"""Columns of a table that the page shows of a point, the most changed first."""
KEYS = ("clean", "flipped", "poisoned")
HEADS = ("Class", "Clean", "Points where they began", "Poisoned")
HARM = 0.01
"""A loss of accuracy that is none."""


def summary(
    ground: AttackSetting,
    aim: AttackGoal,
    outcome: AttackResult,
    audit: Audit | None,
    model: str,
    asked: Mapping[str, Any],
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    names = ground.data.classes
    clean, poisoned, flipped = outcome.clean, outcome.poisoned, outcome.flipped
    success, before = (outcome.success(ground, aim, which) for which in (poisoned, clean))
    share = f"{aim.points / ground.data.count:.2%} of {ground.data.count:,} training rows"
    count, verb = f"{counted(aim.points, 'poison point')} ({share})", partial(agreeing, aim.points)
    if aim.kind == "untargeted":
        shares = f"from {_share(clean.accuracy)} to {_share(poisoned.accuracy)}"
        message = f"{count} {verb('brings', 'bring')} the accuracy {shares}."
        if poisoned.accuracy >= clean.accuracy:
            shares = f"{_share(clean.accuracy)} without, {_share(poisoned.accuracy)} with {verb('it', 'them')}"
            message = f"{count} {verb('does', 'do')} not lower the accuracy: {shares}."
    elif aim.kind == "targeted":
        source, wanted = (names[c] for c in aim.pair)
        message = (
            f"{count} {verb('has', 'have')} {_share(float(success or 0))} of class {source} taken for {wanted}, "
            f"{_share(float(before or 0))} without {verb('it', 'them')}."
        )
    else:
        said = verb("flips", "flip") if success else f"{verb('does', 'do')} not flip"
        by = "" if ground.before is None else ", with the last layer alone trained anew"
        message = f"{count} {said} test row {aim.target} to class {names[wanted_of(ground, aim)]}{by}."
        if before:
            message = f"Test row {aim.target} is given class {names[wanted_of(ground, aim)]} without poison, too."
    if audit is not None and audit.sentence:
        message += f" {audit.sentence}"
    settings = outcome.poison.settings
    return {
        "command": "poison",
        "attack": aim.kind,
        "status": "done",
        "message": message,
        "seed": asked["seed"],
        "seconds": round(seconds, 3),
        "points": aim.points,
        "fraction": aim.points / ground.data.count,
        "rows": ground.data.count,
        "clean_accuracy": clean.accuracy,
        "poisoned_accuracy": poisoned.accuracy,
        "flipped_accuracy": flipped.accuracy,
        "constant_accuracy": ground.constant,
        "success": success,
        "clean_success": before,
        "by_class": {
            names[c]: {
                k: which.by_class[c] for k, which in (("clean", clean), ("flipped", flipped), ("poisoned", poisoned))
            }
            for c in sorted(clean.by_class)
        },
        "epsilon": settings["epsilon"],
        "norm": settings["norm"],
        "l2": float(outcome.poison.l2.max()),
        "linf": float(outcome.poison.linf.max()),
        "model": model,
        "device": str(device),
        "settings": settings,
        "audit": None
        if audit is None
        else {
            "what": audit.what,
            "least": audit.least,
            "values": list(audit.values),
            "runs": audit.runs,
            "wanted": audit.wanted,
            "auc": audit.auc,
        },
        "notes": [*ground.notes, *_learnt_nothing(clean.accuracy, ground.constant)],
    }


def _learnt_nothing(accuracy: float, constant: float) -> list[str]:
    if accuracy > constant:
        return []
    return [
        f"Without poison the victim is right on {_share(accuracy)} of the test rows, and their most frequent class for "
        f"all of them on {_share(constant)}: what an attack does to such a victim says nothing. Use another --model."
    ]


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def write(
    folder: Folder,
    ground: AttackSetting,
    aim: AttackGoal,
    outcome: AttackResult,
    audit: Audit | None,
    result: Mapping[str, Any],
) -> Path:
    """Write all files, the result last; returns the path of the page."""
    poison, names = outcome.poison, np.array(ground.data.classes)
    with whole(folder.path / "poison.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            base=poison.base.numpy(),
            poisoned=poison.x.numpy(),
            y=names[poison.labels.numpy()],
            labels=poison.labels.numpy(),
            rows=_rows(ground, aim, poison.rows),
            l2=poison.l2.numpy(),
            linf=poison.linf.numpy(),
        )
    if poison.solution is not None:
        poison.solution.history.to_csv(folder.path / "history.csv")
    page = folder.write("report.html", render_poison(_page(ground, aim, outcome, audit, result)))
    folder.write_json("result.json", result)  # last: where it is, the run is finished
    return page


def _unseen(aim: AttackGoal) -> str:
    return "of which the attack knew one, its target" if aim.kind == "clean-label" else "that the attack never saw"


def _trusted(ground: AttackSetting, aim: AttackGoal, outcome: AttackResult) -> int:
    """The validation rows, without those that clean-label points began from."""
    out = len(set(outcome.poison.rows.tolist())) if aim.kind == "clean-label" else 0
    return len(ground.validation[1]) - out


def _rows(ground: AttackSetting, aim: AttackGoal, rows: Tensor) -> np.ndarray:
    """Where the bases stood in the data as it was read; of a clean-label attack, among the validation rows."""
    return rows.numpy() if aim.kind == "clean-label" else ground.data.positions[rows.numpy()]


def _page(
    ground: AttackSetting, aim: AttackGoal, outcome: AttackResult, audit: Audit | None, result: Mapping[str, Any]
) -> PoisonPage:
    rows = _accuracy_rows(result)
    gained = float(result["success"] or 0.0) - float(result["clean_success"] or 0.0)
    harmed = gained > 2 * HARM or (
        aim.kind != "clean-label" and result["clean_accuracy"] - result["poisoned_accuracy"] > HARM
    )
    learnt = result["clean_accuracy"] > result["constant_accuracy"]
    bound = "none" if result["epsilon"] is None else f"{result['epsilon']:.4g} in {result['norm']}"
    victim, learner = "The victim", "the victim"
    if ground.before is not None:
        victim, learner = "The last layer of the network,", "the whole network"
    audited = None
    if audit is not None and audit.runs:
        audited = ReportTable(
            audit.sentence,
            (audit.what, "points", "accuracy", "enough"),
            [
                (shown(audit.what, r["value"]), str(r["points"]), _share(r["accuracy"]), "yes" if r["enough"] else "no")
                for r in sorted(audit.runs, key=lambda r: r["value"])
            ],
        )
    return PoisonPage(
        title=f"Poison in {ground.data.name}: {aim.kind} attack",
        outcome=result["message"],
        good=learnt and not harmed,
        accuracy=ReportTable(
            f"{victim} trained anew on clean rows, on these and the points where they began, and on these and the "
            f"points, right on test rows {_unseen(aim)}.",
            HEADS,
            rows,
        ),
        points=_points(ground, aim, outcome),
        target=_target(ground, aim),
        audit=audited,
        defence=""
        if audit is None
        else (
            f"bilevel's own denoiser, given the poisoned set, {_trusted(ground, aim, outcome):,} validation rows as "
            f"trusted and {learner} to train, ranks a clean row above a poison point with an AUC of {audit.auc:.3f} "
            "(1: always; 0.5: chance)."
        ),
        settings=[
            (
                "Rows",
                f"{result['rows']:,} for training, {len(ground.validation[1]):,} for the attack to look at, "
                f"{len(ground.test[1]):,} for the test",
            ),
            ("Points", f"{aim.points}, {result['fraction']:.2%} of the training rows"),
            ("Bound", bound),
            ("Largest change", f"{result['l2']:.4g} in l2, {result['linf']:.4g} in linf"),
            *_victim(result),
            ("Steps", f"{result['settings']['steps']:,}"),
            ("Seed", str(result["seed"])),
            ("Seconds", f"{result['seconds']:.1f}"),
            ("bilevel", __version__),
            ("torch", torch.__version__),
        ],
        notes=result["notes"],
    )


def _victim(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    recipe, body = (
        ", ".join(f"{k} {v}" for k, v in (result["settings"][name] or {}).items()) for name in ("recipe", "body_recipe")
    )
    if not body:
        return [("Victim", result["model"]), ("Trained by", recipe)]
    return [
        ("Victim", f"{result['model']}, its last layer trained anew"),
        ("Last layer trained by", recipe),
        ("Layers below trained by", f"{body}, on clean rows, once"),
    ]


def _target(ground: AttackSetting, aim: AttackGoal) -> Target | None:
    """The input that a clean-label attack is aimed at; a picture of images alone."""
    if aim.kind != "clean-label":
        return None
    row, x, label = target_of(ground, aim)
    names = ground.data.classes
    text = f"Test row {row}, of class {names[label]}, to be taken for {names[wanted_of(ground, aim)]}."
    shown = (
        thumbnails(x[None].float(), torch.zeros(1, dtype=torch.long), SIDE) if ground.data.kind == "images" else None
    )
    return Target(text, None if shown is None else shown[0])


def _points(ground: AttackSetting, aim: AttackGoal, outcome: AttackResult) -> list[Point]:
    poison, names = outcome.poison, ground.data.classes
    images = ground.data.kind == "images"
    every = torch.arange(len(poison.labels))
    shown = [thumbnails(x.float(), every, SIDE) if images else None for x in (poison.base, poison.x)]
    columns = ground.data.features or [f"column {k}" for k in range(int(poison.base[0].numel()))]
    labels = ground.validation[1] if aim.kind == "clean-label" else ground.train[1]
    of_base = [names[int(c)] for c in labels[poison.rows]]
    found = []
    for i in range(len(poison.labels)):
        facts = [
            ("base", f"of class {of_base[i]}"),
            ("l2", f"{float(poison.l2[i]):.3g}"),
            ("linf", f"{float(poison.linf[i]):.3g}"),
        ]
        title = f"{i}: labelled {names[int(poison.labels[i])]}"
        if shown[0] is not None and shown[1] is not None:
            found.append(Point(title, facts, base=shown[0][i], poison=shown[1][i]))
        else:
            found.append(Point(title, facts, changes=_changes(poison.base[i], poison.x[i], columns)))
    return found


def _changes(base: Tensor, poison: Tensor, columns: Sequence[str]) -> list[tuple[str, str, str]]:
    before, after = base.flatten(), poison.flatten()
    order = (after - before).abs().argsort(descending=True)[:CHANGES].tolist()
    return [(columns[k], f"{float(before[k]):.3g}", f"{float(after[k]):.3g}") for k in order]


def _accuracy_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    whole = {key: result[f"{key}_accuracy"] for key in KEYS}
    return [(name, *(_share(v[key]) for key in KEYS)) for name, v in ({"all": whole} | result["by_class"]).items()]


def show(result: Mapping[str, Any]) -> None:
    console = Console()
    table = Table(*HEADS)
    for row in _accuracy_rows(result):
        table.add_row(*row)
    console.print(table)
    if (audit := result["audit"]) is not None:
        console.print(f"AUC of bilevel's denoiser on the points: {audit['auc']:.3f}.")
    console.print(result["message"], soft_wrap=True)
