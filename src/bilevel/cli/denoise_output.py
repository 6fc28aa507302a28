"""The folder of a denoising run: its result, its files, and the data of its page."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor

import bilevel
from bilevel._util.atomic_files import whole
from bilevel._util.text import agreeing
from bilevel.applications.default_classifier import Classifier
from bilevel.applications.denoising.clean_dataset import (
    Cleaned,
    Prepared,
    as_bytes,
    channels_last,
    is_bytes,
    thumbnails,
)
from bilevel.cli.progress import show_table
from bilevel.cli.run_folder import RESULT, RunFolder
from bilevel.data import Labelled
from bilevel.data.arrays import array_keys
from bilevel.report.page import Table as ReportTable
from bilevel.report.page import cell_text
from bilevel.report.review_page import SIDE, Review, Suspect, render_review

FILES = ("importance.csv", "history.csv", "model.safetensors", "result.json", "report.html")
COLUMNS = ("index", "label", "importance", "suspect", "suggested", "confidence", "quality", "key")
NOISY = "noisy.npz"
"""The data with the wrong labels that `--noise` makes, to which decisions are applied."""
SHOWN_FIELDS = 40
"""The most columns of a row that the page shows."""
ROWS = {
    "denoised": "on the cleaned data",
    "labels as they are": "on the labels as they are",
    "trusted set alone": "on only the trusted set",
    "right labels": "on the right labels",
}
"""The training sets, as the tables call them."""
HEADS = ("Trained", "Accuracy")
RIVALS = ("labels as they are", "trusted set alone")
"""The other sets that a user could train on."""


def write_noisy(folder: RunFolder, data: Labelled) -> Labelled:
    """Write the data with the labels that `--noise` made, for decisions to be applied to; rows are named by number."""
    names = np.array(data.classes)
    arrays: dict[str, np.ndarray] = {}
    given = {"": (data.x, data.y), "_trusted": data.trusted, "_test": data.test}
    parts = {suffix: pair for suffix, pair in given.items() if pair is not None}
    array: Callable[[Tensor], np.ndarray] = Tensor.numpy
    if data.kind == "images":
        array = as_bytes if all(is_bytes(x) for x, _ in parts.values()) else channels_last
    for suffix, (x, y) in parts.items():
        arrays["x" + suffix] = array(x)
        arrays["y" + suffix] = names[y.numpy()]
    with whole(folder.path / NOISY) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return replace(data, positions=np.arange(data.count), keys=array_keys(arrays["x"], arrays["y"].tolist()))


def apply_command(source: str, label: str | None) -> str:
    """Return the command that applies decisions to this source."""
    path = Path(source)
    suffix = ".npz" if not path.exists() else "" if path.is_dir() else path.suffix.lower()
    words = ["bilevel", "denoise", source, "--apply", "decisions.csv", *(["--label", label] if label else [])]
    return shlex.join([*words, "--out", f"cleaned{suffix}"])


def summary(
    prepared: Prepared,
    cleaned: Cleaned,
    net: Classifier,
    asked: Mapping[str, Any],
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    data, found = prepared.data, cleaned.denoised
    suspects = int(found.suspect.sum())
    verb = agreeing(suspects, "is", "are")
    message = f"{suspects:,} of {data.count:,} labels ({100 * found.noise_rate:.1f}%) {verb} probably wrong."
    if "denoised" in cleaned.accuracies:
        shares = [f"{ROWS[name]}: {100 * cleaned.accuracies[name]:.1f}%" for name in ROWS if name in cleaned.accuracies]
        message += f" Accuracy on {_part(prepared.held_out)} after training {', '.join(shares)}."
    measured = {"auc": cleaned.auc, "f1": cleaned.f1} if prepared.truth is not None else {}
    if found.solution.ranks > 1:
        measured |= {"ranks": found.solution.ranks, "bytes_per_step": found.solution.bytes_per_step}
    notes = [*prepared.notes, *([net.why] if net.why else []), *cleaned.notes]
    return {
        "command": "denoise",
        "method": asked["method"],
        "status": found.solution.status.name.lower(),
        "message": message,
        "seed": asked["seed"],
        "seconds": round(seconds, 3),
        "noise_rate": found.noise_rate,
        "suspects": suspects,
        "rows": data.count,
        "trusted": len(prepared.trusted[1]),
        "classes": list(data.classes),
        "trusted_rows": list(prepared.drawn),
        "test_accuracy": cleaned.accuracies.get("denoised"),
        "accuracies": cleaned.accuracies,
        "held_out": prepared.held_out,
        **measured,
        "model": net.kind,
        "device": str(device),
        "engine": found.solution.engine,
        "settings": found.settings,
        "notes": notes,
    }


def _part(held_out: bool) -> str:
    return "the held-out part of the trusted set" if held_out else "the test set"


def write(
    folder: RunFolder, prepared: Prepared, cleaned: Cleaned, net: Classifier, result: Mapping[str, Any], command: str
) -> Path:
    """Write all files, result.json last; return the path of the page."""
    data, found, names = prepared.data, cleaned.denoised, prepared.data.classes
    learned = (found.importance, found.suspect, found.suggested, found.confidence, found.quality)
    columns = (data.positions, data.y, *learned)
    rows = (
        {
            "index": i,
            "label": names[y],
            "importance": f"{w:.6f}",
            "suspect": int(s),
            "suggested": names[c],
            "confidence": f"{p:.6f}",
            "quality": f"{q:.6f}",
            "key": key,
        }
        for i, y, w, s, c, p, q, key in zip(*(column.tolist() for column in columns), data.keys, strict=True)
    )
    folder.write_csv("importance.csv", COLUMNS, rows)
    found.solution.history.to_csv(folder.path / "history.csv")
    about = json.dumps({"model": net.kind, "shape": list(data.x.shape[1:]), "classes": names})
    with whole(folder.path / "model.safetensors") as temporary:  # one entry, as the order of several is not kept
        save_model(found.model.cpu(), str(temporary), metadata={"classifier": about})
    page = folder.write("report.html", render_review(_review(prepared, cleaned, result, command)))
    folder.write_json(RESULT, result)  # last: a folder that has it holds a finished run
    return page


def _review(prepared: Prepared, cleaned: Cleaned, result: Mapping[str, Any], command: str) -> Review:
    data, found, accuracies = prepared.data, cleaned.denoised, cleaned.accuracies
    rows = torch.nonzero(found.suspect).squeeze(1)
    suspects = [
        Suspect(
            int(data.positions[i]),
            data.keys[i],
            int(data.y[i]),
            int(found.suggested[i]),
            float(found.importance[i]),
            float(found.confidence[i]),
            float(found.quality[i]),
        )
        for i in rows.tolist()
    ]
    history = found.solution.history
    return Review(
        run=_browser_key(result, found.importance),
        title=f"Labels of {data.name}",
        outcome=result["message"],
        good=all(accuracies[name] <= accuracies["denoised"] for name in RIVALS if name in accuracies),
        accuracy=_accuracy_table(result),
        classes=data.classes,
        history={"step": history["step"], "upper": history["upper"], "lower": history["lower"]},
        importance=found.importance.numpy(),
        suspects=suspects,
        pictures=thumbnails(data.x, rows, SIDE) if data.kind == "images" else None,
        fields=_fields(data, rows) if data.kind != "images" else None,
        command=command,
        settings=[
            ("Rows", f"{result['rows']:,}, of {len(data.classes)} classes"),
            ("Trusted rows", f"{result['trusted']:,}"),
            ("Method", result["method"]),
            ("Classifier", result["model"]),
            ("Seed", str(result["seed"])),
            ("Steps", f"{result['settings']['steps']:,}, then twice {result['settings']['final_steps']:,}"),
            ("Seconds", f"{result['seconds']:.1f}"),
            ("bilevel", bilevel.__version__),
            ("torch", torch.__version__),
        ],
        notes=result["notes"],
    )


def _browser_key(result: Mapping[str, Any], importance: Tensor) -> str:
    """Return the key of the decisions in the browser: the same for the same importances of the same data."""
    digest = hashlib.sha256(importance.numpy().tobytes()).hexdigest()[:16]
    return f"{result['rows']}-{result['suspects']}-{digest}"


def _fields(data: Labelled, rows: Tensor) -> list[list[tuple[str, str]]]:
    if data.fields:
        columns = list(data.fields.items())[:SHOWN_FIELDS]
        return [[(name, cell_text(values[i])) for name, values in columns] for i in rows.tolist()]
    shown = data.x.flatten(1)[rows, :SHOWN_FIELDS]
    return [[(str(k), f"{value:.3g}") for k, value in enumerate(row)] for row in shown.tolist()]


def _accuracy_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["accuracies"]
    return [(text, f"{100 * found[name]:.1f}%") for name, text in ROWS.items() if name in found]


def _accuracy_table(result: Mapping[str, Any]) -> ReportTable | None:
    rows = _accuracy_rows(result)
    caption = f"Accuracy of the same network, trained for as many steps, on {_part(result['held_out'])}."
    return ReportTable(caption, HEADS, rows) if rows else None


def show(result: Mapping[str, Any]) -> None:
    """Print the accuracies and the message."""
    lines = [result["message"]]
    if result.get("auc") is not None:
        lines.insert(0, f"Of the labels that were made wrong: AUC {result['auc']:.3f}, F1 {result['f1']:.3f}.")
    show_table(HEADS, _accuracy_rows(result), *lines)
