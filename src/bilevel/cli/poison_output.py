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
from bilevel.applications.poisoning.audit import Aim, Ground, Outcome, target_of, wanted_of
from bilevel.cli.folder import Folder
from bilevel.cli.poison_audit import Audit, shown
from bilevel.report.figures import amplification, comparison, pictures
from bilevel.report.page import Card, Report, render
from bilevel.report.page import Table as ReportTable

FILES = ("poison.npz", "history.csv", "result.json", "report.html")
SIDE = 128
"""The longest side of a picture on the page, in pixels."""
MOST = 120
"""The most points on the page."""
CHANGES = 8
"""Columns of a table that the page shows of a point, the most changed first."""
KEYS = ("clean", "flipped", "poisoned")
HEADS = ("Class", "Clean", "Points where they began", "Poisoned")
HARM = 0.01
"""A loss of accuracy that is none."""


def summary(
    ground: Ground,
    aim: Aim,
    outcome: Outcome,
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
    folder: Folder, ground: Ground, aim: Aim, outcome: Outcome, audit: Audit | None, result: Mapping[str, Any]
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
    page = folder.write("report.html", render(_page(ground, aim, outcome, audit, result)))
    folder.write_json("result.json", result)  # last: where it is, the run is finished
    return page


def _unseen(aim: Aim) -> str:
    return "of which the attack knew one, its target" if aim.kind == "clean-label" else "that the attack never saw"


def _trusted(ground: Ground, aim: Aim, outcome: Outcome) -> int:
    """The validation rows, without those that clean-label points began from."""
    out = len(set(outcome.poison.rows.tolist())) if aim.kind == "clean-label" else 0
    return len(ground.validation[1]) - out


def _rows(ground: Ground, aim: Aim, rows: Tensor) -> np.ndarray:
    """Where the bases stood in the data as it was read; of a clean-label attack, among the validation rows."""
    return rows.numpy() if aim.kind == "clean-label" else ground.data.positions[rows.numpy()]


def _page(ground: Ground, aim: Aim, outcome: Outcome, audit: Audit | None, result: Mapping[str, Any]) -> Report:
    rows = _accuracy_rows(result)
    gained = float(result["success"] or 0.0) - float(result["clean_success"] or 0.0)
    harmed = gained > 2 * HARM or (
        aim.kind != "clean-label" and result["clean_accuracy"] - result["poisoned_accuracy"] > HARM
    )
    learnt = result["clean_accuracy"] > result["constant_accuracy"]
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
    points, legend = _points(ground, aim, outcome)
    return Report(
        title=f"Poison in {ground.data.name}: {aim.kind} attack",
        outcome=result["message"],
        good=learnt and not harmed,
        table=ReportTable(
            f"{victim} trained anew on clean rows, on these and the points where they began, and on these and the "
            f"points, right on test rows {_unseen(aim)}.",
            HEADS,
            rows,
        ),
        tables=[] if audited is None else [audited],
        remarks=[]
        if audit is None
        else [
            f"bilevel's own denoiser, given the poisoned set, {_trusted(ground, aim, outcome):,} validation rows as "
            f"trusted and {learner} to train, ranks a clean row above a poison point with an AUC of {audit.auc:.3f} "
            "(1: always; 0.5: chance)."
        ],
        heading="The points",
        legend=legend,
        cards=[*_target(ground, aim), *points],
        settings=_settings(ground, aim, result),
        notes=result["notes"],
    )


def _settings(ground: Ground, aim: Aim, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    bound = "none" if result["epsilon"] is None else f"{result['epsilon']:.4g} in {result['norm']}"
    return [
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
    ]


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


def _target(ground: Ground, aim: Aim) -> list[Card]:
    """Return a card with the input that a clean-label attack is aimed at, with its picture if it is an image."""
    if aim.kind != "clean-label":
        return []
    row, x, label = target_of(ground, aim)
    names = ground.data.classes
    text = f"Test row {row}, of class {names[label]}, to be taken for {names[wanted_of(ground, aim)]}."
    if ground.data.kind != "images":
        return [Card("The target", note=text)]
    shown = thumbnails(x[None].float(), torch.zeros(1, dtype=torch.long), SIDE)
    return [Card("The target", pictures({"target": shown[0]}, "the attack"), note=text)]


def _points(ground: Ground, aim: Aim, outcome: Outcome) -> tuple[list[Card], str]:
    """Return a card for each of the first points, and how to read the cards."""
    poison, names = outcome.poison, ground.data.classes
    images = ground.data.kind == "images"
    first = torch.arange(min(len(poison.labels), MOST))
    columns = ground.data.features or [f"column {k}" for k in range(int(poison.base[0].numel()))]
    labels = ground.validation[1] if aim.kind == "clean-label" else ground.train[1]
    legend = "The columns of each point that changed most; numbers are in deviations of a column."
    pairs, factor = [], 1.0
    if images:
        before, after = (thumbnails(x.float(), first, SIDE) for x in (poison.base, poison.x))
        pairs = list(zip(before, after, strict=True))
        factor = amplification(pairs)
        legend = f"Each point with its base and the change, multiplied by {factor:g}: grey is no change."
    cards = []
    for i in first.tolist():
        title = f"{i}: labelled {names[int(poison.labels[i])]}"
        facts = [
            ("base", f"of class {names[int(labels[poison.rows[i]])]}"),
            ("l2", f"{float(poison.l2[i]):.3g}"),
            ("linf", f"{float(poison.linf[i]):.3g}"),
        ]
        if images:
            cards.append(Card(title, comparison(title, pairs[i], factor), facts))
        else:
            rows = _changes(poison.base[i], poison.x[i], columns)
            cards.append(Card(title, "", facts, table=ReportTable(f"Point {i}", ("column", "base", "poison"), rows)))
    more = f" The first {MOST} of {len(poison.labels):,}." if len(poison.labels) > MOST else ""
    return cards, legend + more


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
