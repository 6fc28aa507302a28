"""The run of `bilevel poison`: read, attack and audit under a checkpoint, write the files and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import counted, in_range
from bilevel.applications.denoising.clean_dataset import thumbnails
from bilevel.applications.poisoning.audit import AttackResult, Audit, audit, carry_out, shown
from bilevel.applications.poisoning.goals import Bound
from bilevel.applications.poisoning.setting import (
    AttackGoal,
    AttackSetting,
    goal_of,
    on_features,
    prepare,
    target_of,
    wanted_of,
)
from bilevel.cli.denoise_files import threads_for
from bilevel.cli.option_values import classifier_of, device_of, known
from bilevel.cli.progress import RunBar, show_table
from bilevel.cli.run_folder import RunFolder, folder_of, made_by, refuse_if, report_result, run_or_resume
from bilevel.data import load
from bilevel.report.figures import amplification, comparison, pictures
from bilevel.report.page import Card, Report, Table, render

FILES = ("poison.npz", "history.csv", "result.json", "report.html")
# An l-infinity bound on images is given in steps of a pixel.
LEVELS = 255
FRACTION, COST = 0.03, 5.0
# Options without which an attack is not defined.
NEEDED = {"targeted": ("target_class", "as"), "clean-label": ("target", "epsilon")}
ONLY_FOR = {"target_class": ("targeted",), "as": ("targeted", "clean-label"), "target": ("clean-label",)}
# The longest side of a picture on the page, in pixels.
SIDE = 128
# The most points on the page.
MOST = 120
# The number of columns of a table that the page shows for a point, the most changed first.
CHANGES = 8
KEYS = ("clean", "flipped", "poisoned")
HEADS = ("Class", "Clean", "Points before they moved", "Poisoned")
# A loss of accuracy up to this does not count.
HARM = 0.01


def run(asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Attack the data, or continue a run, and show the result."""
    where = device_of(device)
    _refuse(asked)
    asked = {**asked, "cost": COST if asked["cost"] is None else asked["cost"]}
    data, seed, steps = asked["data"], asked["seed"], asked["steps"]
    loaded = load(data, label=asked["label"], test=asked["test"])
    net = classifier_of(asked["model"], loaded, data, where, seed)
    prepared = prepare(loaded, net.network, rows=asked["rows"], seed=seed)
    prepared = replace(prepared, notes=(*prepared.notes, *filter(None, [net.why])))
    aim, bound = _aim(asked, prepared), None
    if asked["epsilon"] is not None:
        unit = LEVELS if asked["norm"] == "linf" and loaded.kind == "images" else 1
        bound = Bound(asked["epsilon"] / unit, asked["norm"])
    goal_of(prepared, aim, seed)  # refuses a goal that cannot be reached, before anything is written
    folder = folder_of(out, "poison", data)

    def work(checkpoint: Path) -> tuple[dict[str, Any], str]:
        began, audited = time.perf_counter(), None
        with threads_for(net.network):
            setting = on_features(prepared) if aim.kind == "clean-label" else prepared
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
            if asked["audit"]:
                audited = audit(
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
        result = summary(setting, aim, outcome, audited) | {
            "seed": seed,
            "seconds": round(time.perf_counter() - began, 3),
            "model": net.kind,
            "device": str(where),
        }
        write(folder, setting, aim, outcome)
        return result, render(_page(setting, aim, outcome, audited, result))

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    report_result(result, {"report": folder.path / "report.html"}, show, json=json)


# -- options -----------------------------------------------------------------------------------------------------------


def _refuse(asked: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    attack, cost, given = asked["attack"], asked["cost"], {name for name, value in asked.items() if value is not None}
    words = {name: f"--{name.replace('_', '-')}" for name in asked}
    rules = {
        f"--norm {asked['norm']} says what --epsilon bounds; give --epsilon as well.": asked["norm"] != "l2"
        and "epsilon" not in given,
        f"--cost {cost or 0:g} is for --audit; give --audit as well.": "cost" in given and not asked["audit"],
        f"--cost is for --attack untargeted, whose audit counts lost accuracy; got {attack}.": "cost" in given
        and attack != "untargeted",
        "Give either --points or --fraction; got both.": given >= {"points", "fraction"},
    }
    for name in NEEDED.get(attack, ()):
        rules[f"--attack {attack} needs {words[name]}."] = name not in given
    for name, attacks in ONLY_FOR.items():
        rules[f"{words[name]} is for --attack {' or '.join(attacks)}; got {attack}."] = (
            name in given and attack not in attacks
        )
    refuse_if(rules)
    in_range("--fraction", asked["fraction"], above=0, below=1)
    in_range("--epsilon", asked["epsilon"], above=0)
    in_range("--cost", cost, above=0, most=100)


def _aim(asked: Mapping[str, Any], setting: AttackSetting) -> AttackGoal:
    classes, points = setting.data.classes, asked["points"]
    if points is None:
        one = asked["fraction"] is None and asked["attack"] == "clean-label"
        points = 1 if one else max(1, round((asked["fraction"] or FRACTION) * setting.data.count))
    pair = {option: asked[option] for option in ("target_class", "as") if asked[option] is not None}
    for option, name in pair.items():
        known(f"--{option.replace('_', '-')}", name, classes)
    source, wanted = (classes.index(pair[option]) if option in pair else None for option in ("target_class", "as"))
    refuse_if(
        {
            f"--target-class and --as must be two classes; both are {asked['as']!r}.": source is not None
            and source == wanted
        }
    )
    return AttackGoal(asked["attack"], points, source, wanted, asked["target"])


# -- the result and its page -------------------------------------------------------------------------------------------


def summary(
    setting: AttackSetting,
    aim: AttackGoal,
    outcome: AttackResult,
    audit: Audit | None,
) -> dict[str, Any]:
    """Return the contents of result.json, except for the seed, the seconds, the model and the device."""
    names = setting.data.classes
    clean, poisoned, flipped = outcome.clean, outcome.poisoned, outcome.flipped
    success, before = (outcome.success(setting, aim, which) for which in (poisoned, clean))
    message = " ".join(
        filter(None, [_message(setting, aim, outcome, success, before), audit.sentence if audit is not None else ""])
    )
    notes = list(setting.notes)
    if clean.accuracy <= setting.constant:
        notes.append(
            f"Without poison the victim has an accuracy of {_share(clean.accuracy)}. Always predicting the most "
            f"frequent class has {_share(setting.constant)}, so an attack on this victim shows nothing. Use another "
            "--model."
        )
    settings = outcome.poison.settings
    return {
        "command": "poison",
        "attack": aim.kind,
        "status": "done",
        "message": message,
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
            names[c]: {key: getattr(outcome, key).by_class[c] for key in KEYS} for c in sorted(clean.by_class)
        },
        "epsilon": settings["epsilon"],
        "norm": settings["norm"],
        "l2": float(outcome.poison.l2.max()),
        "linf": float(outcome.poison.linf.max()),
        "settings": settings,
        "audit": None if audit is None else asdict(audit),
        "notes": notes,
    }


def _message(
    setting: AttackSetting, aim: AttackGoal, outcome: AttackResult, success: float | None, before: float | None
) -> str:
    """Return a sentence that compares the victim with the points (`success`) and without them (`before`)."""
    names = setting.data.classes
    count = f"{counted(aim.points, 'poison point')} ({aim.points / setting.data.count:.2%} of the training rows)"
    if aim.kind == "untargeted":
        return f"Accuracy with {count}: {_share(outcome.poisoned.accuracy)}; without: {_share(outcome.clean.accuracy)}."
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


def write(folder: RunFolder, setting: AttackSetting, aim: AttackGoal, outcome: AttackResult) -> None:
    """Write the points and the history of the attack."""
    poison, names = outcome.poison, np.array(setting.data.classes)
    # The rows of the bases in the data as read; for a clean-label attack, among the validation rows.
    rows = poison.rows.numpy() if aim.kind == "clean-label" else setting.data.positions[poison.rows.numpy()]
    with atomic_write(folder.path / "poison.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            base=poison.base.numpy(),
            poisoned=poison.x.numpy(),
            y=names[poison.labels.numpy()],
            labels=poison.labels.numpy(),
            rows=rows,
            l2=poison.l2.numpy(),
            linf=poison.linf.numpy(),
        )
    if poison.solution is not None:
        poison.solution.history.to_csv(folder.path / "history.csv")


def _page(
    setting: AttackSetting, aim: AttackGoal, outcome: AttackResult, audit: Audit | None, result: Mapping[str, Any]
) -> Report:
    gained = float(result["success"] or 0.0) - float(result["clean_success"] or 0.0)
    lost = 0.0 if aim.kind == "clean-label" else result["clean_accuracy"] - result["poisoned_accuracy"]
    learned = result["clean_accuracy"] > result["constant_accuracy"]
    victim = "victim" if setting.before is None else "last layer of the network"
    knew = "the attack knew only its target" if aim.kind == "clean-label" else "the attack never saw them"
    points, legend = _points(setting, aim, outcome)
    tables, remarks = [], []
    if audit is not None:
        remarks.append(
            "bilevel's own denoiser, with the poisoned set and the validation rows as trusted, ranks a clean row above "
            f"a poison point with an AUC of {audit.auc:.3f} (1: always; 0.5: chance)."
        )
        runs = [
            (shown(audit.what, r["value"]), str(r["points"]), _share(r["accuracy"]), "yes" if r["enough"] else "no")
            for r in sorted(audit.runs, key=lambda r: r["value"])
        ]
        tables += [Table(audit.sentence, (audit.what, "points", "accuracy", "enough"), runs)] if runs else []
    return Report(
        title=f"Poison in {setting.data.name}: {aim.kind} attack",
        outcome=result["message"],
        good=learned and gained <= 2 * HARM and lost <= HARM,
        table=Table(
            f"Accuracy of the {victim}, trained from scratch, on test rows ({knew}).", HEADS, _accuracy_rows(result)
        ),
        tables=tables,
        remarks=remarks,
        heading="The points",
        legend=legend,
        cards=[*_target(setting, aim), *points],
        settings=_settings(setting, result),
        notes=result["notes"],
    )


def _settings(setting: AttackSetting, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = f"{result['rows']:,} / {len(setting.validation[1]):,} / {len(setting.test[1]):,}"
    bound = "none" if result["epsilon"] is None else f"{result['epsilon']:.4g} in {result['norm']}"
    recipe, body = (
        ", ".join(f"{k} {v}" for k, v in (result["settings"][name] or {}).items()) for name in ("recipe", "body_recipe")
    )
    victim = [("Victim", result["model"]), ("Trained by", recipe)]
    if body:
        victim = [
            ("Victim", f"{result['model']}, its last layer retrained"),
            ("Last layer trained by", recipe),
            ("Layers below trained by", f"{body}, on clean rows, once"),
        ]
    return [
        ("Rows for training / validation / test", rows),
        ("Points", f"{result['points']}, {result['fraction']:.2%} of the training rows"),
        ("Bound", bound),
        ("Largest change", f"{result['l2']:.4g} in l2, {result['linf']:.4g} in linf"),
        *victim,
        ("Steps", f"{result['settings']['steps']:,}"),
        *made_by(result),
    ]


def _target(setting: AttackSetting, aim: AttackGoal) -> list[Card]:
    """Return a card with the input that a clean-label attack is aimed at, with its picture if it is an image."""
    if aim.kind != "clean-label":
        return []
    row, x, label = target_of(setting, aim)
    names = setting.data.classes
    text = f"Test row {row}, of class {names[label]}, to be taken for {names[wanted_of(setting, aim)]}."
    figure = ""
    if setting.data.kind == "images":
        picture = thumbnails(x[None].float(), torch.zeros(1, dtype=torch.long), SIDE)[0]
        figure = pictures({"target": picture}, "the attack")
    return [Card("The target", figure, note=text)]


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
        legend = f"Each point with its base and the change, multiplied by {factor:g}: grey means no change."
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
            base, moved = poison.base[i].flatten(), poison.x[i].flatten()
            most = (moved - base).abs().argsort(descending=True)[:CHANGES].tolist()
            rows = [(columns[k], f"{float(base[k]):.3g}", f"{float(moved[k]):.3g}") for k in most]
            cards.append(Card(title, "", facts, table=Table(f"Point {i}", ("column", "base", "poison"), rows)))
    more = f" The first {MOST} of {len(poison.labels):,}." if len(poison.labels) > MOST else ""
    return cards, legend + more


def _accuracy_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    whole = {key: result[f"{key}_accuracy"] for key in KEYS}
    return [(name, *(_share(v[key]) for key in KEYS)) for name, v in ({"all": whole} | result["by_class"]).items()]


def show(result: Mapping[str, Any]) -> None:
    """Print the accuracies, the AUC of the denoiser and the message."""
    audit = result["audit"]
    found = "" if audit is None else f"AUC of bilevel's own denoiser on the points: {audit['auc']:.3f}."
    show_table(HEADS, _accuracy_rows(result), found, result["message"])
