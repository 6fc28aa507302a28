"""Benchmarks beside other libraries run in an environment of their own, with our package from a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def in_environment(environment: Path, source: Path) -> None:
    """Go on in this environment, with `source` as the place of our package and one thread."""
    python = environment / "bin" / "python"
    if Path(sys.prefix).resolve() == environment.resolve():
        return
    if not python.exists():
        sys.exit(f"build/{environment.name} is not there yet. Make it with: python {sys.argv[0]} setup")
    environ = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    os.execve(python, [str(python), str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], environ)


def commit(source: Path) -> str:
    """Of our package: the note beside a frozen copy, or that of the repository, `-dirty` where files have changed."""
    note = source.parent / "COMMIT"
    if note.exists():
        return note.read_text().strip()
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(describe, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
