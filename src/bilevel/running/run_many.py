"""The cells of a study: each is run once, in one of several processes, and kept as a file.

A cell is a dict of plain settings, all that its result depends on. A study that was stopped goes on where it was: cells
whose file has the same settings are not run again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel._util.checks import in_range
from bilevel._util.parallel_map import Failed, Where, each
from bilevel.errors import RunError

LONGEST = 150
"""Characters of a file's name from which the rest is a hash: file systems allow 255."""
Settings = Mapping[str, Any]
Found = dict[str, Any]
HERE = Where()


@dataclass(frozen=True)
class Cell:
    """A run of a study."""

    settings: Settings
    """All that the result depends on; JSON can say it."""
    weight: float
    """Roughly how long it takes: the longest start first."""

    @property
    def name(self) -> str:
        """What the file is called."""
        words = [_word(value) for value in self.settings.values()]
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-")
        if len(name) <= LONGEST:
            return name
        return f"{name[:LONGEST]}-{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:12]}"


@dataclass
class Session:
    """How much of a study was run since the store was opened."""

    began: float = field(default_factory=time.perf_counter)
    ran: int = 0
    """Cells that were not in the store."""
    kept: int = 0
    """Cells that were."""
    workers: int = 1

    @property
    def seconds(self) -> float:
        """Since the store was opened."""
        return time.perf_counter() - self.began


class Store:
    """The results of cells, one file each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.session = Session()

    def get(self, cell: Cell) -> Found | None:
        """The result of a cell that is finished; None of one that is not, or that had other settings."""
        try:
            kept = json.loads((self.folder / f"{cell.name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        found = kept.get("result") if isinstance(kept, dict) and kept.get("settings") == _same(cell.settings) else None
        return found if isinstance(found, dict) else None

    def put(self, cell: Cell, found: Found) -> None:
        write_whole(self.folder / f"{cell.name}.json", json.dumps({"settings": cell.settings, "result": found}) + "\n")


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    function: Callable[[Settings], Found | None],
    *,
    where: Where = HERE,
    deadline: float | None = None,
    tell: Callable[[Cell], None] = lambda cell: None,
) -> bool:
    """Run the cells that are not in the store, the weightiest first; False where Ctrl-C came first.

    `function` returns None where it was stopped. After the deadline (of `time.monotonic`) no cell is begun. A cell that
    fails is tried again; where one fails for good, the others are run all the same, and RunError names it at the end.
    `tell` hears of each cell that is finished.
    """
    left = sorted((cell for cell in cells if store.get(cell) is None), key=lambda cell: -cell.weight)
    store.session.workers = where.workers
    for cell in cells:
        if cell not in left:
            store.session.kept += 1
            tell(cell)
    failed: list[tuple[str, Failed]] = []
    results = each(
        function, [cell.settings for cell in left], where, lambda: deadline is not None and time.monotonic() >= deadline
    )
    try:
        for place, found in results:
            if found is None:
                return False
            if isinstance(found, Failed):
                failed.append((left[place].name, found))
                continue
            store.put(left[place], found)
            store.session.ran += 1
            tell(left[place])
    except KeyboardInterrupt:
        return False
    finally:
        results.close()
    if failed:
        shown = "; ".join(f"{name} ({found.why})" for name, found in failed[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        error = RunError(
            f"{len(failed)} of {len(left)} runs failed, each tried {where.retries + 1} times: {shown}{more}. The "
            "others are kept; the same call tries these again."
        )
        error.add_note(failed[0][1].trace)
        raise error
    return True


def run_many(
    function: Callable[[Settings], Found],
    items: Sequence[Settings],
    folder: str | Path,
    *,
    workers: int = 1,
    address: str | None = None,
    gpus: float = 0.0,
    retries: int = 2,
) -> list[Found]:
    """`function` of each item, in their order; each result is a file in `folder` as soon as it is there.

    An item is a dict of plain settings (a seed, a target, a point of a grid), its result a dict that JSON can say. Runs
    go to `workers` processes of this machine or, with `address`, to the Ray cluster there (`auto`, `host:6379` or
    `ray://host:10001`), each with `gpus` of its GPUs. One that fails, or whose process dies, is tried `retries` times
    more. The same call goes on where one was stopped: finished runs are not run again. With several workers, `function`
    is one of a module, and a script calls this under `if __name__ == "__main__":`.
    """
    in_range("workers", workers, least=1, whole=True)
    in_range("retries", retries, least=0, whole=True)
    cells, store = [Cell(item, 0) for item in items], Store(Path(folder))
    if not run_cells(cells, store, function, where=Where(workers, address, gpus, retries)):
        raise KeyboardInterrupt
    return [found for cell in cells if (found := store.get(cell)) is not None]


def _same(settings: Settings) -> Any:
    """The settings as they come back from a file."""
    return json.loads(json.dumps(settings))


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_word(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "-".join(_word(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
