"""A problem from a user's Python file: `path.py`, or `path.py:name`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..applications.comparison import Start, Subject
from ..applications.synthetic import nth
from ..errors import BilevelError, OptionError
from ..problem import Problem

NEEDED = ("problem", "u", "v")


def is_file(text: str) -> bool:
    """Whether PROBLEM is meant as a file."""
    return text.partition(".py:")[1] != "" or text.endswith(".py")


def load(text: str, trials: int, seed: int) -> Subject:
    """The subject that the file defines, with a start for each trial."""
    path, name = _parts(text)
    module = _imported(path)
    if name is None:
        found: Any = module
    elif not hasattr(module, name):
        raise OptionError(f"{path.name} does not define {name!r}.")
    else:
        found = getattr(module, name)
    seeded = callable(found) and "seed" in inspect.signature(found).parameters
    if trials > 1 and not seeded:
        raise OptionError(
            f"--trials {trials} needs `{path.name}:name` with a function name(seed) that returns problem, u and v for "
            "each start; this file has one start."
        )
    return Subject(text, [_start(path, found, nth(seed, k) if seeded else None) for k in range(trials)])


def source(text: str) -> str:
    """The text of the file: what a finished run belongs to."""
    return _parts(text)[0].read_text(encoding="utf-8", errors="replace")


def _parts(text: str) -> tuple[Path, str | None]:
    before, mark, name = text.partition(".py:")
    path = Path(before + ".py" if mark else text)
    if not path.is_file():
        raise OptionError(f"PROBLEM must be a synthetic problem or a Python file; there is no file {path}.")
    return path, name or None


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bilevel_problem_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} could not be run: {_told(error)}") from error
    return module


def _start(path: Path, found: Any, seed: int | None) -> Start:
    if callable(found) and not isinstance(found, type):
        try:
            found = found() if seed is None else found(seed=seed)
        except BilevelError:
            raise
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {_told(error)}") from error
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


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first.rstrip('.')}."
