"""What `bilevel denoise` does: read, denoise under a checkpoint, write and show the result."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bilevel._util.checks import did_you_mean
from bilevel._util.parallel_map import one_thread
from bilevel.applications.comparison.compare import METHODS
from bilevel.applications.default_classifier import Classifier
from bilevel.applications.denoising.clean_dataset import Cleaned, Prepared, clean, prepare
from bilevel.cli.denoise_output import FILES, NOISY, apply_command, show, summary, write, write_noisy
from bilevel.cli.options import device_of
from bilevel.cli.progress import RunBar, stages
from bilevel.cli.run_folder import CHECKPOINT, folder_of, open_run, report_result, resumable
from bilevel.cli.user_code import classifier_of
from bilevel.data import Labelled, apply_decisions, load
from bilevel.distributed.process_group import ProcessGroup, first_rank, restarted
from bilevel.distributed.synchronise import run_on_first
from bilevel.errors import OptionError
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.base import Method

SMALL = 500_000
"""The number of weights up to which one thread is as fast as several."""
FIT = {name: method for name, method in METHODS.items() if name != "forward-mode"}
"""Methods by name. Forward mode cannot learn an importance for each row."""
FIT["approx-grad"] = partial(ApproxGrad, damping=0.1)  # the curvature of a network has directions of size zero


def run(asked: Mapping[str, Any], out: Path | None, device: str, resume: bool, json: bool) -> None:
    """Denoise the data, or continue a run, and show the result."""
    data, where, began = asked["data"], device_of(device), time.perf_counter()
    method = method_of(asked["method"])
    prepared = _prepared(asked)
    net = classifier_of(asked["model"], prepared.data, data, where, asked["seed"])
    folder = folder_of(out, "denoise", data)
    resume = resume or restarted()
    ranks = ProcessGroup.from_environment(where)
    first = ranks is None or ranks.first
    opened = partial(open_run, folder, asked, resume, (*FILES, NOISY))
    result = opened() if ranks is None else run_on_first(ranks, opened)
    if result is None:
        checkpoint = folder.path / CHECKPOINT
        with resumable(checkpoint, (*FILES, NOISY), first=first):
            if asked["noise"] is not None and first:
                prepared = replace(prepared, data=write_noisy(folder, prepared.data))
            cleaned = _clean(prepared, net, method, asked, checkpoint, resume)
        if not first:
            return
        result = summary(prepared, cleaned, net, asked, time.perf_counter() - began, where)
        source, label = (data, asked["label"]) if asked["noise"] is None else (str(folder.path / NOISY), None)
        write(folder, prepared, cleaned, net, result, apply_command(source, label))
        shutil.rmtree(checkpoint, ignore_errors=True)
    if first:
        report_result(result, show, json=json, report=folder.path / "report.html")


def _prepared(asked: Mapping[str, Any]) -> Prepared:
    """Read the data and set the trusted rows apart."""
    data, noise, kind = asked["data"], asked["noise"], asked["noise_kind"]
    if noise is None and kind != "symmetric":
        raise OptionError(f"--noise-kind {kind} says which labels --noise makes; give --noise as well.")
    count, file = _trusted(asked["trusted"])
    loaded: Labelled = load(data, label=asked["label"], trusted=file, test=asked["test"])
    if loaded.trusted is None and count is None and noise is None and data != "digits":
        raise OptionError(
            f"--trusted is needed, as {data} has no trusted rows: a file of rows whose labels are right, or how many "
            "rows to draw."
        )
    return prepare(loaded, trusted=count, noise=noise, kind=kind, seed=asked["seed"])


def _trusted(text: str | None) -> tuple[int | None, str | None]:
    """Split --trusted into a number of rows and a file."""
    if text is None or not text.lstrip("+-").isdigit():
        return None, text
    if int(text) < 1:
        raise OptionError(f"--trusted must be a file, or a number of rows of at least 1; got {text}.")
    return int(text), None


def method_of(name: str) -> Method:
    """Return the method that --method names."""
    if name not in FIT:
        raise OptionError(f"--method must be one of {', '.join(FIT)}; got {name!r}.{did_you_mean(name, FIT)}")
    return FIT[name]()


def threads_for(network: torch.nn.Module) -> Any:
    """Return a context with one thread for a small network on the CPU."""
    parameters = list(network.parameters())
    small = parameters[0].device.type == "cpu" and sum(p.numel() for p in parameters) < SMALL
    return one_thread() if small else nullcontext()


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
            tell=on_progress,
        )


def apply_to_data(data: str, decisions: Path, out: Path | None, label: str | None, json: bool) -> None:
    """Write the data as the decisions of a review say."""
    if not first_rank():
        return
    if out is None:
        example = shlex.split(apply_command(data, label))[-1]
        raise OptionError(f"--apply needs --out: where to write the cleaned data, such as {example}.")
    done = apply_decisions(data, decisions, out, label=label)
    counts = f"{done.dropped:,} dropped, {done.relabelled:,} relabelled, {done.unchanged:,} unchanged"
    result = {
        "command": "denoise --apply",
        "status": "done",
        "message": f"{done.rows:,} rows: {counts}.",
        "out": str(done.out),
        "rows": done.rows,
        "dropped": done.dropped,
        "relabelled": done.relabelled,
        "unchanged": done.unchanged,
        "notes": list(done.notes),
    }
    report_result(result, lambda result: print(result["message"]), json=json, data=done.out)
