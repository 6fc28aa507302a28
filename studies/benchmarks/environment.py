"""Run benchmarks against other libraries in a separate environment, with our package from a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(environment: Path, install: Sequence[str], check: str) -> None:
    """Make an environment in which the packages of this one are found, too (no second torch), and install into it.

    `install` are the words after `pip install`; `check` is an import that must work there.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "reuse.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pins = environment.with_suffix(".txt")
    pins.write_text(f"torch=={version('torch').split('+')[0]}\n")
    subprocess.run([str(python), "-m", "pip", "install", "-q", "-c", str(pins), *install], check=True)
    subprocess.run([str(python), "-c", check], check=True)


def in_environment(environment: Path, source: Path) -> None:
    """Continue in this environment, with `source` as the place of our package and one thread."""
    python = environment / "bin" / "python"
    if Path(sys.prefix).resolve() == environment.resolve():
        return
    if not python.exists():
        sys.exit(f"build/{environment.name} is not there yet. Make it with: python {sys.argv[0]} setup")
    environ = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    os.execve(python, [str(python), str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], environ)


def commit(source: Path) -> str:
    """Return the commit of our package: the note next to a frozen copy, or the repository's (`-dirty` if changed)."""
    note = source.parent / "COMMIT"
    if note.exists():
        return note.read_text().strip()
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(describe, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
