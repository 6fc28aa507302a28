"""`bilevel denoise`: find wrong labels with the help of a trusted set, review them, write the data without them."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel._util.checks import did_you_mean
from bilevel._util.parallel_map import one_thread
from bilevel.applications.comparison.compare import METHODS
from bilevel.applications.default_classifier import KINDS, Classifier
from bilevel.applications.denoising.clean_dataset import Cleaned, Prepared, clean, prepare
from bilevel.cli.denoise_output import FILES, NOISY, apply_command, show, summary, write, write_noisy
from bilevel.cli.device import device_of
from bilevel.cli.given import refuse
from bilevel.cli.model import classifier_of
from bilevel.cli.options import DataArgument, DeviceOption, JsonOption, LabelOption, ResumeOption, SeedOption
from bilevel.cli.progress import RunBar, StageBar
from bilevel.cli.run_state import begin, finished, folder_of, resumable
from bilevel.cli.telling import tell
from bilevel.data import apply_decisions, load
from bilevel.distributed.process_group import ProcessGroup, first_rank, restarted
from bilevel.distributed.synchronise import run_on_first
from bilevel.errors import OptionError
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.base import Method

SMALL = 500_000
"""Weights up to which one thread is as fast as several."""
FIT = {name: method for name, method in METHODS.items() if name != "forward-mode"}
"""Methods by name: forward mode has no importances row by row."""
FIT["approx-grad"] = partial(ApproxGrad, damping=0.1)  # the curvature of a network has directions of size zero


class Noise(StrEnum):
    symmetric = "symmetric"
    asymmetric = "asymmetric"


OF_A_RUN = ("trusted", "test", "noise", "noise_kind", "model", "method", "steps", "baselines", "seed", "resume")
"""Options that --apply has no use for."""


def command(
    context: typer.Context,
    data: DataArgument,
    trusted: Annotated[
        str | None,
        typer.Option(
            help="A file or folder of the same form with right labels, or how many rows to draw as trusted; with "
            "--noise, and of digits, ten for each class by default."
        ),
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="A file or folder of the same form to measure accuracies on.")
    ] = None,
    label: LabelOption = None,
    noise: Annotated[
        float | None, typer.Option(help="Make this share of the labels wrong on purpose, to see how it does.")
    ] = None,
    noise_kind: Annotated[
        Noise | None,
        typer.Option(
            help="What a wrong label of --noise is: any other class (symmetric), or the next one (asymmetric).",
            show_default="symmetric",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(KINDS)}, or path.py:make with make(shape, classes).")
    ] = "auto",
    method: Annotated[str, typer.Option(help=f"{', '.join(FIT)}.")] = "penalty",
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps of the bilevel run, and of each training before and after it; by default 12 passes over the "
            "data, and at least 1,200.",
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Also train on the labels as they are, and on the trusted rows alone, to compare.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run; with --apply, the cleaned data.", show_default="runs/denoise-DATA"),
    ] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    apply: Annotated[
        Path | None,
        typer.Option(
            help="Decisions exported from a report: write the data without the dropped and with the new labels."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the wrong labels of a data set with the help of a few right ones.

    Every training example gets an importance, learnt so that a classifier trained with it does well on the trusted set.
    The run folder has importance.csv, the classifier, result.json, and report.html to review the suspects in. What is
    exported there, `bilevel denoise DATA --apply decisions.csv --out cleaned.npz` turns into cleaned data.
    """
    if apply is not None:
        refuse(context, OF_A_RUN, "--apply, which runs nothing")
        if first_rank():
            _apply(data, apply, out, label, json)
        return
    asked = {
        "command": "denoise",
        "data": data,
        "trusted": trusted,
        "test": test,
        "label": label,
        "noise": noise,
        "noise_kind": str(noise_kind or Noise.symmetric),
        "model": model,
        "method": method,
        "steps": steps,
        "baselines": baselines,
        "seed": seed,
    }
    where = device_of(device)
    chosen = _method(method)
    if noise_kind is not None and noise is None:
        raise OptionError(f"--noise-kind {noise_kind} says what a wrong label of --noise is; give --noise, too.")
    count, file = _trusted(trusted)
    loaded = load(data, label=label, trusted=file, test=test)
    if loaded.trusted is None and count is None and noise is None and data != "digits":
        raise OptionError(
            f"--trusted is needed, as {data} has no trusted rows: a file of rows whose labels are right, or how many "
            "rows to draw as such."
        )
    prepared = prepare(loaded, trusted=count, noise=noise, kind=(noise_kind or Noise.symmetric).value, seed=seed)
    net = classifier_of(model, prepared.data, data, where, seed)
    folder = folder_of(out, "denoise", data)
    resume = resume or restarted()

    def opened() -> tuple[dict[str, Any] | None, Path | None]:
        done = finished(folder, asked) if resume else None
        return done, None if done is not None else begin(folder, asked, resume, (*FILES, NOISY))

    ranks = ProcessGroup.from_environment(where)
    first = ranks is None or ranks.first
    done, checkpoint = opened() if ranks is None else run_on_first(ranks, opened)
    if done is not None or checkpoint is None:
        if first:
            print("note: this run is finished already.", file=sys.stderr)
            tell(done or {}, show, json=json, report=folder.path / "report.html")
        return
    began = time.perf_counter()
    with resumable(checkpoint, first=first, files=(NOISY,)):
        if noise is not None and first:
            prepared = replace(prepared, data=write_noisy(folder, prepared.data))
        cleaned = _run(prepared, net, chosen, steps, baselines, seed, checkpoint, resume)
    if not first:
        return
    result = summary(prepared, cleaned, net, asked, time.perf_counter() - began, where)
    source = data if noise is None else str(folder.path / NOISY)
    write(folder, prepared, cleaned, net, result, apply_command(source, label if noise is None else None))
    shutil.rmtree(checkpoint, ignore_errors=True)
    tell(result, show, json=json, report=folder.path / "report.html")


