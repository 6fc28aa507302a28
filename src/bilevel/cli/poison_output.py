"""The folder of a poisoning run: its result, its files, and the data of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bilevel
from bilevel._util.atomic_files import whole
from bilevel._util.text import counted
from bilevel.applications.denoising.clean_dataset import thumbnails
from bilevel.applications.poisoning.audit import (
    AttackGoal,
    AttackResult,
    AttackSetting,
    Audit,
    shown,
    target_of,
    wanted_of,
)
from bilevel.cli.progress import show_table
from bilevel.cli.run_folder import RESULT, RunFolder
from bilevel.report.figures import amplification, comparison, pictures
from bilevel.report.page import Card, Report, render
from bilevel.report.page import Table as ReportTable

FILES = ("poison.npz", "history.csv", "result.json", "report.html")
SIDE = 128
"""The longest side of a picture on the page, in pixels."""
MOST = 120
"""The most points on the page."""
CHANGES = 8
"""The number of columns of a table that the page shows for a point, the most changed first."""
KEYS = ("clean", "flipped", "poisoned")
HEADS = ("Class", "Clean", "Points before they moved", "Poisoned")
HARM = 0.01
"""A loss of accuracy up to this does not count."""


def summary(
    setting: AttackSetting,
    aim: AttackGoal,
    outcome: AttackResult,
    audit: Audit | None,
    model: str,
    asked: Mapping[str, Any],
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    names = setting.data.classes
    clean, poisoned, flipped = outcome.clean, outcome.poisoned, outcome.flipped
    success, before = (outcome.success(setting, aim, which) for which in (poisoned, clean))
    message = _message(setting, aim, outcome)
    if audit is not None and audit.sentence:
        message += f" {audit.sentence}"
    notes = list(setting.notes)
    if clean.accuracy <= setting.constant:
        notes.append(
            f"Without poison the victim has an accuracy of {_share(clean.accuracy)}; always giving the most frequent "
            f"class has {_share(setting.constant)}. An attack on such a victim says nothing. Use another --model."
        )
    settings = outcome.poison.settings
    return {
        "command": "poison",
        "attack": aim.kind,
        "status": "done",
        "message": message,
        "seed": asked["seed"],
        "seconds": round(seconds, 3),
        "points": aim.points,
        "fraction": aim.points / setting.data.count,
        "rows": setting.data.count,
        "clean_accuracy": clean.accuracy,
        "poisoned_accuracy": poisoned.accuracy,
        "flipped_accuracy": flipped.accuracy,
        "constant_accuracy": setting.constant,
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
        "audit": None if audit is None else asdict(audit),
        "notes": notes,
    }


def _message(setting: AttackSetting, aim: AttackGoal, outcome: AttackResult) -> str:
    """Return one sentence: what the points do, and how it is without them."""
    names, clean, poisoned = setting.data.classes, outcome.clean, outcome.poisoned
    success, before = (outcome.success(setting, aim, which) for which in (poisoned, clean))
    count = f"{counted(aim.points, 'poison point')} ({aim.points / setting.data.count:.2%} of the training rows)"
    if aim.kind == "untargeted":
        return f"Accuracy with {count}: {_share(poisoned.accuracy)}; without: {_share(clean.accuracy)}."
    if aim.kind == "targeted":
        source, wanted = (names[c] for c in aim.pair)
        shares = f"{_share(float(success or 0))}; without: {_share(float(before or 0))}"
        return f"Rows of class {source} taken for {wanted} with {count}: {shares}."
    given, without = ("yes" if flag else "no" for flag in (success, before))
    victim = "" if setting.before is None else ", only the last layer retrained"
    wanted = names[wanted_of(setting, aim)]
    return f"Test row {aim.target} taken for class {wanted} with {count}{victim}: {given}; without: {without}."


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def write(
    folder: RunFolder,
    setting: AttackSetting,
    aim: AttackGoal,
    outcome: AttackResult,
    audit: Audit | None,
    result: Mapping[str, Any],
) -> Path:
    """Write all files, the result last; return the path of the page."""
    poison, names = outcome.poison, np.array(setting.data.classes)
    with whole(folder.path / "poison.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            base=poison.base.numpy(),
            poisoned=poison.x.numpy(),
            y=names[poison.labels.numpy()],
            labels=poison.labels.numpy(),
            rows=_rows(setting, aim, poison.rows),
            l2=poison.l2.numpy(),
            linf=poison.linf.numpy(),
        )
    if poison.solution is not None:
        poison.solution.history.to_csv(folder.path / "history.csv")
    page = folder.write("report.html", render(_page(setting, aim, outcome, audit, result)))
    folder.write_json(RESULT, result)  # last: a folder that has it holds a finished run
    return page


def _rows(setting: AttackSetting, aim: AttackGoal, rows: Tensor) -> np.ndarray:
    """Return the rows of the bases in the data as read; for a clean-label attack, among the validation rows."""
    return rows.numpy() if aim.kind == "clean-label" else setting.data.positions[rows.numpy()]


def _page(
    setting: AttackSetting, aim: AttackGoal, outcome: AttackResult, audit: Audit | None, result: Mapping[str, Any]
) -> Report:
    gained = float(result["success"] or 0.0) - float(result["clean_success"] or 0.0)
    lost = 0.0 if aim.kind == "clean-label" else result["clean_accuracy"] - result["poisoned_accuracy"]
    learned = result["clean_accuracy"] > result["constant_accuracy"]
    victim = "victim" if setting.before is None else "last layer of the network"
    knew = "the attack knew only its target" if aim.kind == "clean-label" else "the attack never saw them"
    points, legend = _points(setting, aim, outcome)
    return Report(
        title=f"Poison in {setting.data.name}: {aim.kind} attack",
        outcome=result["message"],
        good=learned and gained <= 2 * HARM and lost <= HARM,
        table=ReportTable(
            f"Accuracy of the {victim}, trained from scratch, on test rows ({knew}).", HEADS, _accuracy_rows(result)
        ),
        tables=_audited(audit),
        remarks=[] if audit is None else [_defence(audit)],
        heading="The points",
        legend=legend,
        cards=[*_target(setting, aim), *points],
        settings=_settings(setting, result),
        notes=result["notes"],
    )


def _audited(audit: Audit | None) -> list[ReportTable]:
    """Return the table of the audit's attacks, if there were any."""
    if audit is None or not audit.runs:
        return []
    rows = [
        (shown(audit.what, r["value"]), str(r["points"]), _share(r["accuracy"]), "yes" if r["enough"] else "no")
        for r in sorted(audit.runs, key=lambda r: r["value"])
    ]
    return [ReportTable(audit.sentence, (audit.what, "points", "accuracy", "enough"), rows)]


