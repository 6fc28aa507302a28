"""`bilevel denoise` without a trusted set: a cross-validated estimate, or rows to check, with a page to review them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel._util.checks import agreeing, counted, in_range
from bilevel.applications.default_classifier import Classifier
from bilevel.applications.denoising.clean_dataset import thumbnails
from bilevel.applications.denoising.cross_validation import Estimate, cross_validate, rows_to_check
from bilevel.applications.training import accuracy
from bilevel.cli.denoise_files import FOUND, ISSUES, apply_command, fields_of, suffix_of, threads_for, write_found
from bilevel.cli.option_values import classifier_of
from bilevel.cli.progress import stages
from bilevel.cli.run_folder import folder_of, made_by, refuse_if, report_result, run_or_resume
from bilevel.data import Labelled, apply_decisions
from bilevel.report.page import Table
from bilevel.report.review_page import SIDE, Review, Suspect, render_review

FILES = (*FOUND, "result.json", "report.html")
NOTE = (
    "Nothing is trusted, so this is an estimate by cross-validation, as cleanlab makes it: mistakes that follow a rule "
    "stay hidden. `--pick-trusted 100` chooses rows to check, and --trusted with their decisions finds more."
)


def run(
    data: Labelled,
    asked: Mapping[str, Any],
    out: Path | None,
    device: torch.device,
    resume: bool,
    json: bool,
    *,
    suggested: bool,
) -> None:
    """Estimate which labels are wrong, or choose the rows to check, and show the result."""
    pick, began = asked["pick_trusted"], time.perf_counter()
    method, baselines = asked["method"], asked["baselines"]
    refuse_if(
        {
            f"--method {method} needs a trusted set; give --trusted, or leave --method out.": method != "penalty",
            "--no-baselines must be left out without --trusted; the estimate has no baselines.": not baselines,
            "--apply suggested must be left out with --pick-trusted, which only chooses rows.": suggested
            and pick is not None,
        }
    )
    in_range("pick_trusted", pick, least=len(data.classes), below=data.count)
    net = classifier_of(asked["model"], data, asked["data"], device, asked["seed"])
    folder = folder_of(out, "denoise" if pick is None else "pick", asked["data"])

    def work(checkpoint: Path) -> tuple[dict[str, Any], str]:
        with threads_for(net.network), stages() as on_progress:
            found = cross_validate(
                (data.x, data.y),
                net.network,
                steps=asked["steps"],
                augment=net.augment,
                seed=asked["seed"],
                checkpoint=checkpoint,
                on_progress=lambda stage, done, total: on_progress(f"training: {stage}", done, total),
            )
        rows = found.suspect.nonzero().squeeze(1).numpy() if pick is None else rows_to_check(data, found, pick)
        result = summary(data, found, net, asked, rows, device)
        result["seconds"] = round(time.perf_counter() - began, 3)
        parts = {"suspect": found.suspect, "quality": found.quality, "suggested": found.suggested}
        write_found(folder, data, net.network, net.kind, weight=(~found.suspect).double(), **parts)
        return result, render_review(review(data, found, result, rows, asked))

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    files = {"report": folder.path / "report.html"}
    if suggested:
        files["cleaned data"] = cleaned = folder.path / f"cleaned{suffix_of(asked['data'])}"
        if not cleaned.exists():
            apply_decisions(asked["data"], folder.path / ISSUES, cleaned, label=asked["label"])
    report_result(result, files, json=json)


def summary(
    data: Labelled,
    found: Estimate,
    net: Classifier,
    asked: Mapping[str, Any],
    rows: Sequence[int] | np.ndarray,
    device: torch.device,
) -> dict[str, Any]:
    """Return the contents of result.json."""
    suspects, pick = int(found.suspect.sum()), asked["pick_trusted"]
    share = f"{suspects:,} of {data.count:,} labels ({100 * found.noise_rate:.1f}%)"
    message = f"{share} {agreeing(suspects, 'is', 'are')} probably wrong, estimated by cross-validation."
    accuracies = {} if data.test is None else {"without the suspects": accuracy(net.network, data.test)}
    if accuracies:
        message += f" Accuracy on the test set without the suspects: {100 * accuracies['without the suspects']:.1f}%."
    if pick is not None:
        message = f"{counted(len(rows), 'row')} to check, of {data.count:,}. {message}"
    return {
        "command": "denoise",
        "method": "cross-validation",
        "status": "done",
        "message": message,
        "seed": asked["seed"],
        "seconds": 0.0,
        "noise_rate": found.noise_rate,
        "suspects": suspects,
        "rows": data.count,
        "trusted": 0,
        "to_check": [int(data.positions[i]) for i in rows] if pick is not None else [],
        "classes": list(data.classes),
        "test_accuracy": accuracies.get("without the suspects"),
        "accuracies": accuracies,
        "model": net.kind,
        "device": str(device),
        "notes": [*data.notes, *filter(None, [net.why]), *([NOTE] if pick is None else [])],
    }


def review(
    data: Labelled, found: Estimate, result: Mapping[str, Any], rows: np.ndarray, asked: Mapping[str, Any]
) -> Review:
    """Return the page to review the suspects, or the rows to check."""
    suspects = [
        Suspect(
            int(data.positions[i]),
            data.keys[i],
            int(data.y[i]),
            int(found.suggested[i]),
            float(found.quality[i]),
            float(found.confidence[i]),
        )
        for i in rows.tolist()
    ]
    at = torch.from_numpy(rows)
    digest = hashlib.sha256(found.quality.numpy().tobytes()).hexdigest()[:16]
    pick, names = asked["pick_trusted"], ["--label", asked["label"]] if asked["label"] else []
    command = apply_command(asked["data"], asked["label"])
    if pick is not None:
        command = " ".join(["bilevel", "denoise", asked["data"], *names, "--trusted", "decisions.csv"])
    shares = [(name, f"{100 * share:.1f}%") for name, share in result["accuracies"].items()]
    return Review(
        run=f"{result['rows']}-{len(rows)}-{digest}",
        title=f"Labels of {data.name}" if pick is None else f"Labels of {data.name} to check",
        outcome=result["message"],
        good=True,
        accuracy=Table("Accuracy on the test set.", ("Trained", "Accuracy"), shares) if shares else None,
        classes=data.classes,
        history={},
        importance=found.quality.numpy(),
        suspects=suspects,
        pictures=thumbnails(data.x, at, SIDE) if data.kind == "images" else None,
        fields=fields_of(data, at) if data.kind != "images" else None,
        command=command,
        settings=[
            ("Rows", f"{result['rows']:,}, of {len(data.classes)} classes"),
            ("Method", result["method"]),
            ("Classifier", result["model"]),
            *made_by(result),
        ],
        notes=result["notes"],
        counted="Suspects: estimated wrong labels" if pick is None else "Rows to check",
        heading="Suspects" if pick is None else "Rows to check",
    )
