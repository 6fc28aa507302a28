"""How a command tells its result: notes on standard error, then one JSON object, or tables and where the files are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from bilevel.cli.folder import to_json

Result = Mapping[str, Any]


def tell(result: Result, show: Callable[[Result], None], *, json: bool, **files: Path | str) -> None:
    """Print the notes of a result and the result itself, for people by `show`, with the files by name."""
    for note in result.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if json:
        typer.echo(to_json(result))
        return
    show(result)
    for name, path in files.items():
        typer.echo(f"{name}: {path}")
