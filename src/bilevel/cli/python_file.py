"""What a user's Python file defines: `path.py`, or `path.py:name`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from bilevel._util.random_state import seeded
from bilevel.errors import OptionError


def is_file(text: str) -> bool:
    """Whether the text is meant as a Python file."""
    return text.partition(".py:")[1] != "" or text.endswith(".py")


def parts(text: str, rule: str = "a Python file is needed") -> tuple[Path, str | None]:
    """The path and the name after the colon. `rule` begins the sentence that says that there is no such file."""
    before, mark, name = text.partition(".py:")
    path = Path(before + ".py" if mark else text)
    if not path.is_file():
        raise OptionError(f"{rule}; there is no file {path}.")
    return path, name or None


def load(text: str, rule: str) -> tuple[Path, Any]:
    """The path, and what the name after the colon stands for: without one, the module."""
    path, name = parts(text, rule)
    module = _imported(path)
    if name is not None and not hasattr(module, name):
        raise OptionError(f"{path.name} does not define {name!r}.")
    return path, module if name is None else getattr(module, name)


def network(text: str, option: str, call: str, arguments: Sequence[Any], seed: int) -> tuple[Path, nn.Module]:
    """The path, and what the function after the colon makes of these arguments; `call` is how an option shows it."""
    path, make = load(text, f"{option} must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"{option} must name a function {call}, as in {path.name}:make.")
    name = parts(text)[1]
    with seeded(seed):
        try:
            found = make(*arguments)
        except Exception as error:
            raise OptionError(f"{name} in {path} could not be run: {told(error)}") from error
    if not isinstance(found, nn.Module):
        raise OptionError(f"{name} in {path} must return an nn.Module; got {type(found).__name__}.")
    return path, found


def told(error: Exception) -> str:
    """What went wrong, in a sentence."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first.rstrip('.')}."


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bilevel_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} could not be run: {told(error)}") from error
    return module
