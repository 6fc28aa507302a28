"""A problem from a user's Python file: `path.py`, or `path.py:name`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilevel.applications.comparison.compare import Start, Subject
from bilevel.applications.comparison.synthetic_problems import nth
from bilevel.cli import python_file
from bilevel.errors import BilevelError, OptionError
from bilevel.problem.problem import Problem

NEEDED = ("problem", "u", "v")


def load(text: str, trials: int, seed: int) -> Subject:
    """The subject that the file defines, with a start for each trial."""
    path, found = python_file.load(text, "PROBLEM must be a synthetic problem or a Python file")
    seeded = callable(found) and "seed" in inspect.signature(found).parameters
    if trials > 1 and not seeded:
        raise OptionError(
            f"--trials {trials} needs `{path.name}:name` with a function name(seed) that returns problem, u and v for "
            "each start; this file has one start."
        )
    return Subject(text, [_start(path, found, nth(seed, k) if seeded else None) for k in range(trials)])


def source(text: str) -> str:
    """The text of the file: what a finished run belongs to."""
    return python_file.parts(text)[0].read_text(encoding="utf-8", errors="replace")


def _start(path: Path, found: Any, seed: int | None) -> Start:
    if callable(found) and not isinstance(found, type):
        try:
            found = found() if seed is None else found(seed=seed)
        except BilevelError:
            raise
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {python_file.told(error)}") from error
    if isinstance(found, (tuple, list)):
        if len(found) not in (3, 4):
            raise OptionError(f"{path} must give (problem, u, v) or (problem, u, v, data); got {len(found)} values.")
        found = dict(zip((*NEEDED, "data"), found, strict=False))
    values = found if isinstance(found, Mapping) else {key: getattr(found, key, None) for key in (*NEEDED, "data")}
    for key in NEEDED:
        if values.get(key) is None:
            raise OptionError(f"{path} must define {key!r}: a Problem `problem` and its variables `u` and `v`.")
    if not isinstance(values["problem"], Problem):
        raise OptionError(f"problem in {path} must be a bilevel.Problem; got {type(values['problem']).__name__}.")
    return Start(values["problem"], values["u"], values["v"], values.get("data"))
