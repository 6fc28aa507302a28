"""The folder of a tuning: its result, its files, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import bilevel
from bilevel._util.atomic_files import whole
from bilevel.applications.tuning.tune_table import TunedTable
from bilevel.cli.run_folder import RESULT, RunFolder
from bilevel.data import Labelled
from bilevel.report.figures import losses
from bilevel.report.page import Card, Report, render
from bilevel.report.page import Table as ReportTable
from bilevel.report.tuning_figures import bars, grid

FILES = ("penalties.csv", "history.csv", "model.safetensors", "result.json", "report.html")
HEADINGS = ("Penalties", "Validation loss", "Test loss")
STAGES = (
    "A single penalty is tuned first, then one for each feature; a caution below 1 is lowered from 1 in stages. The "
    "loss includes the cost of the caution."
)
SAME = 1e-3
"""Two losses that differ by less than this share count as the same."""


def summary(data: Labelled, found: TunedTable, asked: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    best = found.best
    alike = asked["penalty"] == "single" or (asked["model"] != "mlp" and found.caution is None)
    count = 1 if alike else len(found.names)
    message = (
        f"Tuned {'1 penalty' if count == 1 else f'{count:,} penalties'}: validation loss {found.valid_loss:.4g}, test "
        f"loss {found.test_loss:.4g}. The best of {len(found.grid)} single penalties by the validation loss: "
        f"{best.valid_loss:.4g} and {best.test_loss:.4g}."
    )
    worse = found.test_loss > (1 + SAME) * best.test_loss
    notes = list(found.notes)
    if worse and count > 1:
        notes.append(
            "On the test set a single penalty of the grid does better than the tuned ones: penalties can fit the rows "
            f"that are held out. {'' if asked['model'] == 'mlp' else 'More --folds, more --caution, or '}"
            "--penalty single can help."
        )
    return {
        "command": "tune",
        "method": "convex" if asked["model"] != "mlp" else "penalty",
        "status": "done",
        "message": message,
        "seed": asked["seed"],
        "seconds": round(found.seconds, 3),
        "model": asked["model"],
        "penalty": asked["penalty"],
        "penalties": count,
        "valid_loss": found.valid_loss,
        "test_loss": found.test_loss,
        "test_accuracy": found.test_accuracy,
        "caution": found.caution,
        "device": str(device),
        "grid": [vars(point) for point in found.grid],
        "best_single": vars(best),
        "worse_than_single": worse,
        "rows": data.count,
        "steps": len(found.curve),
        "notes": notes,
    }


def write(folder: RunFolder, data: Labelled, found: TunedTable, result: Mapping[str, Any]) -> Path:
    """Write all files, the result last; return the path of the page."""
    rows = sorted(zip(found.names, found.penalties.tolist(), found.sizes.tolist(), strict=True), key=lambda row: row[1])
    folder.write_csv(
        "penalties.csv",
        ("name", "penalty", "weight"),
        ({"name": name, "penalty": f"{p:.6g}", "weight": f"{w:.6g}"} for name, p, w in rows),
    )
    folder.write_csv(
        "history.csv",
        ("step", "valid_loss"),
        ({"step": k, "valid_loss": f"{value:.9g}"} for k, value in enumerate(found.curve)),
    )
    about = {
        "model": str(result["model"]),
        "classes": json.dumps(data.classes),
        "inputs": json.dumps(found.names[:1000]),
    }
    with whole(folder.path / "model.safetensors") as temporary:
        save_file({name: tensor.contiguous() for name, tensor in found.state.items()}, str(temporary), metadata=about)
    page = folder.write("report.html", render(_report(data, found, result)))
    folder.write_json(RESULT, result)
    return page


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    best = result["best_single"]
    return [
        (
            "tuned, single" if result["penalties"] == 1 else f"tuned, {result['penalty']}",
            f"{result['valid_loss']:.4g}",
            f"{result['test_loss']:.4g}",
        ),
        (
            f"the best single one of a grid, {best['penalty']:.3g}",
            f"{best['valid_loss']:.4g}",
            f"{best['test_loss']:.4g}",
        ),
    ]


def _report(data: Labelled, found: TunedTable, result: Mapping[str, Any]) -> Report:
    measured = "mean of -log(probability of the class)" if data.classes else "half of the mean squared error"
    order = found.penalties.argsort().tolist()
    ends = ", ".join(found.names[i] for i in order[:3])
    cards = [
        Card(
            "The penalties, sorted",
            bars("penalties", found.names, found.penalties.tolist(), label=f"Penalties; the least penalised: {ends}."),
            note="A feature with a small penalty counts; one with a large penalty does not. All are in penalties.csv.",
        ),
        Card(
            "The path of the validation loss",
            losses("path", {"validation loss": found.curve}, label="Validation loss against step."),
            note="" if result["model"] == "mlp" else STAGES,
        ),
        Card(
            "The losses of a grid",
            grid(
                "grid",
                [(p.penalty, p.valid_loss) for p in found.grid],
                found.valid_loss,
                label="Validation loss against a single penalty. Dashed: with the tuned penalties.",
            ),
        ),
    ]
    accuracy = result["test_accuracy"]
    return Report(
        title=f"Penalties of {data.name}",
        outcome=result["message"],
        good=not result["worse_than_single"],
        table=ReportTable(f"Losses: {measured}.", HEADINGS, _rows(result)),
        cards=cards,
        heading="How it was tuned",
        settings=[
            ("Rows", f"{result['rows']:,}"),
            ("Model", result["model"]),
            ("Penalty", result["penalty"]),
            ("Penalties", f"{result['penalties']:,}"),
            ("Seed", str(result["seed"])),
            *([("Test accuracy", f"{100 * accuracy:.1f}%")] if accuracy is not None else []),
            ("Device", result["device"]),
            ("Seconds", f"{result['seconds']:.1f}"),
            ("bilevel", bilevel.__version__),
            ("torch", torch.__version__),
        ],
        notes=result["notes"],
    )


def show(result: Mapping[str, Any]) -> None:
    """Print the losses and the message."""
    console, table = Console(), Table(*HEADINGS)
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    if result["test_accuracy"] is not None:
        console.print(f"Accuracy on the test set: {100 * result['test_accuracy']:.1f}%.")
    console.print(result["message"], soft_wrap=True)
