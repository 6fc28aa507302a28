"""Writes a file whole or not at all: under a temporary name, and renames it once it is on the disk. Reads JSON."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bilevel.errors import WriteError

_mask = os.umask(0)  # it can only be read by setting it
os.umask(_mask)
# The permissions of a new file.
MODE = 0o666 & ~_mask


@contextmanager
def atomic_write(path: Path, before: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to. It is renamed to `path` at the end, and deleted after an error.

    Until then the file at `path` stays; it is kept as `before` if that is given. Files that a killed process left are
    deleted.
    """
    moved = False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not _alive(stale.name.split(".")[-2]):
            stale.unlink(missing_ok=True)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(MODE)  # safetensors makes files that only the owner can read
        if before is not None and path.exists():
            os.replace(path, before)
            moved = True
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        if before is not None and moved and not path.exists():
            with suppress(OSError):
                os.replace(before, path)
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WriteError(f"{path} cannot be written ({why}). The file that was there, if any, is untouched.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _flush(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    entry = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def write_whole(path: Path, text: str) -> Path:
    """Write text as UTF-8; file names in it that are not valid text keep their bytes."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # JSON can be nested too deeply
        return {}
    return found if isinstance(found, dict) else {}


def _alive(pid: str) -> bool:
    """Return whether a process of this machine has this number."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:  # the process belongs to another user
        pass
    return True
