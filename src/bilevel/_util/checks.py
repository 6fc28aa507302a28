"""Messages to users: checks whose errors name the option, the rule and the value; warnings; words for counts; packages.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence, Sized
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelWarning, MissingPackageError, OptionError

# The names of packages whose modules have another name.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
# The most characters of one value in a `repr`.
LONG = 80
# The extra that brings a module.
EXTRAS = {
    **dict.fromkeys(("sklearn", "scipy", "joblib", "PIL", "pooch", "matplotlib", "jinja2"), "apps"),
    **dict.fromkeys(("pandas", "pyarrow"), "tables"),
    "tensorboard": "tensorboard",
    "ray": "ray",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question to append to a message if a known name is close; else an empty text."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(name: str, value: object, allowed: Sequence[str], *, optional: bool = False) -> None:
    if value not in allowed and not (optional and value is None):
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def in_range(
    name: str,
    value: float | None,
    *,
    least: float = float("-inf"),
    above: float = float("-inf"),
    most: float = float("inf"),
    below: float = float("inf"),
    whole: bool = False,
) -> None:
    """Refuse a number out of its range; None passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise OptionError(f"{name} must be a{' whole' if whole else ''} number; got {value!r}.")
    if not least <= value <= most or not above < value < below or not math.isfinite(value):
        bounds = {"at least": least, "above": above, "below": below, "at most": most}
        words = [f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)]
        if not math.isfinite(value):
            words.insert(0, "finite")
        raise OptionError(f"{name} must be {' and '.join(words)}; got {value!r}.")


def check_counts(**counts: int | None) -> None:
    """Refuse a count that is not a whole number of at least 1; None passes."""
    for name, count in counts.items():
        in_range(name, count, least=1, whole=True)


def true_or_false(name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise OptionError(f"{name} must be True or False; got {value!r}.")


def factory(name: str, value: object) -> None:
    """Refuse a value that is not an optimizer factory; None passes."""
    import torch

    if value is not None and (not callable(value) or isinstance(value, torch.optim.Optimizer)):
        raise OptionError(
            f"{name} must be a factory such as partial(torch.optim.Adam, lr=1e-3), not an optimizer; got {value!r}."
        )


def warn_user(message: str) -> None:
    """Warn with a `BilevelWarning` that points at the first line outside this package, torch and context managers."""
    import torch

    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, BilevelWarning, stacklevel=level)


def counted(count: int, noun: str) -> str:
    """Return the count and its noun, with an s in the plural."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def agreeing(count: int, one: str, many: str) -> str:
    """Return the singular for a count of one, else the plural."""
    return one if count == 1 else many


def first_of(names: Iterable[object], most: int) -> str:
    """Join names for a sentence; a long list is cut after the first ones."""
    some = list(map(str, names))
    return ", ".join(some[:most]) + (", ..." if len(some) > most else "")


class ShortRepr:
    """Gives a dataclass, declared with `repr=False`, a `repr` in which a long value is its type and its size."""

    def __repr__(self) -> str:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in names)})"


def brief(value: object) -> str:
    """Return the `repr` of a value, or its type and its shape or length if that is long.

    >>> brief([1.5, 2.5]), brief(range(1000)), brief("word " * 100)
    ('[1.5, 2.5]', 'range(0, 1000)', '<str of 500>')
    """
    text = repr(value)
    if len(text) <= LONG and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    size = "x".join(map(str, shape)) if shape else len(value) if isinstance(value, Sized) else None
    return f"<{type(value).__name__}>" if size is None else f"<{type(value).__name__} of {size}>"


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
