"""What `bilevel tune` does: read, tune under a checkpoint, write and show the result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bilevel._util.parallel_map import one_thread
from bilevel.applications.tuning.tune_table import TunedTable, tune_table
from bilevel.cli.options import device_of
from bilevel.cli.progress import RunBar, stages
from bilevel.cli.run_folder import folder_of, report_result, run_or_resume
from bilevel.cli.tune_output import FILES, show, summary, write
from bilevel.data import Labelled, load, load_numbers
from bilevel.errors import OptionError

FOLDS = 5
SMALL = 5_000_000
"""The number of input values up to which one thread is as fast as several."""


def run(asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Tune the penalties, or continue a run, and show the result."""
    _refuse(asked)
    asked = {**asked, "folds": asked["folds"] or FOLDS}
    data, model = asked["data"], asked["model"]
    read = load_numbers if asked["numbers"] or model == "ridge" else load
    loaded = read(data, label=asked["label"], test=asked["test"])
    where = device_of("cpu" if device == "auto" and model != "mlp" else device)
    folder = folder_of(out, "tune", data)

    def work(checkpoint: Path) -> dict[str, Any]:
        found = _tune(loaded, asked, where, checkpoint)
        result = summary(loaded, found, asked, where)
        write(folder, loaded, found, result)
        return result

    result = run_or_resume(folder, asked, work, resume=resume, files=FILES)
    report_result(result, show, json=json, report=folder.path / "report.html")


def _refuse(asked: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    model = asked["model"]
    if asked["numbers"] and model == "logistic":
        raise OptionError("--numbers is for --model ridge, whose labels are always numbers, and for mlp.")
    for option in ("caution", "folds"):
        if model == "mlp" and asked[option] is not None:
            raise OptionError(f"--{option} is for linear models; leave it out with --model mlp.")
    if asked["penalty"] == "single" and asked["caution"] is not None:
        raise OptionError("--caution is for penalties that differ; leave it out with --penalty single.")
    if asked["penalty"] == "per-layer" and model != "mlp":
        raise OptionError(f"--penalty per-layer is for --model mlp; {model} has one layer.")


def _tune(data: Labelled, asked: Mapping[str, Any], where: torch.device, checkpoint: Path) -> TunedTable:
    small = where.type == "cpu" and data.x.numel() < SMALL
    with one_thread() if small else nullcontext(), stages() as on_progress:
        return tune_table(
            data,
            asked["model"],
            asked["penalty"],
            folds=asked["folds"],
            caution=asked["caution"],
            steps=asked["steps"],
            seed=asked["seed"],
            callbacks=[RunBar("tuning")],
            tell=on_progress,
            device=where,
            checkpoint=checkpoint,
        )
