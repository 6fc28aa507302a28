"""What the faults share: a count of those tried and survived, and a look at every file that a run has written."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file


@dataclass
class Tally:
    """How many faults were tried, and in words those that were not survived."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Count one fault; what goes wrong inside is noted, and the next one is tried."""
        self.tried += 1
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")

    def result(self) -> dict[str, object]:
        survived = self.tried - len(self.failures)
        return {"tried": self.tried, "survived": survived, "failures": self.failures[:20], **self.facts}


def readable(folder: Path) -> int:
    """Read every file under the folder to its end; returns how many there are. Names of files being written begin
    with a dot and are not theirs yet."""
    count = 0
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name.startswith("."):
            continue
        count += 1
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".csv":
            with open(path, newline="", encoding="utf-8") as file:
                text = file.read()
            rows = list(csv.reader(text.splitlines(keepends=True)))
            assert text.endswith("\n"), f"{path} ends within a line"
            assert len({len(row) for row in rows}) == 1, f"{path} has rows of different lengths"
        elif path.suffix == ".npz":
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as arrays:
                assert all(len(arrays[name]) for name in arrays.files)
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
        elif path.suffix == ".html":
            assert path.read_text(encoding="utf-8").rstrip().endswith("</html>"), f"{path} is cut off"
        else:
            raise AssertionError(f"{path} is of no known kind")
    return count


def outcome(folder: Path) -> dict[str, object]:
    """What a finished run of `denoise` has found, without clocks and places."""
    result = json.loads((folder / "result.json").read_text())
    history = list(csv.DictReader((folder / "history.csv").read_text().splitlines()))
    with np.load(folder / "noisy.npz") as noisy:
        data = {name: noisy[name].tobytes() for name in noisy.files}
    return {
        "result": {name: value for name, value in result.items() if name not in ("seconds", "out", "notes")},
        "history": [{name: value for name, value in row.items() if name != "seconds"} for row in history],
        "importance": (folder / "importance.csv").read_text(),
        "model": {name: weights.numpy().tobytes() for name, weights in load_file(folder / "model.safetensors").items()},
        "data": data,
        "hidden": [path.name for path in folder.rglob(".*")],
        "names": sorted(path.name for path in folder.iterdir()),
    }
