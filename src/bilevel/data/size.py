"""Files that claim more than this machine can hold are refused before anything is allocated for them."""

from __future__ import annotations

import os
from pathlib import Path

from bilevel.errors import DataError

COPIES = 4
"""What the reading of a table takes, in sizes of its numbers: the rows stand beside their keys and fields."""


def free_memory() -> int | None:
    """Bytes that can be had; None where the system does not tell."""
    found: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    if not found:
        try:
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        except (AttributeError, OSError, ValueError):
            return None
    return min(found)


def refuse_larger(path: Path, needed: int, what: str) -> None:
    """Raise where `needed` bytes are more than there are; `what` says what the file claims to hold."""
    free = free_memory()
    if free is not None and needed > free:
        raise DataError(
            f"{path} claims to hold {what}: {needed / 2**30:,.0f} GiB would be needed, and {free / 2**30:,.1f} GiB are "
            "free. Use a part of the rows, or a larger machine."
        )
