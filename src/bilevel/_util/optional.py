"""Packages of the extras, and the sentence that says how to install one that is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bilevel.errors import MissingPackageError

# The names of packages whose modules have another name.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
# The extra that brings a module.
EXTRAS = {
    **dict.fromkeys(("sklearn", "scipy", "joblib", "PIL", "pooch", "matplotlib", "jinja2"), "apps"),
    **dict.fromkeys(("pandas", "pyarrow"), "tables"),
    "tensorboard": "tensorboard",
    "ray": "ray",
}


def require(module: str, extra: str) -> Any:
    """Return an optional module, or raise `MissingPackageError` with the command that installs it.

    >>> require("math", extra="apps").sqrt(4.0)
    2.0
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(how_to_install(module, extra)) from None


def how_to_install(module: str, extra: str | None = None) -> str:
    """Return the sentence that names the package of a missing module and the extra that brings it."""
    name = module.partition(".")[0]
    extra = extra or EXTRAS.get(name)
    package = DISTRIBUTIONS.get(name, name)
    return f"This needs {package}: pip install {package if extra is None else repr(f'bilevel[{extra}]')}."
