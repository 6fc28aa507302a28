"""The folder of a run: files that are written whole, a run that is resumed or refused, and the result as it is shown.

config.json has the options of a run, checkpoint/ is there until it ends, and result.json is written last: a folder
that has one holds a finished run. Importing this module does not import torch.
"""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bilevel
from bilevel._util.atomic_files import write_whole
from bilevel.errors import BilevelError, CheckpointError, OptionError, RankError, WriteError

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as shells expect."""
STOPPED = "Stopped by Ctrl-C."
CHECKPOINT = "checkpoint"
CONFIG = "config.json"
RESULT = "result.json"
Result = Mapping[str, Any]


class Stopped(Exception):  # noqa: N818
    """Ctrl-C ended the command. The message says what is kept; it is empty if another rank says so."""


class RunFolder:
    """A folder that can be written to. It is made, with its parents, if it is not there."""

    def __init__(self, path: Path, option: str = "--out") -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except (FileExistsError, NotADirectoryError):
            raise OptionError(f"{option} must be a folder; {path} is a file, or is in one.") from None
        except OSError as error:
            raise OptionError(f"{option} must be a folder that can be written to; {path}: {error.strerror}.") from None

    def write(self, name: str, text: str) -> Path:
        """Write a file. An older file of that name stays whole until the new one is on the disk."""
        return write_whole(self.path / name, text)

    def write_json(self, name: str, value: Result) -> Path:
        """Write a JSON file."""
        return self.write(name, to_json(value) + "\n")

    def write_csv(self, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write these columns of the rows."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        return self.write(name, buffer.getvalue())

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty if there is none."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # JSON can be nested too deeply
            return {}
        return found if isinstance(found, dict) else {}


def to_json(value: Result) -> str:
    """Return the value as JSON; a number that is not finite, which JSON does not have, becomes null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_result(result: Result, show: Callable[[Result], None], *, json: bool, **files: Path | str) -> None:
    """Print the notes of a result to standard error, then one JSON object, or what `show` prints and the files."""
    for note in result.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if json:
        print(to_json(result))
        return
    show(result)
    for name, path in files.items():
        print(f"{name}: {path}")


def versions() -> dict[str, str]:
    """Return the versions that the result of a run depends on."""
    packages = {name: version(name) for name in ("torch", "numpy")}
    return {"bilevel": bilevel.__version__, **packages, "python": platform.python_version()}


# -- resume or refuse --------------------------------------------------------------------------------------------------


def folder_of(out: Path | None, command: str, data: str) -> RunFolder:
    """Return the folder of a run on DATA; refuse one that lies inside of DATA."""
    path = out or Path("runs") / f"{command}-{Path(data).stem}"
    if Path(data).is_dir() and path.resolve().is_relative_to(Path(data).resolve()):
        raise OptionError(f"--out must not lie in {data}, which does not change; got {str(path)!r}.")
    return RunFolder(path)


def run_or_resume(
    folder: RunFolder, asked: Result, work: Callable[[Path], Result], *, resume: bool, files: Sequence[str]
) -> Result:
    """Return the result of a run: of the finished run in the folder if `resume`, else what `work` returns.

    `work` gets the folder of checkpoints, which is removed at the end, and writes `files`, result.json last.
    """
    done = open_run(folder, asked, resume, files)
    if done is not None:
        return done
    checkpoint = folder.path / CHECKPOINT
    with resumable(checkpoint, files):
        result = work(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return result


def open_run(folder: RunFolder, asked: Result, resume: bool, files: Sequence[str]) -> dict[str, Any] | None:
    """Prepare the folder for a run; return the result if `resume` and the same run is finished.

    Refuses a run that was stopped without `resume`, other options with it, and files that would be written over.
    """
    checkpoint, result = folder.path / CHECKPOINT, folder.read_json(RESULT)
    differs = _difference(folder.read_json(CONFIG), asked)
    if result and resume and not differs:
        shutil.rmtree(checkpoint, ignore_errors=True)  # a kill can leave it
        print("note: this run is finished already.", file=sys.stderr)
        return result
    if result:
        options = f", with {differs}" if resume else ""
        raise OptionError(f"{folder.path} holds a finished run{options}. Use another --out, or delete the folder.")
    if checkpoint.exists() and not resume:
        raise OptionError(f"{folder.path} holds a stopped run. Continue it by --resume, or use another --out.")
    if checkpoint.exists() and differs:
        raise OptionError(f"{folder.path} was run with {differs}. --resume needs the same.")
    there = [name for name in (CONFIG, *files) if (folder.path / name).exists()]
    if there and not checkpoint.exists() and (differs or not resume):
        raise OptionError(f"{folder.path} has a {there[0]} already. Use another --out; nothing is written over.")
    folder.write_json(CONFIG, {**asked, "versions": versions()})
    checkpoint.mkdir(exist_ok=True)
    return None


def _difference(before: Result, asked: Result) -> str:
    """Return the first option that changed and its two values; empty if none did."""
    for key, value in asked.items():
        if before.get(key) != value:
            if isinstance(value, Mapping):
                return f"other {key}"
            option = "DATA" if key == "data" else "--" + key.replace("_", "-")
            return f"{option} {before.get(key)}; got {value}"
    return ""


@contextmanager
def resumable(checkpoint: Path, files: Sequence[str], *, first: bool = True) -> Iterator[None]:
    """Keep the checkpoint of a run that ends early if --resume can continue it; else remove what the run wrote.

    `first` is whether this process speaks for all ranks.
    """
    folder = checkpoint.parent
    try:
        yield
    except KeyboardInterrupt:
        message = f"Stopped by Ctrl-C. The same command with --resume continues the run in {folder}."
        raise Stopped(message if first else "") from None
    except (CheckpointError, WriteError):
        if first:
            note = f"note: {checkpoint} stays as it is. Use --resume to continue if you can, or another --out."
            print(note, file=sys.stderr)
        raise
    except RankError:
        raise
    except BilevelError:
        if first:  # a resumed run would end the same way
            for name in (CONFIG, *files):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise
