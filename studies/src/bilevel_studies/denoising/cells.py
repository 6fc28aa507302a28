"""The cells of all parts of the denoising study, and the function that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bilevel import DataError
from bilevel_studies.denoising import runs, small, speed, study, wide
from bilevel_studies.study import Found, RunItem, Settings

DATASETS = (*study.STUDIES, wide.NAME)


def cells(
    datasets: Sequence[str],
    noises: Sequence[float] | None,
    kind: str | None,
    columns: Sequence[str],
    seeds: int,
    passes: int | None = None,
) -> list[RunItem]:
    """Return the requested cells. `noises=None` takes the noises of the study, `kind=None` both kinds of noise."""
    kinds = (study.SYMMETRIC, study.ASYMMETRIC) if kind is None else (kind,)
    if noises is None:
        pairs = [(noise, k) for noise, k in study.NOISES if k in kinds]
    else:
        pairs = [(noise, k) for k in kinds for noise in noises]
    found = study.cells([name for name in datasets if name in study.STUDIES], pairs, columns, seeds)
    if wide.NAME in datasets:
        found += wide.cells(tuple(columns), seeds, passes)
    return found


def run(settings: Settings, device: torch.device, checkpoints: Path, deadline: float | None = None) -> Found | None:
    """Run a cell of any part of the study; return None after Ctrl-C. Cells of the table stop at the deadline."""
    match settings.get("part"):
        case small.HYPER_CLEANING | small.HOW_FEW:
            return small.run(settings, device)
        case speed.SPEED | speed.STEPS:
            return speed.run(settings, device)
    if settings["dataset"] == wide.NAME:
        return wide.run(settings, device, checkpoints, deadline)
    return runs.run(settings, device, checkpoints / RunItem(settings, 0).name, deadline)


def missing(datasets: Sequence[str]) -> dict[str, str]:
    """Return the data sets that cannot be loaded, each with the reason."""
    found = {}
    for name in dict.fromkeys(datasets):
        try:
            runs.loaded("cifar10" if name == wide.NAME else name)
        except DataError as error:
            found[name] = str(error)
    return found
