"""Which cells the denoising study has, and what runs each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bilevel import DataError
from bilevel_studies.denoising import runs as denoising_runs
from bilevel_studies.denoising import small as denoising_small
from bilevel_studies.denoising import speed as denoising_speed
from bilevel_studies.denoising import study as denoising
from bilevel_studies.denoising import wide as denoising_wide
from bilevel_studies.study import Found, RunItem, Settings

DATASETS = (*denoising.STUDIES, denoising_wide.NAME)


def cells(
    datasets: Sequence[str],
    noises: Sequence[float] | None,
    kind: str | None,
    columns: Sequence[str],
    seeds: int,
    passes: int | None = None,
) -> list[RunItem]:
    """The cells that were asked for. No noises: those of the study. No kind: both, of the noises that are given."""
    kinds = (denoising.SYMMETRIC, denoising.ASYMMETRIC) if kind is None else (kind,)
    if noises is None:
        pairs = [(noise, k) for noise, k in denoising.NOISES if k in kinds]
    else:
        pairs = [(noise, k) for k in kinds for noise in noises]
    found = denoising.cells([name for name in datasets if name in denoising.STUDIES], pairs, columns, seeds)
    if denoising_wide.NAME in datasets:
        found += denoising_wide.cells(tuple(columns), seeds, passes)
    return found


def run(settings: Settings, device: torch.device, checkpoints: Path, deadline: float | None = None) -> Found | None:
    """Run a cell of any part of the study, those of the table until the deadline; None where Ctrl-C came."""
    match settings.get("part"):
        case denoising_small.HYPER_CLEANING | denoising_small.HOW_FEW:
            return denoising_small.run(settings, device)
        case denoising_speed.SPEED | denoising_speed.STEPS:
            return denoising_speed.run(settings, device)
    if settings["dataset"] == denoising_wide.NAME:
        return denoising_wide.run(settings, device, checkpoints, deadline)
    return denoising_runs.run(settings, device, checkpoints / RunItem(settings, 0).name, deadline)


def missing(datasets: Sequence[str]) -> dict[str, str]:
    """The data sets that cannot be loaded, each with the sentence that says why."""
    found = {}
    for name in dict.fromkeys(datasets):
        try:
            denoising_runs.loaded("cifar10" if name == denoising_wide.NAME else name)
        except DataError as error:
            found[name] = str(error)
    return found
