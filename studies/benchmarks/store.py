"""Results by name, in a file of one JSON object a line: a long study goes on from what is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Store:
    """A later line replaces an earlier one."""

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
        """Run what is not there yet."""
        if key not in self.results:
            started = time.perf_counter()
            self.put(key, run())
            print(f"{key}  {time.perf_counter() - started:.0f} s", flush=True)
