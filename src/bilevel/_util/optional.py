"""Optional packages: imported where they are used, with one sentence if they are not installed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from bilevel.errors import DataError

TITLES = {"sklearn": "scikit-learn", "PIL": "pillow"}
"""Packages whose module has another name."""


def require(name: str, extra: str) -> ModuleType:
    """Return the module, or raise DataError with the install command."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(f"This needs {TITLES.get(package, package)}: pip install 'bilevel[{extra}]'.") from None