def _defence(audit: Audit) -> str:
    return (
        "bilevel's own denoiser, with the poisoned set and the validation rows as trusted, ranks a clean row above "
        f"a poison point with an AUC of {audit.auc:.3f} (1: always; 0.5: chance)."
    )


def _settings(setting: AttackSetting, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = f"{result['rows']:,} / {len(setting.validation[1]):,} / {len(setting.test[1]):,}"
    bound = "none" if result["epsilon"] is None else f"{result['epsilon']:.4g} in {result['norm']}"
    return [
        ("Rows for training / validation / test", rows),
        ("Points", f"{result['points']}, {result['fraction']:.2%} of the training rows"),
        ("Bound", bound),
        ("Largest change", f"{result['l2']:.4g} in l2, {result['linf']:.4g} in linf"),
        *_victim(result),
        ("Steps", f"{result['settings']['steps']:,}"),
        ("Seed", str(result["seed"])),
        ("Seconds", f"{result['seconds']:.1f}"),
        ("bilevel", bilevel.__version__),
        ("torch", torch.__version__),
    ]


def _victim(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    recipe, body = (
        ", ".join(f"{k} {v}" for k, v in (result["settings"][name] or {}).items()) for name in ("recipe", "body_recipe")
    )
    if not body:
        return [("Victim", result["model"]), ("Trained by", recipe)]
    return [
        ("Victim", f"{result['model']}, its last layer retrained"),
        ("Last layer trained by", recipe),
        ("Layers below trained by", f"{body}, on clean rows, once"),
    ]


def _target(setting: AttackSetting, aim: AttackGoal) -> list[Card]:
    """Return a card with the input that a clean-label attack is aimed at, with its picture if it is an image."""
    if aim.kind != "clean-label":
        return []
    row, x, label = target_of(setting, aim)
    names = setting.data.classes
    text = f"Test row {row}, of class {names[label]}, to be taken for {names[wanted_of(setting, aim)]}."
    if setting.data.kind != "images":
        return [Card("The target", note=text)]
    shown = thumbnails(x[None].float(), torch.zeros(1, dtype=torch.long), SIDE)
    return [Card("The target", pictures({"target": shown[0]}, "the attack"), note=text)]


def _points(setting: AttackSetting, aim: AttackGoal, outcome: AttackResult) -> tuple[list[Card], str]:
    """Return a card for each of the first points, and how to read the cards."""
    poison, names = outcome.poison, setting.data.classes
    images = setting.data.kind == "images"
    first = torch.arange(min(len(poison.labels), MOST))
    columns = setting.data.features or [f"column {k}" for k in range(int(poison.base[0].numel()))]
    labels = setting.validation[1] if aim.kind == "clean-label" else setting.train[1]
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
    """Print the accuracies, the AUC of the denoiser and the message."""
    audit, lines = result["audit"], [result["message"]]
    if audit is not None:
        lines.insert(0, f"AUC of bilevel's denoiser on the points: {audit['auc']:.3f}.")
    show_table(HEADS, _accuracy_rows(result), *lines)
