"""Parts of all runs of `bilevel denoise`: names of columns, the command to apply decisions, the cards of the page."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor

from bilevel._util.atomic_files import atomic_write
from bilevel.applications.denoising.trained_run import PREPARATION, WEIGHTS, described
from bilevel.cli.run_folder import RunFolder
from bilevel.data import Labelled
from bilevel.report.page import cell_text
from bilevel.running.run_many import one_thread

# The names that cleanlab gives to its results, for tools that read them.
ISSUE_COLUMNS = ("index", "is_label_issue", "label_quality", "given_label", "predicted_label", "sample_weight", "key")
ISSUES = "issues.csv"
# What `write_found` writes.
FOUND = (ISSUES, WEIGHTS, PREPARATION)
# The number of weights up to which one thread is as fast as several.
SMALL = 500_000
# The most columns of a row that the page shows.
SHOWN_FIELDS = 40


def threads_for(network: torch.nn.Module) -> Any:
    """Return a context with one thread for a small network on the CPU."""
    parameters = list(network.parameters())
    small = parameters[0].device.type == "cpu" and sum(p.numel() for p in parameters) < SMALL
    return one_thread() if small else nullcontext()


def apply_command(source: str, label: str | None) -> str:
    """Return the command that applies decisions to this source."""
    names, out = ["--label", label] if label else [], f"cleaned{suffix_of(source)}"
    return shlex.join(["bilevel", "denoise", source, "--apply", "decisions.csv", *names, "--out", out])


def suffix_of(source: str) -> str:
    """Return how the name of the cleaned data ends: as the source's; a named set becomes an .npz file."""
    path = Path(source)
    return ".npz" if not path.exists() else "" if path.is_dir() else path.suffix.lower()


def write_found(
    folder: RunFolder,
    data: Labelled,
    network: torch.nn.Module,
    kind: str,
    *,
    suspect: Tensor,
    quality: Tensor,
    suggested: Tensor,
    weight: Tensor,
) -> None:
    """Write issues.csv, and the trained network of this kind with the preparation of its inputs."""
    names = data.classes
    columns = (data.positions, suspect, quality, data.y, suggested, weight)
    rows = zip(*(column.tolist() for column in columns), data.keys, strict=True)
    issues = ((i, wrong, f"{q:.6f}", names[y], names[c], f"{w:.6f}", key) for i, wrong, q, y, c, w, key in rows)
    folder.write_csv(ISSUES, ISSUE_COLUMNS, (dict(zip(ISSUE_COLUMNS, issue, strict=True)) for issue in issues))
    folder.write_json(PREPARATION, described(data, kind))
    about = json.dumps({"model": kind, "shape": list(data.x.shape[1:]), "classes": names})
    with atomic_write(folder.path / WEIGHTS) as temporary:  # one entry, as the order of several is not kept
        save_model(network.cpu(), str(temporary), metadata={"classifier": about})


def fields_of(data: Labelled, rows: Tensor) -> list[list[tuple[str, str]]]:
    if data.fields:
        columns = list(data.fields.items())[:SHOWN_FIELDS]
        return [[(name, cell_text(values[i])) for name, values in columns] for i in rows.tolist()]
    shown = data.x.flatten(1)[rows, :SHOWN_FIELDS]
    return [[(str(k), f"{value:.3g}") for k, value in enumerate(row)] for row in shown.tolist()]
