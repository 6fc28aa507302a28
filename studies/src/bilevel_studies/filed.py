"""The cells of a study in a folder, with a file beside the page that holds them all: a fresh copy goes on from there.

A cell that ended before its time is kept as far as it got (`partial`), shown, and gone on with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.running.run_many import Found, ResultFolder, RunItem, Settings

Kept = tuple[Settings, Found]


class FiledStore(ResultFolder):
    """Cells in a folder, and those of `file` that the folder lacks."""

    def __init__(self, folder: Path, file: Path) -> None:
        super().__init__(folder)
        self.file = file
        pairs: list[Kept] = [(settings, found) for settings, found in _read(file).get("cells", ())]
        self._filed = {_key(settings): (settings, found) for settings, found in pairs}

    def get(self, cell: RunItem) -> Found | None:
        """The result of a cell that is finished; None of one that is not."""
        kept = self.kept(cell)
        return None if kept is None or kept.get("partial") else kept

    def put(self, cell: RunItem, found: Found) -> None:
        """Keep a result, unless it is of a run that did not get as far as one that is kept."""
        old = self.kept(cell)
        if old is None or not found.get("partial") or found["steps"] >= old["steps"]:
            super().put(cell, found)

    def kept(self, cell: RunItem) -> Found | None:
        """The result of a cell, finished or not."""
        own, filed = super().get(cell), self._filed.get(_key(cell.settings))
        if filed is not None and (own is None or own.get("partial", False) > filed[1].get("partial", False)):
            return filed[1]
        return own

    def all(self) -> list[Kept]:
        """Every cell that the folder or the file has, in the order of their settings."""
        found = dict(self._filed)
        for path in self.folder.glob("*.json"):
            kept = _read(path)
            if isinstance(kept.get("settings"), dict) and isinstance(kept.get("result"), dict):
                result = self.kept(RunItem(kept["settings"], 0))
                found[_key(kept["settings"])] = (kept["settings"], result or kept["result"])
        return [found[key] for key in sorted(found)]

    def write(self) -> None:
        """Write all cells to the file, one on a line."""
        lines = ",\n".join(json.dumps(kept) for kept in self.all())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, '{"cells": [\n' + lines + "\n]}\n")


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
