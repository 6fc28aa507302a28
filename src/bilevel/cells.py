"""The cells of a study: each is run once, in one of several processes, and kept as a file.

A cell is a dict of plain settings, all that its result depends on. A study that was stopped goes on where it was: cells
whose file has the same settings are not run again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

LONGEST = 150
"""Characters of a file's name from which the rest is a hash: file systems allow 255."""
Settings = Mapping[str, Any]
Found = dict[str, Any]


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
        except (OSError, ValueError):
            return None
        found = kept.get("result") if isinstance(kept, dict) and kept.get("settings") == _same(cell.settings) else None
        return found if isinstance(found, dict) else None

    def put(self, cell: Cell, found: Found) -> None:
        target = self.folder / f"{cell.name}.json"
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps({"settings": cell.settings, "result": found}) + "\n", encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    function: Callable[[Settings], Found | None],
    *,
    workers: int = 1,
    deadline: float | None = None,
    tell: Callable[[Cell], None] = lambda cell: None,
) -> bool:
    """Run the cells that are not in the store; False where Ctrl-C came first.

    `function` is one of a module, and returns None where it was stopped. After the deadline (of `time.monotonic`) no
    cell is begun. `tell` hears of each cell that is finished.
    """
    left = sorted((cell for cell in cells if store.get(cell) is None), key=lambda cell: -cell.weight)
    store.session.workers = workers
    for cell in cells:
        if cell not in left:
            store.session.kept += 1
            tell(cell)
    complete = True
    for finished, found in _results(left, function, workers, deadline):
        if finished is None or found is None:
            complete = False
            break
        store.put(finished, found)
        store.session.ran += 1
        tell(finished)
    return complete


def _results(
    cells: Sequence[Cell], function: Callable[[Settings], Found | None], workers: int, deadline: float | None
) -> Iterator[tuple[Cell | None, Found | None]]:
    """The results as they come; (None, None) where Ctrl-C stops them."""
    in_time = (cell for cell in cells if deadline is None or time.monotonic() < deadline)
    if workers <= 1 or len(cells) <= 1:
        try:
            with one_thread():
                for cell in in_time:
                    yield cell, function(cell.settings)
        except KeyboardInterrupt:
            yield None, None
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(cells)), mp_context=context, initializer=_begin)
    try:
        running = {pool.submit(function, cell.settings): cell for cell in islice(in_time, workers)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                cell = running.pop(future)
                running |= {pool.submit(function, more.settings): more for more in islice(in_time, 1)}
                yield cell, future.result()
    except KeyboardInterrupt:
        yield None, None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _begin() -> None:
    """In a new process: Ctrl-C is the parent's to hear, except in `solve`, which then ends its run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch inside: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same(settings: Settings) -> Any:
    """The settings as they come back from a file."""
    return json.loads(json.dumps(settings))


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_word(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "-".join(_word(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
