"""What `bilevel tune` does: read, tune under a checkpoint, write and show the result, with a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bilevel._util.atomic_files import atomic_write
from bilevel._util.threads import threads_for
from bilevel.applications.tuning.tune_table import TunedTable, tune_table
from bilevel.cli.option_values import device_of
from bilevel.cli.progress import RunBar, show_table, stages
from bilevel.cli.run_folder import RunFolder, folder_of, made_by, refuse_if, report_result, run_or_resume
from bilevel.data import Labelled, load, load_numbers
from bilevel.report.figures import bars, grid, losses
from bilevel.report.page import Card, Report, Table, render

FILES = ("penalties.csv", "history.csv", "model.safetensors", "result.json", "report.html")
HEADINGS = ("Penalties", "Validation loss", "Test loss")
STAGES = (
    "A single penalty is tuned first, then one for each feature; a caution below 1 is lowered from 1 in stages. The "
    "loss includes the cost of the caution."
)
# Two losses that differ by less than this share count as the same.
SAME = 1e-3
FOLDS = 5


def run(asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Tune the penalties, or continue a run, and show the result."""
    data, model = asked["data"], asked["model"]
    refuse_if(
        {
            "--numbers is for --model ridge, whose labels are always numbers, and for mlp.": asked["numbers"]
            and model == "logistic",
            "--caution is for linear models; leave it out with --model mlp.": model == "mlp"
            and asked["caution"] is not None,
            "--folds is for linear models; leave it out with --model mlp.": model == "mlp"
            and asked["folds"] is not None,
            "--caution is for penalties that differ; leave it out with --penalty single.": asked["penalty"] == "single"
            and asked["caution"] is not None,
            f"--penalty per-layer is for --model mlp; {model} has one layer.": asked["penalty"] == "per-layer"
            and model != "mlp",
        }
    )
    asked = {**asked, "folds": asked["folds"] or FOLDS}
    read = load_numbers if asked["numbers"] or model == "ridge" else load
    loaded = read(data, label=asked["label"], test=asked["test"])
    where = device_of("cpu" if device == "auto" and model != "mlp" else device)
    folder = folder_of(out, "tune", data)

    def work(checkpoint: Path) -> tuple[dict[str, Any], str]:
        with threads_for(loaded.x.numel()), stages() as on_progress:
            found = tune_table(
                loaded,
                model,
                asked["penalty"],
                folds=asked["folds"],
                caution=asked["caution"],
                steps=asked["steps"],
                seed=asked["seed"],
                callbacks=[RunBar("tuning")],
                on_progress=on_progress,
                device=where,
                checkpoint=checkpoint,
            )
        result = summary(loaded, found, asked, where)
        write(folder, loaded, found, model)
        return result, render(_report(loaded, found, result))

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    report_result(result, {"report": folder.path / "report.html"}, show, json=json)


# -- the result and its page -------------------------------------------------------------------------------------------


def summary(data: Labelled, found: TunedTable, asked: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the contents of result.json."""
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
        "method": found.mode,
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


def write(folder: RunFolder, data: Labelled, found: TunedTable, model: str) -> None:
    """Write the penalties, the path of the validation loss and the weights."""
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
    about = {"model": model, "classes": json.dumps(data.classes), "inputs": json.dumps(found.names[:1000])}
    with atomic_write(folder.path / "model.safetensors") as temporary:
        save_file({name: tensor.contiguous() for name, tensor in found.state.items()}, str(temporary), metadata=about)


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
    ends = ", ".join(found.names[i] for i in found.penalties.argsort()[:3].tolist())
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
        table=Table(f"Losses: {measured}.", HEADINGS, _rows(result)),
        cards=cards,
        heading="How it was tuned",
        settings=[
            ("Rows", f"{result['rows']:,}"),
            ("Model", result["model"]),
            ("Penalty", result["penalty"]),
            ("Penalties", f"{result['penalties']:,}"),
            *([("Test accuracy", f"{100 * accuracy:.1f}%")] if accuracy is not None else []),
            ("Device", result["device"]),
            *made_by(result),
        ],
        notes=result["notes"],
    )


def show(result: Mapping[str, Any]) -> None:
    """Print the losses and the message."""
    accuracy = result["test_accuracy"]
    found = "" if accuracy is None else f"Accuracy on the test set: {100 * accuracy:.1f}%."
    show_table(HEADINGS, _rows(result), found, result["message"])