# -- what was asked for ------------------------------------------------------------------------------------------------


def _apply(data: str, decisions: Path, out: Path | None, label: str | None, json: bool) -> None:
    if out is None:
        example = shlex.split(apply_command(data, label))[-1]
        raise OptionError(f"--apply needs --out: where to write the cleaned data, such as {example}.")
    done = apply_decisions(data, decisions, out, label=label)
    counts = f"{done.dropped:,} dropped, {done.relabelled:,} relabelled, {done.unchanged:,} as they were"
    message = f"{done.rows:,} rows: {counts}."
    result = {
        "command": "denoise --apply",
        "status": "done",
        "message": message,
        "out": str(done.out),
        "rows": done.rows,
        "dropped": done.dropped,
        "relabelled": done.relabelled,
        "unchanged": done.unchanged,
        "notes": list(done.notes),
    }
    tell(result, lambda result: typer.echo(result["message"]), json=json, data=done.out)


def _method(name: str) -> Method:
    if name not in FIT:
        raise OptionError(f"--method has no {name!r}.{did_you_mean(name, FIT)} It knows {', '.join(FIT)}.")
    return FIT[name]()


def _trusted(text: str | None) -> tuple[int | None, str | None]:
    """A number of rows to draw, or a file."""
    if text is None:
        return None, None
    try:
        count = int(text)
    except ValueError:
        return None, text
    if count < 1:
        raise OptionError(f"--trusted must be a file, or a number of rows of at least 1; got {text}.")
    return count, None


# -- the run -----------------------------------------------------------------------------------------------------------


def _run(
    prepared: Prepared,
    net: Classifier,
    method: Method,
    steps: int | None,
    baselines: bool,
    seed: int,
    checkpoint: Path,
    resume: bool,
) -> Cleaned:
    bar = StageBar()
    weights = sum(p.numel() for p in net.network.parameters())
    small = next(net.network.parameters()).device.type == "cpu" and weights < SMALL
    try:
        with one_thread() if small else nullcontext():
            return clean(
                prepared,
                net.network,
                method=method,
                steps=steps,
                augment=net.augment,
                baselines=baselines,
                seed=seed,
                checkpoint=checkpoint,
                resume=resume,
                callbacks=[RunBar("learning importances")],
                tell=bar.tell,
            )
    finally:
        bar.stop()
