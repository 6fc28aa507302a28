"""The run of `bilevel denoise`: read, denoise under a checkpoint, write the files and the page; apply decisions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import ApproxGrad, OptionError
from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import agreeing
from bilevel.applications.comparison.compare import METHODS
from bilevel.applications.default_classifier import Classifier
from bilevel.applications.denoising.clean_dataset import (
    Cleaned,
    Prepared,
    as_bytes,
    channels_last,
    clean,
    is_bytes,
    prepare,
    thumbnails,
)
from bilevel.applications.denoising.denoise import METHOD
from bilevel.cli import estimate_run
from bilevel.cli.denoise_files import FOUND, ISSUES, apply_command, fields_of, suffix_of, threads_for, write_found
from bilevel.cli.option_values import classifier_of, device_of, known
from bilevel.cli.progress import RunBar, show_table, stages
from bilevel.cli.run_folder import RunFolder, folder_of, made_by, refuse_if, report_result, run_or_resume
from bilevel.data import Labelled, apply_decisions, load
from bilevel.data.arrays import array_keys
from bilevel.data.decisions import is_decisions, trusted_by_decisions
from bilevel.distributed.process_group import ProcessGroup, first_rank, restarted
from bilevel.distributed.synchronise import run_on_first
from bilevel.methods.base import Method
from bilevel.report.page import Table
from bilevel.report.review_page import SIDE, Review, Suspect, render_review

# The data with the wrong labels that `--noise` makes, to which decisions are applied.
NOISY = "noisy.npz"
FILES = ("importance.csv", "history.csv", *FOUND, "result.json", "report.html", NOISY)
COLUMNS = ("index", "label", "importance", "suspect", "suggested", "confidence", "quality", "key")
# Methods by name. Forward mode and SRBA cannot learn an importance for each row; the others that are left out need a g
# that is strongly convex in v, or are there to be compared.
UNFIT = ("forward-mode", "soba", "srba", "f2sa", "sama", "stocbio", "amigo")
FIT = {name: method for name, method in METHODS.items() if name not in UNFIT}
FIT["penalty"] = lambda: METHOD
# The curvature of a network has directions of size zero.
FIT["approx-grad"] = partial(ApproxGrad, decay="linear", damping=0.1)
# The training sets, as the tables call them.
ROWS = {
    "denoised": "on the cleaned data",
    "labels as they are": "on the labels as they are",
    "trusted set only": "on the trusted set only",
    "right labels": "on the right labels",
}
HEADS = ("Trained", "Accuracy")
# The other sets that a user could train on.
RIVALS = ("labels as they are", "trusted set only")


def run(
    asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool, *, suggested: bool = False
) -> None:
    """Denoise the data, or continue a run, and show the result; `suggested` writes the data with all suggestions."""
    data, where, began = asked["data"], device_of(device), time.perf_counter()
    known("--method", asked["method"], FIT)
    method = FIT[asked["method"]]()
    loaded, count = _loaded(asked)
    if loaded.trusted is None and count is None and asked["noise"] is None and (data != "digits" or picks(asked)):
        if first_rank():  # one process makes the estimate, however many torchrun starts
            resume = resume or restarted()
            estimate_run.run(loaded, asked, out, where, resume, json, suggested=suggested)
        return
    prepared = prepare(loaded, trusted=count, noise=asked["noise"], kind=asked["noise_kind"], seed=asked["seed"])
    net = classifier_of(asked["model"], prepared.data, data, where, asked["seed"])
    folder = folder_of(out, "denoise", data)
    resume = resume or restarted()
    ranks = ProcessGroup.from_environment(where)
    first = ranks is None or ranks.first

    def work(checkpoint: Path) -> tuple[dict[str, Any], str]:
        ready, source, label = prepared, data, asked["label"]
        if asked["noise"] is not None:
            source, label = str(folder.path / NOISY), None
            if first:
                ready = replace(prepared, data=write_noisy(folder, prepared.data))
        cleaned = _clean(ready, net, method, asked, checkpoint, resume)
        if not first:
            return {}, ""
        result = summary(ready, cleaned, net, asked, time.perf_counter() - began, where)
        write(folder, ready, cleaned, net)
        return result, render_review(_review(ready, cleaned, result, apply_command(source, label)))

    once = {} if ranks is None else {"once": partial(run_on_first, ranks)}
    result = run_or_resume(folder, asked, work, resume=resume, files=FILES, first=first, **once)
    if first:
        files = {"report": folder.path / "report.html"}
        if suggested:
            source, label = (data, asked["label"]) if asked["noise"] is None else (str(folder.path / NOISY), None)
            files["cleaned data"] = cleaned = folder.path / f"cleaned{suffix_of(source)}"
            if not cleaned.exists():
                apply_decisions(source, folder.path / ISSUES, cleaned, label=label)
        report_result(result, files, show, json=json)


def picks(asked: Mapping[str, Any]) -> bool:
    return asked["pick_trusted"] is not None


def _loaded(asked: Mapping[str, Any]) -> tuple[Labelled, int | None]:
    """Return the data, and the number of rows to draw as trusted: None if a file has them or none is given."""
    data, noise, kind, trusted = asked["data"], asked["noise"], asked["noise_kind"], asked["trusted"]
    count = int(trusted) if trusted is not None and trusted.lstrip("+-").isdigit() else None
    refuse_if(
        {
            f"--noise-kind {kind} says which labels --noise makes; give --noise as well.": noise is None
            and kind != "symmetric",
            f"--trusted must be a file, or a number of rows of at least 1; got {trusted}.": count is not None
            and count < 1,
            "--pick-trusted chooses rows to check; leave --trusted and --noise out.": picks(asked)
            and not trusted is noise is None,
        }
    )
    if count is None and trusted is not None and is_decisions(trusted):
        return trusted_by_decisions(load(data, label=asked["label"], test=asked["test"]), trusted), None
    loaded: Labelled = load(data, label=asked["label"], trusted=trusted if count is None else None, test=asked["test"])
    if picks(asked) and loaded.trusted is not None:
        raise OptionError(f"--pick-trusted must be left out: {data} has trusted rows.")
    return loaded, count


def _clean(
    prepared: Prepared, net: Classifier, method: Method, asked: Mapping[str, Any], checkpoint: Path, resume: bool
) -> Cleaned:
    with threads_for(net.network), stages() as on_progress:
        return clean(
            prepared,
            net.network,
            method=method,
            steps=asked["steps"],
            augment=net.augment,
            baselines=asked["baselines"],
            seed=asked["seed"],
            checkpoint=checkpoint,
            resume=resume,
            callbacks=[RunBar("learning importances")],
            on_progress=on_progress,
        )


def apply_to_data(data: str, decisions: Path, out: Path | None, label: str | None, json: bool) -> None:
    """Write the data as the decisions of a review say."""
    if not first_rank():
        return
    if out is None:
        raise OptionError(f"--apply needs --out, the cleaned data, as in `{apply_command(data, label)}`.")
    done = apply_decisions(data, decisions, out, label=label)
    result = {
        "command": "denoise --apply",
        "status": "done",
        "message": f"{done.rows:,} rows: {done.dropped:,} dropped, {done.relabelled:,} relabelled, "
        f"{done.unchanged:,} unchanged.",
        "out": str(done.out),
        "rows": done.rows,
        "dropped": done.dropped,
        "relabelled": done.relabelled,
        "unchanged": done.unchanged,
        "notes": list(done.notes),
    }
    report_result(result, {"data": done.out}, json=json)


# -- the result and its page -------------------------------------------------------------------------------------------


def write_noisy(folder: RunFolder, data: Labelled) -> Labelled:
    """Write the data with the labels that `--noise` made, for decisions to be applied to; rows are named by number."""
    names = np.array(data.classes)
    given = {"": (data.x, data.y), "_trusted": data.trusted, "_test": data.test}
    parts = {suffix: pair for suffix, pair in given.items() if pair is not None}
    array: Callable[[Tensor], np.ndarray] = Tensor.numpy
    if data.kind == "images":
        array = as_bytes if all(is_bytes(x) for x, _ in parts.values()) else channels_last
    arrays = {f"x{suffix}": array(x) for suffix, (x, _) in parts.items()}
    arrays |= {f"y{suffix}": names[y.numpy()] for suffix, (_, y) in parts.items()}
    with atomic_write(folder.path / NOISY) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return replace(data, positions=np.arange(data.count), keys=array_keys(arrays["x"], arrays["y"].tolist()))


def summary(
    prepared: Prepared,
    cleaned: Cleaned,
    net: Classifier,
    asked: Mapping[str, Any],
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Return the contents of result.json."""
    data, found = prepared.data, cleaned.denoised
    suspects = int(found.suspect.sum())
    share = f"{suspects:,} of {data.count:,} labels ({100 * found.noise_rate:.1f}%)"
    message = f"{share} {agreeing(suspects, 'is', 'are')} probably wrong."
    if "denoised" in cleaned.accuracies:
        shares = [f"{ROWS[name]}: {100 * cleaned.accuracies[name]:.1f}%" for name in ROWS if name in cleaned.accuracies]
        message += f" Accuracy on {_part(prepared.held_out)} after training {', '.join(shares)}."
    measured = {"auc": cleaned.auc, "f1": cleaned.f1} if prepared.truth is not None else {}
    if found.solution.ranks > 1:
        measured |= {"ranks": found.solution.ranks, "bytes_per_step": found.solution.bytes_per_step}
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
        "notes": [*prepared.notes, *filter(None, [net.why]), *cleaned.notes],
    }


