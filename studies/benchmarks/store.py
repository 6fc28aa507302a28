"""Results by name in a file with one JSON object per line, so that a long study can continue; Markdown tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Store:
    """The results in a file. A later line replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.results: dict[str, Any] = {item["key"]: item["value"] for item in map(json.loads, lines)}

    def put(self, key: str, value: Any) -> None:
        self.results[key] = value
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")

    def make(self, key: str, run: Callable[[], Any]) -> None:
        """Run what has no result yet."""
        if key not in self.results:
            started = time.perf_counter()
            self.put(key, run())
            print(f"{key}  {time.perf_counter() - started:.0f} s", flush=True)


def write_tables(path: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Write the lines of Markdown tables under their titles, to be copied into a page, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in tables.items()) + "\n")
    print(path)
