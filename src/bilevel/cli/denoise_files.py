"""Parts of all runs of `bilevel denoise`: names of columns, the command to apply decisions, the cards of the page."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel.data import Labelled
from bilevel.report.page import cell_text
from bilevel.running.run_many import one_thread

# The names that cleanlab gives to its results, for tools that read them.
ISSUE_COLUMNS = ("index", "is_label_issue", "label_quality", "given_label", "predicted_label", "sample_weight", "key")
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


def fields_of(data: Labelled, rows: Tensor) -> list[list[tuple[str, str]]]:
    if data.fields:
        columns = list(data.fields.items())[:SHOWN_FIELDS]
        return [[(name, cell_text(values[i])) for name, values in columns] for i in rows.tolist()]
    shown = data.x.flatten(1)[rows, :SHOWN_FIELDS]
    return [[(str(k), f"{value:.3g}") for k, value in enumerate(row)] for row in shown.tolist()]
