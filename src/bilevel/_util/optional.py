"""Optional packages: imported when they are needed, with the install command if they are absent."""

from __future__ import annotations

import importlib
from types import ModuleType

from bilevel.errors import DataError

PACKAGES = {"sklearn": "scikit-learn", "PIL": "Pillow"}
"""The name on the package index, if it is not the name of the module."""


def require(name: str, extra: str) -> ModuleType:
    """Return the module, or raise DataError with the install command."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(f"This needs {PACKAGES.get(package, package)}: pip install 'bilevel[{extra}]'.") from None