def _part(held_out: bool) -> str:
    return "the held-out part of the trusted set" if held_out else "the test set"


def write(folder: RunFolder, prepared: Prepared, cleaned: Cleaned, net: Classifier) -> None:
    """Write the importances, the history of the bilevel run, and the trained classifier with its preparation."""
    data, found, names = prepared.data, cleaned.denoised, prepared.data.classes
    columns = (
        data.positions,
        data.y,
        found.importance,
        found.suspect,
        found.suggested,
        found.confidence,
        found.quality,
    )
    rows = [
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
    ]
    folder.write_csv("importance.csv", COLUMNS, rows)
    found.solution.history.to_csv(folder.path / "history.csv")
    parts = {"suspect": found.suspect, "quality": found.quality, "suggested": found.suggested}
    write_found(folder, data, found.model, net.kind, weight=found.importance, **parts)


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
    history, rates = found.solution.history, _accuracy_rows(result)
    caption = f"Accuracy of the same network, trained for as many steps, on {_part(result['held_out'])}."
    digest = hashlib.sha256(found.importance.numpy().tobytes()).hexdigest()[:16]
    return Review(
        run=f"{result['rows']}-{result['suspects']}-{digest}",  # the key of the decisions in the browser
        title=f"Labels of {data.name}",
        outcome=result["message"],
        good=all(accuracies[name] <= accuracies["denoised"] for name in RIVALS if name in accuracies),
        accuracy=Table(caption, HEADS, rates) if rates else None,
        classes=data.classes,
        history={"step": history["step"], "upper": history["upper"], "lower": history["lower"]},
        importance=found.importance.numpy(),
        suspects=suspects,
        pictures=thumbnails(data.x, rows, SIDE) if data.kind == "images" else None,
        fields=fields_of(data, rows) if data.kind != "images" else None,
        command=command,
        settings=[
            ("Rows", f"{result['rows']:,}, of {len(data.classes)} classes"),
            ("Trusted rows", f"{result['trusted']:,}"),
            ("Method", result["method"]),
            ("Classifier", result["model"]),
            ("Steps", f"{result['settings']['steps']:,}, then twice {result['settings']['final_steps']:,}"),
            *made_by(result),
        ],
        notes=result["notes"],
    )


def _accuracy_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["accuracies"]
    return [(text, f"{100 * found[name]:.1f}%") for name, text in ROWS.items() if name in found]


def show(result: Mapping[str, Any]) -> None:
    """Print the accuracies and the message."""
    auc = result.get("auc")
    found = "" if auc is None else f"Of the labels that were made wrong: AUC {auc:.3f}, F1 {result['f1']:.3f}."
    show_table(HEADS, _accuracy_rows(result), found, result["message"])
