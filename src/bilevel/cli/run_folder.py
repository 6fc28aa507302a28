"""The folder of a run: files that are written whole, a run that is resumed or refused, and the result as it is shown.

config.json has the options of a run, checkpoint/ exists until the run ends, and result.json is written last, so it
marks a finished run. Importing this module does not import torch.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bilevel
from bilevel._util.atomic_files import read_json, write_whole
from bilevel.errors import BilevelError, CheckpointError, OptionError, RankError, WriteError

# The exit code after Ctrl-C: 128 + SIGINT, as shells expect.
INTERRUPTED = 130
STOPPED = "Stopped by Ctrl-C."
CHECKPOINT = "checkpoint"
CONFIG = "config.json"
# The form of a run folder, in config.json; releases before 0.2 wrote none.
FORM = 2
RESULT = "result.json"
Result = Mapping[str, Any]
Once = Callable[[Callable[[], Result | None]], Result | None]


class Stopped(Exception):  # noqa: N818
    """Ctrl-C ended the command. The message says which results are kept; it is empty if another rank prints it."""


class RunFolder:
    """A folder that can be written to. It is created, with its parents, if it does not exist."""

    def __init__(self, path: Path, option: str = "--out") -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise OptionError(f"{option} must be a writable folder; {path}: {error.strerror}.") from None

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


def to_json(value: Result) -> str:
    """Return the value as JSON; a number that is not finite, which JSON does not have, becomes null."""
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2, ensure_ascii=False)


def report_result(
    result: Result,
    files: Mapping[str, Path],
    show: Callable[[Result], None] = lambda result: print(result["message"]),
    *,
    json: bool,
) -> None:
    """Print the notes of a result to standard error, then one JSON object, or the output of `show` and the files."""
    for note in result.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if json:
        print(to_json(result))
        return
    show(result)
    for name, path in files.items():
        print(f"{name}: {path}")


def made_by(result: Result) -> list[tuple[str, str]]:
    """Return the settings that end every page: the seed, the seconds and the versions."""
    versions = [("bilevel", bilevel.__version__), ("torch", version("torch"))]
    return [("Seed", str(result["seed"])), ("Seconds", f"{result['seconds']:.1f}"), *versions]


def refuse_if(rules: Mapping[str, bool]) -> None:
    """Raise an OptionError with the first message whose condition holds."""
    for message, broken in rules.items():
        if broken:
            raise OptionError(message)


# -- resume or refuse --------------------------------------------------------------------------------------------------


def folder_of(out: Path | None, command: str, data: str) -> RunFolder:
    """Return the folder of a run on DATA; refuse one that lies inside of DATA."""
    path = out or Path("runs") / f"{command}-{Path(data).stem}"
    if Path(data).is_dir() and path.resolve().is_relative_to(Path(data).resolve()):
        raise OptionError(f"--out must not lie in {data}, which is never changed; got {str(path)!r}.")
    return RunFolder(path)


def run_or_resume(
    folder: RunFolder,
    asked: Result,
    work: Callable[[Path], tuple[Result, str]],
    *,
    resume: bool,
    files: Sequence[str],
    first: bool = True,
    once: Once = lambda call: call(),
) -> Result:
    """Return the result of a run: of the finished run in the folder if `resume`, else of `work`.

    - `work` gets the folder of checkpoints and returns the result and the page of the run. It can write other files.
    - `files`: the names of all files that the run writes. They are removed after an error that a resumed run would
      meet again.
    - `first`, `once`: if several ranks run the command, whether this is the first one, which writes, and a function
      that calls another on the first rank and returns the result on all.

    The page and then the result are written last.
    """
    checkpoint = folder.path / CHECKPOINT
    if (done := once(partial(open_run, folder, asked, resume, files))) is not None:
        return done
    try:
        result, page = work(checkpoint)
        if first:
            folder.write("report.html", page)
            folder.write_json(RESULT, result)  # last: a folder that has it holds a finished run
            shutil.rmtree(checkpoint, ignore_errors=True)
    except KeyboardInterrupt:
        message = f"Stopped by Ctrl-C. The same command with --resume continues the run in {folder.path}."
        raise Stopped(message if first else "") from None
    except BilevelError as error:
        if isinstance(error, (CheckpointError, WriteError)) and first:
            note = f"note: {checkpoint} is kept. Continue the run with --resume, or use another --out."
            print(note, file=sys.stderr)
        elif not isinstance(error, (CheckpointError, WriteError, RankError)) and first:
            for name in (CONFIG, *files):
                (folder.path / name).unlink(missing_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise
    return result


def open_run(folder: RunFolder, asked: Result, resume: bool, files: Sequence[str]) -> dict[str, Any] | None:
    """Prepare the folder for a run; return the result if `resume` and the same run is finished.

    Refuses a run that was stopped without `resume`, other options with it, and files that would be overwritten.
    """
    checkpoint, result = folder.path / CHECKPOINT, read_json(folder.path / RESULT)
    before = read_json(folder.path / CONFIG)
    differs = _difference(before, asked)
    if before.get("command") == asked["command"] and "form" not in before:
        raise OptionError(f"{folder.path} was written by a version before 0.2. Use another --out to start again.")
    if result and resume and not differs:
        shutil.rmtree(checkpoint, ignore_errors=True)  # a kill can leave it
        print("note: this run has already finished.", file=sys.stderr)
        return result
    path, options, stopped = folder.path, f", with {differs}" if resume else "", checkpoint.exists()
    there = next((name for name in (CONFIG, *files) if (path / name).exists()), "")
    refuse_if(
        {
            f"{path} holds a finished run{options}. Use another --out, or delete the folder.": bool(result),
            f"{path} holds a stopped run. Continue it by --resume, or use another --out.": stopped and not resume,
            f"{path} was run with {differs}. --resume needs the same.": stopped and bool(differs),
            f"{path} already has a {there}, which is not overwritten. Use another --out.": there != ""
            and not stopped
            and (bool(differs) or not resume),
        }
    )
    versions = {"bilevel": bilevel.__version__, "torch": version("torch"), "numpy": version("numpy")}
    folder.write_json(CONFIG, {**asked, "form": FORM, "versions": {**versions, "python": platform.python_version()}})
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
