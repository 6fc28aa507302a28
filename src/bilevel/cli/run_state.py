"""What a run's folder holds of an earlier run: nothing, a result, or one that was stopped."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel import __version__
from bilevel.cli.folder import Folder
from bilevel.cli.stopped import Stopped
from bilevel.errors import BilevelError, CheckpointError, OptionError, RankError, WriteError

CHECKPOINT = "checkpoint"
PREVIOUS = "previous"
"""Where the files of a finished run go when another one takes its place; further ones have a number behind it."""


def folder_of(out: Path | None, command: str, data: str) -> Folder:
    """The folder of a run on DATA, which may be a folder itself and is not written into."""
    path = out or Path("runs") / f"{command}-{Path(data).stem}"
    if Path(data).is_dir() and path.resolve().is_relative_to(Path(data).resolve()):
        raise OptionError(f"--out must not lie in {data}, which is not changed; got {str(path)!r}.")
    return Folder(path)


def kept(folder: Folder, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # JSON may be nested without end
        return {}
    return found if isinstance(found, dict) else {}


def finished(folder: Folder, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of the same run, where it is there."""
    config, result = kept(folder, "config.json"), kept(folder, "result.json")
    same = all(config.get(key) == value for key, value in asked.items())
    return result if same and result and not (folder.path / CHECKPOINT).exists() else None


def write_config(folder: Folder, asked: Mapping[str, Any]) -> None:
    """Write what was asked for, and of which versions."""
    folder.write_json("config.json", {**asked, "versions": versions()})


def versions() -> dict[str, str]:
    return {
        "bilevel": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def begin(folder: Folder, asked: Mapping[str, Any], resume: bool, files: Sequence[str]) -> Path:
    """The folder of checkpoints, after a look at what the run's folder holds."""
    checkpoint = folder.path / CHECKPOINT
    if checkpoint.exists():
        if not resume:
            raise OptionError(
                f"{folder.path} holds a run that was stopped. --resume goes on from it; another --out begins anew."
            )
        before = kept(folder, "config.json")
        if differs := _difference(before, asked):
            raise OptionError(f"{folder.path} was run with {differs}. --resume needs the same.")
    else:
        _refuse_foreign(folder, asked["command"], files)
        ended = bool(kept(folder, "result.json"))
        if resume and ended:
            differs = _difference(kept(folder, "config.json"), asked)
            raise OptionError(f"{folder.path} holds a run that is finished, with {differs}. Use another --out.")
        if resume:
            print(f"note: {folder.path} holds no run that was stopped; this one begins anew.", file=sys.stderr)
        elif ended:
            place = _put_by(folder.path, (*files, "config.json"))
            print(f"note: the finished run in {folder.path} is now in {place}.", file=sys.stderr)
        for name in files:  # of a run that did not end: a folder holds the files of one
            (folder.path / name).unlink(missing_ok=True)
    write_config(folder, asked)
    checkpoint.mkdir(exist_ok=True)
    return checkpoint


def _refuse_foreign(folder: Folder, command: str, files: Sequence[str]) -> None:
    """A file that the run would write over, where the folder is none of a run of this command."""
    before = kept(folder, "config.json")
    if "versions" in before:
        if before.get("command") != command:
            raise OptionError(f"{folder.path} holds a run of `bilevel {before.get('command')}`; use another --out.")
        return
    there = [name for name in ("config.json", *files) if (folder.path / name).exists()]
    if there:
        raise OptionError(
            f"{folder.path} has a {there[0]} that is no run's. Nothing is written over; use another --out."
        )


def _difference(before: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The first option that is not what it was; empty where all are."""
    for key, value in asked.items():
        if before.get(key) != value:
            if isinstance(value, Mapping):
                return f"other {key}"
            return f"{'--' + key.replace('_', '-') if key != 'data' else 'DATA'} {before.get(key)}; got {value}"
    return ""


def _places(folder: Path) -> Iterator[Path]:
    """Where runs that were finished in a folder go, the first one first."""
    yield folder / PREVIOUS
    yield from (folder / f"{PREVIOUS}-{i}" for i in count(2))


def _put_by(folder: Path, files: Sequence[str]) -> Path:
    """Move the files of a run to the first place that is free; returns it."""
    place = next(path for path in _places(folder) if not path.exists())
    place.mkdir()
    for name in files:
        if (folder / name).exists():
            (folder / name).replace(place / name)
    return place


def _take_back(checkpoint: Path, files: Sequence[str]) -> None:
    """After a refusal: nothing of this run, and the one that was there before, as it was."""
    folder = checkpoint.parent
    for name in ("config.json", *files):
        (folder / name).unlink(missing_ok=True)
    for place in list(takewhile(Path.exists, _places(folder)))[-1:]:
        for file in place.glob("*"):
            file.replace(folder / file.name)
        place.rmdir()


@contextmanager
def resumable(checkpoint: Path, *, first: bool = True, files: Sequence[str] = ()) -> Iterator[None]:
    """Around what a run does: where it ends early, the checkpoint stays if --resume can go on from it.

    `first` is whether this process speaks for all ranks, `files` what the run writes into its folder meanwhile.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = f"Stopped by Ctrl-C. The same command with --resume goes on from {checkpoint.parent}."
        raise Stopped(again if first else "") from None
    except (CheckpointError, WriteError):
        if first:
            print(
                f"note: {checkpoint} is left as it is: --resume goes on from it where it can, another --out begins "
                "anew.",
                file=sys.stderr,
            )
        raise
    except RankError:
        raise
    except BilevelError:
        if first:
            _take_back(checkpoint, files)
            shutil.rmtree(checkpoint, ignore_errors=True)  # to go on from it would end the same
        raise
