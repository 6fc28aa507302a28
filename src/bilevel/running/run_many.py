"""Many independent runs: each is run once, in one of several processes, and its result is kept as a file.

An item is a dict of plain settings, all that its result depends on. The same call after an interruption runs only the
items that have no file with their settings yet.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel._util.checks import in_range
from bilevel._util.parallel_map import Failed, Where, parallel_map
from bilevel.errors import RunError

# Characters of a file's name from which the rest is a hash: file systems allow 255.
LONGEST = 150
Settings = Mapping[str, Any]
Found = dict[str, Any]
HERE = Where()


@dataclass(frozen=True)
class RunItem:
    """One of many runs."""

    # Everything that the result depends on, as JSON can hold it.
    settings: Settings
    # Roughly how long it takes: the longest runs start first.
    weight: float

    @property
    def name(self) -> str:
        """The name of the file."""
        words = [_word(value) for value in self.settings.values()]
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-")
        if len(name) <= LONGEST:
            return name
        return f"{name[:LONGEST]}-{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:12]}"


class ResultFolder:
    """A folder with one file for each result."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def get(self, item: RunItem) -> Found | None:
        """Return the result of a finished item; None if it is not finished, or its file has other settings."""
        try:
            kept = json.loads((self.folder / f"{item.name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        settings = json.loads(json.dumps(item.settings))
        found = kept.get("result") if isinstance(kept, dict) and kept.get("settings") == settings else None
        return found if isinstance(found, dict) else None

    def put(self, item: RunItem, found: Found) -> None:
        write_whole(self.folder / f"{item.name}.json", json.dumps({"settings": item.settings, "result": found}) + "\n")


def run_items(
    items: Sequence[RunItem],
    folder: ResultFolder,
    function: Callable[[Settings], Found | None],
    *,
    where: Where = HERE,
    deadline: float | None = None,
    tell: Callable[[RunItem], None] = lambda item: None,
) -> bool:
    """Run the items that have no result yet, the longest first; return False if Ctrl-C interrupted it.

    `function` returns None if it was stopped. After the deadline (of `time.monotonic`) no item is begun. An item that
    fails is tried again; if it fails for good, the others still run, and RunError names it at the end. `tell` is
    called with each finished item.
    """
    left = sorted((item for item in items if folder.get(item) is None), key=lambda item: -item.weight)
    for item in items:
        if item not in left:
            tell(item)
    failed: list[tuple[str, Failed]] = []

    results = parallel_map(
        function,
        [item.settings for item in left],
        where,
        lambda: deadline is not None and time.monotonic() >= deadline,
    )
    try:
        for position, found in results:
            if found is None:
                return False
            if isinstance(found, Failed):
                failed.append((left[position].name, found))
                continue
            folder.put(left[position], found)
            tell(left[position])
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
    """Run `function` on each item, and return the results in the order of the items.

    Each result is written to `folder` as soon as it is there. The same call after an interruption runs only the items
    that have no result yet.

    Args:
        function: Takes an item and returns a dict that JSON can hold. With several workers, import it from a module,
            and call `run_many` under `if __name__ == "__main__":`.
        items: Dicts of plain settings: a seed, a target, a point of a grid. The file names are made of their values.
        folder: The folder of the results, one file each.
        workers: The number of processes of this machine (default: 1, this process). More than one needs joblib.
        address: The address of a Ray cluster to run on instead: `auto`, `host:6379` or `ray://host:10001`.
        gpus: The number of GPUs of the cluster that each run uses; it can be a fraction.
        retries: How often a run that fails, or whose process dies, is tried again.

    >>> import tempfile
    >>> run_many(lambda item: {"square": item["x"] ** 2}, [{"x": 2}, {"x": 3}], tempfile.mkdtemp())
    [{'square': 4}, {'square': 9}]
    """
    in_range("workers", workers, least=1, whole=True)
    in_range("retries", retries, least=0, whole=True)
    wanted, results = [RunItem(item, 0) for item in items], ResultFolder(Path(folder))
    if not run_items(wanted, results, function, where=Where(workers, address, gpus, retries)):
        raise KeyboardInterrupt
    return [found for item in wanted if (found := results.get(item)) is not None]


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_word(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "-".join(_word(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
