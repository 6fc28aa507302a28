"""Which cells of the few-shot study a page shows, and with which times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bilevel.running.run_many import Found, Settings
from bilevel_studies.few_shot.study import KIND, MEETS, table_settings, timed_as, trained_for
from bilevel_studies.study import Kept


def apart(cells: Sequence[Kept]) -> list[Kept]:
    """A cell for each kind of tasks, where one was tried on two."""
    out: list[Kept] = []
    for settings, found in cells:
        own = {key: value for key, value in settings.items() if key != "also"} | {"train_shots": settings["shots"]}
        out.append((own, {key: value for key, value in found.items() if key != "also"}))
        if "also" in found:
            own_tasks = ("also", "accuracy_of_means", "train_accuracy", "curve", "right")
            kept = {key: value for key, value in found.items() if key not in own_tasks}
            out.append((own | dict(zip(("ways", "shots"), settings["also"], strict=True)), kept | found["also"]))
    return out


def timed(cells: Sequence[Kept], times: Sequence[Kept]) -> list[Kept]:
    """The cells with the time of a step as a short run by itself had it, so that all are measured alike.

    Where there is none, a cell has its own if it had the GPU to itself, else no time.
    """
    by = {timed_as(s): f["ms_per_step"] for s, f in sorted(times, key=lambda pair: int(pair[0]["steps"]))}
    out: list[Kept] = []
    for settings, found in cells:
        ms = by.get(timed_as(settings))
        if ms is not None or "beside" in found or found.get("ms_per_step") is None:
            curve = [] if ms is None else [row | {"seconds": row["step"] * ms / 1000} for row in found.get("curve", [])]
            seconds = None if ms is None else found["steps"] * ms / 1000
            found = {**found, "ms_per_step": ms, "seconds": seconds, "curve": curve}
        out.append((settings, found))
    return out


def longest(cells: Sequence[Kept]) -> list[Kept]:
    """Of cells of one place and seed one with the settings of now, of these a finished one, and of these the one with
    most steps. Where a method has any with the settings of now in a place, its others are left out."""
    found: dict[tuple[Any, ...], Kept] = {}
    now = {_place(settings) for settings, one in cells if _worth(settings, one)[0]}
    for settings, one in cells:
        if _place(settings) in now and not _worth(settings, one)[0]:
            continue
        key = (*_place(settings), settings["seed"])
        old = found.get(key)
        if old is None or _worth(settings, one) > _worth(*old):
            found[key] = (settings, one)
    return list(found.values())


def _worth(settings: Settings, found: Found) -> tuple[bool, bool, int]:
    dataset, backbone, ways, shots, method = _place(settings)
    now = table_settings(dataset, backbone, ways, shots, method, settings["seed"])
    trained = trained_for(dataset, backbone, ways, shots, method)[1]
    same = all(settings.get(key) == now.get(key) for key in (*KIND, *MEETS))
    same = same and settings.get("train_shots", shots) == trained
    return same, not found.get("partial"), int(settings["steps"])


def _place(settings: Settings) -> tuple[Any, ...]:
    return tuple(settings[key] for key in ("dataset", "backbone", "ways", "shots", "method"))
