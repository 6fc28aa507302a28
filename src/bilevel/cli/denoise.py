"""`bilevel denoise`: find wrong labels with the help of a trusted set, review them, write the data without them."""

from __future__ import annotations

import hashlib
import json as jsonlib
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..applications.classifiers import KINDS, Classifier, classifier
from ..applications.cleaning import Cleaned, Prepared, clean, pictures, prepare
from ..applications.comparison import METHODS
from ..callbacks import Progress
from ..cells import one_thread
from ..data import Labelled, apply_decisions, load
from ..errors import OptionError
from ..options import did_you_mean
from ..report import Table as ReportTable
from ..report.review import Review, Suspect, render_review
from . import python_file
from .bar import progress_bar
from .folder import Folder, to_json

COLUMNS = ("index", "label", "importance", "suspect", "suggested", "confidence", "quality", "key")
CHECKPOINT = "checkpoint"
NOISY = "noisy.npz"
"""The data with the wrong labels that `--noise` makes: what decisions are applied to."""
SMALL = 500_000
"""Weights up to which one thread is as fast as several."""
SHOWN_FIELDS = 12
"""Numbers of an example of an array that the page shows."""


class Noise(StrEnum):
    symmetric = "symmetric"
    asymmetric = "asymmetric"


def command(
    data: Annotated[
        str,
        typer.Argument(
            help="digits, mnist, fashion-mnist, cifar10, svhn; or a .npz, .csv or .parquet file, or a folder of images "
            "in class folders.",
            show_default=False,
        ),
    ],
    trusted: Annotated[
        str | None,
        typer.Option(help="A file or folder of the same form with right labels, or how many rows to draw as trusted."),
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="A file or folder of the same form to measure accuracies on.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the labels, in a table.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Make this share of the labels wrong on purpose, to see how it does.")
    ] = None,
    noise_kind: Annotated[Noise, typer.Option(help="Any other class, or always the next one.")] = Noise.symmetric,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(KINDS)}, or path.py:make with make(shape, classes).")
    ] = "auto",
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}.")] = "penalty",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the bilevel run; by default 12 passes and at least 1,200.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Train what the result is compared with, too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run; with --apply, the cleaned data.", show_default="runs/denoise-DATA"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="What everything random is drawn from.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a run that was stopped.")] = False,
    apply: Annotated[
        Path | None,
        typer.Option(
            help="Decisions exported from a report: write the data without the dropped and with the new labels."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Find the wrong labels of a data set with the help of a few right ones.

    Every training example gets an importance, learnt so that a classifier trained with it does well on the trusted set.
    The run folder has importance.csv, the classifier, result.json, and report.html to review the suspects in. What is
    exported there, `bilevel denoise DATA --apply decisions.csv --out cleaned.npz` turns into cleaned data.
    """
    if apply is not None:
        _apply(data, apply, out, label, json)
        return
    asked = {
        "command": "denoise", "data": data, "trusted": trusted, "test": test, "label": label, "noise": noise,
        "noise_kind": str(noise_kind), "model": model, "method": method, "steps": steps, "baselines": baselines,
        "seed": seed,
    }  # fmt: skip
    where = _device(device)
    chosen = _method(method)
    count, file = _trusted(trusted)
    loaded = load(data, label=label, trusted=file, test=test)
    if loaded.trusted is None and count is None and noise is None and loaded.name != "digits":
        raise OptionError(
            f"--trusted is needed, as {data} has no trusted rows: a file of rows whose labels are right, or how many "
            "rows to draw as such."
        )
    prepared = prepare(loaded, trusted=count, noise=noise, kind=noise_kind.value, seed=seed)
    net = _classifier(model, prepared.data, where, seed)
    folder = Folder(out or Path("runs") / f"denoise-{Path(data).stem}")
    checkpoint = _begin(folder, asked, resume)
    if noise is not None:
        prepared = replace(prepared, data=_write_noisy(folder, prepared.data))
    began = time.perf_counter()
    try:
        cleaned = _run(prepared, net, chosen, steps, baselines, seed, checkpoint, resume)
    except KeyboardInterrupt:
        print(
            f"bilevel: Stopped by Ctrl-C. The same command with --resume goes on from {folder.path}.", file=sys.stderr
        )
        raise typer.Exit(1) from None
    result = _result(prepared, cleaned, net, asked, time.perf_counter() - began, where)
    page = _write(folder, prepared, cleaned, net, result, _source(folder, data, noise), label)
    shutil.rmtree(checkpoint, ignore_errors=True)
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if json:
        typer.echo(to_json(result))
    else:
        _show(result)
        typer.echo(f"report: {page}")


# -- what was asked for ------------------------------------------------------------------------------------------------


def _apply(data: str, decisions: Path, out: Path | None, label: str | None, json: bool) -> None:
    if out is None:
        raise OptionError("--apply needs --out: where to write the cleaned data, such as cleaned.npz.")
    done = apply_decisions(data, decisions, out, label=label)
    counts = f"{done.dropped:,} dropped, {done.relabelled:,} relabelled, {done.unchanged:,} as they were"
    message = f"{done.rows:,} rows: {counts}."
    result = {
        "command": "denoise --apply", "status": "done", "message": message, "out": str(done.out), "rows": done.rows,
        "dropped": done.dropped, "relabelled": done.relabelled, "unchanged": done.unchanged, "notes": list(done.notes),
    }  # fmt: skip
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    typer.echo(to_json(result) if json else f"{message}\ndata: {done.out}")


def _device(text: str) -> torch.device:
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(text)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise OptionError(f"--device must be cpu, or a GPU that is here; got {text!r}: {reason}.") from None
    return found


def _method(name: str) -> Any:
    if name not in METHODS:
        raise OptionError(f"--method has no {name!r}.{did_you_mean(name, METHODS)} It knows {', '.join(METHODS)}.")
    return METHODS[name]()


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


def _classifier(model: str, data: Labelled, device: torch.device, seed: int) -> Classifier:
    shape, classes = tuple(data.x.shape[1:]), len(data.classes)
    if not python_file.is_file(model):
        if model not in KINDS:
            raise OptionError(
                f"--model has no {model!r}.{did_you_mean(model, KINDS)} It is one of {', '.join(KINDS)}, or "
                "path.py:make."
            )
        return classifier(model, shape, classes, device=device, seed=seed)
    path, make = python_file.load(model, "--model must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"--model must name a function make(shape, classes), as in {path.name}:make.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = make(shape, classes)
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {python_file.told(error)}") from error
    if not isinstance(network, nn.Module):
        raise OptionError(f"make in {path} must return an nn.Module; got {type(network).__name__}.")
    return Classifier(network.to(device), model)


def _begin(folder: Folder, asked: Mapping[str, Any], resume: bool) -> Path:
    """The folder of checkpoints, after a look at what the run's folder holds."""
    checkpoint, config = folder.path / CHECKPOINT, folder.path / "config.json"
    if checkpoint.exists():
        if not resume:
            raise OptionError(
                f"{folder.path} holds a run that was stopped. --resume goes on from it; another --out begins anew."
            )
        try:
            before = jsonlib.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise OptionError(f"{config} cannot be read; give another --out.") from None
        for key, value in asked.items():
            if before.get(key) != value:
                option = "--" + key.replace("_", "-") if key != "data" else "DATA"
                raise OptionError(
                    f"{folder.path} was run with {option} {before.get(key)}; got {value}. --resume needs the same."
                )
    elif resume:
        print(f"note: {folder.path} holds no run that was stopped; this one begins anew.", file=sys.stderr)
    versions = {
        "bilevel": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()
    }  # fmt: skip
    folder.write_json("config.json", {**asked, "versions": versions})
    checkpoint.mkdir(exist_ok=True)
    return checkpoint


def _write_noisy(folder: Folder, data: Labelled) -> Labelled:
    """Write the data as it is cleaned, so that decisions can be applied to it; its rows are named by their number."""
    x = pictures(data.x) if data.kind == "images" else data.x.numpy()
    names = np.array(data.classes)
    temporary = folder.path / f".{NOISY}"
    with open(temporary, "wb") as file:
        np.savez_compressed(file, x=x, y=names[data.y.numpy()])
    temporary.replace(folder.path / NOISY)
    return replace(data, positions=np.arange(data.count), keys=[str(i) for i in range(data.count)])


def _source(folder: Folder, data: str, noise: float | None) -> str:
    return data if noise is None else str(folder.path / NOISY)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class _Bar:
    """One bar for all stages after the bilevel run, each under its own name."""

    bar: Any
    task: Any = None
    stage: str = ""

    def tell(self, stage: str, done: int, total: int) -> None:
        if stage != self.stage:
            self.stage = stage
            if self.task is None:
                self.bar.start()
                self.task = self.bar.add_task(stage, total=total)
            self.bar.reset(self.task, total=total, description=stage)
        if done % 20 == 0 or done == total:
            self.bar.update(self.task, completed=done)


def _run(
    prepared: Prepared, net: Classifier, method: Any, steps: int | None, baselines: bool, seed: int, checkpoint: Path,
    resume: bool,
) -> Cleaned:  # fmt: skip
    bar = _Bar(progress_bar())
    weights = sum(p.numel() for p in net.network.parameters())
    small = next(net.network.parameters()).device.type == "cpu" and weights < SMALL
    try:
        with one_thread() if small else nullcontext():
            return clean(
            prepared, net.network, method=method, steps=steps, augment=net.augment, baselines=baselines, seed=seed,
            checkpoint=checkpoint, resume=resume, callbacks=[Progress("learning importances")], tell=bar.tell,
            )  # fmt: skip
    finally:
        bar.bar.stop()


# -- what comes out ----------------------------------------------------------------------------------------------------


def _result(
    prepared: Prepared, cleaned: Cleaned, net: Classifier, asked: Mapping[str, Any], seconds: float,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    data, found = prepared.data, cleaned.denoised
    suspects = int(found.suspect.sum())
    message = f"{suspects:,} of {data.count:,} labels ({100 * found.noise_rate:.1f}%) are probably wrong."
    if (ours := cleaned.accuracies.get("denoised")) is not None:
        part = "the held-out part of the trusted set" if prepared.held_out else "the test set"
        message += f" The classifier trained on the cleaned data is right on {100 * ours:.1f}% of {part}"
        plain = cleaned.accuracies.get("labels as they are")
        message += "." if plain is None else f"; on the labels as they are, on {100 * plain:.1f}%."
    measured = {"auc": cleaned.auc, "f1": cleaned.f1} if prepared.truth is not None else {}
    notes = [*prepared.notes, *([net.why] if net.why else []), *cleaned.notes]
    return {
        "command": "denoise", "method": asked["method"], "status": found.solution.status.name.lower(),
        "message": message, "seed": asked["seed"], "seconds": round(seconds, 3), "noise_rate": found.noise_rate,
        "suspects": suspects, "rows": data.count, "trusted": len(prepared.trusted[1]), "classes": list(data.classes),
        "test_accuracy": ours, "accuracies": cleaned.accuracies, "held_out": prepared.held_out, **measured,
        "model": net.kind, "device": str(device), "engine": found.solution.engine, "settings": found.settings,
        "notes": notes,
    }  # fmt: skip


def _write(
    folder: Folder, prepared: Prepared, cleaned: Cleaned, net: Classifier, result: Mapping[str, Any], source: str,
    label: str | None,
) -> Path:  # fmt: skip
    data, found = prepared.data, cleaned.denoised
    names = data.classes
    columns = zip(
        data.positions.tolist(), data.y.tolist(), found.importance.tolist(), found.suspect.tolist(),
        found.suggested.tolist(), found.confidence.tolist(), found.quality.tolist(), data.keys, strict=True,
    )  # fmt: skip
    rows = (
        {"index": i, "label": names[y], "importance": f"{w:.6f}", "suspect": int(s), "suggested": names[c],
         "confidence": f"{p:.6f}", "quality": f"{q:.6f}", "key": key}
        for i, y, w, s, c, p, q, key in columns
    )  # fmt: skip
    folder.write_csv("importance.csv", COLUMNS, rows)
    history = found.solution.history
    history.to_csv(folder.path / "history.csv")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in found.model.state_dict().items()}
    about = {"model": net.kind, "shape": str(tuple(data.x.shape[1:])), "classes": jsonlib.dumps(names)}
    save_file(weights, folder.path / "model.safetensors", metadata=about)
    folder.write_json("result.json", result)
    return folder.write("report.html", render_review(_review(prepared, cleaned, result, source, label)))


def _review(prepared: Prepared, cleaned: Cleaned, result: Mapping[str, Any], source: str, label: str | None) -> Review:
    data, found = prepared.data, cleaned.denoised
    rows = torch.nonzero(found.suspect).squeeze(1)
    suspects = [
        Suspect(int(data.positions[i]), data.keys[i], int(data.y[i]), int(found.suggested[i]),
                float(found.importance[i]), float(found.confidence[i]))
        for i in rows.tolist()
    ]  # fmt: skip
    history = found.solution.history
    asked = f" --label {label}" if label else ""
    suffix = {"": "", ".csv": ".csv", ".parquet": ".parquet"}.get(Path(source).suffix, ".npz")
    suffix = ".npz" if not Path(source).exists() else suffix
    return Review(
        run=_name(result, found.importance),
        title=f"Labels of {data.name}", outcome=result["message"], good=True, accuracy=_accuracy_table(result),
        classes=data.classes, noise_rate=found.noise_rate,
        history={"step": history["step"], "upper": history["upper"], "lower": history["lower"]},
        importance=found.importance.numpy(), suspects=suspects,
        pictures=pictures(data.x[rows]) if data.kind == "images" else None,
        fields=_fields(data, rows) if data.kind != "images" else None,
        command=f"bilevel denoise {source} --apply decisions.csv{asked} --out cleaned{suffix}",
        settings=[
            ("Rows", f"{result['rows']:,}, of {len(data.classes)} classes"), ("Trusted rows", f"{result['trusted']:,}"),
            ("Method", result["method"]), ("Classifier", result["model"]), ("Seed", str(result["seed"])),
            ("Steps", f"{result['settings']['steps']:,}, then twice {result['settings']['final_steps']:,}"),
            ("Seconds", f"{result['seconds']:.1f}"), ("bilevel", __version__), ("torch", torch.__version__),
        ],
        notes=result["notes"],
    )  # fmt: skip


def _name(result: Mapping[str, Any], importance: Tensor) -> str:
    """What the browser keeps decisions under: the same importances of the same data, the same name."""
    digest = hashlib.sha256(importance.numpy().tobytes()).hexdigest()[:16]
    return f"{result['rows']}-{result['suspects']}-{digest}"


def _fields(data: Labelled, rows: Tensor) -> list[list[tuple[str, str]]]:
    if data.fields:
        return [[(name, str(values[i])) for name, values in data.fields.items()] for i in rows.tolist()]
    shown = data.x.flatten(1)[rows, :SHOWN_FIELDS]
    return [[(str(k), f"{value:.3g}") for k, value in enumerate(row)] for row in shown.tolist()]


ROWS = {
    "denoised": "on the cleaned data",
    "labels as they are": "on the labels as they are",
    "trusted set alone": "on the trusted set alone",
    "right labels": "on the right labels",
}


def _accuracy_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["accuracies"]
    return [(text, f"{100 * found[name]:.1f}%") for name, text in ROWS.items() if name in found]


def _accuracy_table(result: Mapping[str, Any]) -> ReportTable | None:
    rows = _accuracy_rows(result)
    part = "the held-out part of the trusted set" if result["held_out"] else "the test set"
    caption = f"The same network, trained for as many steps, right on {part}."
    return ReportTable(caption, ("Trained", "Accuracy"), rows) if rows else None


def _show(result: Mapping[str, Any]) -> None:
    console = Console()
    if rows := _accuracy_rows(result):
        table = Table("Trained", "Accuracy")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if result.get("auc") is not None:
        console.print(f"Of the labels made wrong: AUC {result['auc']:.3f}, F1 {result['f1']:.3f}.")
    console.print(result["message"], soft_wrap=True)
