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

from bilevel import __version__
from bilevel._util.atomic_files import whole
from bilevel.applications.tuning.tune_table import TunedTable
from bilevel.cli.folder import Folder
from bilevel.data import Labelled
from bilevel.report.figures import bars, grid, losses
from bilevel.report.page import Card, Report, render
from bilevel.report.page import Table as ReportTable

FILES = ("penalties.csv", "history.csv", "model.safetensors", "result.json", "report.html")
HEADINGS = ("Penalties", "Validation loss", "Test loss")
SAME = 1e-3
"""The share of a loss by which two may differ and be called the same."""


def summary(data: Labelled, found: TunedTable, asked: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    best = found.best
    alike = asked["penalty"] == "single" or (asked["model"] != "mlp" and found.caution is None)
    count = 1 if alike else len(found.names)
    what = "1 penalty" if count == 1 else f"{count:,} penalties"
    valid, test = _beside(found.valid_loss, best.valid_loss), _beside(found.test_loss, best.test_loss)
    message = (
        f"Tuned {what}: the validation loss is {found.valid_loss:.4g}, the test loss {found.test_loss:.4g}; with the "
        f"best of {len(found.grid)} single penalties, by the validation loss, {best.valid_loss:.4g} and "
        f"{best.test_loss:.4g}. {_verdict(valid, test)}"
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
        "worse_than_single": test > 0,
        "rows": data.count,
        "steps": len(found.curve),
        "notes": [*found.notes, *_cautions(valid, test, count, asked, found.caution)],
    }


def _beside(loss: float, other: float) -> int:
    """-1 where the loss is below the other, 1 where it is above, and 0 where they are as good as the same."""
    return 0 if abs(loss - other) <= SAME * abs(other) else -1 if loss < other else 1


def _verdict(valid: int, test: int) -> str:
    words = {-1: "better", 0: "as well", 1: "worse"}
    if valid == test:
        return f"The tuning does {words[test]} on both."
    return f"The tuning does {words[valid]} on the rows that it is made on, and {words[test]} on the test set."


def _cautions(valid: int, test: int, count: int, asked: Mapping[str, Any], caution: float | None) -> list[str]:
    """What to make of a single penalty of the grid that does better than the tuned ones."""
    found, network = [], asked["model"] == "mlp"
    if valid > 0:
        why = "a caution above 0 keeps penalties from fitting them" if caution else "the tuning ended short of it"
        found.append(
            "A single penalty of the grid does better than the tuned ones on the rows that both are chosen by: "
            f"{why}. {'Less --caution, or more' if caution else 'More'} --steps may help."
        )
    if test > 0 and count > 1:
        remedy = (
            "Fewer penalties may help (--penalty single), or more rows; a linear model is tuned on several folds."
            if network
            else f"Tuning on more folds may help (--folds {2 * asked['folds']}), or more caution (--caution "
            f"{max(1, 10 * (caution or 0)):g}), or --penalty single."
        )
        fit = " Penalties can fit the held-out rows that they are tuned on." if valid <= 0 else ""
        found.append(f"On the test set a single penalty of the grid does better than the tuned ones.{fit} {remedy}")
    return found


def write(folder: Folder, data: Labelled, found: TunedTable, result: Mapping[str, Any]) -> Path:
    """Write all files, the result last; returns the path of the page."""
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
    folder.write_json("result.json", result)
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
            note="A small penalty lets a feature speak; a large one silences it. All are in penalties.csv.",
        ),
        Card(
            "The path of the validation loss",
            losses("path", {"validation loss": found.curve}, label="Validation loss against step."),
            note=""
            if result["model"] == "mlp"
            else "A single penalty is tuned first, then one for each feature; a "
            "caution below 1 is reached from 1 in stages. The price of the caution is part of the loss that is shown.",
        ),
        Card(
            "What a grid would have given",
            grid(
                "grid",
                [(p.penalty, p.valid_loss) for p in found.grid],
                found.valid_loss,
                label="Validation loss against a single penalty; the tuned penalties' as a dashed line.",
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
            ("bilevel", __version__),
            ("torch", torch.__version__),
        ],
        notes=result["notes"],
    )


def show(result: Mapping[str, Any]) -> None:
    console, table = Console(), Table(*HEADINGS)
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    if result["test_accuracy"] is not None:
        console.print(f"Right on {100 * result['test_accuracy']:.1f}% of the test set.")
    console.print(result["message"], soft_wrap=True)
