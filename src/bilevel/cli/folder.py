"""The folder of a run: config.json, history.csv, result.json, report.html, each written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.errors import OptionError


class Folder:
    """A folder that can be written to: made, with its parents, where it is not there."""

    def __init__(self, path: Path, option: str = "--out") -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except (FileExistsError, NotADirectoryError):
            raise OptionError(f"{option} must be a folder, new or old; {path} is a file, or lies under one.") from None
        except OSError as error:
            raise OptionError(f"{option} must be a folder that can be written to; {path}: {error.strerror}.") from None

    def write(self, name: str, text: str) -> Path:
        """Write a file; one of that name that was there stays whole until the new one is on the disk."""
        return write_whole(self.path / name, text)

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        return self.write(name, to_json(value) + "\n")

    def write_csv(self, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        return self.write(name, buffer.getvalue())


def to_json(value: Mapping[str, Any]) -> str:
    """The value as JSON; a number that is not finite, which JSON does not know, becomes null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
