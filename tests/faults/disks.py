"""A full disk, a read-only folder, and checkpoints that are cut off or altered.

The disk is a tmpfs of a few hundred kilobytes, mounted for the purpose where that is allowed (it takes root).
"""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kills import ARGUMENTS
from tally import Tally, outcome, readable

from bilevel import BilevelWarning, CheckpointError, Penalty, Problem, solve
from bilevel.cli.main import main
from bilevel.running import checkpoints as store

SIZES = [*range(20, 400, 40), *range(400, 900, 100)]
"""Kilobytes at which a disk is too small for some file of a run."""


def mounting() -> bool:
    """Whether a tmpfs can be mounted here."""
    try:
        with disk(Path("/tmp/bilevel-mount-probe"), 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def disk(path: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of this size."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path)
        try:
            yield path
        finally:
            subprocess.run(["umount", path], check=True, capture_output=True)
    finally:
        path.rmdir()


def changed(path: Path, options: str) -> None:
    """The same disk, larger or read-only."""
    _mount("-o", f"remount,{options}", path)


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def denoised(out: Path, *further: str) -> tuple[int, str]:
    """The exit code of a `denoise`, and what it says on standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main([*ARGUMENTS, "--out", str(out), *further])
    return code, errors.getvalue()


def sentence(told: str) -> str:
    """The one line of an error."""
    lines = [line for line in told.splitlines() if line.startswith("bilevel:")]
    assert len(lines) == 1, told
    assert "Traceback" not in told, told
    return lines[0]


def full(folder: Path, sizes: list[int]) -> Tally:
    """`denoise` on disks that are too small; with more room it goes on, and ends as if there had been no fault."""
    tally = Tally()
    assert denoised(folder / "straight")[0] == 0
    straight = outcome(folder / "straight")
    for size in sizes:
        with tally.attempt(f"a disk of {size} kB"), disk(folder / f"disk-{size}", size) as place:
            code, told = denoised(place / "out")
            assert code == 1, f"exit code {code}: {told}"
            line = sentence(told)
            assert "cannot be written" in line, line
            assert "No space left" in line, line
            readable(place)
            changed(place, "size=20m")
            code, told = denoised(place / "out", "--resume")
            assert code == 0, told
            assert [name for name in straight if outcome(place / "out")[name] != straight[name]] == []
    return tally


def read_only(folder: Path) -> Tally:
    """A new run into a folder that cannot be written to, and one that becomes so between two lives."""
    tally = Tally()
    with disk(folder / "locked", 20_000) as place:
        (place / "held").mkdir()
        (place / "held" / "mine.txt").write_text("mine")
        changed(place, "ro")
        for out in (place / "out", place / "held"):
            with tally.attempt(f"{out.name} on a read-only disk"):
                code, told = denoised(out)
                assert code == 2, told
                assert "--out must be a writable folder" in sentence(told)
        with tally.attempt("solve with a checkpoint on a read-only disk"):
            assert "cannot be written" in refusal(lambda: solved(place / "state"))
        changed(place, "rw")
        assert [path.name for path in place.rglob("*")] == ["held", "mine.txt"]
    return tally


def refusal(call: Callable[[], object]) -> str:
    """What a CheckpointError says; there must be one."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was taken for good")


def upper(u: Any, v: Any, batch: Any) -> torch.Tensor:
    return torch.sum((v - 1) ** 2)


def lower(u: Any, v: Any, batch: Any) -> torch.Tensor:
    return torch.sum((v - u) ** 2) + 0.1 * torch.sum(v**4)


def solved(folder: Path, **options: Any) -> Any:
    """A run with a checkpoint of some kilobytes every other step."""
    u, v = (torch.zeros(400, dtype=torch.float64, requires_grad=True) for _ in "uv")
    method = Penalty(mode="stochastic", lower_steps=1)
    given = {"max_steps": 8, "checkpoint": folder, "every": 2, "seed": 3, "hypergradient": False} | options
    return solve(Problem(upper, lower), method, u, v, **given)


def harmed(folder: Path, flips: int, seed: int, every: int = 1024) -> Tally:
    """Checkpoints cut off at every kilobyte, and with one byte flipped: the one before is gone on from, or, where there
    is none, a sentence names the file; neither file is touched by that."""
    tally, draw = Tally(), random.Random(seed)
    whole = solved(folder / "straight")
    solved(folder / "state", max_steps=8)
    good, before = (folder / "state" / store.FILE).read_bytes(), (folder / "state" / store.BEFORE).read_bytes()
    harms = [(f"cut off at {length} bytes", good[:length]) for length in range(0, len(good), every)]
    for _ in range(flips):
        place, bit = draw.randrange(len(good)), 1 << draw.randrange(8)
        harms.append((f"byte {place} flipped", good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :]))
    for number, (what, content) in enumerate(harms):
        alone, both = folder / "alone", folder / "both"
        for place in (alone, both):
            place.mkdir(exist_ok=True)
            (place / store.FILE).write_bytes(content)
        (both / store.BEFORE).write_bytes(before)
        with tally.attempt(what):
            told_alone = refusal(partial(store.load, alone))
            assert str(alone / store.FILE) in told_alone
            assert "\n" not in told_alone
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                state = store.load(both)
            assert [w.category for w in told] == [BilevelWarning]
            assert str(both / store.BEFORE) in str(told[0].message)
            assert state["step"] == 8  # that of the last step; the last file adds how the run ended
            assert (both / store.FILE).read_bytes() == content
            assert (both / store.BEFORE).read_bytes() == before
            if number % 25 == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    again = solved(both, resume=True)
                assert torch.equal(again.u, whole.u)
                assert torch.equal(again.v, whole.v)
    tally.facts = {"bytes of the checkpoint": len(good)}
    return tally
